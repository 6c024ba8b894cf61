# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The simulation of asynchronous training against schedules worked out by hand."""

import json

import pytest

from benchmarks import pipeline_sim
from benchmarks.pipeline_sim import per_step_s, simulate

RAGGED = [1, 7, 1, 7]


def test_a_run_that_waits_takes_the_sum_of_its_phases():
    assert simulate([4, 4], [2, 2], 1, 0) == [7, 14]


@pytest.mark.parametrize("order", pipeline_sim.ORDERS)
def test_with_even_times_a_step_takes_the_longer_phase_and_a_publish(order):
    # Sampling 0-4, 4-8, 9-13, ...; learning 4-6, 9-11, ...: the second batch holds the first publish up until 8.
    assert simulate([4] * 4, [2] * 4, 1, 1, "lockstep") == [9, 14, 19, 22]
    sampler, learner = simulate([4] * 40, [2] * 40, 1, 1, order), simulate([2] * 40, [5] * 40, 1, 1, order)
    assert per_step_s(sampler) == pytest.approx(5)
    assert per_step_s(learner) == pytest.approx(6)


@pytest.mark.parametrize(
    ("k", "order", "served"),
    [
        (0, "between batches", [5, 16, 21, 32]),
        # Batches 0-1, 1-8, 8-9, 12-19: the last may not begin before version 2, at 12.
        (1, "between batches", [8, 12, 19, 23]),
        (1, "in flight", [5, 12, 16, 23]),
        # Batches 0-1, 1-8, 8-9, 9-16: the long one is begun while there is work for the learner.
        (2, "in flight", [5, 12, 16, 20]),
    ],
)
def test_staleness_evens_out_batches_of_uneven_length(k, order, served):
    assert simulate(RAGGED, [4] * 4, 0, k, order) == served


def test_an_interrupted_batch_pays_for_the_publish():
    # Batch 1, begun at 4, is interrupted from 6 to 7.
    assert simulate([4, 4], [2, 2], 1, 1, "in flight") == [7, 12]


def test_the_table_says_what_a_split_of_the_cards_buys(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    record = {"time/rollout_s": 50.0, "time/reward_s": 10.0, "time/publish_s": 0.0, "time/step_s": 80.0}
    path.write_text("".join(json.dumps({"step": i, **record}) + "\n" for i in range(41)))
    assert pipeline_sim.main(["--metrics", str(path), "--cards", "4", "--staleness", "1", "--json"]) == 0
    rows = {(row["sampler"], row["k"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows[4, 0]["step_s"] == pytest.approx(20)  # both phases on four GPUs, one after the other
    assert rows[3, 1]["step_s"] == pytest.approx(20)  # 60 / 3 beside 20 / 1: nothing is lost, nothing won
    assert rows[2, 1]["step_s"] == pytest.approx(30)
    assert pipeline_sim.main(["--metrics", str(path), "--cards", "4", "--staleness", "1", "--overhead", "0.5"]) == 0
    assert "| 3 | 1 | 1 |" in capsys.readouterr().out
