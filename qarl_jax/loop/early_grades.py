# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Groups are graded as they end, while the engine still decodes others.

    early = EarlyGrades(prompts, grade)
    completions = engine.generate(prompts, ..., on_group=early.add)     # calls it from the thread that waits
    groups, parts = early.finish(completions)                           # grades the rest; the order is the prompts'

What is graded does not depend on when: a reward looks at one sample at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from qarl_jax.rollout.dynamic_sampling import Parts
from qarl_jax.types import Completion, Prompt, RolloutGroup

Grade = Callable[[Sequence[Prompt], Sequence[Sequence[Completion]]], tuple[list[RolloutGroup], Parts]]


class EarlyGrades:
    """The grades of one batch of prompts.

    Args:
      prompts: all of the batch.
      grade: grades some of them; called from one thread at a time.
      told: is told of each group that was graded before `finish`, in that thread.
    """

    def __init__(
        self, prompts: Sequence[Prompt], grade: Grade, told: Callable[[int, RolloutGroup], None] | None = None
    ):
        self._prompts, self._grade, self._told = list(prompts), grade, told
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grade")
        self._early: dict[int, Future[tuple[list[RolloutGroup], Parts]]] = {}

    def add(self, number: int, completions: Sequence[Completion]) -> None:
        """Prompt `number` has all its completions."""
        self._early[number] = self._thread.submit(self._one, number, completions)

    def _one(self, number: int, completions: Sequence[Completion]) -> tuple[list[RolloutGroup], Parts]:
        graded = self._grade([self._prompts[number]], [completions])
        if self._told is not None:
            self._told(number, graded[0][0])
        return graded

    def finish(self, completions: Sequence[Sequence[Completion]]) -> tuple[list[RolloutGroup], Parts]:
        """The groups and reward terms of all prompts, as `grade` gives them for all at once.

        Raises:
          what `grade` raised in the thread.
        """
        late = [number for number in range(len(self._prompts)) if number not in self._early]
        groups: dict[int, RolloutGroup] = {}
        terms: dict[int, Parts] = {}
        for number, future in self._early.items():
            (groups[number],), terms[number] = future.result()
        if late:
            graded, parts = self._grade([self._prompts[n] for n in late], [completions[n] for n in late])
            at = 0
            for number, group in zip(late, graded, strict=True):
                end = at + len(group.completions)
                groups[number], terms[number] = group, {name: values[at:end] for name, values in parts.items()}
                at = end
        self.close()
        order = range(len(self._prompts))
        names = terms[0] if terms else {}
        return [groups[n] for n in order], {name: np.concatenate([terms[n][name] for n in order]) for name in names}

    def close(self) -> None:
        """Drop what waits. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
