# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of an update: the mismatch of sampler and learner, the change of the policy, and the clipped shares.

All are sums and counts (or maxima) over a micro-batch's tokens and responses, so micro-batches merge exactly. Inside
exp the log-ratios are clamped as in the loss; reported maxima are not clamped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qarl_jax.loss.common.responses import MAX_LOG_RATIO, Responses, prepare
from qarl_jax.metrics import Metric, counted, masked_max
from qarl_jax.types import LossInputs


def _exp(log: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _k3(d: jax.Array) -> jax.Array:
    """exp(d) - 1 - d, of which float32 keeps digits where d is small."""
    d = jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(d) - d


def _detached(r: Responses) -> Responses:
    return dataclasses.replace(
        r, logprobs=jax.lax.stop_gradient(r.logprobs), log_ratio=jax.lax.stop_gradient(r.log_ratio)
    )


def batch_metrics(r: Responses) -> dict[str, Metric]:
    """Computes the metrics of a batch that do not depend on the objective.

    `mismatch/*` compares the sampler with the learner at the start of the step: k1 estimates KL(sampler || learner),
    and exact is the share of tokens with bitwise equal log-probs. `proximal/*` compares the learner now with the
    learner at the start of the step. `proximal/noise`, the largest |mean log-ratio| of a response, must stay far below
    a response-level band in the step's first update.
    """
    r = _detached(r)
    log_w, log_r = r.log_weight, r.log_ratio
    sequence_w, sequence_r = r.mean(log_w), r.mean(log_r)
    ratio = _exp(log_r)
    return {
        "mismatch/k1": r.token_mean(-log_w),
        "mismatch/k3": r.token_mean(_k3(log_w)),
        "mismatch/exact": counted(r.token_mean(log_w == 0)),
        "mismatch/max_abs": masked_max(jnp.abs(log_w), r.mask),
        "mismatch/mean_abs": r.token_mean(jnp.abs(log_w)),
        "mismatch/prob_error": r.token_mean(_exp(jnp.abs(log_w))),
        "mismatch/seq_k1_high": masked_max(jnp.maximum(-sequence_w, 0.0), r.present),
        "mismatch/seq_k1_low": masked_max(jnp.maximum(sequence_w, 0.0), r.present),
        "mismatch/seq_max_abs": masked_max(jnp.abs(sequence_w), r.present),
        "proximal/k1": r.token_mean(-log_r),
        "proximal/k3": r.token_mean(_k3(log_r)),
        "proximal/max_abs": masked_max(jnp.abs(log_r), r.mask),
        "proximal/noise": masked_max(jnp.abs(sequence_r), r.present),
        "loss/ratio": r.token_mean(ratio),
        "loss/ratio_squared": r.token_mean(ratio * ratio),
        "loss/ratio_max": masked_max(ratio, r.mask),
        "loss/seq_ratio": r.sequence_mean(_exp(sequence_r)),
        "loss/seq_zero_adv": r.sequence_mean((r.sum(jnp.abs(r.advantages)) == 0) & r.present),
        "loss/seq_positive": r.sequence_mean(r.mean(r.advantages) > 0),
    }


def token_clip_metrics(
    r: Responses,
    ratio: Float[Array, "B T"],
    *,
    clip_low: float,
    clip_high: float,
    widen: Float[Array, "B T"],
    dual_clip: float | None,
) -> dict[str, Metric]:
    """Computes the shares of masked tokens outside a PPO clip, by sign of A and edge.

    `pos_high`, `neg_low` and `dual_neg_high` tokens have no gradient and add up to `frac`. `out_pos_low` and
    `out_neg_high` tokens are outside the range and keep theirs; `acr_rescued` tokens (A > 0) do by a widened bound.
    """
    ratio, a = jax.lax.stop_gradient(ratio), r.advantages
    positive, negative = a > 0, a < 0
    upper = 1.0 + clip_high
    pos_high = positive & (ratio > upper * widen)
    neg_low = negative & (ratio < 1.0 - clip_low)
    dual = negative & (ratio > dual_clip) if dual_clip is not None else jnp.zeros_like(negative)
    return {
        "clip/frac": r.token_mean(pos_high | neg_low | dual),
        "clip/pos_high": r.token_mean(pos_high),
        "clip/neg_low": r.token_mean(neg_low),
        "clip/dual_neg_high": r.token_mean(dual),
        "clip/out_pos_low": r.token_mean(positive & (ratio < 1.0 - clip_low)),
        "clip/out_neg_high": r.token_mean(negative & (ratio > upper) & ~dual),
        "clip/acr_rescued": r.token_mean(positive & (ratio > upper) & (ratio <= upper * widen)),
    }


def sequence_clip_metrics(
    r: Responses,
    *,
    pos_high: Bool[Array, "B S"],
    neg_low: Bool[Array, "B S"],
    neg_high: Bool[Array, "B S"],
) -> dict[str, Metric]:
    """Computes the share of responses that a ratio band drops whole, by edge and in all, and the share of their tokens.

    Args:
      r: the batch's responses.
      pos_high, neg_low, neg_high: true where a response is dropped; named by the advantage's sign and the band's edge.
    """
    dropped = pos_high | neg_low | neg_high
    return {
        "clip/seq_pos_high": r.sequence_mean(pos_high),
        "clip/seq_neg_low": r.sequence_mean(neg_low),
        "clip/seq_neg_high": r.sequence_mean(neg_high),
        "clip/seq_dropped": r.sequence_mean(dropped),
        "clip/tok_dropped": r.token_mean(r.spread(dropped.astype(jnp.float32))),
    }


# Bin edges of log-ratios: symmetric, geometric from 1e-5 (a thirtieth of TBPO's narrowest band) to the clamp at 20.
_POSITIVE_EDGES = tuple(float(x) for x in np.geomspace(1e-5, 20.0, 40))
EDGES = (*(-x for x in reversed(_POSITIVE_EDGES)), 0.0, *_POSITIVE_EDGES)


def histograms(x: LossInputs) -> dict[str, Int[Array, " bins"]]:
    """Counts log-ratios per bin of `EDGES`, by the sign of A; counts of micro-batches add up.

    Returns:
      int32 [len(EDGES) + 1] each: bin 0 lies below the first edge, bin i above edge i-1 and at most edge i. Keys:
      `ratio` (tokens: learner now over proximal policy), `weight` (tokens: proximal policy over sampler), `seq_ratio`,
      `seq_weight` (means per response), each with `_pos` and `_neg`; A = 0 is in neither.
    """
    r = _detached(prepare(x))
    a = r.mean(r.advantages)
    out = {}
    for key, log, where, sign in (
        ("ratio", r.log_ratio, r.mask, r.advantages),
        ("weight", r.log_weight, r.mask, r.advantages),
        ("seq_ratio", r.mean(r.log_ratio), r.present, a),
        ("seq_weight", r.mean(r.log_weight), r.present, a),
    ):
        # Below-edge counts, then differences: a fused comparison and sum instead of a scatter.
        above = log[:, :, None] > jnp.asarray(EDGES, jnp.float32)[None, None, :]
        for suffix, chosen in (("pos", where & (sign > 0)), ("neg", where & (sign < 0))):
            # Sums in float32, exact up to 2^24 tokens, travel between devices with the gradients' (metrics.masked_max).
            number = chosen.astype(jnp.float32).sum()
            over = (above & chosen[:, :, None]).astype(jnp.float32).sum((0, 1))
            out[f"{key}_{suffix}"] = -jnp.diff(over, prepend=number, append=0).astype(jnp.int32)
    return out


def quantiles(counts: Sequence[int], levels: Sequence[float] = (0.01, 0.1, 0.5, 0.9, 0.99)) -> list[float]:
    """Computes quantiles of log-ratios from counts of `histograms`, interpolated within bins; NaN if all are 0."""
    cumulative = np.cumsum(np.asarray(counts, np.float64))
    if not cumulative[-1]:
        return [math.nan] * len(levels)
    edges = np.array([EDGES[0], *EDGES, EDGES[-1]])  # the outer bins are open: their quantile is their edge
    share = np.concatenate([[0.0], cumulative / cumulative[-1]])
    out = []
    for level in levels:
        i = max(int(np.searchsorted(share, level, side="left")), 1)
        inside = (level - share[i - 1]) / (share[i] - share[i - 1])
        out.append(float(edges[i - 1] + inside * (edges[i] - edges[i - 1])))
    return out
