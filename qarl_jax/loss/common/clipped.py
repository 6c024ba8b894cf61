# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The clipped surrogate shared by GRPO, Dr. GRPO, DAPO, GSPO and PPO (https://arxiv.org/abs/1707.06347, eq. 7)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.loss.common import diagnostics
from qarl_jax.loss.common.aggregation import aggregate
from qarl_jax.loss.common.options import Shared, option
from qarl_jax.loss.common.sampler_correction import corrected
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped(Shared):
    """Options of a clip on token ratios, with PPO's defaults."""

    clip_low: float = option(0.2, "lower clip is 1 - clip_low", "PPO; verl", at_least=0.0)
    clip_high: float = option(0.2, "upper clip is 1 + clip_high", "PPO; verl", at_least=0.0)
    dual_clip: float | None = option(None, "A < 0: no gradient above it", "off; 3.0 in verl", above=1.0)


def clipped_surrogate(
    ratio: Float[Array, ...],
    advantages: Float[Array, ...],
    *,
    clip_low: float,
    clip_high: float,
    widen: Float[Array, ...] | float = 1.0,
    dual_clip: float | None = None,
) -> Float[Array, ...]:
    """Computes min(r A, clip(r, 1 - clip_low, (1 + clip_high) * widen) A), to be maximized; all arrays of one shape.

    Args:
      widen: factor >= 1 on the upper bound (adaptive clipping range, QuRL eq. 9).
      dual_clip: c > 1: for A < 0 the objective is at least c A, so that r > c has no gradient
        (https://arxiv.org/abs/1912.09729).
    """
    clipped = jnp.clip(ratio, 1.0 - clip_low, (1.0 + clip_high) * widen)
    objective = jnp.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        objective = jnp.where(advantages < 0, jnp.maximum(objective, dual_clip * advantages), objective)
    return objective


def clipped_policy_loss(
    x: LossInputs, *, cfg: Clipped, off_policy_mask: float | None = None
) -> tuple[Mean, dict[str, Metric]]:
    """Computes the token-level clipped loss of GRPO, Dr. GRPO, DAPO and PPO's actor, which differ in their options.

    `off_policy_mask` drops responses with A < 0 whose mean log-prob under the sampler exceeds that under the learner by
    more than this many nats (DeepSeek-V3.2, eq. 9); they still count in denominators.
    """
    r, weights = corrected(x, cfg)
    ratio = r.ratio
    clip: dict[str, Any] = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high, "dual_clip": cfg.dual_clip}
    objective = clipped_surrogate(ratio, r.advantages, widen=weights.widen, **clip)
    masked: dict[str, Metric] = {}
    if off_policy_mask is not None:
        drift = r.mean(jax.lax.stop_gradient(r.drift))
        dropped = (r.mean(r.advantages) < 0) & (drift > off_policy_mask)
        objective = objective * (1.0 - r.spread(dropped.astype(jnp.float32)))
        masked["clip/seq_off_policy"] = r.sequence_mean(dropped)
    mean = aggregate(-weights.weight * objective, r, cfg.aggregation, max_response_len=cfg.max_response_len)
    edges = diagnostics.token_clip_metrics(r, ratio, widen=weights.widen, **clip)
    return mean, diagnostics.batch_metrics(r) | weights.metrics | edges | masked
