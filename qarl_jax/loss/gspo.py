# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""GSPO, group sequence policy optimization (https://arxiv.org/abs/2507.18071, bounds from sec. 5.1).

    s = exp(min(mean_t (logprobs - old_logprobs), 10))      J_t = w_t min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

The clip is PPO's, one-sided by the sign of A: for A < 0 a large s passes (TBPO's band is what stops it). The bounds are
1000 times narrower than a token clip because s is a mean over the response. Token sums would weigh long responses more,
hence the mean within each response.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qarl_jax.loss.common import diagnostics
from qarl_jax.loss.common.aggregation import aggregate
from qarl_jax.loss.common.clipped import clipped_surrogate
from qarl_jax.loss.common.options import Shared, option
from qarl_jax.loss.common.sampler_correction import corrected, smallest
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs

MAX_LOG_SEQUENCE_RATIO = 10.0  # verl's clamp; the lower side needs none, exp underflows to 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Shared):
    """GSPO: PPO clip on the geometric-mean ratio of the response."""

    name = "gspo"
    formula = "w_t min(s A, clip(s, 1-clip_low, 1+clip_high) A), s = exp(mean_t log r_t)"
    source = "GSPO, arXiv 2507.18071"
    level = "response"

    aggregation: str = option(
        "seq-mean-token-mean",
        "responses weigh equally; `token-mean` (a variant) weighs them by length",
        "GSPO; verl forces it",
        choices=("seq-mean-token-mean", "token-mean"),
    )
    clip_low: float = option(3e-4, "lower clip is 1 - clip_low", "GSPO sec. 5.1", at_least=0.0)
    clip_high: float = option(4e-4, "upper clip is 1 + clip_high", "GSPO sec. 5.1", at_least=0.0)
    dual_clip: float | None = option(None, "A < 0: no gradient above it", "off; 10 in verl's recipe", above=1.0)


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """Computes GSPO's loss of a batch by the formula above; `qarl_jax.loss` explains the returned Mean."""
    r, weights = corrected(x, cfg)
    ratio = jnp.exp(jnp.minimum(r.mean(r.log_ratio), MAX_LOG_SEQUENCE_RATIO))
    objective = clipped_surrogate(
        r.spread(ratio),
        r.advantages,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        widen=weights.widen,
        dual_clip=cfg.dual_clip,
    )
    mean = aggregate(-weights.weight * objective, r, cfg.aggregation)

    now, a = jax.lax.stop_gradient(ratio), r.mean(r.advantages)
    dual = (a < 0) & (now > cfg.dual_clip) if cfg.dual_clip is not None else jnp.zeros_like(r.present)
    # Under `acr` the upper bound varies by token; a response counts as dropped where even its widest bound is passed.
    widest = -smallest(-weights.widen, r)
    edges = diagnostics.sequence_clip_metrics(
        r,
        pos_high=(a > 0) & (now > (1.0 + cfg.clip_high) * widest),
        neg_low=(a < 0) & (now < 1.0 - cfg.clip_low),
        neg_high=dual,
    )
    edges["clip/seq_out_neg_high"] = r.sequence_mean((a < 0) & (now > 1.0 + cfg.clip_high) & ~dual)
    return mean, diagnostics.batch_metrics(r) | weights.metrics | edges
