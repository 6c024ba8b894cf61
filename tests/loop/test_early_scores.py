# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Old log-probs of finished groups are computed while others are drawn, and nothing of a run depends on it."""

import time

import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.loop import updates
from qarl_jax.loop.early_scores import EarlyScores
from qarl_jax.observe.recorder import read_lines
from qarl_jax.run import build
from tests.reference import tiny
from tests.reference.rollouts import completion, group_of

GROUPS = [group_of([completion([i, i + 1])], [1], uid=str(i)) for i in range(4)]


def scored(calls):
    def score(groups):
        calls.append([group.prompt.uid for group in groups])
        return np.array([[float(group.prompt.uid)] for group in groups]), "made"

    return score


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_a_mini_batch_is_scored_once_its_last_group_is_there(order):
    calls = []
    early = EarlyScores([np.array([0, 1]), np.array([2, 3])], scored(calls))
    early.add(order[0], GROUPS[order[0]])
    assert early.take(GROUPS[:2], np.array([[0.0], [1.0]])) is None
    for number in order[1:]:
        early.add(number, GROUPS[number])
    assert early.take(GROUPS[:2], np.array([[0.0], [1.0]])) == "made"
    assert early.take(GROUPS[2:], np.array([[2.0], [3.0]])) == "made"
    early.close()
    assert sorted(calls) == [["0", "1"], ["2", "3"]]


def test_what_was_made_of_other_groups_or_advantages_is_not_taken():
    early = EarlyScores([np.array([0, 1])], scored([]))
    for number in (0, 1):
        early.add(number, GROUPS[number])
    assert early.take(GROUPS[:2], np.array([[0.0], [2.0]])) is None
    assert early.take(GROUPS[1:3], np.array([[1.0], [2.0]])) is None
    early.close()


class Telling:
    """The embedded sampler, but it tells of each group as if it had ended by itself, the last one first."""

    tells_groups = True

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, prompts, *, on_group=None, **options):
        completions = self._engine.generate(prompts, **options)
        if on_group is not None:
            for number in reversed(range(len(prompts))):
                on_group(number, completions[number])
        return completions


@pytest.mark.slow
def test_a_run_is_the_same_to_the_bit_whether_or_not_it_scores_early(tmp_path, monkeypatch):
    world = tiny.World(tmp_path)
    plain = world.changed(run_dir=str(tmp_path / "plain"))
    assert train.main(plain.command()) == 0
    make = build.make_engine
    monkeypatch.setattr(build, "make_engine", lambda *args: Telling(make(*args)))
    score = updates.Updates._score_old
    monkeypatch.setattr(updates.Updates, "_score_old", lambda *args: (time.sleep(0.4), score(*args)))
    assert train.main(world.command()) == 0
    assert world.records() == plain.records()
    assert world.records("samples") == plain.records("samples")
    for line in read_lines(world.run_dir / "metrics.jsonl"):
        assert line["time/beside/old_logprobs_s"] > 0
        assert line["time/beside/pack_s"] > 0
        assert line["time/old_logprobs_s"] > 0.4 > line["time/pack_s"]  # what a step waits for has its name
        assert line["time/beside/reward_s"] > 0
    assert not any("time/beside/old_logprobs_s" in line for line in read_lines(plain.run_dir / "metrics.jsonl"))
