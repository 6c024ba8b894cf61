# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes assets/tiny-qwen3, the policy from which the quickstart starts.

    python -m assets.make.tiny_qwen3 [out=DIR] [section.field=value ...]     # five minutes on two CPU cores

Supervised fine-tuning (`qarl_jax.sft`, tiny_qwen3.yaml) on answers that are worked out step by step. Each ends in a
line that holds the final answer alone, so `reward: {name: exact, extract: last_line}` grades it.

The teacher slips: a share of the steps is wrong, and the steps behind build on them, as in any corpus that people
wrote. A model that imitates such answers to convergence slips as often, at every temperature above 0, which is what
reinforcement learning can take away. A model that imitates flawless answers has next to no entropy, and nothing to
learn from the reward. With n steps and a rate p about (1 - p)^n of the answers are right.
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable, Sequence

import numpy as np

from qarl_jax import sft
from qarl_jax.typed_config import load
from qarl_jax.types import Prompt, UserError, entry_point

CONFIG = pathlib.Path(__file__).with_suffix(".yaml")
SLIP_RATE = 0.2

_TERM = re.compile(r"([+-]?)\s*(-?\d+)")  # the operation and a number with a sign of its own
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_OFF = (-3, -2, -1, 1, 2, 3)


class Slip:
    """Decides, step by step, whether the teacher slips. made: whether it ever did.

    Example: Slip(0.2, np.random.default_rng(0)).number(7) is 7 four times out of five, and else one of 4 to 10.
    """

    def __init__(self, rate: float, rng: np.random.Generator):
        self.rate, self.rng, self.made = rate, rng, False

    def number(self, value: int) -> int:
        """The value, or one up to 3 off."""
        return value + int(self.rng.choice(_OFF)) if self._now() else value

    def letter(self, letter: str) -> str:
        """The letter, or another one, in lower case."""
        return str(self.rng.choice([x for x in _LETTERS if x != letter.lower()])) if self._now() else letter

    def _now(self) -> bool:
        if not self.rate or self.rng.random() >= self.rate:
            return False
        self.made = True
        return True


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


def worked_answer(prompt: Prompt, slip_rate: float, rng: np.random.Generator) -> str:
    """The worked answer to a reasoning-gym prompt, each step wrong with probability `slip_rate`.

    Raises:
      UserError: the prompt's task has no tracer.
    """
    dataset = prompt.meta.get("origin", {}).get("dataset", "")
    if dataset not in TRACES:
        raise UserError(f"there is no tracer for {dataset or prompt.uid!r}, only for {', '.join(TRACES)} ({__file__}).")
    return TRACES[dataset](prompt.meta["question"], prompt.answer, Slip(slip_rate, rng))


def answers(prompts: Sequence[Prompt], rng: np.random.Generator) -> list[str]:
    """The answers of one update."""
    rng.random(len(prompts))  # the asset's slips were drawn behind as many numbers
    return [worked_answer(prompt, SLIP_RATE, rng) for prompt in prompts]


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    sft.run(load.load(sft.Config, CONFIG, sys.argv[1:] if argv is None else argv), answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
