# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Every figure and table of the experiment, from its raw results alone.

    python -m experiments.alignment.figures            # results.tar.xz -> docs/results.md, docs/appendix, docs/results

Needs matplotlib (`pip install qarl-jax[plot]`).
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.alignment import arms, report
from experiments.alignment.report import Curve
from experiments.alignment.results import Results, load
from qarl_jax.plot import COLORS, STYLES, ratio_figure
from qarl_jax.types import UserError, entry_point

LAST = 20
"""Steps whose histograms are summed."""

PANELS = (
    ("eval/reward/mean", "accuracy, validation split", True, False),
    ("mismatch/k3", "mismatch k3 per token", False, True),
    ("error/tok_learner", "error tokens under the learner", False, True),
    ("later/clip/seq_dropped", "responses dropped after the first update", False, False),
)
"""Metric, title, whether it is one of evaluations, whether its axis is logarithmic."""


def training(result: Results, programs: Sequence[str]) -> Any:
    """Curves of some runs over training: a colour per arm, faint for each seed, strong for their mean."""
    return panels(lambda key, held_out: report.curves(result, programs, key, held_out), _look)


def panels(
    curves: Callable[[str, bool], Sequence[Curve]],
    look: Callable[[str], tuple[str, Any]],
    shown: Sequence[tuple[str, str, bool, bool]] = PANELS,
) -> Any:
    """A figure of some panels in two rows.

    Args:
      curves: of a metric, by its name and whether it is one of evaluations.
      look: label -> colour and line style.
      shown: as PANELS.
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


def ratios(result: Results) -> Any:
    """Histograms of log-ratios of the main arms at the main rung, first seed, summed over their last steps."""
    first = result.scale.seeds[0]
    wanted = {arms.Run(arm=arm, rung=result.scale.main, seed=first).name for arm in arms.ARMS.values() if arm.main}
    out: dict[str, dict[str, list[int]]] = {}
    for name, run in sorted(result.runs.items()):
        if name in wanted and run.has_ended and run.histograms:
            sums: dict[str, list[int]] = {}
            for record in run.histograms[-LAST:]:
                for key, counts in record.items():
                    if key.startswith("hist/"):
                        short = key.removeprefix("hist/")
                        before = sums.get(short, [0] * len(counts))
                        sums[short] = [a + b for a, b in zip(before, counts, strict=True)]
            out[run.arm] = sums
    return ratio_figure(out)


def seconds(result: Results) -> Any:
    """Stacked bars: median seconds per step of each phase; timing/...: of runs that had the machine to themselves."""
    alone = {f"timing/{program}": run for program, run in result.timing.items()}
    chosen = alone | report.sharing(result)
    fig = _figure(figsize=(8, 0.6 + 0.45 * max(1, len(chosen))))
    axes = fig.add_subplot()
    left = np.zeros(len(chosen))
    for color, phase in zip(COLORS, report.PHASES, strict=False):
        widths = np.array([report.phases(run)[phase] for run in chosen.values()])
        axes.barh(list(chosen), widths, left=left, color=color, label=phase)
        left = left + widths
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step (median)")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    fig.legend(loc="outside upper center", ncols=len(report.PHASES), frameon=False, fontsize=8)
    return fig


def _look(program: str) -> tuple[str, Any]:
    """A colour per arm, and another line style where the colours begin again."""
    main = [n for n, arm in arms.ARMS.items() if arm.main]
    order = [*main, *(n for n in arms.ARMS if n not in main)].index(program.split("/")[1])
    return COLORS[order % len(COLORS)], STYLES[order // len(COLORS) % len(STYLES)]


def _figure(figsize: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("Figures need matplotlib: pip install qarl-jax[plot].") from None
    return Figure(figsize=figsize, layout="constrained")


def make(archive: pathlib.Path, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the pages of `report` and <out>/results/<scale>_<figure>.png; returns what was written."""
    results = load(archive)
    (out / "results").mkdir(parents=True, exist_ok=True)
    written = []
    for path, text in report.pages(results).items():
        written.append(out / path)
        written[-1].parent.mkdir(exist_ok=True)
        written[-1].write_text(text)
    for name, result in results.items():
        if not any(run.has_ended for run in result.runs.values()):
            continue
        drawn = {kind: training(result, programs) for kind, programs in report.training_figures(result).items()}
        for kind, figure in {**drawn, "ratios": ratios(result), "seconds": seconds(result)}.items():
            written.append(out / "results" / f"{name}_{kind}.png")
            # No date and no version in the file: the same results give the same bytes.
            figure.savefig(written[-1], dpi=90, metadata={"Software": None})
    return written


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.alignment.figures", description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=arms.HERE / "results.tar.xz")
    parser.add_argument("--out", type=pathlib.Path, default=arms.ROOT / "docs")
    args = parser.parse_args(argv)
    if not args.results.exists():
        raise UserError(f"{args.results}: no results; make them with python -m experiments.alignment.run --all --pack.")
    for path in make(args.results, args.out):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
