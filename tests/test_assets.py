# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The recipe of assets/tiny-qwen3: worked answers are right without slips, and wrong in the way they say with them."""

import itertools
import json
import pathlib

import numpy as np
import pytest
import reasoning_gym

from assets.make import tiny_qwen3
from assets.make.tiny_qwen3 import TRACES, worked_answer
from qarl_jax.types import Prompt, UserError

ASSET = pathlib.Path(__file__).parents[1] / "assets" / "tiny-qwen3"
RNG = np.random.default_rng(0)
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
        lines = worked_answer(prompt, 0.0, RNG).split("\n")
        assert len(lines) > 1
        assert lines[-1] == prompt.answer


def test_each_line_of_a_sum_follows_from_the_one_before():
    for prompt in prompts("chain_sum"):
        *steps, answer = worked_answer(prompt, 0.0, RNG).split("\n")
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
        worked_answer(prompt, 0.0, RNG)


@pytest.mark.slow
def test_the_recipe_writes_a_policy_that_has_learned_from_worked_answers(tmp_path, capsys):
    small = ["model.init.num_hidden_layers=1", "train.rows=8", "train.updates=8", "train.log_every=1"]
    assert tiny_qwen3.main([f"out={tmp_path / 'made'}", *small]) == 0
    losses = [float(line.split("nll ")[1].split()[0]) for line in capsys.readouterr().out.splitlines() if "nll" in line]
    assert losses == sorted(losses, reverse=True)
    shipped, made = (json.loads((folder / "config.json").read_text()) for folder in (ASSET, tmp_path / "made"))
    assert made == shipped | {"num_hidden_layers": 1}


def test_the_teacher_slips_in_every_fifth_step_of_what_is_imitated():
    asked = list(prompts("chain_sum", 300))
    lines = [text.split("\n")[:-1] for text in tiny_qwen3.answers(asked, np.random.default_rng(0))]
    wrong = [eval(left) != int(right) for text in lines for left, _, right in (line.partition("=") for line in text)]
    assert np.mean(wrong) == pytest.approx(tiny_qwen3.SLIP_RATE, abs=0.05)
