# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Defines the panels of a run's curves, and computes the curves for figures and the web page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl_jax.observe.recorder import lines_of, read_lines
from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One curve. `run`: index of its colour; `style`: of its dashes; `faint`: raw values; `marks`: points, no line."""

    label: str
    run: int
    steps: Sequence[int]
    values: Sequence[float]
    style: int = 0
    faint: bool = False
    marks: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """One set of axes to draw. `log` expects positive values; the axis is logarithmic if they span a factor of ten."""

    title: str
    lines: Sequence[Line]
    percent: bool = False
    log: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """The definition of a set of axes. `metrics` maps a metric's name to its label in the legend.

    `log`: use a logarithmic axis if values span orders of magnitude. `markers`: held-out metrics, drawn as points.
    `needs`: a metric; steps where it is absent or 0 are left out.
    """

    title: str
    metrics: Mapping[str, str]
    log: bool = False
    percent: bool = False
    markers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: str = ""

    def series(self, run: Run, metric: str) -> tuple[list[int], list[float]]:
        """Returns steps and values of one of the panel's metrics, without those that the axis cannot show."""
        steps, values = run.evaluated(metric) if metric in self.markers else run.series(metric, self.needs)
        return _positive(steps, values) if self.log else (steps, values)

    def values(self, runs: Sequence[Run]) -> list[float]:
        """Returns all values that the panel shows."""
        return [x for run in runs for metric in (*self.metrics, *self.markers) for x in self.series(run, metric)[1]]


PANELS: tuple[Panel, ...] = (
    Panel("Reward", {"reward/mean": "mean"}, markers={"eval/reward/mean": "held-out"}),
    Panel("Response length (tokens)", {"response/length_mean": "mean"}),
    Panel("Truncated responses", {"response/truncated": "share"}, percent=True),
    Panel("Entropy (nats per token)", {"entropy/mean": "mean"}),
    Panel("Learner and sampler apart", {"mismatch/k3": "KL (k3)", "mismatch/max_abs": "max |Δ logp|"}, log=True),
    Panel(
        "Sequences dropped by the loss",
        {"clip/seq_dropped": "all updates", "later/clip/seq_dropped": "after the first"},
        percent=True,
    ),
    Panel(
        "Sequences dropped, by band",
        {"clip/seq_pos_high": "A > 0, above", "clip/seq_neg_low": "A < 0, below", "clip/seq_neg_high": "A < 0, above"},
        percent=True,
    ),
    Panel(
        "Tokens clipped, by sign of advantage",
        {
            "clip/pos_high": "A > 0, above",
            "clip/neg_low": "A < 0, below",
            "clip/dual_neg_high": "A < 0, above (dual clip)",
        },
        percent=True,
    ),
    Panel(
        "Largest token ratio and weight",
        {"loss/ratio_max": "learner now / start", "mismatch/w_max": "weight in the loss"},
        log=True,
    ),
    Panel(
        "Mismatch weights cut, by edge",
        {
            "mismatch/w_cap_high": "above",
            "mismatch/w_cap_low": "below",
            "mismatch/seq_rejected": "whole response rejected",
        },
        percent=True,
    ),
    Panel(
        "Error tokens (below p = 0.001)",
        {"error/tok_learner": "learner", "error/tok_sampler": "sampler", "error/tok_hidden": "learner alone"},
        log=True,
    ),
    Panel(
        "Error tokens of the learner, by sign of A",
        {"error/tok_learner_pos": "A > 0", "error/tok_learner_neg": "A < 0"},
        percent=True,
    ),
    Panel(
        "Error tokens in clusters",
        {"error/cluster_tok_learner": "learner", "error/cluster_tok_sampler": "sampler"},
        percent=True,
    ),
    Panel(
        "Responses with a cluster of error tokens",
        {"error/seq_learner_pos": "A > 0", "error/seq_learner_neg": "A < 0"},
        percent=True,
    ),
    Panel(
        "Where the first cluster begins (share of the response)",
        {"error/onset_share": "mean"},
        percent=True,
        needs="error/seq_learner",
    ),
    Panel("Repetition", {"text/repeated": "repeated 4-grams", "text/loops": "responses that loop"}, percent=True),
    Panel("Responses, compressed / plain bytes", {"text/zlib_ratio": "mean"}),
    Panel("Critic: variance of the returns explained", {"critic/explained_variance": "share"}),
    Panel("Gradient norm", {"optim/grad_norm": "before clipping"}, log=True),
    Panel(
        "Weights: update and quantization error",
        {"quant/weight_change": "change per update, squared", "quant/error": "quantization error, squared"},
        log=True,
    ),
    Panel("Codes changed per publish", {"quant/code_flips": "share"}, log=True),
    Panel("Seconds per step", {"time/step_s": "all", "time/rollout_s": "rollout"}),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run's name in the legend, its records by step, and its held-out evaluations by version."""

    name: str
    records: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]] = ()

    def evaluated(self, metric: str) -> tuple[list[int], list[float]]:
        """Returns versions and values of a held-out metric, including the policy before training (version 0).

        Step n samples from version n and makes version n + 1; its record has the evaluation of version n + 1.
        """
        if not self.evaluations:
            steps, values = self.series(metric)
            return [step + 1 for step in steps], values
        points = [
            (record["version"], float(record[metric]))
            for record in self.evaluations
            if {metric, "version"} <= set(record)
        ]
        return [version for version, _ in points], [value for _, value in points]

    def series(self, metric: str, needs: str = "") -> tuple[list[int], list[float]]:
        """Returns steps and values where the metric is a finite number, and `needs` (if given) is positive."""
        points = [
            (record["step"], float(record[metric]))
            for record in self.records
            if isinstance(record.get(metric), (int, float)) and math.isfinite(record[metric])
            if not needs or (record.get(needs) or 0) > 0
        ]
        return [step for step, _ in points], [value for _, value in points]


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Loads runs from run directories (or metrics.jsonl files), named by the shortest path endings that differ.

    Raises:
      UserError: a path has no metrics, or none are recorded yet.
    """
    files = []
    for path in map(Path, paths):
        file = path / "metrics.jsonl" if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{path} is not a run: there is no {file}.")
        files.append(file)
    runs = []
    for file, name in zip(files, names_of([file.absolute().parent for file in files]), strict=True):
        records = read_lines(file)
        if not records:
            raise UserError(f"{file} holds no step yet.")
        if not all(isinstance(record, dict) and isinstance(record.get("step"), int) for record in records):
            raise UserError(f"{file} is not the metrics.jsonl of a run: not every line has a `step`.")
        records.sort(key=lambda record: record["step"])
        evaluations = lines_of(file.parent, "eval.jsonl") if file.name == "metrics.jsonl" else []
        runs.append(Run(name=name, records=records, evaluations=evaluations))
    return runs


def names_of(directories: Sequence[Path]) -> list[str]:
    """Returns the shortest endings of the paths that differ: ["a", "b"], or ["x/run", "y/run"]."""
    depth = 1
    most = max(len(directory.parts) for directory in directories)
    while depth < most and len({d.parts[-depth:] for d in directories}) < len(set(directories)):
        depth += 1
    return ["/".join(d.parts[-depth:]) for d in directories]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Averages the last `window` values at each position (fewer at the start)."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value
        if i >= window:
            total -= values[i - window]
        out.append(total / min(i + 1, window))
    return out


def specs(extra: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Converts every panel to JSON for the page, which shows panels with a nonzero value, and all `asked` ones.

    Args:
      extra: names of metrics that get a panel each, with `asked` true.
    """
    asked = [dataclasses.asdict(Panel(metric, {metric: ""})) | {"asked": True} for metric in extra]
    return [dataclasses.asdict(panel) | {"asked": False} for panel in PANELS] + asked


def panels(runs: Sequence[Run], extra: Sequence[str]) -> list[Panel]:
    """Picks the panels with a nonzero value, and the panels of the metrics that were asked for."""
    asked = [Panel(metric, {metric: ""}) for metric in extra]
    return [panel for panel in PANELS if any(panel.values(runs))] + [panel for panel in asked if panel.values(runs)]


def charts(runs: Sequence[Run], *, window: int = 5, extra: Sequence[str] = ()) -> list[Chart]:
    """Makes a chart for every panel with something to show, for figures.

    Args:
      window: number of steps of the running mean; 1: none. extra: names of further metrics to show.
    """
    out = []
    for panel in panels(runs, extra):
        lines = []
        for index, run in enumerate(runs):
            for style, (metric, label) in enumerate(panel.metrics.items()):
                steps, values = panel.series(run, metric)
                line = Line(label=label, run=index, style=style, steps=steps, values=values, faint=True)
                smooth = dataclasses.replace(line, values=running_mean(values, window), faint=False)
                lines += ([line, smooth] if window > 1 else [smooth]) if steps else []
            for metric, label in panel.markers.items():
                steps, values = panel.series(run, metric)
                if steps:
                    lines.append(Line(label=label, run=index, steps=steps, values=values, marks=True))
        out.append(Chart(title=panel.title, lines=lines, percent=panel.percent, log=panel.log))
    return out


def _positive(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    kept = [(s, v) for s, v in zip(steps, values, strict=True) if v > 0]
    return [s for s, _ in kept], [v for _, v in kept]
