# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Publishing from one real GPU to another: staged and sent by JAX's process, received by torch in another.

JAX_PLATFORMS=cuda pytest -m gpu tests/gpu/test_nccl_publish.py
"""

import contextlib
import hashlib
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.transport import nccl

from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.rollout.vllm.engine import engine_tensors
from tests.reference import tiny_policies

ON_GPU = jax.default_backend() == "gpu"
FOUND = len(jax.local_devices()) if ON_GPU else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(FOUND < 2, reason=f"needs two CUDA devices (JAX_PLATFORMS=cuda); JAX sees {FOUND}"),
]
LIMIT_S = 60.0
SPEED_BYTES = 2 << 30

VERSIONS = """
import hashlib, sys, time
import msgspec
from qarl_bridge.server import staged_gpu as device
from qarl_bridge.protocol import messages as wire
manifest, memory, rounds = msgspec.msgpack.decode(
    sys.stdin.buffer.read(), type=tuple[wire.Manifest, wire.NcclMemory, int]
)
receiver = device.receiver()
for _ in range(rounds):
    copy = device.receive_version(receiver, manifest, memory, lambda: None)
    copy.validate()
    bytes_ = copy._buffer[: manifest.total_bytes].cpu().numpy().tobytes()
    copy.confirm()
    print(len(next(copy.checked_parts())), hashlib.sha256(bytes_).hexdigest(), flush=True)
    copy.close()
time.sleep(float(sys.argv[1]))
receiver.close()
"""

SPEED = """
import sys, time
import msgspec, torch
from qarl_bridge.server import staged_gpu as device
from qarl_bridge.protocol import fingerprint, messages as wire
memory, size, rounds = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[wire.NcclMemory, int, int])
receiver = device.receiver()
for _ in range(rounds):
    start = time.perf_counter()
    buffer = receiver.receive(memory, size, lambda: None)
    print(time.perf_counter() - start, flush=True)
    buffer.release()
sums = device.on_the_host(device.row_sums(torch.as_tensor(device._Span(buffer.pointer, size), device="cuda")))
print(fingerprint.digest_of_sums(sums).hex(), flush=True)
receiver.close()
"""


def second_gpu():
    """As CUDA_VISIBLE_DEVICES names it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[1] if visible else "1"


@contextlib.contextmanager
def child(code, message, *arguments):
    """A process on the second GPU."""
    root = pathlib.Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "bridge"), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment | {"CUDA_VISIBLE_DEVICES": second_gpu(), "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        process.stdin.write(msgspec.msgpack.encode(message))
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def beginning():
    """(library, what the other end must know)."""
    pytest.importorskip("torch")
    library = nccl.load()
    name, version = nccl.new_id(library), nccl.version(library)
    return library, messages.NcclMemory(unique_id=name, rank=1, world=2, version=version, timeout_s=LIMIT_S)


def alive(process):
    """What a root checks while it waits."""

    def check():
        if process.poll() not in (None, 0):
            raise BridgeError(f"the receiver ended with {process.returncode}", "dead")

    return check


def joined(gpu, memory, library, process):
    return nccl.Communicator(gpu, 0, 2, memory.unique_id, library=library, timeout_s=LIMIT_S, check=alive(process))


def identity(step):
    version = messages.Version(run_id="run", incarnation=1, step=step)
    return {"version": version, "model": bytes(16), "scheme": bytes(16)}


@pytest.mark.parametrize("scheme", ["bf16", "w4a16:g32"])
def test_another_gpu_receives_the_learners_version_twice_over_one_communicator(scheme):
    library, memory = beginning()
    weights = tiny_policies.policy(scheme)
    host = sender.stage(engine_tensors(weights, stacked=True), **identity(0))
    expected = hashlib.sha256(os.pread(host.fd, host.manifest.total_bytes, 0)).hexdigest()
    stager = gpu_staging.DeviceStager([sender.gpu_buffers(*gpu_staging.gpus_of(weights, [""]))], "nccl")
    try:
        staged = stager.stage(weights, **identity(0))
        assert staged.manifest == host.manifest
        with child(VERSIONS, (staged.manifest, memory, 2), "0") as process:
            communicator = joined(staged.buffers[0].device, memory, library, process)
            for _ in range(2):
                communicator.broadcast(
                    staged.buffers[0].pointer, staged.buffers[0].size, timeout_s=LIMIT_S, check=alive(process)
                )
                count, digest = process.stdout.readline().split()
                assert int(count) == len(staged.manifest.tensors)
                assert digest.decode() == expected
            assert process.wait(LIMIT_S) == 0
            communicator.abort()
        staged.close()
    finally:
        stager.close()


def test_a_killed_receiver_frees_the_learners_gpu_and_another_can_come():
    buffers = sender.gpu_buffers(0)
    weights = tiny_policies.policy("bf16")
    stager = gpu_staging.DeviceStager([buffers], "nccl")
    try:
        staged = stager.stage(weights, **identity(0))
        at, size = staged.buffers[0].pointer, staged.buffers[0].size
        for life in range(2):
            library, memory = beginning()
            with child(VERSIONS, (staged.manifest, memory, 1), "600") as process:
                communicator = joined(staged.buffers[0].device, memory, library, process)
                communicator.broadcast(at, size, timeout_s=LIMIT_S, check=alive(process))
                assert process.stdout.readline()
                if life == 0:
                    process.kill()
                begun: list[float] = []

                def send_on(communicator=communicator, process=process, begun=begun):
                    """Small messages still end in NCCL's own buffers, until they are full."""
                    for _ in range(10_000):
                        begun.append(time.monotonic())
                        communicator.broadcast(at, size, timeout_s=5.0, check=alive(process))

                with pytest.raises(BridgeError) as error:  # nobody receives any more
                    send_on()
                assert error.value.code in ("dead", "unshared")
                assert time.monotonic() - begun[-1] < 5.0 + 2 * nccl.ABORT_S
                assert communicator.abort(), "the aborted broadcast still runs on the GPU"
            assert float(jnp.arange(1000.0).sum()) == 499500.0  # JAX goes on
        staged.close()
    finally:
        stager.close()


def test_the_speed_from_gpu_to_gpu(capsys):
    rounds = 6
    library, memory = beginning()
    buffers = sender.gpu_buffers(0)
    buffer = buffers.take(SPEED_BYTES)
    try:
        data = jax.jit(lambda key: jax.random.bits(key, (SPEED_BYTES // 4,), jnp.uint32))(jax.random.key(0))
        data = jax.device_put(data, jax.local_devices()[0]).block_until_ready()
        buffer.device.copy_all([(buffer.pointer, data.unsafe_buffer_pointer(), SPEED_BYTES)])
        buffer.device.synchronize()
        words = np.asarray(gpu_staging.row_sums(data.view(jnp.int32), 0))
        with child(SPEED, (memory, SPEED_BYTES, rounds)) as process:
            start = time.perf_counter()
            communicator = joined(buffer.device, memory, library, process)
            join_s = time.perf_counter() - start
            for _ in range(rounds):
                communicator.broadcast(buffer.pointer, SPEED_BYTES, timeout_s=LIMIT_S, check=alive(process))
            *seconds, digest = process.stdout.read().split()
            assert process.wait(LIMIT_S) == 0
            communicator.abort()
        assert digest.decode() == fingerprint.digest_of_sums(words).hex()
        best = min(float(s) for s in seconds[1:])
        version = nccl.readable(nccl.version(library))
        with capsys.disabled():
            print(
                f"\nNCCL {version}: joined in {join_s:.2f} s, {SPEED_BYTES / 2**30:g} GiB in {best:.4f} s: "
                f"{SPEED_BYTES / best / 1e9:.1f} GB/s"
            )
    finally:
        buffer.release()
        buffers.close()
