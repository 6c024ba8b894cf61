# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Simulated devices have threads enough for a program that communicates, however many are launched behind it."""

import os
import subprocess
import sys

import pytest

LAUNCH = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from qarl_jax.runtime.mesh import make_mesh

mesh = make_mesh(fsdp=4)
rows, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
host = np.ones((4, 4096, 1024), np.float32)
x, one = jax.device_put(host[:, :256, :256], rows), jax.device_put(np.float32(1), whole)
first = jax.jit(lambda x, host: x + host[:, :256, :256])
step = lambda x, _: (x @ x.sum(0, keepdims=True) * 1e-4, None)
loop = jax.jit(lambda x: (jax.lax.scan(step, x, length=100)[0], x.sum()))
for _ in range(5):
    y, total = loop(first(x, jax.device_put(host, rows)))  # begins when the copy has come, after many launches
    for _ in range(60):
        total = total + one
    y, other = loop(y)
    for _ in range(60):
        total = total + other
    jax.block_until_ready(total)
"""
FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
    "--xla_cpu_collective_call_terminate_timeout_seconds=90",
)


def environment(**more):
    return {key: value for key, value in os.environ.items() if key != "PJRT_NPROC"} | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(FLAGS),
        **more,
    }


@pytest.mark.slow
def test_many_launches_behind_a_collective_leave_every_device_a_thread():
    subprocess.run([sys.executable, "-c", LAUNCH], env=environment(), check=True, timeout=300)


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({}, str(max(8, os.cpu_count() or 1))),
        ({"PJRT_NPROC": "5"}, "5"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, "None"),
        ({"XLA_FLAGS": ""}, "None"),
    ],
)
def test_simulated_devices_have_two_threads_each_unless_told_otherwise(given, threads):
    code = "import os, qarl_jax.runtime.mesh; print(os.environ.get('PJRT_NPROC'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(**given), check=True, capture_output=True)
    assert done.stdout.decode().strip() == threads
