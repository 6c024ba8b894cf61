# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward 1 if math-verify (https://github.com/huggingface/Math-Verify) finds answer and reference equal, else 0.

Equality is symbolic (1/2 = 0.5 = \\frac{1}{2}), in worker processes with a deadline (see `pool.py`). Answers that are
already equal as text or as plain numbers do not go through a worker.

Where math-verify 0.9.0 is wrong, and what is done about it here:

    several boxes                  it takes them for one set of answers: it is given the last alone
    no box, <answer>42</answer>    it reads the tags as mathematics: it is given what they hold
    \\textbf{(C)}\\ 42              it finds no 42: the label is taken off, or compared alone where the reference is one
    \\ge 5; 1,\\ldots,5              it takes both for 5, and 5\\text{ hours }30 too: no numbers, here
    0.\\overline{3} = 1/3           it says no: compared exactly, here
    42\\degree, 5^{\\text{th}}, \\varnothing, \\text{18 units}: it does not know them, and is given what they mean
    \\fbox{42}                      it sees no box: read as \\boxed{42}
    4.5e33 = 4.5 \\times 10^{33}    it says no, and calls 1.6 and 1.7 \\times 10^{-19} equal: compared exactly, here
    4210_5 = 4210_7                it says yes: two numbers with a base are equal where both parts are, here
    a typographic minus            it overlooks it after "####": given to it as "-"
    50\\% = 50, 50\\% = 0.5         it says yes to both; so do we. With antlr 4.11 it says no to both: 4.13 is required
    e^{i\\pi} = -1                  it says no, and so do we

Published tables of two benchmarks come from judges that allow an error, and accept a percentage for a fraction.
`tolerance` accepts what these judges accept, besides all equal answers:

    minerva         1e-4 of the larger number (Qwen2.5-Math's grader)
    olympiadbench   1.01 times the row's `error`, 1e-8 where it has none (OlympiadBench's judge); of several answers,
                    each is found among the given ones, as many as there are

Both compare with the reference, a hundred times it, and a hundredth of it. Expressions are evaluated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards import extract
from qarl_jax.rewards.pool import PoolConfig, WorkerPool
from qarl_jax.rewards.sample import BaseReward, Sample
from qarl_jax.types import UserError

# The answer stands at the end; the parser's cost grows with the text.
MAX_CHARS = 8000
_SCIENTIFIC = re.compile(
    r"(?P<digits>[^eE\\\s]{1,100}?)\s*(?:[eE]|\\(?:times|cdot)\s*10\^)\{?(?P<exponent>[-+]?\d{1,3})\}?"
    r"\s*(?:\\(?:text|mathrm)\{[^{}]{0,100}\})?"
)
_BASED = re.compile(r"(?:\\(?:text|mathrm)\{)?([0-9A-Za-z]{1,100})\}?_\{?(\d{1,3})\}?")
# "(C) 42", "\\textbf{(C)}\\ 42": a choice's letter, and what follows it.
_LABELLED = re.compile(r"(?:\\(?:text|textbf|mathrm) ?\{ *)?\(([A-J])\)(?:[ }~]|\\[ ,;:]|\\q?quad)+(.+)", re.DOTALL)
# A relation in front, dots, a unit between two numbers.
_MANY = re.compile(
    r"^\\(?:geq?|leq?|neq?|neg|sim)\b|\\[lc]?dots"
    r"|\d *\\(?:text|mathrm)\{ *(?!and\b|or\b)[^{}A-Za-z]*[A-Za-z][^{}]*\} *\d"
)
_WRITTEN = {"\u2212": "-", "\\degree": "^\\circ", "\\varnothing": "\\emptyset"}
_ORDINAL = re.compile(r"\^(?:\{\\text\{(?:st|nd|rd|th)\}\}|\\text\{(?:st|nd|rd|th)\})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PoolConfig):
    """Settings of the math-verify reward, besides those of `PoolConfig`.

    Attributes:
      truncated: what an unfinished response gets: "zero", or "score" to grade its text all the same.
      tolerance: the error that a benchmark's own judge allows: none, minerva or olympiadbench (the module's text).
    """

    truncated: Literal["zero", "score"] = "zero"
    tolerance: Literal["none", "minerva", "olympiadbench"] = "none"


class Reward(BaseReward):
    """Compares answers symbolically with math-verify: 1 if equal to the reference, else 0."""

    pool: WorkerPool

    def __init__(self, cfg: Config, max_response_len: int):
        self.cfg = cfg
        self.pool = WorkerPool("math", cfg)

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        out = np.zeros(len(samples), np.float32)
        hard: list[int] = []
        tasks = []
        for i, sample in enumerate(samples):
            if (not sample.finished and self.cfg.truncated == "zero") or not sample.text.strip():
                continue
            answer, boxed = sample.prompt.answer, extract.extract(sample.text, "boxed")
            boxed = boxed and _one_answer(boxed, answer)
            found = boxed or extract.extract(sample.text, "tag")
            verdict = settled(found, answer) if found else None
            allowed = self._allowed(sample)
            if not verdict and allowed and found and near(found, answer, allowed):
                verdict = True
            if verdict is None:
                text = f"\\boxed{{{boxed}}}" if boxed else found or sample.text
                hard.append(i)
                task: dict[str, Any] = {"text": _rewritten(text[-MAX_CHARS:]), "answer": _rewritten(answer)}
                tasks.append(task | ({"allowed": dataclasses.astuple(allowed[0])} if allowed else {}))
            else:
                out[i] = verdict
        for i, value in zip(hard, self.pool.map(tasks), strict=True):
            out[i] = value or 0.0
        return out

    def _allowed(self, sample: Sample) -> list[Allowed]:
        """The error that each answer of a question may have; empty: none."""
        if self.cfg.tolerance == "none":
            return []
        if self.cfg.tolerance == "minerva":
            return [Allowed(relative=1e-4)]
        written = str(sample.prompt.meta.get("error") or "1e-8")
        try:
            return [Allowed(absolute=1.01 * float(part)) for part in written.split(",") if part.strip()]
        except ValueError:
            raise UserError(f"prompt {sample.prompt.uid}: column error={written!r} is no number.") from None


@dataclasses.dataclass(frozen=True)
class Allowed:
    """The tolerance of a comparison: `relative` to the larger number, or `absolute`, whichever is larger."""

    relative: float = 0.0
    absolute: float = 0.0

    def holds(self, given: float, expected: float) -> bool:
        """Tells whether `given` is within the tolerance of `expected`, of 100 times it or of a hundredth of it."""
        return any(
            abs(given - each) <= max(self.absolute, self.relative * max(abs(given), abs(each)))
            for each in (expected, expected / 100, expected * 100)
        )


def near(given: str, expected: str, allowed: Sequence[Allowed]) -> bool:
    """Tells whether all answers, separated by commas, are numbers near the expected ones, in any order.

    Args:
      given, expected: the answers as written.
      allowed: the error of each expected answer; the last entry is for all further answers.
    """
    wanted, left = ([_value(part) for part in _parts(text)] for text in (expected, given))
    if len(wanted) != len(left) or None in wanted or None in left:
        return False
    for number, one in enumerate(wanted):
        error = allowed[min(number, len(allowed) - 1)]
        found = next((i for i, each in enumerate(left) if error.holds(float(each), float(one))), None)  # type: ignore[arg-type]
        if found is None:
            return False
        del left[found]
    return True


def _parts(text: str) -> list[str]:
    """Splits answers at commas, except at a comma between groups of three digits."""
    whole = text.strip().strip("$")
    return [whole] if _value(whole) is not None else [part for part in whole.split(",") if part.strip()]


def _value(text: str) -> Fraction | None:
    scientific = _scientific(text)
    return extract.number(text) if scientific is None else scientific


def _one_answer(boxed: str, expected: str) -> str:
    """Removes the label of a choice from a boxed answer, or returns the label if the reference is a letter."""
    if found := _LABELLED.fullmatch(boxed):
        letter = re.sub(r"\\[a-z]+|[^A-Za-z]", "", expected)
        rest = found[2].removesuffix("}") if found[2].count("}") > found[2].count("{") else found[2]
        return found[1] if len(letter) == 1 and letter in "ABCDEFGHIJ" else rest
    styled = extract.STYLED.fullmatch(boxed)
    return styled[1] if styled and styled[1].strip()[:1].isdigit() else boxed


def settled(given: str, expected: str) -> bool | None:
    """Compares two answers without algebra, or where math-verify would be wrong; None: math-verify has to decide."""
    if extract.same(given, expected):
        return True
    based = [_BASED.fullmatch(text.strip()) for text in (given, expected)]
    if based[0] and based[1]:
        return based[0].groups() == based[1].groups()
    given_many = _MANY.search(given[:MAX_CHARS].strip())
    if extract.number(expected) is not None and (given_many or extract.is_other_number(given)):
        return False
    exact = [_scientific(text) for text in (given, expected)]
    if exact != [None, None]:
        a, b = (extract.number(text) if x is None else x for x, text in zip(exact, (given, expected), strict=True))
        return None if a is None or b is None else a == b
    return None


def _scientific(text: str) -> Fraction | None:
    """The value of 4.5e33 or 4.5 \\times 10^{33}, a unit in \\text{} aside; None of anything else."""
    found = _SCIENTIFIC.fullmatch(_rewritten(text).strip())
    digits = extract.number(found["digits"]) if found else None
    return digits * Fraction(10) ** int(found["exponent"]) if found and digits is not None else None


def _rewritten(text: str) -> str:
    for written, meant in _WRITTEN.items():
        text = text.replace(written, meant)
    return _ORDINAL.sub("", text)
