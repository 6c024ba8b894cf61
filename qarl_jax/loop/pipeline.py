# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Streams a step's responses through grading, packing, scoring and updates while the engine decodes the rest.

    completions = engine.draw(requests, sampling=sampling)      # as they end
    graded(completions, prompts, num_samples, grade, timer, scoring.add)    # a group is graded once it is complete,
                                                                # a whole mini-batch packed, scored or trained on
    scoring.take(groups, advantages)                            # the mini-batch made of exactly these, or None

A reward depends on one sample, and a mini-batch on its groups and advantages alone, so no result depends on timing. A
mini-batch whose advantages have changed since (shuffled ones) is made anew. `tail.py` says which steps begin their
updates during decoding.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.rollout import Drawn
from qarl_jax.rollout.dynamic_sampling import Parts
from qarl_jax.runtime import processes
from qarl_jax.types import Completion, Prompt, RolloutGroup

Graded = tuple[list[RolloutGroup], Parts]
Grade = Callable[[Sequence[Prompt], Sequence[Sequence[Completion]]], Graded]
# Gets the number of a step's prompt and its graded group.
Add = Callable[[int, RolloutGroup], None]
# (number of the mini-batch, its groups in order) -> the groups as they are trained on, their advantages, and whatever
# is made of both.
Score = Callable[[int, list[RolloutGroup]], tuple[list[RolloutGroup], np.ndarray, Any]]


def graded(
    completions: Drawn,
    prompts: Sequence[Prompt],
    num_samples: int,
    grade: Grade,
    timer: PhaseTimer,
    add: Add | None = None,
) -> Graded:
    """Grades groups in a thread as they complete; groups that complete during a grading are graded together next.

    In a run of several processes the first grades for all: all groups at once, at the end.

    Args:
      completions: yields (index of the request, completion), with `num_samples` requests per prompt.
      grade: grades some prompts' completions; called from one thread at a time.
      timer: measures the wait for completions as `rollout`, for grades as `reward`.
      add: called with each graded group at once, from the grading thread; None: not streamed.

    Returns:
      The groups in the order of the prompts, and the reward terms over all their samples.

    Raises:
      whatever `completions` or `grade` raises.
    """
    ended: list[dict[int, Completion]] = [{} for _ in prompts]
    whole: collections.deque[int] = collections.deque()  # complete, not being graded
    groups: dict[int, RolloutGroup] = {}
    terms: dict[int, Parts] = {}

    def grade_whole() -> None:
        numbers = [whole.popleft() for _ in range(len(whole))]
        if not numbers:  # they were graded with others
            return
        found, parts = grade([prompts[n] for n in numbers], [[ended[n][i] for i in sorted(ended[n])] for n in numbers])
        for at, number in enumerate(numbers):
            mine = slice(at * num_samples, (at + 1) * num_samples)
            groups[number], terms[number] = found[at], {name: values[mine] for name, values in parts.items()}
            if add is not None:
                add(number, groups[number])

    with ThreadPoolExecutor(1, thread_name_prefix="grade") as thread, contextlib.closing(completions):
        grading: list[Future[None]] = []
        while True:
            with timer("rollout"):
                index, completion = next(completions, (-1, None))
            if completion is None:
                break
            number = index // num_samples
            ended[number][index] = completion
            if len(ended[number]) == num_samples:
                whole.append(number)
                if processes.count() == 1:
                    grading.append(thread.submit(grade_whole))
            while grading and grading[0].done():
                grading.pop(0).result()
        with timer("reward"):
            for future in grading:
                future.result()
            grade_whole()
    order = range(len(prompts))
    names = terms[0] if terms else {}
    return [groups[n] for n in order], {name: np.concatenate([terms[n][name] for n in order]) for name in names}


class Scoring:
    """Makes the mini-batches of a step's first epoch in a thread, each as soon as its groups are graded.

    Args:
      chosen: per mini-batch, the numbers of its prompts in the step.
      score: makes a mini-batch; called from one thread at a time.
      phase: name of the timed phase that waiting for `score` counts as.
    """

    def __init__(self, chosen: Sequence[np.ndarray], score: Score, phase: str = "pack"):
        self._chosen, self._score, self.phase = [[int(i) for i in numbers] for numbers in chosen], score, phase
        self._groups: dict[int, RolloutGroup] = {}
        self._made: list[Future[tuple[list[RolloutGroup], np.ndarray, Any]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._first: float | None = None  # when the step's first mini-batch was complete
        self._spans: list[list[float]] = []  # [begin, end or nothing yet] of each `score`

    def add(self, number: int, group: RolloutGroup) -> None:
        """Takes the graded responses of the step's prompt `number`."""
        self._groups[number] = group
        for place, numbers in enumerate(self._chosen):
            if number in numbers and all(other in self._groups for other in numbers):
                if not place:
                    self._first = time.perf_counter()
                groups = [self._groups[other] for other in numbers]
                self._made.append(self._thread.submit(self._run, place, groups))

    def _run(self, place: int, groups: list[RolloutGroup]) -> tuple[list[RolloutGroup], np.ndarray, Any]:
        span = [time.perf_counter()]
        self._spans.append(span)
        try:
            return self._score(place, groups)
        finally:
            span.append(time.perf_counter())

    def idle(self) -> dict[str, float]:
        """Returns seconds since the step's first mini-batch was complete, and how many of them ran no `score`."""
        now = time.perf_counter()
        first = now if self._first is None else self._first
        busy = sum(max(0.0, (span[1] if span[1:] else now) - max(span[0], first)) for span in self._spans)
        return {"time/rollout/tail_s": now - first, "time/rollout/idle_s": max(0.0, now - first - busy)}

    def take(self, groups: Sequence[RolloutGroup], advantages: np.ndarray) -> Any | None:
        """Returns the mini-batch that was made from exactly these groups and advantages; None if there is none.

        Raises:
          whatever `score` raised in the thread.
        """
        for future in self._made:
            made_of, used, made = future.result()
            if len(made_of) == len(groups) and all(map(_are_alike, made_of, groups)):
                return made if np.array_equal(used, advantages) else None
        return None

    def close(self) -> None:
        """Cancels waiting mini-batches and waits for the running one. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _are_alike(a: RolloutGroup, b: RolloutGroup) -> bool:
    """Tells whether two groups have the same prompt and responses."""
    same = all(x is y or x.tokens == y.tokens for x, y in zip(a.completions, b.completions, strict=True))
    return a is b or (a.prompt is b.prompt and same)
