# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO's soft penalty on long responses (arXiv 2503.14476, eq. 13), a term to add to a verifier.

With limit L and buffer C: 0 up to L - C tokens, then falling linearly to -1 at L, and -1 for a response that was cut
off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.sample import BaseReward, Sample
from qarl_jax.types import UserError, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """DAPO's penalty on responses that come near the limit.

    Attributes:
      buffer_len: tokens before the limit over which the penalty grows. DAPO: 4096 of 20480.
      max_len: the limit in tokens; 0: rollout.max_response_len, or that of the stage (`rollout.stages`).
    """

    buffer_len: int = 4096
    max_len: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "buffer_len")
        at_least(self, 0, "max_len", note="; 0 means rollout.max_response_len")


class Reward(BaseReward):
    """Gives a penalty from 0 to -1 to responses that come near the length limit.

    Raises:
      UserError: `buffer_len` exceeds the limit.
    """

    def __init__(self, cfg: Config, max_response_len: int):
        self.buffer_len = cfg.buffer_len
        self.max_len = cfg.max_len or max_response_len
        self.is_own = cfg.max_len > 0
        if self.buffer_len > self.max_len:
            raise UserError(
                f"reward overlong: buffer_len={self.buffer_len} exceeds the limit of {self.max_len} tokens; lower it."
            )

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        lengths = np.array([sample.num_tokens for sample in samples], np.float32)
        limits = np.array([(not self.is_own and s.max_tokens) or self.max_len for s in samples], np.float32)
        penalty = np.clip((limits - self.buffer_len - lengths) / self.buffer_len, -1.0, 0.0)
        finished = np.array([sample.finished for sample in samples], bool)
        return np.where(finished, penalty, -1.0).astype(np.float32)
