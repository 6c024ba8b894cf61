# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers in longhand: right by the task's own scorer, each line right by itself, and wrong only where a slip is."""

import re

import jinja2
import numpy as np
import pytest
import reasoning_gym

from qarl_jax.data.worked import longhand
from qarl_jax.data.worked.answers import worked_answer
from qarl_jax.data.worked.mistakes import Slip
from qarl_jax.types import Prompt, UserError

CONFIGS = {
    "chain_sum": {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 5, "allow_negation": True},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 4},
    "caesar_cipher": {"min_words": 3, "max_words": 8},
    "letter_counting": {"min_words": 5, "max_words": 15},
    "number_sorting": {"min_numbers": 3, "max_numbers": 8, "max_decimals": 0, "min_value": -50, "max_value": 50},
}


def entries(name, count=80):
    return list(reasoning_gym.create_dataset(name, seed=3, size=count, **CONFIGS[name]))


def prompt_of(name, entry):
    meta = {"origin": {"dataset": name}, "question": entry["question"]}
    return Prompt(uid="x", tokens=(1,), text="", answer=entry["answer"], meta=meta)


def lines_of(name, entry, rate=0.0, rng=None):
    return worked_answer(prompt_of(name, entry), rate, rng, manner="longhand").split("\n")


def test_every_tracer_is_tested():
    assert set(CONFIGS) == set(longhand.TRACES)


@pytest.mark.parametrize("name", longhand.TRACES)
def test_the_tasks_own_scorer_accepts_the_last_line(name):
    dataset = reasoning_gym.create_dataset(name, seed=3, size=80, **CONFIGS[name])
    for entry in dataset:
        lines = lines_of(name, entry)
        assert len(lines) > 1
        assert dataset.score_answer(lines[-1], entry) == 1.0


@pytest.mark.parametrize("name", ["chain_sum", "products"])
def test_every_line_of_arithmetic_is_true_by_itself(name):
    for entry in entries(name):
        for line in lines_of(name, entry):
            left, _, right = line.partition("=")
            if left and right:
                assert re.fullmatch(r"[\d+*-]+", left)
                assert eval(left) == int(right)  # digits and signs only: it is our own text


@pytest.mark.parametrize("name", ["chain_sum", "products"])
def test_one_slip_of_many_changes_the_answer(name):
    class Once(Slip):
        def _now(self):
            first, self.made = not self.made, True
            return first

    entry = entries(name)[7]
    assert longhand.TRACES[name](entry["question"], entry["answer"], Once(1.0, np.random.default_rng(0))).split("\n")[
        -1
    ] != str(entry["answer"])


@pytest.mark.parametrize("name", longhand.TRACES)
def test_slips_make_answers_wrong_and_nothing_malformed(name):
    rng, found = np.random.default_rng(0), entries(name)
    last = [lines_of(name, entry, 0.2, rng)[-1] for entry in found]
    right = np.mean([answer == lines_of(name, entry)[-1] for answer, entry in zip(last, found, strict=True)])
    assert right < 0.8
    shape = r"\[.*\]" if name == "number_sorting" else r"[A-Z ]+" if name == "caesar_cipher" else r"-?\d+"
    assert all(re.fullmatch(shape, answer) for answer in last)


def test_a_slip_is_built_upon():
    rng = np.random.default_rng(1)
    for entry in entries("chain_sum"):
        lines = lines_of("chain_sum", entry, 0.3, rng)
        totals = [line[1:] for line in lines if line.startswith("=")]
        opened = [line for line in lines[:-1] if "=" not in line]
        assert lines[-1] == totals[-1]
        assert all(line.startswith(total) for total, line in zip(totals, opened[1:], strict=False))


def test_the_same_seed_gives_the_same_answers():
    def run(seed):
        rng = np.random.default_rng(seed)
        return [lines_of(name, entry, 0.2, rng) for name in CONFIGS for entry in entries(name, 10)]

    assert run(5) == run(5) != run(6)


def test_the_prompt_says_all_that_is_asked():
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(longhand.PROMPT)
    render = {name: template.render(question="", meta=entries(name, 1)[0]["metadata"]) for name in CONFIGS}
    metadata = {name: entries(name, 1)[0]["metadata"] for name in CONFIGS}
    assert render["chain_sum"].rstrip("=") == metadata["chain_sum"]["expression"].replace(" ", "")
    assert render["products"].rstrip("=") == metadata["products"]["expression"].replace(" ", "")
    cipher = metadata["caesar_cipher"]
    assert render["caesar_cipher"] == f"{cipher['cipher_text']}<{cipher['rotation']}:"
    counted = metadata["letter_counting"]
    assert render["letter_counting"] == f"{counted['target_letter']}?{' '.join(counted['span'])}:"
    ordered = metadata["number_sorting"]
    sign = "<" if ordered["direction"] == "ascending" else ">"
    assert render["number_sorting"] == f"{sign}{' '.join(ordered['original_numbers'])}:"


def test_a_task_without_a_longhand_is_refused_by_name():
    prompt = Prompt(uid="x", tokens=(1,), text="", answer="", meta={"origin": {"dataset": "gcd"}, "question": ""})
    with pytest.raises(UserError, match=r"no tracer for 'gcd', only for chain_sum, .*manner=longhand.*longhand\.py"):
        worked_answer(prompt, manner="longhand")


def test_slips_keep_within_what_they_are_told():
    slip = Slip(0.999, np.random.default_rng(0))
    numbers = [slip.number(1, least=0) for _ in range(300)]
    assert min(numbers) == 0
    assert max(numbers) == 4
    assert {slip.digit(7) for _ in range(300)} >= set(range(10)) - {7}
    assert slip.choice("a", []) == "a"
    assert {slip.choice("a", ["b", "c"]) for _ in range(300)} >= {"b", "c"}
    flawless = Slip(0.0, np.random.default_rng(0))
    assert (flawless.number(3), flawless.digit(3), flawless.choice("a", ["b"]), flawless.made) == (3, 3, "a", False)
    assert slip.made
