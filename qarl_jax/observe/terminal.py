# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The live view of a run: a table at the bottom of a terminal, or a line per step.

    view = make_view("auto", name="quickstart", total_steps=40, stream=sys.stdout)
    view.show({"step": 12, "reward/mean": 0.53, ..., "time/rollout_s": 1.2})     # a record of metrics.jsonl
    view.say("a line for the reader")                                            # above the table, or among the lines
    view.close()

`ROWS` lists the table's metrics, `LINE` those of a line, in order; a metric that a record lacks is left out.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from qarl_jax.metrics import PERF, TIME, phases
from qarl_jax.runtime import progress

log = logging.getLogger(__name__)

Cells = Sequence[tuple[str, str, str]]
"""(label, metric, format) each; a metric that a record lacks is left out."""

ROWS: Sequence[tuple[str, Cells]] = (
    (
        "reward",
        (
            ("mean", "reward/mean", ".3f"),
            ("std", "reward/std", ".3f"),
            ("eval", "eval/reward/mean", ".3f"),
            ("95 % from", "eval/reward/low", ".3f"),
            ("to", "eval/reward/high", ".3f"),
        ),
    ),
    (
        "response",
        (
            ("length", "response/length_mean", ".1f"),
            ("truncated", "response/truncated", ".1%"),
            ("entropy", "entropy/mean", ".3f"),
        ),
    ),
    (
        "mismatch",
        (("k1", "mismatch/k1", ".2e"), ("k3", "mismatch/k3", ".2e"), ("max", "mismatch/max_abs", ".2e")),
    ),
    (
        # Token clipping (GRPO and kin) and sequence dropping (TBPO) never log the same keys.
        "clipped",
        (
            ("tokens", "clip/frac", ".1%"),
            ("A>0", "clip/pos_high", ".1%"),
            ("A<0", "clip/neg_low", ".1%"),
            ("sequences", "clip/seq_dropped", ".1%"),
            ("later", "later/clip/seq_dropped", ".1%"),
            ("A>0", "clip/seq_pos_high", ".1%"),
            ("A<0 low", "clip/seq_neg_low", ".1%"),
            ("A<0 high", "clip/seq_neg_high", ".1%"),
        ),
    ),
    (
        "update",
        (
            ("loss", "loss/total", ".4f"),
            ("grad norm", "optim/grad_norm", ".3g"),
            ("lr", "optim/lr", ".2e"),
            ("code flips", "quant/code_flips", ".2e"),
            ("noise", "proximal/noise", ".1e"),
        ),
    ),
    (
        "critic",
        (
            ("loss", "critic/loss", ".4f"),
            ("explained", "critic/explained_variance", ".2f"),
            ("clipped", "critic/clip_fraction", ".1%"),
            ("return", "return/mean", ".3f"),
        ),
    ),
)


def _text(value: Any, spec: str) -> str:
    return "nan" if value is None else format(value, spec)


def _row(record: Mapping[str, Any], cells: Cells) -> list[tuple[str, str]]:
    return [(label, _text(record[key], spec)) for label, key, spec in cells if key in record]


def _speed(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Tokens per second, seconds per step, the learner's FLOP/s, then the phases from slow to fast."""
    cells = _row(
        record,
        (
            ("tokens/s", f"{TIME}tok_per_s", ",.0f"),
            ("step", f"{TIME}step_s", ".2f"),
            ("TFLOP/s", f"{PERF}model_tflops", ",.3g"),
            ("MFU", f"{PERF}mfu", ".1%"),
            ("padding", "train/padding_share", ".0%"),
            ("recompiles", f"{PERF}recompiles", ".0f"),
        ),
    )
    slowest = sorted(((v, k) for k, v in phases(record).items() if isinstance(v, (int, float))), reverse=True)
    return cells + [(name, f"{seconds:.2f}s") for seconds, name in slowest]


LINE: Cells = (
    ("reward", "reward/mean", ".3f"),
    ("held-out", "eval/reward/mean", ".3f"),
    ("length", "response/length_mean", ".1f"),
    ("k3", "mismatch/k3", ".1e"),
    ("clipped", "clip/frac", ".1%"),
    ("dropped", "clip/seq_dropped", ".1%"),
    ("grad", "optim/grad_norm", ".3g"),
    ("seconds", f"{TIME}step_s", ".2f"),
    ("tokens/s", f"{TIME}tok_per_s", ",.0f"),
)
"""Metrics that fit on a line; metrics.jsonl has everything."""


def summary_line(record: Mapping[str, Any], total_steps: int | None = None) -> str:
    """Formats a step as one short line. Example: "step 12/100 | reward 0.530 | length 41.2 | ... | tokens/s 12,346"."""
    step = f"step {record['step']}" + (f"/{total_steps}" if total_steps else "")
    cells = [f"{label} {text}" for label, text in _row(record, LINE)]
    if record.get("nonfinite"):
        cells.append("not finite: " + ", ".join(record["nonfinite"]))
    return " | ".join([step, *cells])


def held_out_score(record: Mapping[str, Any]) -> str:
    """Formats an evaluation's mean reward with its 95 % interval and sample counts.

    Example: "0.500 (95 %: 0.237 to 0.763; 10 prompts x 4 samples)". Records of older versions have the mean alone.
    """
    text = f"{record['eval/reward/mean']:.3f}"
    if "eval/reward/low" not in record:
        return text
    prompts, different = record["eval/prompts"], record["eval/different_prompts"]
    apart = f" ({different:.0f} different)" if different < prompts else ""
    count = f"{prompts:.0f} prompt{'s' * (prompts > 1)}{apart} x {record['eval/responses'] / prompts:.0f} samples"
    return f"{text} (95 %: {record['eval/reward/low']:.3f} to {record['eval/reward/high']:.3f}; {count})"


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draws the last `width` values as bars, lowest to highest. Example: sparkline([0, 1, 2]) = "▁▅█"."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(BARS[round((v - low) / span * (len(BARS) - 1)) if span else 0] for v in shown)


class _Silent:
    """The view of a run without one: notes still reach the log."""

    def show(self, record: Mapping[str, Any]) -> None:
        del record

    def say(self, text: str) -> None:
        log.info(text)

    def close(self) -> None:
        pass


class _Lines:
    """A line per step, for files and pipes."""

    def __init__(self, total_steps: int | None, stream: Any):
        self._total, self._stream = total_steps, stream
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(progress.reporting(self.say))

    def show(self, record: Mapping[str, Any]) -> None:
        self.say(summary_line(record, self._total))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._stack.close()


class _Table:
    """A table that stays at the bottom of the terminal."""

    def __init__(self, name: str, total_steps: int | None, stream: Any):
        from rich.console import Console
        from rich.live import Live

        self._name, self._total = name, total_steps
        self._last: Mapping[str, Any] = {}
        self._ended = False
        self._rewards: deque[float] = deque(maxlen=40)
        self._seconds: deque[float] = deque(maxlen=20)
        self._console = Console(file=stream)
        stdout = stream is sys.stdout  # then prints and log lines of others scroll above the table, too
        self._live = Live(
            console=self._console, get_renderable=self._renderable, redirect_stdout=stdout, redirect_stderr=stdout
        )
        self._live.start()

    def _renderable(self) -> Any:
        from rich.console import Group

        parts = [self._render(self._last, ended=self._ended)] if self._last else []
        return Group(*parts, progress.renderable())

    def show(self, record: Mapping[str, Any]) -> None:
        if isinstance(record.get("reward/mean"), float):
            self._rewards.append(record["reward/mean"])
        if isinstance(record.get(f"{TIME}step_s"), float):
            self._seconds.append(record[f"{TIME}step_s"])
        self._last = record
        self._live.refresh()

    def _render(self, record: Mapping[str, Any], *, ended: bool = False) -> Any:
        from rich import box
        from rich.table import Table

        title = f"{self._name}  step {record['step']}" + (f" of {self._total}" if self._total else "")
        if self._total and self._seconds and not ended:
            left = (self._total - record["step"] - 1) * sum(self._seconds) / len(self._seconds)
            title += f"  {datetime.timedelta(seconds=round(max(left, 0)))} left"
        table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        for name, cells in [(title, _row(record, cells)) for title, cells in ROWS] + [("time", _speed(record))]:
            if not cells:
                continue
            text = "   ".join(f"[dim]{label}[/dim] {value}" for label, value in cells)
            table.add_row(name, f"{text}   {sparkline(self._rewards)}" if name == "reward" else text)
        if record.get("nonfinite"):
            table.add_row("[red]not finite[/red]", ", ".join(f"{k} = {v}" for k, v in record["nonfinite"].items()))
        return table

    def say(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(text))  # markup=False would reach the table, which is drawn anew below the text

    def close(self) -> None:
        self._ended = True
        self._live.stop()


def make_view(kind: str, name: str, total_steps: int | None, stream: Any) -> _Silent | _Lines | _Table:
    """Makes the view `kind` ("auto", "table", "lines" or "off", see `recorder.Config`) of run `name` on `stream`."""
    if kind == "auto":
        kind = "table" if progress.is_terminal(stream) else "lines"
    if kind == "off":
        return _Silent()
    return _Table(name, total_steps, stream) if kind == "table" else _Lines(total_steps, stream)
