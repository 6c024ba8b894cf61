# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Four real engines (vLLM on a CPU), two of them killed at random moments: the run is the one-engine run."""

import os
import random
import signal
import threading

import jax
import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.run import build
from qarl_jax.run.checkpoint import Checkpoints
from tests.reference import tiny

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.usefixtures("compiled_programs")]
LIMITS = {"max_model_len": 64, "kv_cache_gb": 0.1, "threads": 1, "max_num_seqs": 4}


def run(folder, replicas, monkeypatch, kills=0):
    """(records, parameters, bridges replaced) of a run of three steps."""
    world = tiny.World(folder, hidden=128).changed(
        model={"dtype": "bfloat16"},
        quant={"forward": "w8a8", "engine": "cpu"},
        rollout={"engine": {"name": "vllm", "replicas": replicas} | LIMITS},
        train={"steps": 3},
        eval={"at_start": False, "at_end": False},
    )
    rng, made, timers = random.Random(0), [], []
    own = build.make_engine

    def watched(*args):
        engine = own(*args)
        draw = engine.draw

        def drawing(*requests, **options):
            if engine.version >= 1 and len(timers) < kills:  # one in each of the last steps
                pids = [replica.facts.pid for replica in engine.fleet.replicas if replica.serves(engine._staged)]
                timers.append(threading.Timer(rng.uniform(0.0, 0.3), os.kill, (rng.choice(pids), signal.SIGKILL)))
                timers[-1].start()
            return draw(*requests, **options)

        engine.draw = drawing
        made.append(engine)
        return engine

    monkeypatch.setattr(build, "make_engine", watched)
    assert train.main(world.command()) == 0
    monkeypatch.undo()
    like = tiny.load_model(world.config, build.make_mesh(world.config))[1]
    params = Checkpoints(world.run_dir / "checkpoints").restore({"params": like})
    return world.records(), params.state["params"], made[0].restarts


def test_a_run_over_four_engines_two_of_them_killed_equals_the_one_engine_run_to_the_bit(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    (tmp_path / "four").mkdir()
    records, params, _ = run(tmp_path / "one", 1, monkeypatch)
    others, again, replaced = run(tmp_path / "four", 4, monkeypatch, kills=2)
    assert replaced >= 1  # the second may die after its last request
    assert [line["rollout/version"] for line in others] == [0, 1, 2]
    assert others == records

    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
