# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""CISPO, clipped importance-sampling policy optimization (MiniMax-M1, https://arxiv.org/abs/2506.13585).

    J_t = w_t stop_gradient(clip(r_t, ratio_min, ratio_max)) A logprob_t

CISPO is REINFORCE with a capped weight: every token keeps a gradient. Only the gradient of J has a meaning; its value
depends on the log-prob itself. The bounds are ratios (as in ScaleRL and TRL; verl writes 1 + eps).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qarl_jax.loss.common import diagnostics
from qarl_jax.loss.common.aggregation import aggregate
from qarl_jax.loss.common.options import Shared, option
from qarl_jax.loss.common.sampler_correction import corrected
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Shared):
    """CISPO: REINFORCE weighted by the clipped, detached token ratio."""

    name = "cispo"
    formula = "w_t sg(clip(r_t, ratio_min, ratio_max)) A logprob_t"
    source = "MiniMax-M1, arXiv 2506.13585"

    ratio_min: float = option(0.0, "lower cap of the ratio", "off, as in MiniMax-M1", at_least=0.0)
    ratio_max: float = option(5.0, "upper cap of the ratio", "ScaleRL; TRL", above=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_min >= self.ratio_max:
            raise UserError(f"loss 'cispo': ratio_min = {self.ratio_min} must be below ratio_max = {self.ratio_max}")


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """Computes CISPO's loss of a batch by the formula above; `qarl_jax.loss` explains the returned Mean."""
    r, weights = corrected(x, cfg)
    ratio = jax.lax.stop_gradient(r.ratio)
    objective = jnp.clip(ratio, cfg.ratio_min, cfg.ratio_max) * r.advantages * r.logprobs
    mean = aggregate(-weights.weight * objective, r, cfg.aggregation, max_response_len=cfg.max_response_len)

    high, low = ratio > cfg.ratio_max, ratio < cfg.ratio_min
    capped: dict[str, Metric] = {
        "clip/capped_pos_high": r.token_mean((r.advantages > 0) & high),
        "clip/capped_pos_low": r.token_mean((r.advantages > 0) & low),
        "clip/capped_neg_high": r.token_mean((r.advantages < 0) & high),
        "clip/capped_neg_low": r.token_mean((r.advantages < 0) & low),
    }
    return mean, diagnostics.batch_metrics(r) | weights.metrics | capped
