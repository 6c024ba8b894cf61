# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces of this machine in place of two hosts, a GPU in each, which NCCL joins over their cable."""

import json
import os
import subprocess
import sys

import pytest

from tests.reference import namespaces, tiny

PLATFORM = os.environ.get("QARL_TWO_HOSTS", "cuda,cpu")  # cpu: tries the test where there are no GPUs
gpus = subprocess.run(["sh", "-c", "nvidia-smi --list-gpus"], capture_output=True, text=True).stdout.count("\n")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(PLATFORM != "cpu" and gpus < 2, reason="needs two GPUs"),
    namespaces.needed,
]
# With shared memory and peer access off, and no InfiniBand, NCCL has the cable alone.
TRAINED = f"""
import os, sys
number = os.environ.get("NUMBER", "")
apart = {{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "cable"}}
os.environ |= {{"JAX_PLATFORMS": "{PLATFORM}", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}
os.environ |= apart | {{"CUDA_VISIBLE_DEVICES": number}} if number else {{}}
from qarl_jax import train
sys.exit(train.main([*sys.argv[1:], *([f"distributed.process_id={{number}}"] if number else [])]))
"""


def words(run_dir):
    return [
        "--config", "configs/quickstart.yaml", f"run_dir={run_dir}", "train.steps=2", "mesh.fsdp=2",
        "quant.forward=w8a8", "train.micro_batch_rows=2", "train.prompts_per_step=4", "train.prompts_per_update=4",
        "optimizer.name=adamw", "eval.every=0", "eval.at_start=false", "eval.at_end=false", "checkpoint.every=0",
        "checkpoint.at_end=false", "log.view=lines",
    ]  # fmt: skip


def steps_of(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k.startswith(("loss/", "optim/", "reward"))} for line in lines
    ]


def test_nccl_over_a_cable_gives_the_losses_and_gradient_norms_of_one_process_with_two_gpus(tmp_path):
    (tmp_path / "apart").mkdir()
    told = ["distributed.coordinator=first:7777", "distributed.num_processes=2"]
    codes, said = namespaces.launch(tmp_path / "apart", TRAINED, *words(tmp_path / "two"), *told, patience_s=250)
    assert codes == [0, 0], said
    path = os.pathsep.join([str(tiny.ROOT), f"{tiny.ROOT}/bridge", os.environ.get("PYTHONPATH", "")])
    environment = tiny.environment() | {"PYTHONPATH": path}
    environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "").replace("device_count=8", "device_count=2")
    one = [sys.executable, "-c", TRAINED, *words(tmp_path / "one")]
    done = subprocess.run(one, cwd=tiny.ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    two = steps_of(tmp_path / "two")
    assert two == steps_of(tmp_path / "one")
    assert len(two) == 2
    assert {"loss/total", "optim/grad_norm"} <= two[0].keys(), two[0].keys()
