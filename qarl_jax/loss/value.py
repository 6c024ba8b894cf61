# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The critic's clipped value loss (PPO's code; verl), averaged over tokens, without a sampler correction.

L_t = 0.5 max((V - ret)^2, (clip(V, V_old - clip, V_old + clip) - ret)^2)

`qarl_jax.learning.critic` computes the values V and returns ret.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from qarl_jax.loss.common.aggregation import aggregate
from qarl_jax.loss.common.options import AGGREGATIONS, canonical_aggregation, check, option
from qarl_jax.loss.common.responses import prepare, require
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Clipped value loss of a critic."""

    name: ClassVar[str] = "value"
    formula: ClassVar[str] = "0.5 max((V-ret)^2, (clip(V, V_old-clip, V_old+clip) - ret)^2)"
    source: ClassVar[str] = "PPO code; verl"

    clip: float | None = option(0.5, "how far the value may move within an update; null: no clip", "verl", above=0.0)
    aggregation: str = option("token-mean", "as for objectives", "verl", choices=AGGREGATIONS[:3])

    def __post_init__(self) -> None:
        object.__setattr__(self, "aggregation", canonical_aggregation(self.aggregation))
        check(self)


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """Computes the value loss of a batch; of the inputs only `values` [B, T] is differentiated."""
    require(x, "values", "old_values", "returns")
    r = prepare(x)
    clean = lambda y: jnp.where(r.mask, jnp.asarray(y).astype(jnp.float32), 0.0)  # noqa: E731
    values = clean(x.values)
    old, returns = jax.lax.stop_gradient(clean(x.old_values)), jax.lax.stop_gradient(clean(x.returns))
    squared = (values - returns) ** 2
    if cfg.clip is not None:
        clipped = (jnp.clip(values, old - cfg.clip, old + cfg.clip) - returns) ** 2
        squared_max = jnp.maximum(squared, clipped)
    else:
        clipped = squared_max = squared
    mean = aggregate(0.5 * squared_max, r, cfg.aggregation)
    metrics: dict[str, Metric] = {
        "critic/clip_fraction": r.token_mean(jax.lax.stop_gradient(clipped > squared)),
        "critic/value_mean": r.token_mean(jax.lax.stop_gradient(values)),
    }
    return mean, metrics


def explained_variance(values: Float[np.ndarray, " n"], returns: Float[np.ndarray, " n"]) -> float:
    """Computes 1 - var(ret - V) / var(ret): 1 for a perfect critic, 0 for a constant one or constant returns.

    It computes on the host in float64, because float32 loses the variance of returns close to a large mean.
    """
    values, returns = np.asarray(values, np.float64), np.asarray(returns, np.float64)
    variance = returns.var() if returns.size else 0.0
    return float(1.0 - (returns - values).var() / variance) if variance > 1e-12 else 0.0
