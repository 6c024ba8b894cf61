# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Worked answers to procedural tasks: what a model should write before the final answer, for supervised fine-tuning.

reasoning-gym gives a question and its final answer; a tracer writes the steps between. Every trace ends in a line that
holds the final answer alone, so `reward: {name: exact, extraction: last_line}` grades it. Adding one: a function of
(question, answer), and a line in `TRACES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from qarl_jax.types import Prompt, UserError

_TERM = re.compile(r"([+-]?)\s*(\d+)")


def chain_sum(question: str, answer: str) -> str:
    """Left to right, one operation a line. Example: "...: 12 + 34 - 7 =" -> "12+34=46\\n46-7=39\\n39"."""
    terms = _TERM.findall(question.rpartition(":")[2])
    total, lines = int(f"{terms[0][0]}{terms[0][1]}"), []
    for sign, digits in terms[1:]:
        step = total + int(f"{sign}{digits}")
        lines.append(f"{total}{sign}{digits}={step}")
        total = step
    if str(total) != answer:
        raise ValueError(f"the trace of {question!r} gives {total}, the task says {answer}")
    return "\n".join([*lines, answer])


def spell_backward(question: str, answer: str) -> str:
    """The letters one by one, then the word. Example: "...: ward" -> "d r a w\\ndraw"."""
    del question
    return f"{' '.join(answer)}\n{answer}"


# reasoning-gym data set -> tracer.
TRACES: dict[str, Callable[[str, str], str]] = {
    "chain_sum": chain_sum,
    "spell_backward": spell_backward,
}


def worked_answer(prompt: Prompt) -> str:
    """The worked answer to a reasoning-gym prompt.

    Raises:
      UserError: the prompt's task has no tracer.
    """
    dataset = prompt.meta.get("origin", {}).get("dataset", "")
    if dataset not in TRACES:
        raise UserError(
            f"worked_share > 0: there is no tracer for {dataset or prompt.uid!r}, only for {', '.join(TRACES)}; use"
            " worked_share=0, or add one in qarl_jax/data/traces.py."
        )
    return TRACES[dataset](prompt.meta["question"], prompt.answer)
