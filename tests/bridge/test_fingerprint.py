# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: what they are, what they find, and that every backend computes the same."""

import hashlib
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from qarl_bridge.protocol import fingerprint

from tests.reference import bridge_world

ROW = fingerprint.ROW_BYTES


def by_definition(data: bytes) -> np.ndarray:
    """The two sums of each row, in Python's integers."""
    out = []
    for start in range(0, len(data), ROW):
        row = data[start : start + ROW].ljust(ROW, b"\0")
        words = [int.from_bytes(row[i : i + 2], "little") for i in range(0, ROW, 2)]
        out.append((sum(words) % 2**32, sum((i + 1) * w for i, w in enumerate(words)) % 2**32))
    return np.array(out, np.uint32).reshape(-1, 2)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4095, 4096, 4097, 3 * 4096 + 7, 70 * 4096])
def test_row_sums_are_those_of_the_definition(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    want = by_definition(data.tobytes())
    assert np.array_equal(fingerprint.row_sums(data), want)
    assert fingerprint.digest(data.tobytes()) == hashlib.sha256(want.astype("<u4").tobytes()).digest()[:16]
    assert fingerprint.rows_of(size) == len(want)


def test_the_largest_words_wrap_as_on_a_device():
    data = np.full(ROW, 255, np.uint8)
    # 2048 * 65535; 65535 * 2048 * 2049 / 2, which exceeds 2^32.
    assert fingerprint.row_sums(data).tolist() == [[134215680, 65535 * 1024 * 2049 % 2**32]]


def test_any_flipped_bit_swapped_word_and_swapped_row_is_found():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 3 * ROW + 100, np.uint8)
    good = fingerprint.digest(data)
    for bit in rng.integers(0, len(data) * 8, 200):
        bad = data.copy()
        bad[bit // 8] ^= 1 << (bit % 8)
        assert fingerprint.digest(bad) != good
    words = data.view(np.uint16)
    for i, j in rng.integers(0, ROW // 2, (200, 2)):
        bad = words.copy()
        bad[[i, j]] = bad[[j, i]]
        assert (fingerprint.digest(bad) != good) == (words[i] != words[j])
    rows = np.concatenate([data[ROW : 2 * ROW], data[:ROW], data[2 * ROW :]])
    assert fingerprint.digest(rows) != good


def test_two_words_that_change_together_are_found_whatever_they_become():
    rng = np.random.default_rng(1)
    for _ in range(300):
        words = rng.integers(0, 65536, ROW // 2).astype(np.uint16)
        good = fingerprint.digest(words)
        i, j = rng.choice(len(words), 2, replace=False)
        room = min(int(words[j]), 65535 - int(words[i]))
        if not room:
            continue
        delta = int(rng.integers(1, room + 1))
        words[i] += np.uint16(delta)  # the plain sum stays as it was
        words[j] -= np.uint16(delta)
        assert fingerprint.digest(words) != good


def test_a_version_on_a_device_is_validated_and_confirmed():
    """A DeviceCopy over torch memory of the host."""
    torch = pytest.importorskip("torch")
    from qarl_bridge.client import sender
    from qarl_bridge.protocol.errors import BridgeError
    from qarl_bridge.server import staged_gpu

    version = bridge_world.staged(3)
    size = sender.align(version.manifest.total_bytes)
    raw = os.pread(version.fd, version.manifest.total_bytes, 0).ljust(size, b"\0")
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    closed = []
    copy = staged_gpu.DeviceCopy(version.manifest, buffer, closed.append)
    copy.validate()
    assert copy.borrowed
    (tensors,) = copy.checked_parts()
    for name, tensor in tensors.items():
        want = bridge_world.tensors(3)[name]
        assert tensor.shape == want.shape
        assert np.array_equal(tensor.float().numpy(), want.astype(np.float32))
    copy.confirm()
    entries = {entry.name: entry for entry in version.manifest.tensors}
    scale = entries["model.layers.0.self_attn.k_proj.weight_scale"]
    buffer[scale.offset + 2] ^= 1
    with pytest.raises(BridgeError, match=r"k_proj\.weight_scale is torn"):
        copy.validate()
    with pytest.raises(BridgeError, match="wrote to it after it was staged"):
        copy.confirm()
    copy.close()
    copy.close()
    assert closed == [False]  # it did not hold what was announced


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, None])
def test_a_version_on_a_device_with_a_bad_scale_is_refused(bad):
    torch = pytest.importorskip("torch")
    from qarl_bridge.client import sender
    from qarl_bridge.protocol.errors import BridgeError
    from qarl_bridge.server import staged_gpu

    name = "model.layers.0.self_attn.k_proj.weight_scale"
    scale = bridge_world.tensors(0)[name]
    if bad is None:
        scale[:] = 0
    else:
        scale[3] = bad
    version = bridge_world.staged(0, replace={name: scale})
    total = version.manifest.total_bytes
    raw = os.pread(version.fd, total, 0).ljust(sender.align(total), b"\0")
    copy = staged_gpu.DeviceCopy(version.manifest, torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    with pytest.raises(BridgeError, match=name) as error:
        copy.validate()
    assert error.value.code == "tensor"


@pytest.mark.parametrize("worst", [1.0, -0.5, 0.0, float("nan")])
def test_scales_in_e4m3_on_a_device_are_looked_at(worst):
    torch = pytest.importorskip("torch")
    import ml_dtypes
    from qarl_bridge.client import sender
    from qarl_bridge.protocol import messages
    from qarl_bridge.protocol.errors import BridgeError
    from qarl_bridge.server import staged_gpu

    scales = np.zeros((4, 32), np.float32) if worst == 0 else np.linspace(0.25, 448, 128).reshape(4, 32)
    scales = scales.astype(ml_dtypes.float8_e4m3fn)
    scales[2, 5] = worst
    entry = messages.TensorEntry(
        name="q.weight_scale",
        dtype="float8_e4m3fn",
        shape=[4, 32],
        offset=0,
        nbytes=128,
        digest=fingerprint.digest(scales.tobytes()),
    )
    manifest = sender.manifest_of([entry], version=1, model=b"m" * 16, scheme=b"s" * 16)
    raw = scales.tobytes().ljust(sender.align(128), b"\0")
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    copy = staged_gpu.DeviceCopy(manifest, buffer)
    if worst == 1.0:
        copy.validate()
    else:
        with pytest.raises(BridgeError, match=r"q\.weight_scale"):
            copy.validate()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("bad", [0, 3, 11, 12, None])
def test_tensors_that_are_looked_at_together_are_told_apart(dtype, bad):
    """Experts' weights and scales take turns, at equal distances, and then other layers begin."""
    torch = pytest.importorskip("torch")
    import ml_dtypes  # noqa: F401  (numpy learns its names)
    from qarl_bridge.client import sender
    from qarl_bridge.protocol import messages
    from qarl_bridge.protocol.errors import BridgeError
    from qarl_bridge.server import staged_gpu

    numpy_dtype = messages.DTYPES[dtype]
    arrays = {}
    for number in range(13):
        gap = 5000 if number > 7 else 3000  # equal distances end here
        arrays[f"experts.{number}.weight_packed"] = np.zeros(gap, np.int32)
        arrays[f"experts.{number}.other"] = np.full((3, 5), 1 + number, np.float32).astype(numpy_dtype)
    arrays["norm"] = np.ones((7,), np.float32).astype(numpy_dtype)
    if bad is not None:
        arrays[f"experts.{bad}.other"][1, 2] = np.nan
    entries, chunks, end = [], [], 0
    for name, array in arrays.items():
        raw = array.tobytes()
        digest = fingerprint.digest(raw)
        entries.append(
            messages.TensorEntry(
                name=name, dtype=dtype if array.dtype == numpy_dtype else "int32", shape=list(array.shape),
                offset=end, nbytes=len(raw), digest=digest,
            )
        )  # fmt: skip
        chunks.append(raw.ljust(sender.align(len(raw)), b"\0"))
        end += sender.align(len(raw))
    runs = staged_gpu._runs(entries)
    assert sorted(len(run) for run in runs if run[0].dtype != "int32") == [1, 5, 8]
    manifest = sender.manifest_of(
        entries, version=bridge_world.staged(0).manifest.version, model=b"m" * 16, scheme=b"s" * 16
    )
    copy = staged_gpu.DeviceCopy(manifest, torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8))
    if bad is None:
        return copy.validate()
    with pytest.raises(BridgeError, match=rf"experts\.{bad}\.other holds NaN"):
        copy.validate()


def test_torch_computes_the_same_sums():
    torch = pytest.importorskip("torch")
    from qarl_bridge.server import staged_gpu

    data = np.random.default_rng(2).integers(0, 256, 5 * ROW, np.uint8)
    got = staged_gpu.on_the_host(staged_gpu.row_sums(torch.from_numpy(data)))
    assert np.array_equal(got, fingerprint.row_sums(data))
    data[:] = 255
    got = staged_gpu.on_the_host(staged_gpu.row_sums(torch.from_numpy(data)))
    assert np.array_equal(got, fingerprint.row_sums(data))


TRITON = """
import numpy as np, torch
from qarl_bridge.protocol import fingerprint
from qarl_bridge.server import gpu_sums
for rows in (1, 3, 4, 9):
    data = np.random.default_rng(rows).integers(0, 256, rows * fingerprint.ROW_BYTES, np.uint8)
    data[:4096] = 255
    got = gpu_sums.row_sums(torch.from_numpy(data)).numpy().view(np.uint32)
    assert np.array_equal(got, fingerprint.row_sums(data)), rows
print("equal")
"""


@pytest.mark.slow
def test_the_gpu_kernels_sums_are_the_same():
    """Through Triton's interpreter; on a GPU tests/gpu publishes with it."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", TRITON], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr[-2000:]


def test_a_large_tensor_is_summed_in_pieces_and_gives_the_sums_of_the_whole():
    data = np.random.default_rng(0).integers(0, 256, 3 * fingerprint._ROWS_PER_THREAD * 4096 + 12, dtype=np.uint8)
    words = np.append(data, np.zeros(-len(data) % 4096, np.uint8)).view("<u2").reshape(-1, 2048).astype(np.uint64)
    wanted = np.stack([words.sum(1), (words * np.arange(1, 2049, dtype=np.uint64)).sum(1)], axis=1).astype(np.uint32)
    np.testing.assert_array_equal(fingerprint.row_sums(data), wanted)


def test_a_tensor_is_summed_in_memory_that_is_there_already():
    """Of an adapter's size. In new memory for every 64 rows, each page of it was paged in again for each tensor."""
    data = np.arange(640 << 8, dtype=np.uint32)
    fingerprint.digest(data)
    tracemalloc.start()
    try:
        fingerprint.digest(data)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < data.nbytes / 8
