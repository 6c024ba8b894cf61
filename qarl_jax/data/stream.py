# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the prompts of a step: a pure function of (seed, step), so a resumed run needs only its step number.

With stages (`curriculum.py`) the choice depends on the stage as well, and so on the rewards of earlier steps.

Epoch e visits the source in the order permutation(seed, e). With P prompts per step, step s takes positions
[s*P, (s+1)*P) of the endless sequence epoch 0, epoch 1, ... A step may straddle two epochs; nothing is dropped at the
border, and there is no iterator to save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qarl_jax.data.curriculum import Curriculum, Stage
from qarl_jax.data.sources import mix
from qarl_jax.data.sources.template import PromptSource, digest
from qarl_jax.types import Prompt, UserError

# Keeps the shuffles apart from other draws of the same seed.
_SHUFFLE = 0x5EED


class PromptStream:
    """Batches of prompts. Example: PromptStream(source, seed=0, prompts_per_step=32).batch(7) -> 32 prompts.

    Args:
      source: the prompts; it is not empty, and has at least `prompts_per_step` of them.
      seed: seed of the shuffles.
      prompts_per_step: number of prompts of a step.
      stages: `data.stages`; the source must then be a mix.
      setting: the setting that `prompts_per_step` comes from, for the message.
    """

    def __init__(
        self,
        source: PromptSource,
        seed: int,
        prompts_per_step: int,
        stages: Sequence[Stage] = (),
        setting: str = "train.prompts_per_step",
    ):
        """Raises `UserError` when a step needs more prompts than the source has."""
        if len(source) == 0:
            raise UserError("the data set has no prompts.")
        if prompts_per_step > len(source):
            raise UserError(
                f"{setting}={prompts_per_step} is more than the {len(source)} prompts of the data set;"
                " every step would repeat prompts. Lower it or use more data."
            )
        self.source = source
        self.seed = seed
        self.prompts_per_step = prompts_per_step
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # a cache only: (epoch, its permutation)
        self.curriculum: Curriculum | None = None
        if stages:
            if not isinstance(source, mix.Source):
                raise UserError("data.stages weighs the parts of a mix: set data.source.name=mix.")
            self._mix, self._stages = source, tuple(stages)
            self.curriculum = Curriculum(stages, list(source.sizes), prompts_per_step)
            self._part_order: dict[tuple[int, int], np.ndarray] = {}

    def indices(self, step: int) -> list[int]:
        """Returns the source indices of a step's prompts, in order; ValueError for a negative step."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        return self.positions(step * self.prompts_per_step, self.prompts_per_step)

    def positions(self, start: int, count: int) -> list[int]:
        """Returns the source indices at positions [start, start + count) of the endless sequence of epochs."""
        if self.curriculum is not None:
            steps = range(start // self.prompts_per_step, -(-(start + count) // self.prompts_per_step))
            chosen = [index for step in steps for index in self._of_stage(step)]
            skip = start % self.prompts_per_step
            return chosen[skip : skip + count]
        size = len(self.source)
        return [int(self._permutation(p // size)[p % size]) for p in range(start, start + count)]

    def _of_stage(self, step: int) -> list[int]:
        """The prompts of a step, each source's in its own order, shuffled together."""
        assert self.curriculum is not None
        before, counts = self.curriculum.counts(step)
        chosen = [
            self._mix.begin[name] + self._within(part, int(at), size)
            for part, (name, size) in enumerate(self._mix.sizes.items())
            for at in range(before[part], before[part] + counts[part])
        ]
        return [int(i) for i in np.random.default_rng([_SHUFFLE, self.seed, step, 1]).permutation(chosen)]

    def _within(self, part: int, position: int, size: int) -> int:
        """Index within a source at a position of its own endless sequence."""
        epoch, at = divmod(position, size)
        if (part, epoch) not in self._part_order:
            self._part_order = {key: order for key, order in self._part_order.items() if key[0] != part}
            order = np.random.default_rng([_SHUFFLE, self.seed, epoch, part, 2]).permutation(size)
            self._part_order[part, epoch] = order
        return int(self._part_order[part, epoch][at])

    def eligible(self, step: int) -> np.ndarray:
        """Returns the source indices, int64 [n], from which a step may draw more prompts: those with weight above 0."""
        if self.curriculum is None:
            return np.arange(len(self.source))
        weights = self.curriculum.weights(step)
        ranges = [
            np.arange(self._mix.begin[name], self._mix.begin[name] + size)
            for weight, (name, size) in zip(weights, self._mix.sizes.items(), strict=True)
            if weight
        ]
        return np.concatenate(ranges)

    def batch(self, step: int) -> list[Prompt]:
        """Returns the prompts of a step. Repeated calls, in any order of steps, return equal prompts."""
        return [self.source.prompt(i) for i in self.indices(step)]

    def state(self, step: int) -> dict[str, Any]:
        """Returns the record in a checkpoint by which a resumed run checks that its data is unchanged."""
        return {
            "step": step,
            "seed": self.seed,
            "prompts_per_step": self.prompts_per_step,
            "size": len(self.source),
            "fingerprint": self.source.fingerprint
            if self.curriculum is None
            else digest(self.source.fingerprint, self._stages),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Checks that a run resumes on the data of its checkpoint.

        Raises:
          UserError: the data differs; the message names the difference.
        """
        now = self.state(0)
        words = {
            "seed": "seed",
            "prompts_per_step": "train.prompts_per_step",
            "size": "the number of prompts",
            "fingerprint": "the data set (its file, parameters, template or split)",
        }
        for key, name in words.items():
            if state.get(key) != now[key]:
                raise UserError(
                    f"cannot resume: {name} changed since the checkpoint ({state.get(key)} -> {now[key]}), so the run"
                    " would not continue on the same prompts. Restore it, or start a new run_dir."
                )

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            rng = np.random.default_rng([_SHUFFLE, self.seed, epoch])
            self._order = (epoch, rng.permutation(len(self.source)))
        return self._order[1]
