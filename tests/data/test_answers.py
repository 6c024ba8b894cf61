# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Worked answers: right without slips, and wrong in the way they say with them."""

import itertools

import numpy as np
import pytest
import reasoning_gym

from qarl_jax.data.worked.answers import TRACES, worked_answer
from qarl_jax.types import Prompt, UserError

CONFIGS = {
    "chain_sum": {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 3, "allow_negation": True},
    "spell_backward": {"min_word_len": 3, "max_word_len": 9},
}


def prompts(name, count=60):
    for i, entry in enumerate(reasoning_gym.create_dataset(name, seed=3, size=count, **CONFIGS[name])):
        meta = {"origin": {"dataset": name}, "question": entry["question"]}
        yield Prompt(uid=str(i), tokens=(1,), text="", answer=entry["answer"], meta=meta)


def test_every_tracer_is_tested():
    assert set(CONFIGS) == set(TRACES)


@pytest.mark.parametrize("name", TRACES)
def test_the_last_line_of_a_flawless_trace_is_the_answer(name):
    for prompt in prompts(name):
        lines = worked_answer(prompt).split("\n")
        assert len(lines) > 1
        assert lines[-1] == prompt.answer


def test_each_line_of_a_sum_follows_from_the_one_before():
    for prompt in prompts("chain_sum"):
        *steps, answer = worked_answer(prompt).split("\n")
        assert [step.partition("=")[2] for step in steps][-1] == answer
        for step in steps:
            left, _, right = step.partition("=")
            assert eval(left) == int(right)  # digits and signs only: it is our own text


def test_slips_come_at_their_rate_and_are_built_upon():
    rng, wrong, steps = np.random.default_rng(0), 0, 0
    for prompt in prompts("chain_sum", 400):
        *lines, answer = worked_answer(prompt, 0.2, rng).split("\n")
        assert lines[-1].partition("=")[2] == answer
        for before, after in itertools.pairwise(lines):
            assert after.startswith(before.partition("=")[2])
        offsets = [eval(line.partition("=")[0]) - int(line.partition("=")[2]) for line in lines]
        assert all(abs(offset) <= 3 for offset in offsets)
        wrong, steps = wrong + sum(offset != 0 for offset in offsets), steps + len(lines)
    assert wrong / steps == pytest.approx(0.2, abs=0.05)


def test_a_slipped_word_is_spelled_as_it_was_spelt():
    rng = np.random.default_rng(0)
    answers = [(prompt.answer, worked_answer(prompt, 0.3, rng).split("\n")) for prompt in prompts("spell_backward")]
    assert all(letters.replace(" ", "") == word for _, (letters, word) in answers)
    differing = [a != b for answer, (_, word) in answers for a, b in zip(answer, word, strict=True)]
    assert np.mean(differing) == pytest.approx(0.3, abs=0.1)


def test_a_task_without_a_tracer_is_refused_by_name():
    prompt = Prompt(uid="x", tokens=(1,), text="", answer="", meta={"origin": {"dataset": "gcd"}, "question": ""})
    with pytest.raises(UserError, match=r"no tracer for 'gcd', only for chain_sum, spell_backward"):
        worked_answer(prompt)
