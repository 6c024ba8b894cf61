# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Grading while others are drawn gives what grading all of them afterwards gives, in the prompts' order."""

import threading

import numpy as np
import pytest

from qarl_jax.loop.early_grades import EarlyGrades
from qarl_jax.types import Prompt, RolloutGroup
from tests.reference.rollouts import completion

PROMPTS = [Prompt(uid=f"p{n}", tokens=(1, n), text="", answer="") for n in range(4)]
COMPLETIONS = [[completion(np.arange(n + j + 1), np.zeros(n + j + 1)) for j in range(n + 1)] for n in range(4)]


def grade(prompts, completions):
    """Rewards are lengths; groups differ in size, as partial ones do."""
    groups, lengths = [], []
    for prompt, group in zip(prompts, completions, strict=True):
        own = np.array([len(c.tokens) for c in group], np.float32)
        groups.append(RolloutGroup(prompt=prompt, completions=tuple(group), rewards=own))
        lengths.append(own)
    return groups, {"length": np.concatenate(lengths)}


@pytest.mark.parametrize("early", [(), (2,), (3, 0), (1, 0, 3, 2)])
def test_the_order_in_which_groups_end_changes_nothing(early):
    grades = EarlyGrades(PROMPTS, grade)
    for number in early:
        grades.add(number, COMPLETIONS[number])
    groups, parts = grades.finish(COMPLETIONS)
    wanted, wanted_parts = grade(PROMPTS, COMPLETIONS)
    assert [group.prompt.uid for group in groups] == [group.prompt.uid for group in wanted]
    for found, expected in zip(groups, wanted, strict=True):
        np.testing.assert_array_equal(found.rewards, expected.rewards)
    np.testing.assert_array_equal(parts["length"], wanted_parts["length"])


def test_a_group_is_graded_while_its_caller_still_waits():
    graded = threading.Event()

    def noticed(*args):
        graded.set()
        return grade(*args)

    grades = EarlyGrades(PROMPTS, noticed)
    grades.add(1, COMPLETIONS[1])
    assert graded.wait(10)
    grades.close()


def test_what_a_reward_raises_is_raised_where_grades_are_asked_for():
    def refuse(*args):
        raise ValueError("no such answer")

    grades = EarlyGrades(PROMPTS, refuse)
    grades.add(0, COMPLETIONS[0])
    with pytest.raises(ValueError, match="no such answer"):
        grades.finish(COMPLETIONS)
    grades.close()
