# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws figures of metrics over training: a colour per arm, faint for each seed, strong for the seeds' mean.

Needs matplotlib (`pip install qarl-jax[plot]`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Curve:
    """A labelled line of a figure: per seed, its (steps, values)."""

    label: str
    seeds: dict[int, tuple[list[int], list[float]]]


def panels(
    curves: Callable[[str, bool], Sequence[Curve]],
    look: Callable[[str], tuple[str, Any]],
    shown: Sequence[tuple[str, str, bool, bool]],
) -> Any:
    """Draws a figure of panels in two rows.

    Args:
      curves: the curves of a metric, by its name and whether evaluations measure it.
      look: label -> colour and line style.
      shown: per panel the metric, the title, whether evaluations measure it, whether the axis is logarithmic.
    """
    columns = (len(shown) + 1) // 2
    fig = _figure(figsize=(5 * columns, 7))
    handles: dict[str, Any] = {}
    for number, (key, title, held_out, logarithmic) in enumerate(shown):
        axes = fig.add_subplot(2, columns, number + 1)
        for curve in curves(key, held_out):
            color, style = look(curve.label)
            handles[curve.label] = _draw(axes, curve, color, style, logarithmic)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("policy version" if held_out else "step", fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if logarithmic and axes.has_data():
            axes.set_yscale("log")
    fig.legend(handles.values(), handles, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return fig


def _draw(axes: Any, curve: Curve, color: str, style: Any, positive: bool) -> Any:
    common = sorted(set.intersection(*(set(steps) for steps, _ in curve.seeds.values())))
    for steps, values in curve.seeds.values():
        shown = [(s, v) for s, v in zip(steps, values, strict=True) if v > 0 or not positive]
        axes.plot([s for s, _ in shown], [v for _, v in shown], color=color, alpha=0.3, linewidth=0.7)
    means = [float(np.mean([dict(zip(*seed, strict=True))[s] for seed in curve.seeds.values()])) for s in common]
    shown = [(s, v) for s, v in zip(common, means, strict=True) if v > 0 or not positive]
    xs, ys = [s for s, _ in shown], [v for _, v in shown]
    return axes.plot(xs, ys, color=color, linestyle=style, linewidth=1.8)[0]


def _figure(figsize: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("Figures need matplotlib: pip install qarl-jax[plot].") from None
    return Figure(figsize=figsize, layout="constrained")
