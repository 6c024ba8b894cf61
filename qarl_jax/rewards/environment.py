# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward that sums what the environment gave for each turn of a response (`rollout.environment`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.sample import BaseReward, Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """An empty section: this reward has no settings."""


class Reward(BaseReward):
    """Sums the environment's rewards over the turns of a response."""

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        return np.array([sum(sample.turn_rewards) for sample in samples], np.float32)
