# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The teacher's slips: a share of the steps of worked answers is wrong, and what follows builds on them.

As in any corpus people wrote. A model that imitates such answers to convergence slips as often, at every temperature
above 0, which is what reinforcement learning can take away; one that imitates flawless answers has next to no entropy,
and nothing to learn from the reward. With n steps and a rate p about (1 - p)^n of the answers are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_OFF = (-3, -2, -1, 1, 2, 3)

T = TypeVar("T")


class Slip:
    """Decides, step by step, whether the teacher slips. made: whether it ever did.

    Example: Slip(0.2, np.random.default_rng(0)).number(7) is 7 four times out of five, and else one of 4 to 10.
    """

    def __init__(self, rate: float, rng: np.random.Generator):
        self.rate, self.rng, self.made = rate, rng, False

    def number(self, value: int, least: int | None = None) -> int:
        """The value, or one up to 3 off, but not below `least`."""
        if not self._now():
            return value
        off = int(self.rng.choice(_OFF))
        return value - off if least is not None and value + off < least else value + off

    def digit(self, value: int) -> int:
        """The decimal digit, or another one."""
        return (value + int(self.rng.integers(1, 10))) % 10 if self._now() else value

    def letter(self, letter: str) -> str:
        """The letter, or another one, in lower case."""
        return str(self.rng.choice([x for x in _LETTERS if x != letter.lower()])) if self._now() else letter

    def choice(self, right: T, others: Sequence[T]) -> T:
        """`right`, or one of the `others`; always `right` where there are none."""
        if not others or not self._now():
            return right
        return others[int(self.rng.integers(len(others)))]

    def _now(self) -> bool:
        if not self.rate or self.rng.random() >= self.rate:
            return False
        self.made = True
        return True
