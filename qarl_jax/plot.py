# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.plot RUN [RUN ...] [--out DIR]`: curves of one or more runs from their metrics.jsonl.

Writes <out>/curves.png, <out>/report.html, and where runs recorded histograms or tokens <out>/ratios.png and
<out>/probabilities.png. <out> is the run's folder, and for several runs figures/. A run in whose folder the output of
`evaluate --view ... --json` is saved as views.jsonl also gets <out>/views_<run>.png: accuracy in each view.

curves.png has one panel per topic and one colour per run. The faint line is the measurement, the strong one its running
mean. A panel is left out if no run has a number other than zero for it. A held-out evaluation is drawn at the version
that was evaluated. ratios.png: histograms of log-ratios by the sign of the advantage, over each run's last steps.
probabilities.png: the tokens of samples.jsonl, in the manner of figures 4 and 5 of QaRL (arXiv 2604.07853).

The figures need matplotlib (`pip install qarl-jax[plot]`); the report is written without it, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl_jax.observe import html_report
from qarl_jax.observe.curves import Chart, Run, charts, load_runs
from qarl_jax.observe.recorder import folder_of, lines_of
from qarl_jax.types import UserError, command, did_you_mean, entry_point

log = logging.getLogger(__name__)

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart under every common colour blindness, and in grey."""

STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")
"""Metrics within a panel."""


class NoMatplotlibError(UserError):
    """Matplotlib is not installed, so no figure can be drawn."""


def _blank(width: float, height: float) -> Any:
    """A figure of so many inches.

    Raises:
      NoMatplotlibError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlibError("Plots need matplotlib: pip install qarl-jax[plot].") from None
    return Figure(figsize=(width, height), layout="constrained")


def _dress(axes: Any, title: str, size: int) -> None:
    axes.set_title(title, fontsize=size)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=size - 2)


def _with_legend(fig: Any, names: Sequence[str]) -> Any:
    """The figure with a colour per run explained above it."""
    from matplotlib.lines import Line2D

    colors = zip(itertools.cycle(COLORS), names, strict=False)
    handles = [Line2D([], [], color=color, linewidth=2.5, label=name) for color, name in colors]
    fig.legend(handles=handles, loc="outside upper center", ncols=min(len(names), 4), frameon=False, fontsize=10)
    return fig


def figure(runs: Sequence[Run], *, window: int = 5, extra: Sequence[str] = ()) -> Any:
    """Draws the curves of runs: a panel for each chart in which some run has a number other than zero.

    Args:
      runs: the runs; more than seven share colours.
      window: steps of the running mean.
      extra: more metrics, a panel each.

    Raises:
      UserError: matplotlib is missing, or there is nothing to draw.
    """
    known = {key for run in runs for record in run.records for key in record}
    for metric in extra:
        if metric not in known:
            raise UserError(f"--metric {metric}: no run has it.{did_you_mean(metric, known)}")
    drawn = charts(runs, window=window, extra=extra)
    if not drawn:
        raise UserError("No run has any of the metrics that plots show; name some with --metric.")

    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    fig = _blank(4.4 * columns, 2.9 * rows + 0.5)
    for index, chart in enumerate(drawn):
        axes = fig.add_subplot(rows, columns, index + 1)
        _draw(axes, chart)
        if index + columns >= len(drawn):
            axes.set_xlabel("step", fontsize=9)
    return _with_legend(fig, [run.name for run in runs])


HISTOGRAMS: tuple[tuple[str, str], ...] = (
    ("ratio", "Token: learner now / at the start of the update"),
    ("weight", "Token: learner / sampler"),
    ("seq_ratio", "Response: learner now / at the start of the update"),
    ("seq_weight", "Response: learner / sampler"),
)
"""Names in histograms.jsonl, less the sign; and titles."""


def load_histograms(path: str | Path, last: int = 50) -> dict[str, list[int]]:
    """Loads a run's histograms, summed over its last steps: name ("ratio_pos") -> counts; empty if it has none."""
    out: dict[str, list[int]] = {}
    for record in lines_of(folder_of(path), "histograms.jsonl")[-last:]:
        for key, counts in record.items():
            if key.startswith("hist/"):
                name = key.removeprefix("hist/")
                out[name] = [a + b for a, b in zip(out.get(name, [0] * len(counts)), counts, strict=True)]
    return out


def ratio_figure(runs: Mapping[str, Mapping[str, Sequence[int]]]) -> Any:
    """Draws histograms of log-ratios: a row per quantity, a column per sign of the advantage, a colour per run.

    Args:
      runs: run name -> the result of `load_histograms`.

    Raises:
      UserError: matplotlib is missing.
    """
    from qarl_jax.loss.common.diagnostics import EDGES

    edges = [EDGES[0] * 1.5, *EDGES, EDGES[-1] * 1.5]
    fig = _blank(9.5, 2.5 * len(HISTOGRAMS) + 0.5)
    for row, (name, title) in enumerate(HISTOGRAMS):
        for column, (sign, words) in enumerate((("pos", "A > 0"), ("neg", "A < 0"))):
            axes = fig.add_subplot(len(HISTOGRAMS), 2, 2 * row + column + 1)
            for color, counts in zip(itertools.cycle(COLORS), runs.values(), strict=False):
                bins = counts.get(f"{name}_{sign}", [])
                if sum(bins):
                    axes.stairs([n / sum(bins) for n in bins], edges, color=color, linewidth=1.3)
            axes.set_xscale("symlog", linthresh=1e-5)
            axes.set_xticks([-1, -1e-2, -1e-4, 0, 1e-4, 1e-2, 1])
            _dress(axes, f"{title}, {words}", 9)
            if column == 0:
                axes.set_ylabel("share", fontsize=9)
            if row == len(HISTOGRAMS) - 1:
                axes.set_xlabel("log-ratio", fontsize=9)
    return _with_legend(fig, list(runs))


def load_tokens(path: str | Path, last: int = 50) -> dict[str, list[float]]:
    """Loads the logged tokens of a run's samples.jsonl, in the form that `tokens_of` returns."""
    return tokens_of(lines_of(folder_of(path), "samples.jsonl"), last)


def tokens_of(samples: Sequence[Mapping[str, Any]], last: int = 50) -> dict[str, list[float]]:
    """Collects the logged tokens of a run's last steps; tokens without a finite log-prob are left out.

    Returns:
      `old` and `now`, log-probs under the learner at the start of a step and in the response's last update, and
      `advantage`, each [tokens]; empty where none were recorded.
    """
    records = [record for record in samples if record.get("tokens")]
    steps = sorted({record["step"] for record in records})[-last:]
    out: dict[str, list[float]] = {"old": [], "now": [], "advantage": []}
    for record in records:
        if record["step"] not in steps:
            continue
        for old, now in zip(record["tokens"]["old"], record["tokens"]["now"], strict=True):
            if old is not None and now is not None:
                out["old"].append(old)
                out["now"].append(now)
                out["advantage"].append(record["advantage"])
    return out if out["old"] else {}


def probability_figure(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> Any:
    """Draws two panels per run: density of tokens over (probability before, after), and after / before against before.

    Args:
      runs: run name -> `tokens_of` its samples; runs without tokens are left out.

    Raises:
      UserError: matplotlib is missing.
    """
    shown = {name: tokens for name, tokens in runs.items() if tokens}
    fig = _blank(9.5, 3.6 * len(shown))
    for row, (name, tokens) in enumerate(shown.items()):
        old, now, ratio = ([math.exp(x) for x in values] for values in (
            tokens["old"], tokens["now"], [b - a for a, b in zip(tokens["old"], tokens["now"], strict=True)]
        ))  # fmt: skip
        axes = fig.add_subplot(len(shown), 2, 2 * row + 1)
        drawn = axes.hexbin(old, now, gridsize=50, xscale="log", yscale="log", bins="log", mincnt=1, cmap="viridis")
        low = min(*old, *now)
        axes.plot([low, 1], [low, 1], color="0.5", linewidth=0.8)
        fig.colorbar(drawn, ax=axes, label="tokens")
        _dress(axes, f"{name}: density of tokens", 9)
        axes.set_ylabel("probability after", fontsize=9)
        beside = fig.add_subplot(len(shown), 2, 2 * row + 2)
        for color, words, sign in ((COLORS[0], "A > 0", 1), (COLORS[1], "A < 0", -1)):
            of_sign = [i for i, advantage in enumerate(tokens["advantage"]) if advantage * sign > 0]
            at = [old[i] for i in of_sign], [ratio[i] for i in of_sign]
            beside.plot(*at, ".", color=color, markersize=2, alpha=0.5, label=words)
        if any(tokens["advantage"]):  # without a point matplotlib draws no logarithmic axis
            beside.set_xscale("log")
            beside.set_yscale("log")
        beside.legend(fontsize=8, framealpha=0.7, edgecolor="none", markerscale=4)
        _dress(beside, f"{name}: ratio by probability", 9)
        beside.set_ylabel("probability after / before", fontsize=9)
        for each in (axes, beside):
            each.set_xlabel("probability before", fontsize=9)
    return fig


def view_figure(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draws one policy's accuracy per evaluation view and per difficulty, with 95 % intervals; a row of axes per suite.

    Args:
      name: name of the run. rows: the JSON objects that `evaluate --view NAME,... --json` printed.

    Raises:
      UserError: matplotlib is missing.
    """
    suites = list(dict.fromkeys(str(row.get("suite", "held out")) for row in rows))
    fig = _blank(9.5, 3.0 * len(suites))
    for place, suite in enumerate(suites):
        own = {row.get("view", "plain"): row for row in rows if str(row.get("suite", "held out")) == suite}
        score = next(key for key in next(iter(own.values())) if key.startswith("eval/avg_at_") and key.count("/") == 1)
        levels = own.get("difficulty", {})
        graded = [key for key in levels if key.startswith("eval/difficulty_") and key.count("/") == 1]
        panels = (
            (f"{suite}: views", ["plain" if view == "difficulty" else view for view in own], [
                (row, score) for row in own.values()
            ]),
            (f"{suite}: by the base's pass rate", [
                f"<={key.rpartition('_')[2]} % ({levels[f'{key}/prompts']:.0f})" for key in graded
            ], [(levels, key) for key in graded]),
        )  # fmt: skip
        for column, (title, labels, numbers) in enumerate(panels):
            axes = fig.add_subplot(len(suites), 2, 2 * place + column + 1)
            for at, (row, key) in enumerate(numbers):
                axes.bar(at, row[key], color=COLORS[at % len(COLORS)], width=0.6)
                axes.plot([at, at], [row[f"{key}/low"], row[f"{key}/high"]], color="0.2", linewidth=1.2)
            axes.set_xticks(range(len(labels)), labels)
            axes.set_ylim(0, 1)
            _dress(axes, f"{name}, {title}", 9)
    return fig


def _draw(axes: Any, chart: Chart) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    shown: dict[str, Any] = {}  # what the panel's own legend explains: line styles and markers; colours are runs
    for line in chart.lines:
        color, style = COLORS[line.run % len(COLORS)], STYLES[line.style % len(STYLES)]
        look: dict[str, Any] = {"linestyle": style}
        if line.faint:
            axes.plot(line.steps, line.values, color=color, alpha=0.25, linewidth=0.8, **look)
            continue
        if line.marks:
            look = {"linestyle": "none", "marker": "D"}
            axes.plot(line.steps, line.values, color=color, markersize=5, markeredgecolor="w", **look)
        else:
            dot = "o" if len(line.steps) == 1 else None
            axes.plot(line.steps, line.values, color=color, linewidth=1.8, marker=dot, markersize=4, **look)
        shown[line.label] = Line2D([], [], color="0.3", label=line.label, **look)
    drawn = [value for line in chart.lines if not line.marks for value in line.values]
    if chart.log and drawn and max(drawn) > 10 * min(drawn):  # below that a logarithmic axis has hardly a tick
        axes.set_yscale("log")
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _dress(axes, chart.title, 10)
    if len(shown) > 1:
        axes.legend(handles=list(shown.values()), fontsize=8, framealpha=0.7, edgecolor="none")


def draw(paths: Sequence[str], out: Path, *, window: int = 5, extra: Sequence[str] = (), steps: int = 12) -> list[Path]:
    """Draws runs into the folder `out`: report.html and, where matplotlib is installed, figures. Returns the files.

    Args:
      paths: the runs. window: steps of the running mean. extra: metrics to show besides.
      steps: number of steps per run whose samples the report shows.

    Raises:
      UserError: a run cannot be read, or `out` not be written.
    """
    runs = load_runs(paths)
    figures = {}
    with contextlib.suppress(NoMatplotlibError):
        figures["curves.png"] = figure(runs, window=window, extra=extra)
        counts = {run.name: load_histograms(path) for run, path in zip(runs, paths, strict=True)}
        if any(counts.values()):
            figures["ratios.png"] = ratio_figure(counts)
        tokens = {run.name: load_tokens(path) for run, path in zip(runs, paths, strict=True)}
        if any(tokens.values()):
            figures["probabilities.png"] = probability_figure(tokens)
        for run, path in zip(runs, paths, strict=True):
            if rows := lines_of(folder_of(path), "views.jsonl"):
                figures[f"views_{run.name}.png"] = view_figure(run.name, rows)
    for name, fig in figures.items():
        try:
            out.mkdir(parents=True, exist_ok=True)
            fig.savefig(out / name, dpi=150)
        except OSError as error:
            raise UserError(f"Cannot write {out / name}: {error.strerror or error}.") from None
    names = {run.name: path for run, path in zip(runs, paths, strict=True)}
    html_report.write(out / "report.html", html_report.render(names, steps=steps, extra=extra))
    return [out / name for name in (*figures, "report.html")]


def leave(run_dir: str) -> None:
    """Draws a finished run into its folder. An error is logged as a warning and not raised."""
    try:
        draw([run_dir], Path(run_dir))
    except Exception as error:
        log.warning("%s was not drawn: %s The run is whole.", run_dir, error)


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog=command("plot"), description="Curves of runs, side by side.")
    parser.add_argument("runs", nargs="+", help="run directories")
    parser.add_argument("--out", help="directory for figures and report (default: the run's; of several runs, figures)")
    parser.add_argument("--window", type=int, default=5, help="steps of the running mean (default: 5)")
    parser.add_argument("--metric", action="append", default=[], help="one more metric to show; may be repeated")
    parser.add_argument(
        "--report-steps", type=int, default=12, help="steps per run whose samples the report shows (default: 12)"
    )
    args = parser.parse_args(argv)
    if args.window < 1:
        raise UserError(f"--window must be at least 1, got {args.window}.")
    if args.report_steps < 0:
        raise UserError(f"--report-steps must be 0 or more, got {args.report_steps}.")
    out = Path(args.out or (folder_of(args.runs[0]) if len(args.runs) == 1 else "figures"))
    drawn = draw(args.runs, out, window=args.window, extra=args.metric, steps=args.report_steps)
    if len(drawn) == 1:
        print("the report alone: plots need matplotlib: pip install qarl-jax[plot].", file=sys.stderr)
    for path in drawn:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
