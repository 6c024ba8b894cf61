# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Staging on a GPU, against a CUDA driver made of files (tests/reference/fake_libcuda.c): the calls, their arguments,
both ends of a version, and what happens where there is no driver. `tests/gpu` asks a real one."""

import ctypes
import functools
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from qarl_bridge.client import sender
from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server import window
from qarl_bridge.transport import cuda_ipc

from qarl_jax import models
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, engine_tensors
from qarl_jax.runtime.mesh import make_mesh, param_shardings
from qarl_jax.types import UserError
from tests.reference import bridge_world, fake_gpu, tiny


@pytest.fixture(scope="module")
def library_path(tmp_path_factory):
    if fake_gpu.COMPILER is None:
        pytest.skip("no C compiler for the stand-in of the CUDA driver")
    folder = tmp_path_factory.mktemp("cuda")
    os.environ["FAKE_CUDA_DIR"] = str(folder)
    yield fake_gpu.build(folder)[0]
    del os.environ["FAKE_CUDA_DIR"]


@pytest.fixture
def gpu(library_path):
    return cuda_ipc.Device(0, cuda_ipc.load(library_path))


def read(pointer, size):
    return ctypes.string_at(pointer, size)


# ---- the driver -----------------------------------------------------------------------------------------------------


def test_a_machine_without_a_driver_says_so_and_what_to_do():
    with pytest.raises(BridgeError, match=r"no CUDA driver.*publish over host memory") as error:
        cuda_ipc.load("libcuda-that-is-not-there.so.1")
    assert error.value.code == "unshared"


def test_what_is_written_on_one_side_is_read_on_the_other(gpu, library_path):
    pointer = gpu.allocate(8192)
    assert read(pointer, 8192) == bytes(8192)
    gpu.write(pointer + 100, b"weights")
    source = np.arange(1000, dtype=np.uint8)
    gpu.copy_all([(pointer + 4096, source.ctypes.data, 1000)])
    gpu.synchronize()
    code = f"""
import ctypes
from qarl_bridge.transport import cuda_ipc
device = cuda_ipc.find({gpu.uuid!r}, cuda_ipc.load({library_path!r}))
pointer = device.open({gpu.export(pointer)!r}, 8192)
print(ctypes.string_at(pointer + 100, 7).decode(), sum(ctypes.string_at(pointer + 4096, 1000)))
device.close_mapping(pointer)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["weights", str(int(source.sum()))]
    gpu.free(pointer)


def test_errors_of_the_driver_are_named(gpu, library_path, monkeypatch):
    with pytest.raises(BridgeError, match="cuMemFree_v2 failed on GPU 0: CUDA_ERROR_INVALID_VALUE"):
        gpu.free(12345)
    with pytest.raises(BridgeError, match="CUDA_ERROR_INVALID_HANDLE") as error:
        gpu.open(b"nobody".ljust(64, b"\0"), 1)
    assert error.value.code == "unshared"
    pointer = gpu.allocate(4096)
    with pytest.raises(BridgeError, match="holds 4096 bytes, the manifest announces 8192"):
        gpu.open(gpu.export(pointer), 8192)
    gpu.free(pointer)
    with pytest.raises(BridgeError, match="trainer and engine see different GPUs"):
        cuda_ipc.find(bytes(16), cuda_ipc.load(library_path))
    monkeypatch.setenv("FAKE_CUDA_BYTES", "1000")
    with pytest.raises(BridgeError, match=r"no room for a staging buffer.*gpu_memory_utilization.*transport=host"):
        gpu.allocate(4096)


def test_two_buffers_serve_any_number_of_versions_and_are_freed(gpu):
    folder = os.environ["FAKE_CUDA_DIR"]
    before = set(os.listdir(folder))
    pool = cuda_ipc.Buffers(gpu)
    held = pool.take(4096)
    for _ in range(5):
        following = pool.take(4096)
        held.release()
        held = following
    assert len(set(os.listdir(folder)) - before) == 2
    held.release()
    other = pool.take(8192)  # another model: the old ones go
    assert len(set(os.listdir(folder)) - before) == 1
    other.release()
    other.release()
    pool.close()
    assert set(os.listdir(folder)) == before


class Counting:
    """A device that counts what is mapped. Handles name nothing."""

    def __init__(self):
        self.mapped, self.calls = {}, 0

    def open(self, handle, size):
        self.calls += 1
        self.mapped[self.calls] = handle
        return self.calls

    def close_mapping(self, pointer):
        del self.mapped[pointer]


def test_two_buffers_are_mapped_once_and_let_go_with_their_trainer():
    device = Counting()
    mappings = cuda_ipc.Mappings(device)
    for version in range(6):  # a version's buffer is given back when the next one serves
        handle = b"ab"[version % 2 : version % 2 + 1]
        assert mappings.open(handle, 64) == version % 2 + 1
        if version:
            mappings.close(b"ba"[version % 2 : version % 2 + 1])
    assert device.calls == 2
    with pytest.raises(BridgeError, match="holds 64 bytes, the manifest announces 65"):
        mappings.open(b"a", 65)
    mappings.clear()  # b is still read
    assert set(device.mapped.values()) == {b"b"}
    mappings.open(b"b", 64)
    mappings.close(b"b")
    mappings.close(b"b", keep=False)  # it did not hold what was announced
    assert not device.mapped
    assert mappings.open(b"b", 64) == 3
    mappings.close(b"b")
    mappings.open(b"c", 32)  # the trainer has other buffers now
    assert set(device.mapped.values()) == {b"c"}


# ---- the learner's side ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3,), (5, 7), (2, 3, 4096), (2, 1, 0), (2, 6000)])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "int32", "float32", "float8_e4m3fn"])
def test_jax_computes_the_hosts_fingerprints(shape, dtype):
    raw = np.random.default_rng(0).integers(
        0, 256, (*shape[:-1], shape[-1] * messages.DTYPES[dtype].itemsize), np.uint8
    )
    stack = raw.view(messages.DTYPES[dtype])
    sums = np.asarray(gpu_staging.row_sums(jnp.asarray(stack), 1))
    for one, mine in zip(stack, sums, strict=True):
        assert np.array_equal(mine, fingerprint.row_sums(np.ascontiguousarray(one)))


@functools.cache
def policy(scheme, moe=False, seed=0):
    config = tiny.model_config(
        quant=models.parse_rules(scheme),
        architecture="Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM",
        moe=models.MoEConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True)
        if moe
        else None,
        moe_layers=(1,) if moe else (),
        tie_embeddings=moe,
        param_dtype=jnp.float32,
    )
    graphdef, params, qweights = models.split(models.random_model(config, seed))
    return PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)


def identity(step=0):
    return {
        "version": messages.Version(run_id="run", incarnation=1, step=step),
        "model": messages.model_fingerprint(bridge_world.CONFIG),
        "scheme": messages.scheme_hash(bridge_world.CONFIG["quantization_config"]),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "moe"),
    [
        ("bf16", False),
        ("w4a16:g32", True),
        *[pytest.param(*case, marks=pytest.mark.nightly) for case in [("w4a16:g32", False), ("w8a8", True)]],
    ],
)
def test_a_version_staged_on_the_device_is_that_of_the_host(gpu, scheme, moe):
    """Names, order, dtypes, shapes, fingerprints and bytes; twice, into two buffers."""
    stager = gpu_staging.DeviceStager([cuda_ipc.Buffers(gpu)])
    for step in range(2):
        weights = policy(scheme, moe, seed=step)
        host = sender.stage(engine_tensors(weights, stacked=True), **identity(step))
        device = stager.stage(weights, **identity(step))
        assert device.manifest == host.manifest
        size = host.manifest.total_bytes
        assert read(device.buffers[0].pointer, size) == os.pread(host.fd, size, 0)
        device.close()
    stager.close()


def spread(weights, **sizes):
    """`weights` on a mesh, as a learner has them."""
    mesh = make_mesh(**sizes)
    placed = [jax.device_put(tree, param_shardings(tree, mesh)) for tree in (weights.params, weights.qweights)]
    return PolicyWeights(graphdef=weights.graphdef, params=placed[0], qweights=placed[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "sizes", "numbers"),
    [
        pytest.param("bf16", {"fsdp": 2}, (1,), marks=pytest.mark.nightly),
        pytest.param("w4a16:g32", {"fsdp": 2, "expert": 3}, (0, 5), marks=pytest.mark.nightly),
        ("w8a8", {"fsdp": 3}, (0, 1, 2)),
    ],
)
def test_a_learner_on_a_mesh_stages_whole_versions_on_any_of_its_gpus(
    monkeypatch, library_path, scheme, sizes, numbers
):
    monkeypatch.setattr(gpu_staging, "PIECE_BYTES", 2**12)  # less than a layer of some stacks, more than all of others
    weights = policy(scheme, moe=True)
    host = sender.stage(engine_tensors(weights, stacked=True), **identity())
    pools = []
    for number in numbers:
        gpu = cuda_ipc.Device(0, cuda_ipc.load(library_path))
        gpu.ordinal, gpu.uuid = number, bytes([number]) * 16
        pools.append(cuda_ipc.Buffers(gpu))
    stager = gpu_staging.DeviceStager(pools)
    device = stager.stage(spread(weights, **sizes), **identity())
    assert device.manifest == host.manifest
    expected = os.pread(host.fd, host.manifest.total_bytes, 0)
    for number, buffer in zip(numbers, device.buffers, strict=True):
        assert read(buffer.pointer, len(expected)) == expected
        assert device.memory(bytes([number]) * 16) == messages.DeviceMemory(
            device=bytes([number]) * 16, handle=buffer.handle
        )
    assert device.buffer(b"a GPU elsewhere.") is device.buffers[0]
    device.close()
    assert all(pool._free and not pool._taken for pool in pools)
    stager.close()


@pytest.mark.parametrize("spread_over", [1, 2])
def test_a_stack_that_is_cast_or_joined_comes_in_pieces_of_whole_layers(monkeypatch, spread_over):
    stack = jnp.arange(6 * 8 * 4, dtype=jnp.float32).reshape(6, 8, 4)
    monkeypatch.setattr(gpu_staging, "PIECE_BYTES", 4 * 8 * 4 * 2 + 1)  # of four layers in bfloat16: three divide six
    mesh = make_mesh(fsdp=spread_over)
    placed = jax.device_put(stack, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    found = list(gpu_staging._pieces(placed, jnp.bfloat16, 1))
    assert [first for first, _ in found] == [0, 3]
    assert all(len(piece) == spread_over for _, piece in found)
    for number in range(spread_over):
        joined = jnp.concatenate([piece[number] for _, piece in found])
        np.testing.assert_array_equal(joined, stack.astype(jnp.bfloat16))
    ((first, piece),) = gpu_staging._pieces(placed[0], jnp.bfloat16, 0)
    assert first == 0
    assert piece[0].shape == (8, 4)


def test_what_lies_on_one_gpu_as_it_travels_is_not_copied():
    stack = jnp.ones((6, 8, 4), jnp.int8)
    ((first, piece),) = gpu_staging._pieces(stack, jnp.int8, 1)
    assert first == 0
    assert piece[0] is stack


@pytest.mark.slow
def test_versions_are_staged_on_the_engines_gpus_where_the_learner_is_on_them_too(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(BridgeError, match="the learner runs on cpu, not on a GPU"):
        gpu_staging.gpus_of(policy("w8a8"), [""])
    gpus_of = functools.partial(gpu_staging.gpus_of, platform="cpu")
    for engines in ([""], ["0"], ["1"], ["1", "2"]):
        assert gpus_of(policy("w8a8"), engines) == [0]
    both = spread(policy("w8a8"), fsdp=2)
    for engines, found in {("",): [0], ("1",): [1], ("1", "0"): [0, 1], ("2",): [0], ("2", "1"): [1]}.items():
        assert gpus_of(both, engines) == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-x")
    for engines, found in {("",): [0], ("GPU-x",): [1], ("GPU-x", "5"): [0, 1], ("1",): [0]}.items():
        assert gpus_of(both, engines) == found


# ---- both -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path, gpu, library_path, monkeypatch):
    """A bridge whose engine expects the tensors of `policy`, and a stager on its GPU."""
    named = dict(engine_tensors(policy("w8a8")))
    monkeypatch.setattr(bridge_world, "tensors", lambda seed: named)
    with bridge_world.world(tmp_path) as w:
        w.engine.mapper = fake_gpu.opener(library_path)
        w.engine.facts = msgspec.structs.replace(w.engine.facts, device=gpu.uuid)
        yield w, gpu_staging.DeviceStager([cuda_ipc.Buffers(gpu)])


@pytest.mark.slow
def test_versions_are_published_from_the_device_and_restored_from_it(served):
    w, stager = served
    client = w.trainer()
    held = None
    for step in range(4):
        following = stager.stage(policy("w8a8", seed=step), **identity(step))
        report = client.publish(following, readback="full")
        assert report["tensors"] == len(following.manifest.tensors)
        if held is not None:
            held.close()
        held = following
    draws = [messages.Draw(prompt=[1, 2], seed=0)]
    before = client.generate(draws, messages.Sampling(max_tokens=4))
    w.engine.fail_load = 1
    bad = stager.stage(policy("w8a8", seed=9), **identity(9))
    with pytest.raises(BridgeError, match="run/1/3 was restored"):
        client.publish(bad)
    assert client.generate(draws, messages.Sampling(max_tokens=4)) == before
    assert [span.version.step for span in before[0].spans] == [3]


@pytest.mark.slow
def test_a_byte_that_changes_on_the_device_is_found_wherever_it_changes(served, monkeypatch):
    w, stager = served
    client = w.trainer()
    client.publish(stager.stage(policy("w8a8"), **identity(0)))
    bad = stager.stage(policy("w8a8", seed=1), **identity(1))
    entry = bad.manifest.tensors[5]
    ctypes.memset(bad.buffers[0].pointer + entry.offset + 3, 0x55, 1)
    with pytest.raises(BridgeError, match=f"{entry.name} is torn"):
        client.publish(bad)
    assert client.status().version.step == 0


@pytest.mark.slow
def test_what_a_dead_trainer_staged_is_forgotten_with_its_lease(served):
    w, stager = served
    first = w.trainer()
    first.publish(stager.stage(policy("w8a8"), **identity(0)))
    first.close()
    other = w.client()
    bridge_world.wait_for(lambda: other.status().holder is None)
    assert w.bridge._good is None  # its memory is gone: nothing may be restored from it
    bridge_world.wait_for(lambda: w.engine.trainers_forgotten == 1)
    assert other.status().state == "serving"
    other.acquire("run", 2)
    w.engine.fail_load = 1
    version = stager.stage(
        policy("w8a8", seed=1), **(identity(1) | {"version": messages.Version(run_id="run", incarnation=2, step=1)})
    )
    with pytest.raises(BridgeError, match="fenced until a complete version"):
        other.publish(version)
    other.publish(version)
    assert other.status().state == "serving"


# ---- in parts -------------------------------------------------------------------------------------------------------


def places(*layers, nbytes=4096):
    """Of a layout: an embedding, so many tensors in each of some layers, a norm."""
    names = [f"model.layers.{i}.w{n}.weight" for i, count in enumerate(layers) for n in range(count)]
    names = ["model.embed_tokens.weight", *names, "model.norm.weight"]
    where = {"source": ("x", "master"), "dtype": "int8", "shape": (nbytes,), "nbytes": nbytes}
    return [gpu_staging._Place(name=name, offset=n * nbytes, **where) for n, name in enumerate(names)]


@pytest.mark.parametrize(
    ("pages", "ends"), [(100, [8]), (3, [3, 6, 8]), (2, [1, 3, 6, 8]), (1, [1, 3, 6, 7, 8]), (4, [3, 7, 8])]
)
def test_a_part_has_as_many_whole_layers_as_the_window_holds(pages, ends):
    found = places(2, 3, 1)
    assert gpu_staging.parts_of(found, 4096 * pages) == ends
    spans = gpu_staging.spans_of(found, ends)
    assert [start for start, _ in spans] == [4096 * first for first in [0, *ends[:-1]]]
    assert sum(size for _, size in spans) == 8 * 4096


@pytest.fixture
def in_parts(gpu, monkeypatch):
    """A stager whose window holds a layer, or the embedding."""
    monkeypatch.setattr(gpu_staging, "WINDOW_BYTES", 2**14)
    stager = gpu_staging.DeviceStager([cuda_ipc.Buffers(gpu)], in_parts=True)
    yield stager
    stager.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16:g32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_the_parts_in_the_window_make_the_version_of_the_host(in_parts, scheme):
    weights = policy(scheme, moe=True)
    host = sender.stage(engine_tensors(weights, stacked=True), **identity())
    version = in_parts.stage(weights, **identity())
    assert version.manifest == host.manifest
    assert len(version.ends) > 2
    (buffer,) = version.buffers
    assert buffer.size < host.manifest.total_bytes
    tensors = host.manifest.tensors
    for part, end in reversed(list(enumerate(version.ends))):  # in any order
        first = version.ends[part - 1] if part else 0
        version.write(part, buffer)
        for entry in tensors[first:end]:
            found = read(buffer.pointer + entry.offset - tensors[first].offset, entry.nbytes)
            assert found == os.pread(host.fd, entry.nbytes, entry.offset), entry.name
    version.close()


@pytest.mark.slow
def test_a_learner_on_a_mesh_writes_parts_on_each_of_its_gpus(monkeypatch, library_path):
    monkeypatch.setattr(gpu_staging, "PIECE_BYTES", 2**12)
    monkeypatch.setattr(gpu_staging, "WINDOW_BYTES", 2**14)
    weights = policy("w8a8", moe=True)
    host = sender.stage(engine_tensors(weights, stacked=True), **identity())
    pools = []
    for number in range(2):
        gpu = cuda_ipc.Device(0, cuda_ipc.load(library_path))
        gpu.ordinal, gpu.uuid = number, bytes([number]) * 16
        pools.append(cuda_ipc.Buffers(gpu))
    stager = gpu_staging.DeviceStager(pools, in_parts=True)
    placed = spread(weights, fsdp=2)
    version = stager.stage(placed, **identity())
    assert version.manifest == host.manifest
    starts = [host.manifest.tensors[first].offset for first in [0, *version.ends[:-1]]]
    for number in range(2):
        buffer = version.buffer(bytes([number]) * 16)
        for part, (start, stop) in enumerate(zip(starts, [*starts[1:], host.manifest.total_bytes], strict=True)):
            version.write(part, buffer)
            last = host.manifest.tensors[version.ends[part] - 1]
            size = last.offset + last.nbytes - start
            assert size <= stop - start
            assert read(buffer.pointer, size) == os.pread(host.fd, size, start)
    stager.close()


@pytest.mark.slow
def test_versions_go_through_the_window_and_nothing_can_be_restored(served, in_parts):
    w, _ = served
    client = w.trainer()
    for step in range(2):
        weights = policy("w8a8", seed=step)
        version = in_parts.stage(weights, **identity(step))
        report = client.publish(version, readback="full")
        assert (report["tensors"], report["bytes"]) == (len(version.manifest.tensors), version.manifest.total_bytes)
        assert report["weights_read_back"] == len(version.manifest.tensors)
        held = {name: messages.as_bytes(array) for name, array in engine_tensors(weights, stacked=True)}
        assert {name: messages.as_bytes(array) for name, array in w.engine.held.items()} == held
        version.close()
    client.publish(version)  # the same again, as after a failure elsewhere
    w.engine.fail_load = 1
    weights = policy("w8a8", seed=2)
    version = in_parts.stage(weights, **identity(2))
    with pytest.raises(BridgeError, match="no earlier version to restore"):
        client.publish(version)
    assert client.status().state == "fenced"
    client.publish(version)
    assert client.status().version.step == 2
    with pytest.raises(BridgeError, match="nothing published to compare with"):
        client.read_back()


def through_a_window(version, torch, spoil=lambda sweep, part, buffer: None):
    """A WindowCopy of a host version whose window is a tensor of torch's, and a thread that fills it."""
    from qarl_bridge.server import staged_gpu

    tensors = version.manifest.tensors
    ends = [2, 3, len(tensors)]
    starts = [tensors[first].offset for first in [0, *ends[:-1]]]
    buffer = torch.full((sender.align(version.manifest.total_bytes),), 0x55, dtype=torch.uint8)

    def open_part(part):
        return staged_gpu.DeviceCopy(part, buffer[: staged_gpu.whole_rows(part.total_bytes)])

    copy = window.WindowCopy(version.manifest, ends, open_part)
    copy.fetches.begin()
    fetched = []

    def serve():
        while (part := copy.fetches.wanted(60)) is not None:
            last = tensors[ends[part] - 1]
            raw = os.pread(version.fd, last.offset + last.nbytes - starts[part], starts[part])
            buffer.zero_()
            buffer[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            spoil(len(fetched) // len(ends), part, buffer)
            fetched.append(part)
            copy.fetches.bring()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return copy, fetched, thread


def test_parts_are_checked_on_the_engines_side_each_time_they_are_read():
    torch = pytest.importorskip("torch")
    version = bridge_world.staged(3)
    copy, fetched, thread = through_a_window(version, torch)
    copy.validate()
    for sweep in (copy.at_the_door, copy.parts):
        found = {name: tensor.clone() for part in sweep() for name, tensor in part.items()}
        for name, want in bridge_world.tensors(3).items():
            assert np.array_equal(found[name].float().numpy(), want.astype(np.float32))
    copy.confirm()
    assert fetched == 3 * [0, 1, 2]
    copy.fetches.stop()
    thread.join()
    copy.fetches.end(BridgeError("over", "dead"))
    with pytest.raises(BridgeError, match="over"):
        next(copy.parts())

    def another_byte(sweep, part, buffer):
        if (sweep, part) == (1, 1):
            buffer[7] ^= 1

    copy, fetched, thread = through_a_window(version, torch, another_byte)
    copy.validate()
    with pytest.raises(BridgeError, match=r"torn.*after it was staged"):
        list(copy.at_the_door())
    assert fetched == [0, 1, 2, 0, 1]
    copy.fetches.stop()
    thread.join()
    copy.close()


@pytest.mark.parametrize("ends", [[], [2], [2, 2, 5], [3, 2, 5], [5, 6], [0, 5]])
def test_parts_that_do_not_make_the_version_are_refused(ends):
    version = bridge_world.staged(3)
    assert len(version.manifest.tensors) == 5
    with pytest.raises(BridgeError, match="do not make the version"):
        window.WindowCopy(version.manifest, ends, lambda part: None)


@pytest.mark.slow
def test_a_part_that_is_not_what_was_announced_is_found_before_anything_is_replaced(served, in_parts):
    w, _ = served
    client = w.trainer()
    weights = policy("w8a8")
    client.publish(in_parts.stage(weights, **identity(0)))
    loaded = dict(w.engine.held)
    other = policy("w8a8", seed=1)
    version = in_parts.stage(other, **identity(1))
    write, entry = version.write, version.manifest.tensors[version.ends[0]]

    def torn(part, buffer):
        write(part, buffer)
        if part == 1:
            ctypes.memset(buffer.pointer + 3, 0x55, 1)

    version.write = torn
    with pytest.raises(BridgeError, match=f"{entry.name} is torn"):
        client.publish(version)
    assert client.status().state == "serving"
    assert all(loaded[name] is array for name, array in w.engine.held.items())
    version.write = write
    client.publish(version)


@pytest.mark.slow
def test_a_version_whose_weights_are_gone_is_given_up_and_the_engine_serves_on(served, in_parts):
    w, _ = served
    client = w.trainer()
    weights = policy("w8a8")
    client.publish(in_parts.stage(weights, **identity(0)))
    graphdef, params, qweights = models.split(models.random_model(models.config_of(weights.graphdef), 7))
    version = in_parts.stage(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), **identity(1))
    for leaf in jax.tree.leaves((params, qweights)):
        leaf.delete()  # as an update does that takes the old ones' memory
    with pytest.raises(BridgeError, match="the learner holds the weights of run/1/1 no longer") as error:
        client.publish(version)
    assert error.value.code == "bad_state"
    assert client.status().version.step == 0
    assert client.status().state == "serving"


@pytest.mark.slow
def test_a_trainer_that_dies_while_its_parts_are_loaded_leaves_an_engine_that_is_fenced(served, in_parts):
    w, _ = served
    client = w.trainer()
    weights = policy("w8a8")
    version = in_parts.stage(weights, **identity(0))
    write, calls = version.write, []

    def dying(part, buffer):
        calls.append(part)
        if len(calls) > len(version.ends):  # checked; now it is loaded
            raise KeyboardInterrupt
        write(part, buffer)

    version.write = dying
    with pytest.raises(KeyboardInterrupt):
        client.publish(version)
    client.close()
    other = w.client()
    bridge_world.wait_for(lambda: other.status().holder is None)
    bridge_world.wait_for(lambda: other.status().state == "fenced")
    other.acquire("run", 2)
    again = {"version": messages.Version(run_id="run", incarnation=2, step=0)}
    other.publish(in_parts.stage(weights, **(identity(0) | again)))
    assert other.status().state == "serving"


def test_an_engine_elsewhere_takes_no_parts(gpu, in_parts):
    client = sender.Client.__new__(sender.Client)
    client.facts = type("Facts", (), {"device": b"another GPU....."})()
    with pytest.raises(BridgeError, match="staging_buffers to 1 or 2") as error:
        client.route(in_parts.stage(policy("bf16"), **identity()))
    assert error.value.code == "unshared"


@pytest.mark.slow
def test_a_bridge_without_a_gpu_or_over_tcp_refuses_device_memory(tmp_path, gpu, monkeypatch):
    named = dict(engine_tensors(policy("w8a8")))
    monkeypatch.setattr(bridge_world, "tensors", lambda seed: named)
    stager = gpu_staging.DeviceStager([cuda_ipc.Buffers(gpu)], "cuda_ipc")
    for tcp in (False, True):
        with bridge_world.world(tmp_path, tcp=tcp) as w:
            staged = stager.stage(policy("w8a8"), **identity(0))
            with pytest.raises(BridgeError) as error:
                w.trainer().publish(staged)
            assert error.value.code == "unshared"
            staged.close()


# ---- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_transport_is_chosen_and_said(monkeypatch):
    lines = []
    engine = VllmEngine(Config(engine="fake", max_model_len=128), log=lines.append)
    try:
        engine.publish(policy("w8a8"), 0)
        engine.publish(policy("w8a8", seed=1), 1)
    finally:
        engine.close()
    assert sum("publishing over host memory: the learner runs on cpu" in line for line in lines) == 1
    assert sum("transport=host" in line for line in lines) == 1
    engine = VllmEngine(Config(engine="fake", transport="cuda_ipc"))
    with pytest.raises(UserError, match=r"transport=cuda_ipc: the learner runs on cpu.*set auto or host"):
        engine.publish(policy("w8a8"), 0)
    engine.close()
