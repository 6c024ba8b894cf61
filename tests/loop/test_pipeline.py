# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups are graded and scored while others are drawn, and no result depends on when it was made."""

import threading
import time

import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.loop import updates
from qarl_jax.loop.pipeline import Scoring, graded
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.observe.recorder import read_lines
from qarl_jax.rollout import RolloutEngine
from qarl_jax.run import build
from qarl_jax.types import Prompt, RolloutGroup
from tests.reference import tiny
from tests.reference.rollouts import completion, group_of

pytestmark = pytest.mark.usefixtures("shared_learners")

PROMPTS = [Prompt(uid=f"p{n}", tokens=(1, n), text="", answer="") for n in range(4)]
COMPLETIONS = [[completion(np.arange(n + j + 1), np.zeros(n + j + 1)) for j in range(2)] for n in range(4)]


def grade(prompts, completions):
    """Rewards are lengths."""
    groups = [
        RolloutGroup(
            prompt=prompt, completions=tuple(group), rewards=np.array([len(c.tokens) for c in group], np.float32)
        )
        for prompt, group in zip(prompts, completions, strict=True)
    ]
    return groups, {"length": np.concatenate([group.rewards for group in groups])}


def drawn(order, before=lambda index: None):
    for index in order:
        before(index)
        yield index, COMPLETIONS[index // 2][index % 2]


@pytest.mark.parametrize("order", [range(8), range(7, -1, -1), (1, 6, 0, 3, 2, 7, 5, 4)])
def test_the_order_in_which_completions_end_changes_no_grade(order):
    arrived = []
    add = lambda number, group: arrived.append((number, group))  # noqa: E731
    groups, parts = graded(drawn(order), PROMPTS, 2, grade, PhaseTimer(), add)
    wanted, wanted_parts = grade(PROMPTS, COMPLETIONS)
    assert [group.prompt.uid for group in groups] == [group.prompt.uid for group in wanted]
    for found, expected in zip(groups, wanted, strict=True):
        np.testing.assert_array_equal(found.rewards, expected.rewards)
        assert all(a is b for a, b in zip(found.completions, expected.completions, strict=True))
    np.testing.assert_array_equal(parts["length"], wanted_parts["length"])
    assert sorted(number for number, _ in arrived) == [0, 1, 2, 3]
    assert all(group is groups[number] for number, group in arrived)


def test_no_prompt_gives_no_group():
    assert graded(drawn(()), [], 2, grade, PhaseTimer()) == ([], {})


def test_a_group_is_graded_and_passed_on_while_the_next_completion_is_still_drawn():
    passed, events = threading.Event(), []

    def add(number, group):
        events.append(f"group {number}")
        passed.set()

    def wait(index):
        if index == 2:
            assert passed.wait(10)  # the first group is there although no other completion ends
        events.append(index)

    graded(drawn(range(8), wait), PROMPTS, 2, grade, PhaseTimer(), add)
    assert events[:3] == [0, 1, "group 0"]


def test_what_a_reward_raises_is_raised_and_ends_the_drawing():
    closed = []

    def refuse(*args):
        raise ValueError("no such answer")

    def endless():
        try:
            yield from drawn(range(2))
            while True:
                time.sleep(0.01)
                yield 2, COMPLETIONS[1][0]
        finally:
            closed.append(True)

    with pytest.raises(ValueError, match="no such answer"):
        graded(endless(), PROMPTS, 2, refuse, PhaseTimer())
    assert closed == [True]


GROUPS = [group_of([completion([i, i + 1])], [1], uid=str(i)) for i in range(4)]


def scored(calls):
    def score(number, groups):
        calls.append([group.prompt.uid for group in groups])
        return groups, np.array([[float(group.prompt.uid)] for group in groups]), "made"

    return score


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 2, 0)])
def test_a_mini_batch_is_scored_once_its_last_group_is_there(order):
    calls = []
    early = Scoring([np.array([0, 1]), np.array([2, 3])], scored(calls))
    early.add(order[0], GROUPS[order[0]])
    assert early.take(GROUPS[:2], np.array([[0.0], [1.0]])) is None
    for number in order[1:]:
        early.add(number, GROUPS[number])
    assert early.take(GROUPS[:2], np.array([[0.0], [1.0]])) == "made"
    assert early.take(GROUPS[2:], np.array([[2.0], [3.0]])) == "made"
    early.close()
    assert sorted(calls) == [["0", "1"], ["2", "3"]]


def test_what_was_made_of_other_groups_or_advantages_is_not_taken():
    early = Scoring([np.array([0, 1])], scored([]))
    for number in (0, 1):
        early.add(number, GROUPS[number])
    assert early.take(GROUPS[:2], np.array([[0.0], [2.0]])) is None
    assert early.take(GROUPS[1:3], np.array([[1.0], [2.0]])) is None
    early.close()


class OneByOne(RolloutEngine):
    """The embedded sampler, whose completions end one by one, the last request's first."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def prepare(self, graphdef):
        self.engine.prepare(graphdef)

    def publish(self, weights, version):
        return self.engine.publish(weights, version)

    def draw(self, requests, *, sampling):
        for item in reversed(list(self.engine.draw(requests, sampling=sampling))):
            time.sleep(0.01)
            yield item

    def close(self):
        self.engine.close()


@pytest.mark.slow
def test_a_run_is_the_same_to_the_bit_whether_or_not_it_scores_early(tmp_path, monkeypatch):
    world = tiny.World(tmp_path)
    plain = world.changed(run_dir=str(tmp_path / "plain"))
    with monkeypatch.context() as patch:
        patch.setattr(updates.Updates, "_scoring_of", lambda *args: None)
        assert train.main(plain.command()) == 0
    make = build.make_engine
    monkeypatch.setattr(build, "make_engine", lambda *args: OneByOne(make(*args)))
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
