# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What the environment gave, turn by turn (`rollout.environment`), added up over a response's turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.sample import Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """No settings."""


class Reward:
    """See the module's text."""

    def __init__(self, cfg: Config, max_response_len: int):
        self.cfg = cfg

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        return np.array([sum(sample.turn_rewards) for sample in samples], np.float32)

    def close(self) -> None:
        """Nothing to release."""
