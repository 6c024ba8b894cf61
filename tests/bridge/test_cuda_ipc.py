# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Staging on a GPU, against a CUDA driver made of files (tests/reference/fake_libcuda.c): the calls, their arguments,
both ends of a version, and what happens where there is no driver. `tests/gpu` asks a real one."""

import ctypes
import functools
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from qarl_bridge.client import one_base, sender
from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport import cuda_ipc

from qarl_jax.rollout.vllm import all_gather, gpu_staging
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, engine_tensors
from qarl_jax.types import UserError
from tests.reference import bridge_world
from tests.reference.device_versions import identity, policy, read, spread

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


def test_a_base_on_a_gpu_is_read_by_another_process_once_it_is_written(library_path):
    memory = one_base.GpuMemory(8192, 0, library_path)
    source = np.arange(1000, dtype=np.uint8)
    code = f"""
import ctypes
from qarl_bridge.transport import cuda_ipc
device = cuda_ipc.find({memory.place.device!r}, cuda_ipc.load({library_path!r}))
pointer = device.open({memory.place.handle!r}, 8192)
print(sum(ctypes.string_at(pointer, 8192)))
input()
print(sum(ctypes.string_at(pointer + 4096, 1000)))
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as engine:  # which is started on an empty base
        assert engine.stdout.readline() == "0\n"
        memory.write(4096, source.ctypes.data, 1000)
        assert engine.communicate("\n")[0] == f"{source.sum()}\n"
    assert memory.dlpack == (2, 0)


def test_gpus_are_counted_without_touching_one(library_path, monkeypatch):
    assert sender.gpu_count(library_path) == 1
    monkeypatch.setenv("FAKE_CUDA_GPUS", "8")  # of which only the first could be opened
    assert sender.gpu_count(library_path) == 8
    monkeypatch.setenv("FAKE_CUDA_GPUS", "0")
    with pytest.raises(BridgeError, match="cannot count GPUs") as error:
        sender.gpu_count(library_path)
    assert error.value.code == "unshared"


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
    monkeypatch.setattr(all_gather, "PIECE_BYTES", 2**12)  # less than a layer of some stacks, more than all of others
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
    assert not w.bridge._good.is_there  # its memory is gone: nothing may be restored from it
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
