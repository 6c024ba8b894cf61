# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes on this machine: how they are started, killed, and compared with runs of one."""

import re
import subprocess
import sys

import jax
import numpy as np

from qarl_jax import models
from qarl_jax.run.checkpoint import Checkpoints
from tests.reference import tiny
from tests.reference.bridge_world import free_port

PATIENCE_S = 400  # for one start, on a machine that does other things as well


def launch(arguments, *, count=2, devices=1, port=None, slurm=False, programs=None):
    """Starts `python *arguments(process)` `count` times; (exit codes, outputs).

    programs: a folder for compiled ones; None: none are kept.
    """
    port = port or free_port()
    started = []
    for number in range(count):
        environment = tiny.environment(programs)
        flags = re.sub(r"device_count=\d+", f"device_count={devices}", environment["XLA_FLAGS"])
        environment |= {"XLA_FLAGS": flags, "PYTHONPATH": f"{tiny.ROOT}:{tiny.ROOT / 'bridge'}", "PORT": str(port)}
        if slurm:  # what srun sets for each task
            environment |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": str(port)}
            environment |= {"SLURM_NTASKS": str(count), "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
        started.append(
            subprocess.Popen(
                [sys.executable, *map(str, arguments(number))],
                cwd=tiny.ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


# Runs the trainer; the process with the given number sends itself a signal when the n-th step's updates are done, or
# kills its engine. Each says after the first step which process its engine is.
SIGNALLED = """
import os, signal, sys
number, victims, name, nth = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
from qarl_jax import train
from qarl_jax.loop.updates import Updates
learn, calls = Updates.run, [0]
def counted(*args, **kwargs):
    out = learn(*args, **kwargs)
    calls[0] += 1
    facts = args[0]._publisher.engine.facts
    if facts is not None and calls[0] == 1:
        print("engine", facts.pid, flush=True)
    if str(number) in victims and calls[0] == nth:
        kills_engine = name == "ENGINE"
        os.kill(facts.pid if kills_engine else os.getpid(), signal.Signals["SIGKILL" if kills_engine else name])
    return out
Updates.run = counted
sys.exit(train.main(sys.argv[5:]))
"""


def trained(world, *, count=2, devices=1, slurm=False, victims="", name="SIGTERM", nth=1, programs=None):
    """(exit codes, outputs) of the run, by `count` processes that are told who they are, or find out."""
    port = free_port()

    def arguments(number):
        who = [f"localhost:{port}", f"distributed.num_processes={count}", f"distributed.process_id={number}"]
        who = ["auto"] if slurm else who
        return [
            "-c",
            SIGNALLED,
            number,
            victims,
            name,
            nth,
            *world.command(f"distributed.coordinator={who[0]}", *who[1:]),
        ]

    return launch(arguments, count=count, devices=devices, port=port, slurm=slurm, programs=programs)


def masters(world):
    template = models.split(tiny.random_model(world.hidden))[1]
    back = Checkpoints(world.run_dir / "checkpoints").restore({"params": template})
    assert back.step == world.tree["train"]["steps"]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(back.state)]


def assert_equal(one, other, names=("metrics",)):
    """Two runs left the same numbers and the same bits."""
    for name in names:
        assert one.records(name) == other.records(name), name
    for a, b in zip(masters(one), masters(other), strict=True):
        assert a.tobytes() == b.tobytes()
