# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the source of a step's prompts, stage by stage (`data.stages`): math first, then code (AceReason-Nemotron,
arXiv 2505.16400), or any weights.

    data:
      source: {name: mix, parts: {math: {...}, code: {...}}}
      stages:
      - {weights: {math: 1}, reach: 0.8, until: 400}        # until the reward is 0.8, or step 400
      - {weights: {math: 1, code: 3}}                       # from then on

A step has its stage's shares, rounded to whole prompts; later steps make up for the rounding. Within a source the
prompts are visited as without stages: a permutation for every epoch, each prompt once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the run with its own mix of sources.

    Attributes:
      weights: share of each source, by name; those that are not named have none.
      until: the stage ends before this step; 0: it lasts until `reach`, or to the end.
      reach: the stage ends once the mean reward of its last `window` steps is at least this; null: at `until` alone.
      window: number of steps that `reach` averages over.
    """

    weights: dict[str, float]
    until: int = 0
    reach: float | None = None
    window: int = 10

    def __post_init__(self) -> None:
        if not self.weights or min(self.weights.values()) < 0 or not sum(self.weights.values()) > 0:
            raise UserError(f"weights: at least one source needs a weight above 0, got {self.weights}.")
        if self.until < 0 or self.window < 1:
            raise UserError(f"until must not be negative and window at least 1, got {self.until} and {self.window}.")


def check(stages: Sequence[Stage], names: Sequence[str]) -> None:
    """Raises `UserError` for stages that name an unknown source, never end, or end before they begin."""
    last = 0
    for number, stage in enumerate(stages):
        for name in stage.weights:
            if name not in names:
                raise UserError(f"stages.{number}: no source {name!r}; source.parts has {', '.join(names) or 'none'}.")
        if number < len(stages) - 1 and not stage.until and stage.reach is None:
            raise UserError(f"stages.{number} never ends: give it `until` or `reach`, or make it the last.")
        if stage.until and stage.until <= last:
            raise UserError(
                f"stages.{number}: until={stage.until} does not come after the stage before it, which lasts until step"
                f" {last}; list the stages in order."
            )
        last = stage.until or last


class Curriculum:
    """Tracks the stage that a run is in: a function of the config and of its steps' rewards.

    Args:
      stages: in order; the last one has no end.
      names: the sources' names, in order.
      prompts_per_step: prompts of a step.
    """

    def __init__(self, stages: Sequence[Stage], names: Sequence[str], prompts_per_step: int):
        check(stages, names)
        self._stages, self._names, self._per_step = tuple(stages), tuple(names), prompts_per_step
        self._rewards: list[float] = []  # of the stage that `reach` may end
        self.reached: dict[int, int] = {}  # stage -> step before which its reward ended it
        self._counts = np.zeros((0, len(names)), np.int64)  # a cache: prompts of each source, step by step
        self._carry = np.zeros(len(names))

    def stage(self, step: int) -> int:
        """Returns the number of the stage of a step, from 0."""
        for number, stage in enumerate(self._stages[:-1]):
            end = self.reached.get(number, stage.until)
            if not end or step < end:
                return number
        return len(self._stages) - 1

    def weights(self, step: int) -> np.ndarray:
        """Returns the sources' shares of a step, [sources] float64; they add up to 1."""
        stage = self._stages[self.stage(step)]
        weights = np.array([stage.weights.get(name, 0.0) for name in self._names])
        return weights / weights.sum()

    def counts(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns two arrays [sources] int64: prompts of each source before a step, and in it."""
        while len(self._counts) <= step:
            self._counts = np.vstack([self._counts, self._next(len(self._counts))])
        return self._counts[:step].sum(0), self._counts[step]

    def _next(self, step: int) -> np.ndarray:
        """Divides the next step's prompts by largest remainders, carried over; a source of weight 0 gets none."""
        weights = self.weights(step)
        quota = np.where(weights > 0, weights * self._per_step + self._carry, 0.0)
        counts = np.floor(np.maximum(quota, 0.0)).astype(np.int64)
        if (surplus := int(counts.sum()) - self._per_step) > 0:  # others are below 0 by what they had too much
            counts[np.argmax(counts)] -= surplus
        order = np.argsort(-np.where(weights > 0, quota - counts, -np.inf), kind="stable")
        counts[order[: max(0, self._per_step - int(counts.sum()))]] += 1
        self._carry = np.where(weights > 0, quota - counts, 0.0)
        return counts

    def tell(self, step: int, reward: float, begun: int = 0) -> None:
        """Records the mean reward of a step, which may end the stage. Steps come in order.

        Args:
          begun: number of steps of which a prompt is chosen already (partial rollouts); they stay in the stage.
        """
        number = self.stage(step)
        if number in self.reached:
            return
        if step and number != self.stage(step - 1):
            self._rewards = []
        stage = self._stages[number]
        self._rewards = [*self._rewards, reward][-stage.window :]
        if stage.reach is None or number == len(self._stages) - 1 or len(self._rewards) < stage.window:
            return
        if float(np.mean(self._rewards)) >= stage.reach:
            end = max(step + 1, begun)
            self.reached[number] = min(end, stage.until or end)
            self._rewards = []
            self._forget()

    def _forget(self) -> None:
        """Drops the counts of later steps, after the stage has changed."""
        self._counts, self._carry = self._counts[:0], np.zeros(len(self._names))

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON, for a checkpoint."""
        return {"reached": {str(k): v for k, v in self.reached.items()}, "rewards": list(self._rewards)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state` returned."""
        self.reached = {int(k): int(v) for k, v in state["reached"].items()}
        self._rewards = [float(x) for x in state["rewards"]]
        self._forget()
