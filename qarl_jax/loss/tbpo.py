# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""TBPO, trust-band policy optimization (QaRL, https://arxiv.org/abs/2604.07853, sec. 3.2, eq. 5, app. B and E).

One ratio and one weight per response, both geometric means over its tokens:

    r = exp(mean_t (logprobs - old_logprobs))
    w = clip(exp(mean_t (old_logprobs - rollout_logprobs)), 1/C, C)
    A > 0:  J = w clip(r, 0, 1 + clip_high) A
    A < 0:  J = w clip(r, 1 - neg_clip_low, 1 + neg_clip_high) A
    loss = - mean of J over the non-empty responses

There is no outer min(): for A < 0 it would pick r A above the band and undo the upper bound, which exists to drop
garbled responses. A dropped response has no gradient but stays in the value and in the count. The clip of w acts on
log w: taken literally, the paper's clip(w, -log 2, log 2) would cut every w = 1 to 0.69.

The default bands suit responses of thousands of tokens: the standard deviation of a mean falls with sqrt(L), so short
responses need wider bands. With d_t = logprobs - old_logprobs of a response of L tokens, `bands` multiplies edges by

    fixed     1
    length    sqrt(4096 / L)
    spread    sqrt(4096 / L) max(1, s / spread_ref),   s^2 = sum_t (d_t - mean d)^2 / (L - 1)

s sqrt(1 / L) is the standard error of the response's mean log-ratio. So with `spread` and s above spread_ref an edge is
the same number of standard errors for every scheme and length. s is large under coarse schemes: a small update changes
few codes by whole steps, and with them single tokens' log-probs by much. s does not depend on the mean, which the band
limits. Below spread_ref, for example in a response of one token, the max with 1 gives the bands of `length`. The
factors depend on one response alone, so that micro-batches and packing do not matter, and have no gradient.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.loss.common import diagnostics
from qarl_jax.loss.common.aggregation import aggregate_sequences
from qarl_jax.loss.common.options import Shared, option
from qarl_jax.loss.common.responses import MAX_LOG_RATIO, Responses
from qarl_jax.loss.common.sampler_correction import MISMATCH, corrected
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs

AGGREGATIONS = ("seq-mean-token-mean", "token-mean")
BANDS = ("fixed", "length", "spread")
LENGTH_REF = 4096.0
"""Tokens of a response for which the edges hold as written, whatever `bands` is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Shared):
    """TBPO: response-level ratio, one-sided band for A > 0, two-sided band for A < 0, truncated mismatch weight."""

    name = "tbpo"
    formula = "w clip(r, 0, 1+clip_high) A for A > 0; w clip(r, 1-neg_clip_low, 1+neg_clip_high) A for A < 0"
    source = "QaRL, arXiv 2604.07853, eq. 5"
    level = "response"
    aggregation: str = option(
        "seq-mean-token-mean",
        "responses weigh equally; `token-mean` (a variant) weighs them by length",
        "QaRL App. E, as GSPO",
        choices=AGGREGATIONS,
    )
    mismatch: str = option(
        "geometric",
        "w outside [1/C, C]: `geometric` truncates it (eq. 5), `geometric_mis` drops the response; `none` sets w = 1",
        "QaRL eq. 5",
        choices=tuple(MISMATCH),
    )
    clip_high: float = option(4e-4, "A > 0: dropped above 1 + clip_high", "QaRL table 2", above=0.0)
    neg_clip_low: float = option(3e-4, "A < 0: dropped below 1 - neg_clip_low", "QaRL table 2", above=0.0)
    neg_clip_high: float = option(7e-4, "A < 0: dropped above 1 + neg_clip_high", "QaRL table 2", above=0.0)
    bands: str = option(
        "fixed",
        "the edges are as written, or hold for 4,096 tokens and follow a response's length, or its length and spread",
        "ours",
        choices=BANDS,
    )
    spread_ref: float = option(
        0.0256,
        "s for which the edges hold: there clip_high = 4e-4 is one standard error at 4,096 tokens",
        "ours",
        above=0.0,
    )


def widths(r: Responses, cfg: Config) -> Float[Array, "B S"] | float:
    """Computes the factors by which `cfg.bands` widens each response's band (formulas above); they have no gradient."""
    if cfg.bands == "fixed":
        return 1.0
    width = jnp.sqrt(LENGTH_REF / jnp.maximum(r.length, 1.0))
    if cfg.bands == "length":
        return width
    d = jax.lax.stop_gradient(jnp.clip(r.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    squares = r.sum((d - r.spread(r.mean(d))) ** 2)
    return width * jnp.maximum(jnp.sqrt(squares / jnp.maximum(r.length - 1.0, 1.0)) / cfg.spread_ref, 1.0)


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """Computes TBPO's loss of a batch by the formula above; `qarl_jax.loss` explains the returned Mean."""
    r, weights = corrected(x, cfg)
    advantage, w = r.mean(r.advantages), r.mean(weights.weight)
    ratio = jnp.exp(jnp.clip(r.mean(r.log_ratio), -MAX_LOG_RATIO, MAX_LOG_RATIO))

    width = widths(r, cfg)
    pos_high, neg_low, neg_high = (1.0 + side * width for side in (cfg.clip_high, -cfg.neg_clip_low, cfg.neg_clip_high))
    banded = jnp.where(advantage > 0, jnp.clip(ratio, 0.0, pos_high), jnp.clip(ratio, neg_low, neg_high))
    mean = aggregate_sequences(-w * banded * advantage, r, cfg.aggregation)

    now = jax.lax.stop_gradient(ratio)
    edges = diagnostics.sequence_clip_metrics(
        r,
        pos_high=(advantage > 0) & (now > pos_high),
        neg_low=(advantage < 0) & (now < neg_low),
        neg_high=(advantage < 0) & (now > neg_high),
    )
    edges["loss/band_width"] = r.sequence_mean(jnp.broadcast_to(width, r.length.shape))
    return mean, diagnostics.batch_metrics(r) | weights.metrics | edges
