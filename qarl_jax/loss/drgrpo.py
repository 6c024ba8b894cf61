# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Dr. GRPO (https://arxiv.org/abs/2503.20783, sec. 3.2): GRPO without its length bias and difficulty bias.

The token objective is GRPO's; the advantage is R - mean (`group_advantages(..., "drgrpo")`). The sum over a response is
divided by a constant instead of its length, so that long wrong answers are not penalized less per token. The constant
is the run's response limit; with the padded length of a batch the loss would depend on the packing.
"""

from __future__ import annotations

import dataclasses

from qarl_jax.loss.common.clipped import Clipped
from qarl_jax.loss.common.options import AGGREGATIONS, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Clipped):
    """Dr. GRPO: token-level PPO clip, constant length normalization; use with advantages R - mean."""

    name = "drgrpo"
    formula = "w_t min(r_t A, clip(r_t, 1-clip_low, 1+clip_high) A)"
    source = "Dr. GRPO, arXiv 2503.20783"

    aggregation: str = option(
        "seq-mean-token-sum-norm", "sum over tokens / (N max_response_len)", "Dr. GRPO code", choices=AGGREGATIONS
    )
    dual_clip: float | None = option(None, "A < 0: no gradient above it", "off", above=1.0)
