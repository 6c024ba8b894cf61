# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Intervals for accuracies that were measured on the same prompts, over a few seeds.

Everything is an array x [S, P]: per seed and test prompt the share of right responses, or a difference of two such
arrays, which pairs arms by seed and prompt. Seeds and prompts both vary, so

    se^2 = var over seeds of the seeds' means / S  +  var over prompts of the prompts' means / P

(the first is left out where S = 1, and the interval then says nothing about other seeds). It counts the sampling noise
twice, which errs on the wide side. Intervals are Student's t at 95 %, degrees of freedom after Welch and Satterthwaite.

Share of a gap that is recovered, for numerator N = c - b and denominator D = a - b (a: bf16, b: quantized rollout, c:
aligned): s = mean N / mean D, and by the delta method its standard error is that of N - s D over |mean D|, which keeps
the pairing. It is given only where D exceeds two standard errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy import stats

TWO = 2.0
"""Standard errors that a gap must exceed to be called one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, its standard error, degrees of freedom, and the half-width of its 95 % interval."""

    mean: float
    stderr: float
    dof: float
    seeds: int

    @property
    def half(self) -> float:
        """Half of the 95 % interval."""
        return float(stats.t.ppf(0.975, self.dof)) * self.stderr

    @property
    def is_clear(self) -> bool:
        """Tells whether the mean differs from 0 by more than two standard errors."""
        return abs(self.mean) > TWO * self.stderr


def estimate(x: Float[np.ndarray, "S P"]) -> Estimate:
    """Estimates the mean of x [S, P] over seeds and prompts.

    Raises:
      ValueError: fewer than two prompts.
    """
    seeds, prompts = x.shape
    if prompts < 2:
        raise ValueError(f"an interval over prompts needs at least 2 of them, got {prompts}")
    over_prompts = float(x.mean(0).var(ddof=1)) / prompts
    over_seeds = float(x.mean(1).var(ddof=1)) / seeds if seeds > 1 else 0.0
    total = over_prompts + over_seeds
    weights = over_prompts**2 / (prompts - 1) + (over_seeds**2 / (seeds - 1) if seeds > 1 else 0.0)
    dof = total**2 / weights if weights else float(prompts - 1)
    return Estimate(mean=float(x.mean()), stderr=float(np.sqrt(total)), dof=dof, seeds=seeds)


def recovered(
    bf16: Float[np.ndarray, "S P"], rollout: Float[np.ndarray, "S P"], aligned: Float[np.ndarray, "S P"]
) -> Estimate | None:
    """Estimates the share of the gap between `bf16` and `rollout` that `aligned` recovers; None: there is no gap."""
    gap = bf16 - rollout
    size = estimate(gap)
    if not size.is_clear or size.mean <= 0:
        return None
    share = float((aligned - rollout).mean()) / size.mean
    rest = estimate((aligned - rollout) - share * gap)
    return Estimate(mean=share, stderr=rest.stderr / size.mean, dof=rest.dof, seeds=rest.seeds)


def over_seeds(x: Float[np.ndarray, "S P"]) -> Estimate | None:
    """Estimates the mean by Student's t over the seeds' means alone; None for a single seed."""
    means = x.mean(1)
    return of_means(means, np.zeros_like(means)) if len(means) > 1 else None


def of_means(means: Float[np.ndarray, " S"], stderrs: Float[np.ndarray, " S"]) -> Estimate:
    """Estimates as `estimate` does, from each seed's mean and standard error over its prompts."""
    seeds = len(means)
    over_prompts = float((stderrs**2).sum()) / seeds**2
    spread = float(means.var(ddof=1)) / seeds if seeds > 1 else 0.0
    total = over_prompts + spread
    dof = total**2 * (seeds - 1) / spread**2 if spread else np.inf
    return Estimate(mean=float(means.mean()), stderr=float(np.sqrt(total)), dof=dof, seeds=seeds)


def bootstrap(
    statistic: Callable[..., Float[np.ndarray, " N"]], *x: Float[np.ndarray, "S P"], draws: int = 10_000
) -> tuple[float, float]:
    """Returns the 95 % percentile interval of a statistic over bootstrap draws of the prompts; seeds are fixed.

    Args:
      statistic: of [P, N] arrays, one per argument: their columns are N draws of the same prompts.
      *x: [S, P] each.
    """
    prompts = x[0].shape[1]
    picked = np.random.default_rng(0).integers(prompts, size=(prompts, draws))
    low, high = np.percentile(statistic(*(each.mean(0)[picked] for each in x)), [2.5, 97.5])
    return float(low), float(high)
