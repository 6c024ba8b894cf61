# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Publishing from GPU to GPU, against an NCCL made of sockets (tests/reference/fake_libnccl.c): the calls, both ends of
a version, and what happens when an end dies, sticks or lies. `tests/gpu` asks a real one, on two GPUs."""

import contextlib
import ctypes
import hashlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport import cuda_ipc, nccl

from qarl_jax.rollout import SamplingConfig
from qarl_jax.rollout.vllm import engine as vllm_engine
from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.rollout.vllm.engine import Config, VllmEngine
from qarl_jax.types import UserError
from tests.reference import bridge_world, fake_gpu, tiny_policies

OTHER_GPU = b"another of tests"
LIMIT_S = 3.0  # of the clients here whose ends get stuck


@pytest.fixture
def library(folder):
    return nccl.load(str(folder / "libnccl.so"))


@pytest.fixture
def stalls(folder, monkeypatch):
    """A function that makes a rank stop half-way through the next broadcast; and the file that then appears."""

    def stall(rank):
        monkeypatch.setenv("FAKE_NCCL_STALL", str(rank))
        return folder / f"stalled-{rank}"

    yield stall
    for rank in (0, 1):
        (folder / f"stalled-{rank}").unlink(missing_ok=True)


def nothing():
    pass


def joined(device, rank, unique_id, library, check=nothing, timeout_s=bridge_world.PATIENCE_S):
    return nccl.Communicator(device, rank, 2, unique_id, library=library, timeout_s=timeout_s, check=check)


def of(pointer, size):
    return np.frombuffer((ctypes.c_ubyte * size).from_address(pointer), np.uint8)


# ---- the library ----------------------------------------------------------------------------------------------------


def test_an_environment_without_nccl_says_so_and_what_to_do(folder):
    with pytest.raises(BridgeError, match=r"no NCCL.*pip install nvidia-nccl-cu12.*transport=host") as error:
        nccl.load("libnccl-that-is-not-there.so.2")
    assert error.value.code == "unshared"
    with pytest.raises(BridgeError, match=r"lacks ncclGetVersion: 2\.14 or later"):
        nccl.load(str(folder / "libcuda.so"))


def test_nvidias_wheel_comes_before_the_systems_library(tmp_path, monkeypatch):
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    (tmp_path / "nvidia" / "nccl" / "__init__.py").touch()
    assert nccl.candidates()[-1] == "libnccl.so.2"
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert nccl.candidates() == [str(library), "libnccl.so.2"]


def test_versions_are_read_as_nccl_writes_them(library):
    assert nccl.readable(nccl.version(library)) == "2.27.3"
    assert nccl.readable(21805) == "2.18.5"
    assert nccl.new_id(library) != nccl.new_id(library)


def test_two_processes_exchange_bytes_again_and_again(gpu, library, folder, monkeypatch):
    monkeypatch.setattr(nccl, "PIECE_BYTES", 1000)  # several broadcasts each
    unique_id = nccl.new_id(library)
    code = f"""
import ctypes, hashlib
from qarl_bridge.transport import cuda_ipc, nccl
nccl.PIECE_BYTES = 1000
device = cuda_ipc.Device(0, cuda_ipc.load({str(folder / "libcuda.so")!r}))
library = nccl.load({str(folder / "libnccl.so")!r})
communicator = nccl.Communicator(device, 1, 2, {unique_id!r}, library=library, timeout_s=60, check=lambda: None)
pointer = device.allocate(8192)
for _ in range(2):
    communicator.broadcast(pointer, 5500, timeout_s=60, check=lambda: None)
    print(hashlib.sha256(ctypes.string_at(pointer, 8192)).hexdigest())
communicator.abort()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    communicator = joined(gpu, 0, unique_id, library)
    pointer = gpu.allocate(8192)
    digests = []
    for seed in range(2):
        data = np.random.default_rng(seed).integers(0, 256, 5500, np.uint8)
        of(pointer, 8192)[:5500] = data
        communicator.broadcast(pointer, 5500, timeout_s=60, check=nothing)
        digests.append(hashlib.sha256(data.tobytes() + bytes(8192 - 5500)).hexdigest())
    communicator.abort()
    communicator.abort()
    assert child.communicate()[0].split() == digests
    assert child.returncode == 0
    gpu.free(pointer)


def test_a_peer_that_never_comes_is_waited_for_no_longer_than_said(gpu, library):
    started = time.monotonic()
    with pytest.raises(BridgeError, match=r"NCCL: joining 2 GPUs took over 0\.2 s") as error:
        joined(gpu, 0, nccl.new_id(library), library, timeout_s=0.2)
    assert error.value.code == "unshared"
    assert time.monotonic() - started < 10

    def told():
        raise BridgeError("it is gone", "dead")

    with pytest.raises(BridgeError, match="it is gone"):
        joined(gpu, 1, nccl.new_id(library), library, check=told)


def test_another_version_of_nccl_is_refused_by_name(gpu, library):
    memory = messages.NcclMemory(unique_id=nccl.new_id(library), rank=1, world=2, version=21805, timeout_s=1)
    with pytest.raises(BridgeError, match=r"trainer has NCCL 2\.18\.5, the engine 2\.27\.3: install the same"):
        nccl.Receiver(gpu, library).receive(memory, 4096, nothing)


# ---- a bridge on another GPU ----------------------------------------------------------------------------------------


class Trainer:
    """Versions on its own GPU, and what sends them."""

    def __init__(self, gpu):
        self.buffers = cuda_ipc.Buffers(gpu)

    def stage(self, step, transport="auto", **changes):
        host = bridge_world.staged(step, **changes)
        size = host.manifest.total_bytes
        buffer = self.buffers.take(sender.align(size))
        buffer.device.write(buffer.pointer, host.chunk(0, size))
        host.close()
        return sender.DeviceVersion(host.manifest, (buffer,), 0.0, transport)


@pytest.fixture
def served(tmp_path, gpu, library, monkeypatch):
    """A bridge whose engine has another GPU, and a trainer."""
    monkeypatch.setattr(sender.nccl, "load", lambda: library)
    with bridge_world.world(tmp_path) as w:
        w.engine.facts = msgspec.structs.replace(w.engine.facts, device=OTHER_GPU)
        receiver = nccl.Receiver(gpu, library)
        w.engine.receiver = fake_gpu.receiving(receiver)
        yield w, Trainer(gpu), receiver
        receiver.close()


def serves(w, step):
    status = w.client().status()
    assert status.state == "serving"
    assert status.version.step == step


def test_versions_cross_over_one_communicator_and_outlive_their_trainer(served, monkeypatch, library):
    w, trainer, receiver = served
    ids = []
    make = nccl.new_id
    monkeypatch.setattr(nccl, "new_id", lambda library: ids.append(make(library)) or ids[-1])
    client = w.trainer()
    held = None
    for step in range(4):
        following = trainer.stage(step)
        assert client.route(following) == "nccl"
        report = client.publish(following, readback="full")
        assert client.sent_over == "nccl"
        assert report["tensors"] == len(following.manifest.tensors)
        if held is not None:
            held.close()
        held = following
    assert len(ids) == 1
    assert len(receiver._buffers._free) + len(receiver._buffers._taken) == 2
    draws = [messages.Draw(prompt=[1, 2], seed=0)]
    before = client.generate(draws, messages.Sampling(max_tokens=4))
    w.engine.fail_load = 1
    with pytest.raises(BridgeError, match="run/1/3 was restored"):
        client.publish(trainer.stage(9))
    assert client.generate(draws, messages.Sampling(max_tokens=4)) == before
    client.close()  # the engine's copy is its own: it can be restored without the trainer it came from
    other = w.client()
    bridge_world.wait_for(lambda: other.status().holder is None)
    assert w.bridge._good is not None
    other.acquire("run", 2)
    w.engine.fail_load = 1
    with pytest.raises(BridgeError, match="run/1/3 was restored"):
        other.publish(trainer.stage(0, incarnation=2))
    other.publish(trainer.stage(1, incarnation=2))
    assert len(ids) == 2  # a connection, a communicator
    serves(w, 1)


def test_a_byte_that_changes_on_the_way_is_found_and_named(served, monkeypatch):
    w, trainer, _ = served
    client = w.trainer()
    client.publish(trainer.stage(0))
    bad = trainer.stage(1)
    entry = bad.manifest.tensors[2]
    monkeypatch.setenv("FAKE_NCCL_FLIP", str(entry.offset + 3))
    with pytest.raises(BridgeError, match=f"{entry.name} is torn") as error:
        client.publish(bad)
    assert error.value.code == "torn"
    serves(w, 0)
    monkeypatch.delenv("FAKE_NCCL_FLIP")
    client.publish(bad)
    serves(w, 1)


def test_values_that_are_not_finite_are_refused_as_ever(served):
    w, trainer, _ = served
    client = w.trainer()
    client.publish(trainer.stage(0))
    nan = np.full((8, 1), np.nan, np.float32)
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    with pytest.raises(BridgeError, match=f"{name} holds NaN"):
        client.publish(trainer.stage(1, replace={name: nan}))
    serves(w, 0)
    client.publish(trainer.stage(2))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_end_that_sticks_frees_both_and_the_next_publish_begins_anew(served, stalls, rank, monkeypatch):
    w, trainer, _ = served
    client = w.trainer()
    client.publish(trainer.stage(0))
    client.set_timeout(LIMIT_S)
    monkeypatch.setenv("FAKE_NCCL_DEAF", "1")
    stuck = stalls(rank)
    started = time.monotonic()
    with pytest.raises(BridgeError, match=r"took over 3 s|gave up sending") as error:
        client.publish(trainer.stage(1))
    assert stuck.exists()
    assert error.value.code == "unshared"
    assert LIMIT_S - 0.5 < time.monotonic() - started < bridge_world.PATIENCE_S / 2
    serves(w, 0)
    client.publish(trainer.stage(2))
    serves(w, 2)


@pytest.mark.slow
def test_ends_that_disagree_on_the_size_are_freed_by_the_time_limit(served):
    w, trainer, _ = served
    client = w.trainer()
    client.publish(trainer.stage(0))
    client.set_timeout(LIMIT_S)
    short = trainer.stage(1)
    whole, short.buffers[0].size = short.buffers[0].size, short.buffers[0].size - 4096
    with pytest.raises(BridgeError, match=r"a broadcast of \d+ bytes took over 3 s"):
        client.publish(short)
    short.buffers[0].size = whole
    serves(w, 0)
    client.publish(short)
    serves(w, 1)


def test_an_engine_that_cannot_receive_says_so_at_once(served):
    w, trainer, _ = served
    w.engine.receiver = None
    started = time.monotonic()
    with pytest.raises(BridgeError, match="this engine has no GPU") as error:
        w.trainer().publish(trainer.stage(0))
    assert error.value.code == "unshared"
    assert time.monotonic() - started < bridge_world.PATIENCE_S / 2


def test_a_communicator_that_cannot_be_made_is_one_error(served, monkeypatch):
    w, trainer, _ = served
    client = w.trainer()
    monkeypatch.setenv("FAKE_NCCL_FAIL", "1")
    with pytest.raises(BridgeError, match="NCCL failed: unhandled system error") as error:
        client.publish(trainer.stage(0))
    assert error.value.code == "unshared"
    monkeypatch.delenv("FAKE_NCCL_FAIL")
    client.publish(trainer.stage(1))
    serves(w, 1)


def test_which_way_a_version_goes(served, gpu):
    w, trainer, _ = served
    client = w.client()
    staged = trainer.stage(0)
    assert client.route(bridge_world.staged(0)) == "host"
    assert client.route(staged) == "nccl"
    facts = client.facts
    client.facts = msgspec.structs.replace(facts, device=gpu.uuid)
    assert client.route(staged) == "cuda_ipc"
    with pytest.raises(BridgeError, match=r"share a GPU.*rollout\.engine\.visible_gpus"):
        client.route(trainer.stage(0, "nccl"))
    client.facts = msgspec.structs.replace(facts, device=b"")
    with pytest.raises(BridgeError, match="runs on a CPU"):
        client.route(staged)
    client.facts, client.address = facts, "tcp://h:1"
    assert client.route(trainer.stage(0, "nccl")) == "nccl"
    with pytest.raises(BridgeError, match="reached over TCP"):  # NCCL would not encrypt what the socket does
        client.route(staged)


def test_nccl_is_not_kept_from_a_bridge_over_tcp(tmp_path, gpu, library, monkeypatch):
    monkeypatch.setattr(sender.nccl, "load", lambda: library)
    with bridge_world.world(tmp_path, tcp=True) as w:
        receiver = nccl.Receiver(gpu, library)
        w.engine.receiver = fake_gpu.receiving(receiver)
        w.trainer().publish(Trainer(gpu).stage(0, "nccl"))
        serves(w, 0)


TRAINER = """
import sys
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages as wire
from qarl_bridge.transport import cuda_ipc, nccl
from tests.bridge import test_nccl
from tests.reference import bridge_world
address, folder = sys.argv[1:]
library = nccl.load(folder + "/libnccl.so")
sender.nccl.load = lambda: library
trainer = test_nccl.Trainer(cuda_ipc.Device(0, cuda_ipc.load(folder + "/libcuda.so")))
client = sender.Client(address, bytes(range(32)))
client.acquire("run", 1)
client.publish(trainer.stage(1))
"""


@pytest.mark.slow
def test_a_trainer_killed_while_it_sends_leaves_the_engine_serving(served, folder, stalls, monkeypatch):
    w, trainer, _ = served
    first = w.trainer("run", 0)
    first.publish(trainer.stage(0, incarnation=0))
    first.close()
    monkeypatch.setenv("FAKE_NCCL_DEAF", "1")  # a GPU that waits for another does not notice
    sending = stalls(0)
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "bridge")])}
    child = subprocess.Popen([sys.executable, "-c", TRAINER, w.address, str(folder)], env=environment)
    try:
        bridge_world.wait_for(sending.exists)
    finally:
        child.kill()
        child.wait()
    other = w.client()
    bridge_world.wait_for(lambda: other.status().holder is None)
    assert other.status().state == "serving"
    assert other.status().version.incarnation == 0
    other.acquire("run", 2)
    other.publish(trainer.stage(0, incarnation=2))
    assert other.status().version.incarnation == 2


# ---- the trainer's engine, and a bridge that is a process -----------------------------------------------------------


@contextlib.contextmanager
def engine(folder, gpu, library, monkeypatch, tmp_path, **options):
    """A VllmEngine whose learner is on a GPU of this process, and whose bridge finds the one it is told to."""
    python = tmp_path / "python"
    script = pathlib.Path(fake_gpu.__file__)
    python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(script), str(folder)])} "$@"\n')
    python.chmod(0o755)
    root = script.parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "bridge")]))
    monkeypatch.setattr(sender.nccl, "load", lambda: library)
    monkeypatch.setattr(vllm_engine, "gpus_of", lambda weights, engines: [0])
    monkeypatch.setattr(sender, "gpu_buffers", lambda ordinal: cuda_ipc.Buffers(gpu))
    lines = []
    config = Config(engine="fake", python=str(python), max_model_len=128, request_timeout_s=60, **options)
    e = VllmEngine(config, log=lines.append)
    try:
        yield e, lines
    finally:
        e.close()


def drawn(e):
    groups = e.generate(tiny_policies.prompts(2), num_samples=1, sampling=SamplingConfig(max_response_len=4), key=0)
    return [completion.tokens for group in groups for completion in group]


def policy(step):
    return tiny_policies.policy("w8a8", seed=step)


@pytest.mark.slow
def test_an_engine_on_another_gpu_is_published_to_over_nccl(folder, gpu, library, monkeypatch, tmp_path):
    asked, own = [], sender.Client.route
    monkeypatch.setattr(sender.Client, "route", lambda client, staged: asked.append(1) or own(client, staged))
    with engine(folder, gpu, library, monkeypatch, tmp_path, visible_gpus="2") as (e, lines):
        for step in range(3):
            report = e.publish(policy(step), step)
            assert report["bytes"] > 0
            assert len(asked) == step + 1
        assert e.route == "nccl"
        assert sum("transport=nccl" in line for line in lines) == 1
        assert e.restarts == 0
        mine = drawn(e)
    with engine(folder, gpu, library, monkeypatch, tmp_path, visible_gpus="s") as (e, lines):
        e.publish(policy(2), 2)
        assert sum("transport=cuda_ipc" in line for line in lines) == 1
        assert drawn(e) == mine


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 2])
def test_one_staging_buffer_serves_every_version_and_survives_a_dead_engine(
    folder, gpu, library, monkeypatch, tmp_path, count
):
    monkeypatch.setattr(gpu_staging, "CHUNK_BYTES", 2**14)
    with engine(folder, gpu, library, monkeypatch, tmp_path, visible_gpus="s", staging_buffers=count) as (e, _):
        for step in range(3):
            weights = policy(step)  # which a learner holds while it samples
            size = e.publish(weights, step)["bytes"]
        assert e.route == "cuda_ipc"
        buffers = [*e._stager._pools[0]._free, *e._stager._pools[0]._taken]
        assert len(buffers) == max(count, 1)
        assert (buffers[0].size < size) == (count == 0)
        mine = drawn(e)
        os.kill(e.fleet.replicas[0].bridge.process.pid, signal.SIGKILL)
        assert drawn(e) == mine
        assert e.restarts == 1


@pytest.mark.slow
def test_an_engine_killed_while_it_receives_is_replaced_and_given_both_versions(
    folder, gpu, library, monkeypatch, tmp_path, stalls
):
    monkeypatch.setenv("FAKE_NCCL_DEAF", "1")
    with engine(folder, gpu, library, monkeypatch, tmp_path, visible_gpus="2", transport="nccl") as (e, _):
        e.publish(policy(0), 0)
        receiving = stalls(1)
        # The bridge was started without the fault: it gets it with its next life.
        os.kill(e.fleet.replicas[0].bridge.process.pid, signal.SIGKILL)

        def kill():
            bridge_world.wait_for(receiving.exists)
            os.kill(e.fleet.replicas[0].bridge.process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        e.publish(policy(1), 1)
        killer.join()
        assert e.restarts == 2
        assert drawn(e)
        assert e.status().version.step == 1
        assert e.route == "nccl"


@pytest.mark.slow
def test_without_nccl_auto_says_why_and_goes_over_host_memory(folder, gpu, library, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_NCCL_FAIL", "1")
    with engine(folder, gpu, library, monkeypatch, tmp_path, visible_gpus="2") as (e, lines):
        e.publish(policy(0), 0)
        assert sum("publishing over host memory: NCCL failed" in line for line in lines) == 1
        assert e._stager is None
        e.publish(policy(1), 1)
        assert drawn(e)
    with (
        engine(folder, gpu, library, monkeypatch, tmp_path, visible_gpus="2", transport="nccl") as (e, _),
        pytest.raises(UserError, match=r"rollout\.engine\.transport=nccl: NCCL failed.*; set auto or host"),
    ):
        e.publish(policy(0), 0)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match=r"transport=nccl is for.*different GPUs.*visible_gpus"):
        Config(transport="nccl")
    with pytest.raises(
        UserError, match=r"transport=nccl is for.*different GPUs.*shares_gpus=true.*: set transport=auto"
    ):
        Config(transport="nccl", visible_gpus="0", shares_gpus=True)
    with pytest.raises(UserError, match=r"transport=cuda_ipc needs learner and engine on one GPU.*set nccl or host"):
        Config(transport="cuda_ipc", endpoints=("tcp://h:1",), key_file="k")
    with pytest.raises(UserError, match="visible_gpus is for a bridge that the trainer starts"):
        Config(visible_gpus="1", endpoints=("/tmp/s",), key_file="k")
    apart = Config(transport="nccl", endpoints=("tcp://h:1",), key_file="k")
    assert apart.has_own_gpu
    assert apart.stages_on_gpu
    assert not Config(endpoints=("tcp://h:1",), key_file="k").stages_on_gpu
    assert not Config().has_own_gpu
    assert not Config(visible_gpus="0", transport="cuda_ipc").has_own_gpu
