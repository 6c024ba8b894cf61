# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Metric types for accumulation over micro-batches: each type defines how two partial results are merged.

A `Mean` is an unreduced sum and its denominator, a `Max` a running maximum. `merge(a, b)` of two micro-batches' metrics
equals the metrics of the whole batch; a mean's division happens once, when its `value` is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Prefixes of every metric that depends on the clock or the process, and not on config and seed alone.
TIME = "time/"
PERF = "perf/"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A weighted mean, kept as two sums until `value` divides them.

    Attributes:
      total: float32 scalar, the sum of what is averaged; int32 behind `counted`.
      count: likewise, the sum of the weights (0 is allowed: `value` is then 0).
    """

    total: Any
    count: Any

    @property
    def value(self) -> jax.Array:
        """The mean as a float32 scalar: total / count, or 0 if count is 0."""
        count = jnp.asarray(self.count, jnp.float32)
        return jnp.where(count > 0, jnp.asarray(self.total, jnp.float32) / jnp.where(count > 0, count, 1.0), 0.0)

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A running maximum; merging two takes the larger one."""

    maximum: Any

    @property
    def value(self) -> jax.Array:
        """The maximum as a float32 scalar."""
        return jnp.asarray(self.maximum, jnp.float32)

    def __add__(self, other: Max) -> Max:
        return Max(jnp.maximum(self.maximum, other.maximum))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts per bin of a histogram, int32 [bins]; merging adds them. `values` leaves histograms out."""

    counts: Any

    @property
    def value(self) -> jax.Array:
        """The counts, int32 [bins]."""
        return jnp.asarray(self.counts, jnp.int32)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.counts + other.counts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays [B, T], one per micro-batch in order; merging appends them. `values` leaves them out."""

    parts: tuple[Any, ...]

    @property
    def value(self) -> jax.Array:
        """The arrays concatenated along the batch axis, [sum of B, T]."""
        return jnp.concatenate(self.parts)

    def __add__(self, other: Rows) -> Rows:
        return Rows(self.parts + other.parts)


Metric = Mean | Max | Counts | Rows


def merge(a: dict[str, Metric], b: dict[str, Metric]) -> dict[str, Metric]:
    """Merges the metrics of two disjoint parts of a batch into the metrics of their union. Keys may differ."""
    out = dict(a)
    for key, value in b.items():
        out[key] = out[key] + value if key in out else value  # type: ignore[operator]
    return out


def masked_mean(x: jax.Array, mask: jax.Array) -> Mean:
    """Returns the mean of `x` where `mask` is true; other entries may be NaN. Shapes are equal; sums are float32."""
    return Mean(jnp.where(mask, x, 0.0).astype(jnp.float32).sum(), mask.astype(jnp.float32).sum())


def counted(share: Mean) -> Mean:
    """Returns a micro-batch's share of tokens with its two numbers in int32, to which others are added exactly.

    Float32 skips whole numbers beyond 2^24: in an update of more tokens a single one would not count.
    """
    return Mean(jnp.asarray(share.total).astype(jnp.int32), jnp.asarray(share.count).astype(jnp.int32))


def masked_max(x: jax.Array, mask: jax.Array) -> Max:
    """Returns the maximum of `x` where `mask` is true, both [B, ...]; 0 if `mask` is false everywhere.

    Devices exchange float32 sums only: each row's maximum has an entry of a vector, and the vectors are added. XLA
    combines these sums with those of gradients and metrics into one all-reduce. A max-all-reduce would have no order
    among the other collectives of a loop: on simulated CPU devices, two devices then wait for each other forever.
    """
    rows = jnp.where(mask, x, -jnp.inf).astype(jnp.float32).reshape(len(x), -1).max(1, initial=-jnp.inf)
    top = jnp.where(jnp.eye(len(x), dtype=bool), rows[None, :], 0.0).sum(1).max(initial=-jnp.inf)
    return Max(jnp.where(mask.astype(jnp.float32).sum() > 0, top, 0.0))


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Fetches the `Mean` and `Max` metrics, as floats. `histograms` fetches histograms.

    The host divides, with correct rounding. On a GPU a sum over itself may be 1 - 2^-24, which reads as a mismatch.
    """
    fetched = jax.device_get({key: metric for key, metric in metrics.items() if isinstance(metric, Mean | Max)})
    return {
        key: float(metric.maximum) if isinstance(metric, Max) else _divided(metric) for key, metric in fetched.items()
    }


def _divided(mean: Mean) -> float:
    kind = np.float64 if np.asarray(mean.count).dtype.kind == "i" else np.float32
    with np.errstate(all="ignore"):
        return float(kind(mean.total) / kind(mean.count)) if mean.count > 0 else 0.0


def histograms(metrics: dict[str, Metric]) -> dict[str, list[int]]:
    """Fetches the histograms (`Counts`) among the metrics to the host: counts per bin."""
    counts = jax.device_get({key: metric.value for key, metric in metrics.items() if isinstance(metric, Counts)})
    return {key: [int(n) for n in value] for key, value in counts.items()}


def phases(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the seconds of each phase of a step, from its record's keys `time/NAME_s`. They sum to `time/step_s`.

    Left out: concurrent work (`time/beside/`), parts of a phase (`time/publish/`), sampling for other steps (`ahead_`)
    and the run's start (`start_`).
    """
    names = {key: key.removeprefix(TIME).removesuffix("_s") for key in record if key.startswith(TIME)}
    none = {"step", "start", "rollout_tok_per", "tok_per"}
    apart = ("start_", "ahead_")
    return {
        name: record[key]
        for key, name in names.items()
        if key == f"{TIME}{name}_s" and "/" not in name and name not in none and not name.startswith(apart)
    }
