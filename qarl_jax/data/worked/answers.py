# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Worked answers to procedural tasks: what a model should write before the final answer, for supervised fine-tuning.

reasoning-gym gives a question and its final answer; a tracer writes the steps between. Every trace ends in a line that
holds the final answer alone, so `reward: {name: exact, extract: last_line}` grades it.

Two manners: *short*, where a step is a whole operation (this file), and *longhand*, digit by digit (`longhand.py`). In
both the teacher may slip (`mistakes.py`).

Adding a task: a function of (question, answer, slip), and a line in `TRACES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import numpy as np

from qarl_jax.data.worked import longhand
from qarl_jax.data.worked.mistakes import Slip
from qarl_jax.types import Prompt, UserError

_TERM = re.compile(r"([+-]?)\s*(-?\d+)")  # the operation and a number with a sign of its own

Manner = Literal["short", "longhand"]


def chain_sum(question: str, answer: str, slip: Slip) -> str:
    """Left to right, one operation a line. Example: "...: 12 + 34 - 7 =" -> "12+34=46\\n46-7=39\\n39"."""
    terms = _TERM.findall(question.rpartition(":")[2])
    total, lines = int(f"{terms[0][0]}{terms[0][1]}"), []
    for sign, number in terms[1:]:
        step = slip.number(total - int(number) if sign == "-" else total + int(number))
        lines.append(f"{total}{sign}{number}={step}")
        total = step
    if str(total) != answer and not slip.made:
        raise ValueError(f"the trace of {question!r} gives {total}, the task says {answer}")
    return "\n".join([*lines, str(total)])


def spell_backward(question: str, answer: str, slip: Slip) -> str:
    """The letters one by one, then the word. Example: "...: ward" -> "d r a w\\ndraw"."""
    del question
    letters = [slip.letter(letter) for letter in answer]
    return f"{' '.join(letters)}\n{''.join(letters)}"


# reasoning-gym data set -> tracer.
TRACES: dict[str, Callable[[str, str, Slip], str]] = {
    "chain_sum": chain_sum,
    "spell_backward": spell_backward,
}


MANNERS: dict[str, dict[str, Callable[[str, str, Slip], str]]] = {"short": TRACES, "longhand": longhand.TRACES}


def worked_answer(
    prompt: Prompt, slip_rate: float = 0.0, rng: np.random.Generator | None = None, manner: Manner = "short"
) -> str:
    """The worked answer to a reasoning-gym prompt.

    Args:
      prompt: the prompt.
      slip_rate: probability that a step is wrong; needs `rng`.
      manner: short or longhand.

    Raises:
      UserError: the prompt's task has no tracer.
    """
    dataset = prompt.meta.get("origin", {}).get("dataset", "")
    traces = MANNERS[manner]
    if dataset not in traces:
        raise UserError(
            f"worked_share > 0: there is no tracer for {dataset or prompt.uid!r}, only for {', '.join(traces)}"
            f" (manner={manner}); use worked_share=0, or add one in qarl_jax/data/"
            f"{'longhand' if manner == 'longhand' else 'traces'}.py."
        )
    slip = Slip(slip_rate, rng or np.random.default_rng(0))
    return traces[dataset](prompt.meta["question"], prompt.answer, slip)
