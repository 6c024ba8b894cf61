# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Importance weights w that correct for the mismatch of sampler and learner, truncated or masked.

rho_t = pi_old(token) / pi_sampler(token), with the token log-ratio clamped to +-20. A ratio has one of three levels,
which differ by orders of magnitude over a long response, so every correction names its level:

  * token: rho_t;
  * product: prod_t rho_t, the importance weight of the whole response;
  * geometric mean: (prod_t rho_t)^(1/L).

Weights never carry a gradient, are applied after clipping, and never change a denominator: a rejected token or response
contributes 0 and is still counted (the masked importance-sampling estimator; survivors are not scaled up).

To add a correction: one function and one line in `MISMATCH`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.loss.common.responses import MAX_LOG_RATIO, Responses, prepare
from qarl_jax.metrics import Mean, Metric, masked_max
from qarl_jax.types import LossInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights that a correction gives to a batch.

    Attributes:
      weight: [B, T] float32 >= 0, multiplies the (clipped) objective of each token. No gradient.
      widen: [B, T] float32 >= 1, multiplies the upper clip bound (1 but for `acr`). No gradient.
      metrics: `mismatch/w_*`.
    """

    weight: Float[Array, "B T"]
    widen: Float[Array, "B T"]
    metrics: dict[str, Metric]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
    """A sampler correction, an entry of `MISMATCH`.

    Attributes:
      level: "token", "product", "geometric mean" or "smallest token"; "" if no ratio is read.
      weight: (ratio at this level [B, T] or [B, S], low, high) -> weight of equal shape.
      formula, source: for the table in the documentation.
      low, high: default bounds; None: 1/C and C.
      reads: names of the options that it reads.
    """

    level: str
    weight: Callable[[jax.Array, float, float], jax.Array]
    formula: str
    source: str
    low: float | None = None
    high: float | None = None
    reads: tuple[str, ...] = ()


def truncated(ratio: jax.Array, low: float, high: float) -> jax.Array:
    """Clips the ratio to [low, high]."""
    return jnp.clip(ratio, low, high)


def masked(ratio: jax.Array, low: float, high: float) -> jax.Array:
    """Returns the ratio where it lies in [low, high], else 0."""
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def kept(ratio: jax.Array, low: float, high: float) -> jax.Array:
    """Returns 1 where the ratio lies in [low, high], else 0."""
    return ((ratio >= low) & (ratio <= high)).astype(jnp.float32)


_CAP, _BOTH = ("mismatch_cap",), ("mismatch_low", "mismatch_high")

MISMATCH: dict[str, Correction] = {
    "none": Correction(
        level="", weight=kept, low=0.0, high=math.inf, formula="w = 1", source="ignores the sampler's log-probs"
    ),
    "tis": Correction(
        level="token",
        weight=truncated,
        formula="w_t = min(rho_t, C)",
        source="FlashRL; QuRL eq. 5",
        low=0.0,
        reads=_CAP,
    ),
    "seq_tis": Correction(
        level="product",
        weight=truncated,
        formula="w = min(P, C), P = prod_t rho_t",
        source="verl `sequence`, TRL `sequence_*`",
        low=0.0,
        reads=_CAP,
    ),
    "mis": Correction(
        level="token",
        weight=masked,
        formula="w_t = rho_t [1/C <= rho_t <= C]",
        source="masked importance sampling, verl",
        reads=_CAP + _BOTH,
    ),
    "seq_mis": Correction(
        level="product",
        weight=masked,
        formula="w = P [P <= C], P = prod_t rho_t",
        source="Liu et al. 2025; QaRL's MIS ablation (upper side only)",
        low=0.0,
        reads=_CAP + _BOTH,
    ),
    "icepop": Correction(
        level="token",
        weight=masked,
        formula="w_t = rho_t [0.5 <= rho_t <= 5]",
        source="IcePop",
        low=0.5,
        high=5.0,
        reads=_BOTH,
    ),
    "geometric": Correction(
        level="geometric mean",
        weight=truncated,
        formula="w = clip(g, 1/C, C), g = exp(mean_t log rho_t)",
        source="QaRL eq. 5 (its clip acts on log w); slime `geometric`",
        reads=_CAP,
    ),
    "geometric_mis": Correction(
        level="geometric mean",
        weight=masked,
        formula="w = g [1/C <= g <= C]",
        source="QaRL introduction (`drop entire responses`)",
        reads=_CAP + _BOTH,
    ),
    "geometric_filter": Correction(
        level="geometric mean",
        weight=kept,
        formula="w = [0.999 <= g <= 1.001]",
        source="verl's preset of geometric rejection",
        low=0.999,
        high=1.001,
        reads=_BOTH,
    ),
    "acr": Correction(
        level="token",
        weight=truncated,
        formula="w_t = min(rho_t, C); the upper clip bound is multiplied by max(1, rho_t / C)",
        source="QuRL eq. 6-9",
        low=0.0,
        reads=_CAP,
    ),
    "ais": Correction(
        level="token",
        weight=truncated,
        formula="w_t = 1 + m (min(rho_t, C) - 1), m = 1 - ESS/L exp(-k3), per response",
        source="AIS, arXiv 2605.13907; m is ours (`adaptive_mix`)",
        low=0.0,
        reads=_CAP,
    ),
    "decoupled": Correction(
        level="token",
        weight=truncated,
        formula="w_t = rho_t",
        source="decoupled PPO, QuRL eq. 4 (a baseline: one token can weigh 1e5)",
        low=0.0,
        high=math.inf,
    ),
    "veto": Correction(
        level="smallest token",
        weight=kept,
        formula="w = [min_t rho_t >= 1e-4]",
        source="slime",
        low=1e-4,
        high=math.inf,
        reads=("mismatch_low",),
    ),
}


def ratio_at(level: str, r: Responses) -> jax.Array:
    """Computes pi_old / pi_sampler at a level: [B, T] for "token" and "", [B, S] for others; 1 for padding."""
    if level in ("", "token"):
        log = r.log_weight
    elif level == "product":
        log = r.sum(r.log_weight)
    elif level == "geometric mean":
        log = r.mean(r.log_weight)
    else:
        log = smallest(r.log_weight, r)
    return jnp.exp(jnp.clip(log, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def adaptive_mix(r: Responses) -> Float[Array, "B S"]:
    """Computes AIS's mixing coefficient per response, in [0, 1): 0 leaves the gradient uncorrected, 1 corrects fully.

        m = 1 - (ESS / L) exp(-k3)      ESS = (sum_t rho_t)^2 / sum_t rho_t^2      k3 = mean_t (rho_t - 1 - log rho_t)

    AIS (https://arxiv.org/abs/2605.13907) mixes by three diagnostics: reliability of the weights (ESS / L), severity of
    the divergence (k3 estimates KL(sampler || learner) on the sampler's tokens), and amplification of the variance,
    which is 1 / reliability: L / ESS = 1 + CV^2. The abstract does not say how the paper combines them; this product is
    ours. It has no constant, is 0 where the two policies agree, and grows with each diagnostic. The paper has one
    coefficient per batch; we have one per response, because a batch's would depend on its micro-batches.
    """
    log = jnp.clip(r.log_weight, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = jnp.exp(log)
    squares = jnp.maximum(r.length * r.sum(rho * rho), jnp.finfo(jnp.float32).tiny)
    return jnp.maximum(1.0 - r.sum(rho) ** 2 / squares * jnp.exp(-r.mean(jnp.expm1(log) - log)), 0.0)


def smallest(x: Float[Array, "B T"], r: Responses) -> Float[Array, "B S"]:
    """Finds the smallest masked entry of each response: [B, T] -> [B, S], 0 for an empty response."""
    slots = r.length.shape[1]
    rows = jax.vmap(lambda x, ids: jax.ops.segment_min(x, ids, num_segments=slots + 1))(x, r.segment_ids)
    return jnp.where(r.present, rows[:, 1:], 0.0)


def bounds(cfg: Any) -> tuple[float, float]:
    """Returns the lower and upper bound of the correction `cfg.mismatch`, with an objective's options (`Shared`)."""
    correction, cap, low, high = MISMATCH[cfg.mismatch], cfg.mismatch_cap, cfg.mismatch_low, cfg.mismatch_high
    low = low if low is not None else correction.low if correction.low is not None else 1.0 / cap
    return low, high if high is not None else correction.high if correction.high is not None else cap


def corrected(x: LossInputs, cfg: Any) -> tuple[Responses, Weights]:
    """Computes `prepare`, and the weights of the correction `cfg.mismatch`, with an objective's options (`Shared`)."""
    r = prepare(x, on_policy=cfg.on_policy, positive_only=cfg.positive_only, ratio=cfg.ratio)
    mismatch, cap = cfg.mismatch, cfg.mismatch_cap
    correction, (low, high) = MISMATCH[mismatch], bounds(cfg)
    ratio = jax.lax.stop_gradient(ratio_at(correction.level, r))
    weight = correction.weight(ratio, low, high)
    metrics: dict[str, Metric] = {}
    count: Callable[[jax.Array], Mean] = r.token_mean
    if mismatch == "ais":
        mix = jax.lax.stop_gradient(jnp.where(r.present, adaptive_mix(r), 0.0))
        weight = 1.0 + r.spread(mix) * (weight - 1.0)
        metrics["mismatch/ais_mix"] = r.sequence_mean(mix)
    if correction.level not in ("", "token"):  # decided per response, counted per response
        count, weight = r.sequence_mean, r.spread(weight)
    weight = jax.lax.stop_gradient(jnp.where(r.mask, weight, 0.0))
    widen = jnp.maximum(ratio / cap, 1.0) if mismatch == "acr" else jnp.ones_like(weight)
    if correction.level:
        metrics |= {"mismatch/w_cap_high": count(ratio > high), "mismatch/w_cap_low": count(ratio < low)}
    metrics |= {
        "mismatch/w": r.token_mean(weight),
        "mismatch/w_squared": r.token_mean(weight * weight),
        "mismatch/w_max": masked_max(weight, r.mask),
        "mismatch/tok_rejected": r.token_mean((weight == 0) & r.mask),
        "mismatch/seq_rejected": r.sequence_mean((r.sum(weight) == 0) & r.present),
    }
    return r, Weights(weight=weight, widen=jax.lax.stop_gradient(widen), metrics=metrics)
