# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics that carry their reduction in their type.

A `Mean` is an unreduced sum and its denominator, a `Max` a running maximum. Accumulating micro-batches is `merge(a, b)`
and equals computing the metric on the whole batch; the division happens once, in the logger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Prefixes of every metric that depends on the clock or the process, and not on config and seed alone.
TIME = "time/"
PERF = "perf/"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A ratio of two sums.

    Attributes:
      total: float32 scalar, the sum of what is averaged.
      count: float32 scalar, the sum of its weights (0 is allowed: `value` is then 0).
    """

    total: Any
    count: Any

    @property
    def value(self) -> jax.Array:
        """total / count, and 0 where nothing was counted."""
        count = jnp.asarray(self.count, jnp.float32)
        return jnp.where(count > 0, jnp.asarray(self.total, jnp.float32) / jnp.where(count > 0, count, 1.0), 0.0)

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """A maximum over everything seen; merging takes the larger one. `value` is a float32 scalar."""

    maximum: Any

    @property
    def value(self) -> jax.Array:
        """float32 scalar."""
        return jnp.asarray(self.maximum, jnp.float32)

    def __add__(self, other: Max) -> Max:
        return Max(jnp.maximum(self.maximum, other.maximum))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts per bin of a histogram, int32 [bins]; merging adds them. Not a number: `values` leaves it out."""

    counts: Any

    @property
    def value(self) -> jax.Array:
        """int32 [bins]."""
        return jnp.asarray(self.counts, jnp.int32)

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.counts + other.counts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """An array [B, T] per micro-batch, in order; merging strings them together. Not a number either."""

    parts: tuple[Any, ...]

    @property
    def value(self) -> jax.Array:
        """[sum of B, T], the micro-batches one below the other."""
        return jnp.concatenate(self.parts)

    def __add__(self, other: Rows) -> Rows:
        return Rows(self.parts + other.parts)


Metric = Mean | Max | Counts | Rows


def merge(a: dict[str, Metric], b: dict[str, Metric]) -> dict[str, Metric]:
    """Metrics of two disjoint parts of a batch -> metrics of their union. Keys may differ."""
    out = dict(a)
    for key, value in b.items():
        out[key] = out[key] + value if key in out else value  # type: ignore[operator]
    return out


def masked_mean(x: jax.Array, mask: jax.Array) -> Mean:
    """Mean of `x` where `mask`; masked entries may hold NaN. Shapes are equal; the sums are float32."""
    return Mean(jnp.where(mask, x, 0.0).astype(jnp.float32).sum(), mask.astype(jnp.float32).sum())


def masked_max(x: jax.Array, mask: jax.Array) -> Max:
    """Maximum of `x` where `mask`, both [B, ...]; 0 where nothing is.

    Devices exchange sums in float32 alone: of rows' maxima, each in a place of its own, and of the mask. XLA combines
    them with the sums of gradients and metrics into one all-reduce. All-reduces of other kinds have no order among the
    collectives of a loop beside them: on simulated CPU devices, two devices then wait for each other for ever.
    """
    rows = jnp.where(mask, x, -jnp.inf).astype(jnp.float32).reshape(len(x), -1).max(1, initial=-jnp.inf)
    top = jnp.where(jnp.eye(len(x), dtype=bool), rows[None, :], 0.0).sum(1).max(initial=-jnp.inf)
    return Max(jnp.where(mask.astype(jnp.float32).sum() > 0, top, 0.0))


def values(metrics: dict[str, Metric]) -> dict[str, float]:
    """The reduced numbers, fetched to the host. Histograms have their own function."""
    reduced = jax.device_get({key: metric.value for key, metric in metrics.items() if isinstance(metric, Mean | Max)})
    return {key: float(value) for key, value in reduced.items()}


def histograms(metrics: dict[str, Metric]) -> dict[str, list[int]]:
    """The histograms among the metrics, fetched to the host."""
    counts = jax.device_get({key: metric.value for key, metric in metrics.items() if isinstance(metric, Counts)})
    return {key: [int(n) for n in value] for key, value in counts.items()}


def phases(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the seconds of each phase of a step's record by its name: `time/NAME_s`. They sum to `time/step_s`.

    Names with a further slash are of what went on beside (`time/beside/`) or made up a phase (`time/publish/`);
    `ahead_` and `start_` are of other steps' sampling and of the run's start.
    """
    names = {key: key.removeprefix(TIME).removesuffix("_s") for key in record if key.startswith(TIME)}
    none = {"step", "start", "rollout_tok_per", "tok_per"}
    apart = ("start_", "ahead_")
    return {
        name: record[key]
        for key, name in names.items()
        if key == f"{TIME}{name}_s" and "/" not in name and name not in none and not name.startswith(apart)
    }
