# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The reward that the environment gave, turn by turn (`rollout.environment`), summed over a response."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.sample import BaseReward, Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """No settings."""


class Reward(BaseReward):
    """See the module's text."""

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        return np.array([sum(sample.turn_rewards) for sample in samples], np.float32)
