# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Publishing through the memory of a real GPU: staged by JAX in this process, read by torch in another.

JAX_PLATFORMS=cuda pytest -m gpu tests/gpu
"""

import os
import subprocess
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import msgspec
import pytest
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages

from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.rollout.vllm.engine import engine_tensors
from tests.reference import tiny_policies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device (JAX_PLATFORMS=cuda)"),
]

READER = """
import sys
import msgspec
from qarl_bridge.server import staged_gpu as device
from qarl_bridge.protocol import messages as wire
manifest, memory = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[wire.Manifest, wire.DeviceMemory])
copy = device.open_version(manifest, memory)
copy.validate()
(tensors,) = copy.checked_parts()
print(len(tensors), float(tensors["model.norm.weight"].float().sum()))
copy.confirm()
copy.close()
"""


def identity(step):
    version = messages.Version(run_id="run", incarnation=1, step=step)
    return {"version": version, "model": bytes(16), "scheme": bytes(16)}


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16:g32"])
def test_another_process_reads_the_learners_version_in_place(scheme):
    pytest.importorskip("torch")
    weights = tiny_policies.policy(scheme)
    host = sender.stage(engine_tensors(weights, stacked=True), **identity(0))
    stager = gpu_staging.DeviceStager([sender.gpu_buffers(*gpu_staging.gpus_of(weights, [""]))])
    try:
        staged = stager.stage(weights, **identity(0))
        assert staged.manifest == host.manifest, "fingerprints of the GPU are those of the host"
        message = msgspec.msgpack.encode((staged.manifest, staged.memory()))
        done = subprocess.run([sys.executable, "-c", READER], input=message, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        count, total = done.stdout.split()
        assert int(count) == len(staged.manifest.tensors)
        assert float(total) == float(dict(engine_tensors(weights))["model.norm.weight"].astype("float32").sum())
        staged.close()
    finally:
        stager.close()
