# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Streaming rewards and scores: a step's responses pass through grading, packing and scoring while others are decoded.

    completions = engine.draw(requests, sampling=sampling)      # as they end
    groups = graded(completions, prompts, num_samples, grade)   # graded groups, as they are complete
    for number, group in groups:
        scoring.add(number, group)                              # a whole mini-batch is packed and scored
    scoring.take(groups, advantages)                            # the mini-batch made of exactly these, or None

A reward looks at one sample at a time, and a mini-batch is made from the same groups and advantages by the same
programs. So no result depends on when it was made. A mini-batch that turned out otherwise (a truncated response masked,
advantages shuffled) is made anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.rollout import Drawn
from qarl_jax.rollout.dynamic_sampling import Collected, Parts
from qarl_jax.runtime import processes
from qarl_jax.types import Completion, Prompt, RolloutGroup

Grade = Callable[[Sequence[Prompt], Sequence[Sequence[Completion]]], tuple[list[RolloutGroup], Parts]]
Graded = tuple[list[RolloutGroup], Parts]
# (groups, in order) -> their advantages and whatever is made of both.
Score = Callable[[list[RolloutGroup]], tuple[np.ndarray, Any]]
T = TypeVar("T")
# Graded groups as they are complete, each with the number of its prompt; returns T.
GroupStream = Generator[tuple[int, RolloutGroup], None, T]
# The groups of a step; returns what the step trains on.
StepStream = GroupStream[Collected]


def drained(stream: Generator[Any, None, T], add: Callable[..., None] | None = None) -> T:
    """Exhausts a stream and returns its value; `add` is called with every item."""
    with contextlib.closing(stream):
        while True:
            try:
                item = next(stream)
            except StopIteration as end:
                return end.value
            if add is not None:
                add(*item)


def graded(
    completions: Drawn, prompts: Sequence[Prompt], num_samples: int, grade: Grade, timer: PhaseTimer
) -> GroupStream[Graded]:
    """Grades groups in a thread as they are complete; groups that are complete while it grades are graded together.

    Over several processes the first grades for all, so all groups are graded at once, at the end.

    Args:
      completions: each with its number, `num_samples` per prompt.
      grade: grades some prompts' completions; called from one thread at a time.
      timer: measures the wait for completions as `rollout`, for grades as `reward`.

    Returns:
      The groups in the order of the prompts, and the reward terms over all their samples.

    Raises:
      whatever `completions` or `grade` raises.
    """
    ended: list[dict[int, Completion]] = [{} for _ in prompts]
    whole: list[int] = []  # complete, not being graded
    groups: dict[int, RolloutGroup] = {}
    terms: dict[int, Parts] = {}

    def start(numbers: list[int]) -> Graded:
        return grade([prompts[n] for n in numbers], [[ended[n][i] for i in sorted(ended[n])] for n in numbers])

    def finish(numbers: list[int], result: Graded) -> list[tuple[int, RolloutGroup]]:
        for at, number in enumerate(numbers):
            mine = slice(at * num_samples, (at + 1) * num_samples)
            groups[number], terms[number] = result[0][at], {name: values[mine] for name, values in result[1].items()}
        return [(number, groups[number]) for number in numbers]

    with ThreadPoolExecutor(1, thread_name_prefix="grade") as thread, contextlib.closing(completions):
        numbers: list[int] = []
        future: Future[Graded] | None = None
        while True:
            with timer("rollout"):
                index, completion = next(completions, (-1, None))
            if completion is None:
                break
            number = index // num_samples
            ended[number][index] = completion
            if len(ended[number]) == num_samples:
                whole.append(number)
            if future is not None and future.done():
                yield from finish(numbers, future.result())
                future = None
            if future is None and whole and processes.count() == 1:
                numbers, whole = whole, []
                future = thread.submit(start, numbers)
        with timer("reward"):
            result = None if future is None else future.result()
            rest = start(whole) if whole else None
    if result is not None:
        yield from finish(numbers, result)
    if rest is not None:
        yield from finish(whole, rest)
    order = range(len(prompts))
    names = terms[0] if terms else {}
    return [groups[n] for n in order], {name: np.concatenate([terms[n][name] for n in order]) for name in names}


class Scoring:
    """The mini-batches of one step's first pass.

    Args:
      chosen: per mini-batch, the numbers of its prompts.
      score: makes a mini-batch; called from one thread at a time.
      phase: the phase of a step that waiting for `score` counts for.
    """

    def __init__(self, chosen: Sequence[np.ndarray], score: Score, phase: str = "pack"):
        self._chosen, self._score, self.phase = [[int(i) for i in numbers] for numbers in chosen], score, phase
        self._groups: dict[int, RolloutGroup] = {}
        self._made: list[tuple[list[RolloutGroup], Future[tuple[np.ndarray, Any]]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")

    def add(self, number: int, group: RolloutGroup) -> None:
        """Takes the graded responses of the step's prompt `number`."""
        self._groups[number] = group
        for numbers in self._chosen:
            if number in numbers and all(other in self._groups for other in numbers):
                groups = [self._groups[other] for other in numbers]
                self._made.append((groups, self._thread.submit(self._score, groups)))

    def take(self, groups: Sequence[RolloutGroup], advantages: np.ndarray) -> Any | None:
        """Returns the mini-batch made of these groups with these advantages; None: there is none.

        Raises:
          whatever `score` raised in the thread.
        """
        for made_of, future in self._made:
            if len(made_of) == len(groups) and all(a is b for a, b in zip(made_of, groups, strict=True)):
                used, made = future.result()
                return made if np.array_equal(used, advantages) else None
        return None

    def close(self) -> None:
        """Drops what waits; waits for what runs. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
