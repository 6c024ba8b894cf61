# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The critic's clipped value loss (PPO's code; verl): a term of its own, averaged over tokens, never reweighted.

L_t = 0.5 max((V - ret)^2, (clip(V, V_old - clip, V_old + clip) - ret)^2)
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from qarl_jax.loss.aggregation import aggregate
from qarl_jax.loss.options import AGGREGATIONS, canonical_aggregation, check, option
from qarl_jax.loss.responses import prepare, require
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
    """Value loss over this batch. `values` [B, T] is differentiated, `old_values` and `returns` [B, T] are not.

    The metrics hold what explained variance, 1 - var(ret - V) / var(ret), is made of (`explained_variance`).
    """
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
    error = jax.lax.stop_gradient(returns - values)
    metrics: dict[str, Metric] = {
        "value/clip_frac": r.token_mean(jax.lax.stop_gradient(clipped > squared)),
        "value/mean": r.token_mean(jax.lax.stop_gradient(values)),
        "value/error": r.token_mean(error),
        "value/error_squared": r.token_mean(error**2),
        "value/returns": r.token_mean(returns),
        "value/returns_squared": r.token_mean(returns**2),
    }
    return mean, metrics


def explained_variance(metrics: dict[str, Metric]) -> float:
    """1 - var(ret - V) / var(ret), from merged metrics of `loss`; 0 where the returns do not vary."""
    mean = {
        key: float(metrics[f"value/{key}"].value) for key in ("error", "error_squared", "returns", "returns_squared")
    }
    variance = mean["returns_squared"] - mean["returns"] ** 2
    if variance <= 1e-12:
        return 0.0
    return 1.0 - (mean["error_squared"] - mean["error"] ** 2) / variance
