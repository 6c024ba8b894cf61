# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a hint below a question, cut from its worked solution, as SPARKLE does (https://arxiv.org/abs/2506.04723).

| kind | what stands below the question | what it leaves to the policy |
|---|---|---|
| steps | the first `share` of the solution's steps, never the last one | the rest of the solution |
| plan | all steps, with "?" for every number that the question does not have and for every result | the arithmetic |
| knowledge | the solution's equations in alphabetical order, without those that give the answer | the order of steps |

In SPARKLE a model wrote plans and facts; here both are cut from the solution itself, so they add no errors. A solution
is found in a row's column `solution` (MATH, OlympiadBench), `answer` with "####" (GSM8K),
`upstream_answer`, and in reasoning-gym's `answer_cot` (gsm_symbolic). A step is a line of it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from qarl_jax.types import AbsentError, UserError

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_RESULT = re.compile(r"=\s*([^\w\s]?)" + _NUMBER.pattern)
_EQUATION = re.compile(r"[\d.(][\d\s.,+*/x×÷%$€£()-]*=\s*[$€£]?" + _NUMBER.pattern)
_HEADS = {
    "steps": "The solution begins so:",
    "plan": "A plan, with numbers left out:",
    "knowledge": "These facts are true:",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hint:
    """A hint below the questions of training prompts.

    Attributes:
      kind: steps, plan or knowledge.
      share: of the steps that kind=steps shows, rounded up.
      base: file of the untrained policy's responses to these questions (`evaluate --out FILE`); empty: all questions
        get the hint. below: with `base`, only questions with a pass rate of at most this get the hint.
    """

    kind: Literal["steps", "plan", "knowledge"] = "steps"
    share: float = 0.5
    base: str = ""
    below: float = 0.25

    def __post_init__(self) -> None:
        for name in ("share", "below"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} must lie in [0, 1], got {getattr(self, name)}.")


def solution_of(facts: Mapping[str, Any]) -> list[str]:
    """Returns the steps of a row's worked solution, without its last line's "#### 42" and GSM8K's <<2*21=42>>.

    Raises:
      UserError: the row has no worked solution.
    """
    found = facts.get("solution") or facts.get("upstream_answer") or facts.get("answer_cot")
    if not found and "####" in str(facts.get("answer", "")):
        found = facts["answer"]
    text = "\n".join(map(str, found)) if isinstance(found, list) else str(found or "")
    lines = (re.sub(r"<<.*?>>", "", line).strip() for line in text.split("####")[0].splitlines())
    steps = [line for line in lines if line]
    if not steps:
        raise UserError(
            "a hint is cut from a worked solution, and this row has none (solution, upstream_answer, an answer with"
            " '####', or reasoning-gym's answer_cot); leave the hint (or the view) out, or take gsm_symbolic or GSM8K."
        )
    return steps


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _masked(step: str, known: set[float]) -> str:
    def keep(found: re.Match[str]) -> str:
        return found[0] if _value(found[0]) in known else "?"

    return _NUMBER.sub(keep, _RESULT.sub(r"= \1?", step))


def words(hint: Hint, question: str, facts: Mapping[str, Any], answer: str) -> str:
    """Returns the hint's text for one question; empty for a solution of one step, or without equations.

    Args:
      facts: the row, or reasoning-gym's metadata.
      answer: the reference answer, which is not given away.
    """
    steps = solution_of(facts)
    if hint.kind == "steps":
        lines = steps[: min(math.ceil(hint.share * len(steps)), len(steps) - 1)]
    elif hint.kind == "plan":
        known = {_value(number) for number in _NUMBER.findall(question)}
        lines = [_masked(step, known) for step in steps]
    else:
        right = {_value(number) for number in _NUMBER.findall(answer)}
        found = {" ".join(equation.split()) for step in steps for equation in _EQUATION.findall(step)}
        lines = sorted(each for each in found if _value(_NUMBER.findall(each)[-1]) not in right)
    return "\n".join([_HEADS[hint.kind], *lines]) if lines else ""


@functools.lru_cache(maxsize=8)
def pass_rates(file: str) -> dict[str, float]:
    """Reads the pass rate of each prompt, prompt text -> share, from the output of `evaluate --out FILE`.

    Raises:
      UserError: no such file, or one that `evaluate` did not write.
    """
    try:
        with open(file, encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines if line.strip()]
        return {record["prompt"]: record["num_correct"] / len(record["responses"]) for record in records}
    except OSError as error:
        raise AbsentError(
            f"{file}: the base policy's responses cannot be read ({error.strerror or error}); write them with"
            " `evaluate --out`."
        ) from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{file}: not responses that `evaluate --out` wrote ({error!r}); write them anew.") from None


def wanted(hint: Hint, text: str) -> bool:
    """Tells whether the prompt with this text, without a hint, gets one."""
    return not hint.base or pass_rates(hint.base).get(text, 1.0) <= hint.below
