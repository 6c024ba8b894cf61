# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What is done side by side before the first step is timed by itself, and its errors are told where they matter."""

import threading

import pytest

from qarl_jax import train
from qarl_jax.metrics import phases
from qarl_jax.observe.recorder import read_lines
from qarl_jax.runtime import startup
from tests.reference import tiny

PHASES = {
    f"time/{name}_s"
    for name in ("rollout", "reward", "compile", "pack", "old_logprobs", "update", "publish", "metrics", "other")
}


def test_spans_overlap_and_the_whole_is_shorter_than_their_sum():
    go, now = threading.Event(), [0.0]
    starting = startup.SideBySide(clock=lambda: now[0])
    running = threading.Event()

    def compile_them():
        running.set()
        go.wait(10)

    starting.background("programs", compile_them)
    running.wait(10)
    with starting.span("weights"):
        now[0] = 3.0
    now[0] = 4.0
    go.set()
    starting.join()
    assert starting.seconds() == {"time/start_weights_s": 3.0, "time/start_programs_s": 4.0, "time/start_s": 4.0}
    assert startup.words(starting.seconds()) == "ready after 4.0 s, side by side: weights 3.0 s, programs 4.0 s"


def test_an_error_in_a_thread_is_raised_where_it_is_joined_and_not_where_it_is_waited_for():
    starting = startup.SideBySide()

    def fail():
        raise RuntimeError("no such program")

    starting.background("programs", fail)
    starting.wait()
    with pytest.raises(RuntimeError, match="no such program"):
        starting.join()


@pytest.mark.slow
def test_a_runs_weights_engine_and_programs_are_made_side_by_side(tmp_path):
    world = tiny.World(tmp_path).changed(
        rollout={"engine": {"name": "vllm", "engine": "fake", "max_model_len": 64}}, train={"steps": 2}
    )
    assert train.main(world.command()) == 0
    first, second = read_lines(f"{world.config.run_dir}/metrics.jsonl")
    named = [f"time/start_{name}_s" for name in ("programs", "weights", "engine", "publish")]
    assert all(first[name] > 0 for name in named)
    assert not any(name in second for name in named)
    # Until the engine had its first version: reading weights and starting the engine went on under the compilation.
    assert first["time/start_s"] < sum(first[name] for name in named)
    assert {f"time/{name}_s" for name in phases(first)} >= PHASES
    # The metrics of the updates are read while the state is published.
    assert first["time/beside/metrics_s"] > 0
    for record in (first, second):
        assert sum(phases(record).values()) == pytest.approx(record["time/step_s"], abs=1e-9)
        assert all(seconds >= 0 for seconds in phases(record).values()), record
