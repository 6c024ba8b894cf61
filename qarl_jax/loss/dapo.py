# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""DAPO's objective (https://arxiv.org/abs/2503.14476, sec. 3.1 and 3.3): clip-higher and the mean over all tokens.

The token objective is GRPO's with a wider upper clip. The paper's equation averages over the tokens of each prompt's
group; its released code, and this file, average over the tokens of the mini-batch. Dynamic sampling and the overlong
penalty act on batches and rewards, not on the objective.
"""

from __future__ import annotations

import dataclasses

from qarl_jax.loss.common.clipped import Clipped
from qarl_jax.loss.common.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Clipped):
    """DAPO: token-level PPO clip with separate bounds, mean over tokens."""

    name = "dapo"
    formula = "w_t min(r_t A, clip(r_t, 1-clip_low, 1+clip_high) A)"
    source = "DAPO, arXiv 2503.14476"

    clip_low: float = option(0.2, "lower clip is 1 - clip_low", "DAPO sec. 4.1", at_least=0.0)
    clip_high: float = option(0.28, "upper clip is 1 + clip_high", "DAPO sec. 4.1", at_least=0.0)
    dual_clip: float | None = option(None, "A < 0: no gradient above it", "off; 10 in verl's recipe", above=1.0)
