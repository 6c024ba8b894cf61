# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Mini-batches are packed and scored as soon as their groups are graded, while the engine still decodes others.

    early = EarlyScores(chosen, score)             # the prompts of each mini-batch of the step's first pass
    early.add(number, group)                       # from any thread; the last group of a mini-batch starts `score`
    early.take(groups, advantages)                 # what was made of exactly these, or None

What is taken was made from the same groups and advantages by the same programs, so that it has the bits that a later
call would have. Whatever turned out otherwise (a truncated response masked, advantages shuffled) is made anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from qarl_jax.types import RolloutGroup

# (groups, in order) -> their advantages and whatever is made of both.
Score = Callable[[list[RolloutGroup]], tuple[np.ndarray, Any]]


class EarlyScores:
    """One step's.

    Args:
      chosen: per mini-batch, the numbers of its prompts.
      score: called from one thread at a time.
      phase: of a step, that waiting for `score` counts for.
    """

    def __init__(self, chosen: Sequence[np.ndarray], score: Score, phase: str = "pack"):
        self._chosen, self._score, self.phase = [[int(i) for i in numbers] for numbers in chosen], score, phase
        self._groups: dict[int, RolloutGroup] = {}
        self._made: list[tuple[list[RolloutGroup], Future[tuple[np.ndarray, Any]]]] = []
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")

    def add(self, number: int, group: RolloutGroup) -> None:
        """Prompt `number` of the step has its graded responses."""
        with self._lock:
            self._groups[number] = group
            for numbers in self._chosen:
                if number in numbers and all(other in self._groups for other in numbers):
                    own = [self._groups[other] for other in numbers]
                    self._made.append((own, self._thread.submit(self._score, own)))

    def take(self, groups: Sequence[RolloutGroup], advantages: np.ndarray) -> Any | None:
        """What was made of these groups with these advantages; None: nothing was.

        Raises:
          what `score` raised in the thread.
        """
        for own, future in self._made:
            if len(own) == len(groups) and all(a is b for a, b in zip(own, groups, strict=True)):
                used, made = future.result()
                return made if np.array_equal(used, advantages) else None
        return None

    def close(self) -> None:
        """Drop what waits; wait for what runs. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
