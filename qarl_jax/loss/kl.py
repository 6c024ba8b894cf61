# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The KL term: KL to a reference policy, estimated on the sampled tokens (http://joschu.net/blog/kl-approx.html).

With d = logprobs - ref_logprobs, clamped to +-20:

| kind | value | gradient |
|---|---|---|
| k2 | d^2 / 2 | of d^2 / 2: unbiased for KL(policy || reference) on-policy |
| k3 | exp(-d) - 1 + d, at most 10 | of the value, 0 where clamped |
| k3+ | as k3 | as k2 |

The estimator k1, d itself, is a metric alone: its gradient is zero in expectation.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.loss.common.aggregation import aggregate
from qarl_jax.loss.common.options import AGGREGATIONS, canonical_aggregation, check, option
from qarl_jax.loss.common.responses import MAX_LOG_RATIO, prepare, require
from qarl_jax.metrics import Mean, Metric, masked_max
from qarl_jax.types import LossInputs

KINDS = ("k2", "k3", "k3+")
MAX_K3 = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """KL to the reference policy."""

    name: ClassVar[str] = "kl"
    formula: ClassVar[str] = "k3 = exp(-d) - 1 + d, d = logprob - ref_logprob"
    source: ClassVar[str] = "Schulman 2020; GRPO eq. 4"

    kind: str = option("k3", "estimator; `k3+` has k3's value and k2's gradient", "GRPO; verl", choices=KINDS)
    aggregation: str = option("token-mean", "as for objectives", "verl", choices=AGGREGATIONS[:3])

    def __post_init__(self) -> None:
        object.__setattr__(self, "aggregation", canonical_aggregation(self.aggregation))
        check(self)


def estimate(difference: Float[Array, ...], kind: str) -> Float[Array, ...]:
    """Estimates the KL per token from logprobs - ref_logprobs (finite, any shape); `kind` is one of `KINDS`."""
    d = jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    k2 = 0.5 * d * d
    if kind == "k2":
        return k2
    k3 = jnp.minimum(jnp.expm1(-d) + d, MAX_K3)
    return k3 if kind == "k3" else k2 + jax.lax.stop_gradient(k3 - k2)


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """Computes the KL to the reference over a batch; `ref_logprobs` [B, T] is required and not differentiated."""
    require(x, "ref_logprobs")
    r = prepare(x)
    reference = jnp.where(r.mask, jnp.asarray(x.ref_logprobs).astype(jnp.float32), 0.0)
    difference = r.logprobs - jax.lax.stop_gradient(reference)
    mean = aggregate(estimate(difference, cfg.kind), r, cfg.aggregation)
    now = jax.lax.stop_gradient(difference)
    metrics: dict[str, Metric] = {
        "kl/k1": r.token_mean(jnp.clip(now, -MAX_LOG_RATIO, MAX_LOG_RATIO)),
        "kl/k3": r.token_mean(estimate(now, "k3")),
        "kl/max_abs": masked_max(jnp.abs(now), r.mask),
    }
    return mean, metrics
