# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A bridge around a fake engine, in a thread of this process; and one whose GPU is made of files."""

import os

import msgspec
import pytest
from qarl_bridge.transport import cuda_ipc

from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.rollout.vllm.engine import engine_tensors
from tests.reference import bridge_world, fake_gpu
from tests.reference.bridge_world import world
from tests.reference.device_versions import policy


@pytest.fixture(params=["unix", "tcp"])
def any_world(request, tmp_path):
    with world(tmp_path, tcp=request.param == "tcp") as w:
        yield w


@pytest.fixture
def bridge(tmp_path):
    with world(tmp_path) as w:
        yield w


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of GPUs that are made of files: their memory, and the two libraries."""
    if fake_gpu.COMPILER is None:
        pytest.skip("no C compiler for the stand-ins of the CUDA driver and NCCL")
    folder = tmp_path_factory.mktemp("gpu")
    fake_gpu.build(folder)
    os.environ["FAKE_CUDA_DIR"] = str(folder)
    yield folder
    del os.environ["FAKE_CUDA_DIR"]


@pytest.fixture
def library_path(folder):
    return str(folder / "libcuda.so")


@pytest.fixture
def gpu(library_path):
    return cuda_ipc.Device(0, cuda_ipc.load(library_path))


@pytest.fixture
def served(tmp_path, gpu, library_path, monkeypatch):
    """A bridge whose engine expects the tensors of `policy`, and a stager on its GPU."""
    named = dict(engine_tensors(policy("w8a8")))
    monkeypatch.setattr(bridge_world, "tensors", lambda seed: named)
    with bridge_world.world(tmp_path) as w:
        w.engine.mapper = fake_gpu.opener(library_path)
        w.engine.facts = msgspec.structs.replace(w.engine.facts, device=gpu.uuid)
        yield w, gpu_staging.DeviceStager([cuda_ipc.Buffers(gpu)])
