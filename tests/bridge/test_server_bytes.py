# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a trainer hands the bridge, torn, bent, foreign or too much: it is refused by name, and serving goes on."""

import gc
import os
import time

import ml_dtypes
import msgspec
import numpy as np
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.server import staged as staged_copies
from qarl_bridge.transport import shm

from tests.reference import bridge_world
from tests.reference.bridge_world import K_SCALE, K_WEIGHT, refused, staged, still_serves, wait_for, world


def bent(step, edit):
    """A staged version whose bytes were changed after its manifest was made."""
    good = staged(step)
    data = bytearray(os.pread(good.fd, good.manifest.total_bytes, 0))
    edit(data, {entry.name: entry for entry in good.manifest.tensors})
    fd = shm.create(len(data))
    shm.write(fd, memoryview(data), 0)
    shm.seal(fd)
    return sender.StagedVersion(good.manifest, fd, 0.0)


def test_validation_refuses_one_flipped_bit_and_names_the_tensor(any_world):
    client = any_world.trainer()
    client.publish(staged(0))

    def flip(data, entries):
        data[entries[K_WEIGHT].offset + 5] ^= 1

    with refused("torn", f"{K_WEIGHT} is torn"):
        client.publish(bent(1, flip))
    still_serves(any_world, client, 0)
    client.publish(staged(1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, None])
def test_validation_refuses_nan_infinite_negative_and_zero_scales(bridge, bad):
    client = bridge.trainer()
    client.publish(staged(0))
    scale = bridge_world.tensors(1)[K_SCALE]
    if bad is None:
        scale[:] = 0
    else:
        scale[3] = bad
    with refused("tensor", K_SCALE):
        client.publish(staged(1, replace={K_SCALE: scale}))
    still_serves(bridge, client, 0)


@pytest.mark.parametrize("at_once", [5, 33])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_nonfinite_values_are_found_in_every_float_dtype(dtype, at_once, monkeypatch):
    monkeypatch.setattr(staged_copies, "_AT_ONCE", at_once)
    array = np.linspace(-1, 1, 33, dtype=np.float32).astype(messages.DTYPES[dtype]).reshape(3, 11)
    assert not staged_copies.has_nonfinite(array)
    for bad in (np.nan, -np.nan) if dtype == "float8_e4m3fn" else (np.nan, np.inf, -np.inf):
        for place in ((0, 7), (2, 10)):
            good, array[place] = array[place], bad
            assert staged_copies.has_nonfinite(array)
            array[place] = good
    assert not staged_copies.has_nonfinite(np.full(4, -1, np.int8))


def test_scales_are_looked_at_as_fast_as_their_bytes_are_summed():
    """numpy compares bfloat16 at some 20 ns an element."""
    scales = (1 + np.arange(1 << 20) % 100).astype(ml_dtypes.bfloat16)
    digest = fingerprint.digest(scales)

    def seconds(name):
        entry = messages.TensorEntry(
            name=name, dtype="bfloat16", shape=[*scales.shape], offset=0, nbytes=scales.nbytes, digest=digest
        )
        times = []
        for _ in range(5):
            start = time.thread_time()
            staged_copies.validate_tensor(entry, scales)
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds("layer.weight_scale") < 5 * seconds("layer.weight")

    ends = np.array([-0.5, 2.0**-9, 448.0], ml_dtypes.float8_e4m3fn)
    assert staged_copies._range(scales) == (1.0, 100.0)
    ends = np.array([-0.5, 2.0**-9, 448.0], ml_dtypes.float8_e4m3fn)
    assert staged_copies._range(ends) == (-0.5, 448.0)


@pytest.mark.parametrize("field", ["step", "digest of a tensor", "a tensor", "digest", "total_bytes"])
def test_announce_refuses_a_torn_manifest(bridge, field):
    client = bridge.trainer()
    client.publish(staged(0))
    good = staged(1)
    manifest = good.manifest
    replace = msgspec.structs.replace
    if field == "step":
        bad = replace(manifest, version=replace(manifest.version, step=2))
    elif field == "digest of a tensor":
        bad = replace(manifest, tensors=[replace(manifest.tensors[0], digest=bytes(16)), *manifest.tensors[1:]])
    elif field == "a tensor":
        bad = replace(manifest, tensors=manifest.tensors[:-1])
    elif field == "digest":
        bad = replace(manifest, digest=bytes(16))
    else:
        bad = replace(manifest, total_bytes=manifest.total_bytes - 1)
    with refused("torn", "its digest does not match its content"):
        client.publish(sender.StagedVersion(bad, os.dup(good.fd), 0.0))
    still_serves(bridge, client, 0)
    client.publish(good)


def test_swapped_rows_of_two_shards_are_found(bridge):
    client = bridge.trainer()
    client.publish(staged(0))

    def swap(data, entries):
        first, second = (entries[n].offset for n in (K_WEIGHT, K_WEIGHT.replace("k_proj", "q_proj")))
        data[first : first + 8], data[second : second + 8] = data[second : second + 8], data[first : first + 8]

    with refused("torn", "k_proj.weight is torn|q_proj.weight is torn"):
        client.publish(bent(1, swap))
    still_serves(bridge, client, 0)


def test_a_nan_norm_weight_is_refused_too(bridge):
    norm = np.full(8, np.nan, ml_dtypes.bfloat16)
    with refused("tensor", "model.norm.weight holds NaN"):
        bridge.trainer().publish(staged(0, replace={"model.norm.weight": norm}))


def test_chunks_must_come_whole_in_order_and_within_bounds(tmp_path):
    with world(tmp_path, tcp=True) as w:
        client, version = w.trainer(), staged(0)
        total = version.manifest.total_bytes
        assert not client.request(messages.Announce(manifest=version.manifest), messages.Ready).share_memory
        with refused("torn", "in order"):
            client.request(messages.Chunk(offset=64), messages.Ok, data=b"x")
        with refused("torn", "beyond"):
            client.request(messages.Chunk(offset=0), messages.Ok, data=bytes(total + 1))
        with refused("limits", "exceeds the 8388608 of a Chunk"):
            client.request(messages.Chunk(offset=0), messages.Ok, data=bytes(messages.CHUNK_BYTES + 1))
        with refused("unshared", "send Chunks"):
            client.request(messages.Stage(memory=shm.locate(version.fd)), messages.Staged)
        client.request(messages.Announce(manifest=version.manifest), messages.Ready)
        client.request(messages.Chunk(offset=0), messages.Ok, data=bytes(10))
        with refused("torn", f"10 of {total} bytes"):
            client.request(messages.Stage(memory=None), messages.Staged)
        with refused("bad_state", "send Announce first"):  # a torn version is dropped
            client.request(messages.Stage(memory=None), messages.Staged)
        client.publish(version)
        still_serves(w, client, 0)


def test_steps_out_of_order_are_refused(bridge):
    client, version = bridge.trainer(), staged(0)
    commit = messages.Commit(digest=version.manifest.digest)
    with refused("bad_state", "Announce first"):
        client.request(commit, messages.Published)
    client.request(messages.Announce(manifest=version.manifest), messages.Ready)
    with refused("bad_state", "not staged"):
        client.request(commit, messages.Published)
    with refused("torn", "0 of"):
        client.request(messages.Stage(memory=None), messages.Staged)
    client.request(messages.Announce(manifest=version.manifest), messages.Ready)
    client.request(messages.Stage(memory=shm.locate(version.fd)), messages.Staged)
    with refused("torn", "another manifest"):
        client.request(messages.Commit(digest=bytes(16)), messages.Published)


def test_a_trainer_whose_memory_cannot_be_reached_sends_its_bytes(bridge, monkeypatch):
    real = shm.locate
    client = bridge.trainer()
    for step, elsewhere in enumerate(
        (
            # In another PID namespace there are other files at that number.
            lambda fd, *host: msgspec.structs.replace(real(fd, *host), inode=1),
            lambda fd, *host: msgspec.structs.replace(real(fd, *host), fd=0),
            lambda fd, *host: msgspec.structs.replace(real(fd, *host), pid=1 << 30),
        )
    ):
        version = staged(step)
        with refused("unshared"):
            shm.open_located(elsewhere(version.fd))
        monkeypatch.setattr(shm, "locate", elsewhere)
        client.publish(version)
        still_serves(bridge, client, step)


def open_files():
    gc.collect()  # pytest keeps the tracebacks of refusals, and with them their versions
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_memory_files_do_not_leak(bridge):
    client = bridge.trainer()
    for step in range(3):
        client.publish(staged(step))
    before = open_files()
    for step in range(3, 13):
        version = staged(step)
        client.publish(version)
        with refused("stale"):
            client.publish(staged(0))
        version.close()
    wait_for(lambda: open_files() <= before)  # the bridge lets go of a version when it gets to it
