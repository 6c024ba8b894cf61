# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""DPPO, divergence proximal policy optimization (Qi et al. 2026, https://arxiv.org/abs/2602.04879, eq. 11 to 14).

    J_t = w_t M_t sg(min(r_t, ratio_max)) A logprob_t

DPPO has CISPO's capped ratio, and the mask M_t instead of a clip. p is the token's probability under the learner now, q
the probability that r divides by. M_t drops a token whose update would move p away from q, if it is far already:

    A > 0 and p > q and D > clip_high          A < 0 and p < q and D > clip_low
    tv   D = |p - q|
    kl   D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

D is the divergence of the binary distributions (this token, any other token), a lower bound of the divergence over the
vocabulary. A rare token may grow a hundredfold, but a probability of 0.99 may not fall to 0.8; a clip of ratios does
the opposite. The paper recommends the sampler for q (`ratio: sampler`), so that the mask bounds the mismatch too; with
an aligned learner both choices agree. Left out: the paper's top-k variant, which needs more log-probs of the sampler.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.loss.common import diagnostics
from qarl_jax.loss.common.aggregation import aggregate
from qarl_jax.loss.common.options import Shared, option
from qarl_jax.loss.common.responses import MAX_LOG_RATIO
from qarl_jax.loss.common.sampler_correction import corrected
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs

DIVERGENCES = {"tv": 0.15, "kl": 0.05}  # and the paper's threshold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Shared):
    """DPPO: REINFORCE weighted by the capped ratio, without tokens whose divergence is above a threshold."""

    name = "dppo"
    formula = "w_t [D(p, q) within clip_high or clip_low] sg(min(r_t, ratio_max)) A logprob_t"
    source = "DPPO, arXiv 2602.04879, eq. 11 to 14"

    divergence: str = option("tv", "D: binary total variation or binary KL(q || p)", "DPPO", choices=tuple(DIVERGENCES))
    clip_low: float | None = option(None, "A < 0: largest D; unset: 0.15 for `tv`, 0.05 for `kl`", "DPPO", above=0.0)
    clip_high: float | None = option(None, "A > 0: largest D; unset: as clip_low", "DPPO", above=0.0)
    ratio_max: float = option(1e4, "cap of the ratio", "off, as in the authors' runs; 20 in verl", above=0.0)


def binary_divergence(logp: Float[Array, ...], logq: Float[Array, ...], kind: str) -> Float[Array, ...]:
    """Computes the divergence of Bernoulli(p) from Bernoulli(q) from log-probs of one shape, which count as at most 0.

    Args:
      kind: "tv" for |p - q|; "kl" for KL(q || p) in nats.
    """
    logp, logq = jnp.minimum(logp, 0.0), jnp.minimum(logq, 0.0)
    p, q = jnp.exp(logp), jnp.exp(logq)
    if kind == "tv":
        return jnp.abs(p - q)
    rest = jnp.log1p(-jnp.minimum(q, _SURE)) - jnp.log1p(-jnp.minimum(p, _SURE))
    return q * (logq - logp) + (1.0 - q) * rest


_SURE = 1.0 - 2.0**-24  # the largest float32 below 1: the rest of a sure token is not 0


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """Computes DPPO's loss of a batch by the formula above; `qarl_jax.loss` explains the returned Mean."""
    r, weights = corrected(x, cfg)
    log_ratio, now = jax.lax.stop_gradient((r.log_ratio, r.logprobs))
    divergence = binary_divergence(now, now - log_ratio, cfg.divergence)
    low = DIVERGENCES[cfg.divergence] if cfg.clip_low is None else cfg.clip_low
    high = low if cfg.clip_high is None else cfg.clip_high
    pos_high = (r.advantages > 0) & (log_ratio > 0) & (divergence > high)
    neg_low = (r.advantages < 0) & (log_ratio < 0) & (divergence > low)
    ratio = jnp.minimum(jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)), cfg.ratio_max)
    objective = jnp.where(pos_high | neg_low, 0.0, ratio) * r.advantages * r.logprobs
    mean = aggregate(-weights.weight * objective, r, cfg.aggregation, max_response_len=cfg.max_response_len)

    edges: dict[str, Metric] = {
        "clip/frac": r.token_mean(pos_high | neg_low),
        "clip/pos_high": r.token_mean(pos_high),
        "clip/neg_low": r.token_mean(neg_low),
        "loss/divergence": r.token_mean(divergence),
    }
    return mean, diagnostics.batch_metrics(r) | weights.metrics | edges
