# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The page that `python -m qarl_jax.plot` writes beside its figures: what a run said, token by token.

One HTML file that needs nothing else, no network either: runs and their results, small curves, and sample completions
whose tokens are shaded by importance ratio, mismatch weight, probability, or what the loss did with them (QaRL, arXiv
2604.07853, table 6, on one's own data). The numbers come from samples.jsonl (`token_trace.py`); a run that recorded
none still shows its curves and texts.

What a policy writes is hostile until shown otherwise: the template escapes everything, control characters become
pictures of themselves, and the page's own policy forbids it to load or send anything.

Left out: the samples of every step. `--report-steps` of them, spread over the run, keep the page at a few megabytes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from qarl_jax.loss.common.token_effects import FATES
from qarl_jax.observe.recorder import folder_of, lines_of
from qarl_jax.observe.terminal import held_out_score
from qarl_jax.types import UserError

TEMPLATE = "report.html.jinja"

DROPPED = ("above", "below", "rejected")
"""Fates of a token that had a signal and lost its gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: `run` picks its colour, `style` its dashes (0: none); `faint` for what a strong line smooths;
    `marks` for points instead of a line."""

    label: str
    run: int
    steps: Sequence[int]
    values: Sequence[float]
    style: int = 0
    faint: bool = False
    marks: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """One small set of axes; `log` expects positive values, and shows where they span a factor of ten."""

    title: str
    lines: Sequence[Line]
    percent: bool = False
    log: bool = False


def render(runs: Mapping[str, str | Path], charts: Sequence[Chart] = (), *, steps: int = 12) -> str:
    """The page.

    Args:
      runs: name -> run directory (or its metrics.jsonl).
      charts: drawn in this order; their lines number the runs as they stand in `runs`.
      steps: steps per run whose samples are shown.
    """
    about, samples = [], []
    for index, (name, path) in enumerate(runs.items()):
        folder = folder_of(path)
        about.append(_about(folder) | {"name": name, "index": index})
        samples += [_sample(record) | {"run": index} for record in load_samples(folder, steps)]
    columns = [sample["columns"] for sample in samples]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(TEMPLATE).render(
        runs=about,
        charts=[_drawn(chart) for chart in charts],
        samples=samples,
        steps=sorted({sample["step"] for sample in samples}),
        data={"columns": columns, "scales": scales(columns), "fates": FATES},
        number=number,
    )


def write(path: str | Path, page: str) -> None:
    """Puts the page on disk. Lone surrogates, which no file can hold, were replaced by `visible`."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from None


# ---- what the files say ---------------------------------------------------------------------------------------------


def load_samples(folder: Path, steps: int) -> list[dict[str, Any]]:
    """The samples of `steps` steps spread over a run, its first and last among them."""
    records = lines_of(folder, "samples.jsonl")
    shown = set(spread(sorted({record["step"] for record in records}), steps))
    return [record for record in records if record["step"] in shown]


def spread(values: Sequence[int], most: int) -> list[int]:
    """At most `most` of the values, evenly, with both ends. Example: spread([0, 1, 2, 3, 4], 3) = [0, 2, 4]."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[-1:]) * most
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _about(folder: Path) -> dict[str, Any]:
    """Describes a run at the head of the report: (label, text) rows, and its resolved config."""
    records = lines_of(folder, "metrics.jsonl")
    rewards = [record["reward/mean"] for record in records if isinstance(record.get("reward/mean"), float)]
    held_out = lines_of(folder, "eval.jsonl")
    manifest: dict[str, Any] = {}
    if (folder / "run.json").is_file():
        try:
            manifest = json.loads((folder / "run.json").read_text())
        except ValueError as error:
            raise UserError(f"{folder / 'run.json'} is not JSON ({error}).") from None
    cfg, start = manifest.get("config") or {}, (manifest.get("starts") or [{}])[-1]
    quant, loss = cfg.get("quant") or {}, cfg.get("loss") or {}
    rows = [("folder", str(folder))]
    if start.get("command"):
        rows.append(("command", " ".join(["train", *start["command"][1:]])))
    if cfg.get("model"):
        size = f", {start['parameters']:,} parameters" if "parameters" in start else ""
        rows.append(("policy", f"{cfg['model']['path']}{size}"))
    if quant:
        sampler = quant.get("rollout") or quant["forward"]
        rows.append(
            ("scheme", quant["forward"] if sampler == quant["forward"] else f"{quant['forward']}; sampler {sampler}")
        )
    if loss:
        options = ", ".join(f"{key} {number(value)}" for key, value in loss.items() if key in _OPTIONS and value)
        rows.append(("loss", f"{loss['name']} ({options})" if options else loss["name"]))
    rows += [(f"from step {step}", "; ".join(changed)) for step, changed in _changes(manifest.get("starts") or [])]
    if records:
        rows.append(("steps", str(len(records))))
    if rewards:
        rows.append(
            ("reward", f"{np.mean(rewards[:5]):.3f} (first five steps) → {np.mean(rewards[-5:]):.3f} (last five)")
        )
    if len(held_out) > 1:
        rows.append(("held out", f"{held_out_score(held_out[0])} → {held_out_score(held_out[-1])}"))
    if start.get("git"):
        rows.append(("code", start["git"]))
    if start.get("devices"):
        devices = start["devices"]
        rows.append(("devices", devices if isinstance(devices, str) else ", ".join(devices)))
    file = folder / "config.yaml"
    return {"rows": rows, "config": file.read_text() if file.is_file() else ""}


def _changes(starts: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[str]]]:
    """(step, settings that changed with it) of the starts whose steps no later start trained anew."""
    out: list[tuple[int, list[str]]] = []
    for start in starts:
        step = start.get("step", 0)
        out = [*(one for one in out if one[0] < step), (step, start.get("changed") or [])]
    return [one for one in out if one[1]]


_OPTIONS = ("clip_low", "clip_high", "neg_clip_low", "neg_clip_high", "dual_clip", "mismatch", "mismatch_cap", "w_mode")


def _sample(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of samples.jsonl as the template wants it."""
    columns = dict(record.get("tokens") or {})
    texts, fates = columns.pop("text", []), columns.get("fate", [])
    at, count = columns.pop("left_out", [len(texts), 0])
    advantage, cut = record.get("advantage"), record.get("cut") or {}
    if "gain" in columns and advantage is not None:
        columns["push"] = [None if gain is None else round(advantage * gain, 5) for gain in columns["gain"]]
    turns = [turn | {key: visible(turn[key]) for key in ("text", "observation")} for turn in record.get("turns") or ()]
    sign = "unknown" if advantage is None else "pos" if advantage > 0 else "neg" if advantage < 0 else "zero"
    return {
        "step": record["step"],
        "uid": visible(str(record.get("uid", ""))),
        "prompt": visible(record.get("prompt") or ""),
        "response": visible(record.get("response") or ""),
        "answer": visible(str(record.get("answer") or "")),
        "reward": record.get("reward"),
        "advantage": advantage,
        "sign": sign,
        "finish": record.get("finish_reason"),
        "length": record.get("response_len"),
        "number": record.get("update"),
        "updates": record.get("updates"),
        "seq_ratio": record.get("seq_ratio"),
        "seq_mismatch": record.get("seq_mismatch"),
        "cut": cut,
        "dropped": sum(cut.get(fate, 0) for fate in DROPPED),
        "tokens": [(visible(text) or "·", FATES[fate]) for text, fate in zip(texts, fates, strict=True)],
        "left_out": (at, count),
        "turns": turns,
        "observed": _observed(turns, at, count),
        "columns": columns,
    }


def _observed(turns: Sequence[Mapping[str, Any]], at: int, left_out: int) -> dict[int, str]:
    """Number of a token shown -> what was observed before it; of the tokens drawn, `left_out` from `at` are not shown.

    Example: turns of 3 and 2 tokens, all of them shown: {3: "observed between", 5: "observed last"}.
    """
    out: dict[int, str] = {}
    drawn = 0
    for turn in turns:
        drawn += turn["tokens"]
        shown = drawn if drawn <= at else max(at, drawn - left_out)
        if turn["observation"]:
            out[shown] = out.get(shown, "") + turn["observation"]
    return out


def visible(text: str) -> str:
    """Control characters as their pictures (a line break keeps breaking the line), other characters that are not seen,
    among them those that turn text around, as [U+202E]; lone surrogates as U+FFFD."""
    out = []
    for character in text:
        code = ord(character)
        if character == "\n":
            out.append("↵\n")
        elif character == "\t":
            out.append("→\t")
        elif code < 0x20:
            out.append(chr(0x2400 + code))
        elif code == 0x7F:
            out.append("␡")
        elif 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000:
            out.append("\ufffd")
        elif unicodedata.category(character) == "Cf" and character not in _JOINERS:
            out.append(f"[U+{code:04X}]")
        else:
            out.append(character)
    return "".join(out)


_JOINERS = "\u200c\u200d"  # part of words in some scripts, and of emoji


def scales(columns: Iterable[Mapping[str, Sequence[float | None]]]) -> dict[str, float]:
    """Finds the distance from its neutral value at which a quantity gets the full colour: the 95th percentile.

    Log-ratios for `ratio`, `mismatch` and `weight` (at least 1e-3: what is smaller is noise and stays pale), and the
    push A gain.
    """
    columns = list(columns)
    out = {}
    for key in ("ratio", "mismatch", "weight"):
        logs = [abs(math.log(v)) for column in columns for v in column.get(key, ()) if v]
        out[key] = max(_percentile(logs), 1e-3)
    out["push"] = max(_percentile([abs(v) for column in columns for v in column.get("push", ()) if v]), 1e-3)
    return {key: float(f"{value:.2g}") for key, value in out.items()}


def _percentile(values: Sequence[float]) -> float:
    return float(np.percentile(values, 95)) if values else 0.0


# ---- curves ---------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 280, 140, 44, 8, 8, 20


def _drawn(chart: Chart) -> dict[str, Any]:
    """Points and ticks of a chart in the coordinates of its SVG."""
    xs = [x for line in chart.lines for x in line.steps]
    ys = [y for line in chart.lines for y in line.values]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    log = chart.log and y1 > 10 * y0 > 0
    if log:
        y0, y1 = math.log10(y0), math.log10(y1)
    elif chart.percent:
        y0 = min(y0, 0.0)
    if y1 - y0 < 1e-12:
        y0, y1 = (0.0, 0.05) if y0 == 0 else (y0 - 0.5 * abs(y0), y1 + 0.5 * abs(y1))

    def right(x: int) -> float:
        share = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def down(y: float) -> float:
        return round(TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM), 1)

    def label(y: float) -> str:
        return f"{y:.3g}" if not chart.percent else f"{100 * y:.3g}%"

    shown = ticks(y0, y1)
    if log:
        shown = [y for y in shown if y == round(y)]
    lines = []
    for line in chart.lines:
        points = [(right(x), down(math.log10(y) if log else y)) for x, y in zip(line.steps, line.values, strict=True)]
        lines.append({"points": points, "line": line, "alone": len(points) == 1})
    styles = {line.label: line for line in reversed(chart.lines) if line.label and not line.faint}
    return {
        "title": chart.title,
        "lines": lines,
        "legend": list(reversed(styles.values())) if len(styles) > 1 else [],
        "x_ticks": [(right(x), number(x)) for x in dict.fromkeys((x0, x1))],
        "y_ticks": [(down(y), label(10**y if log else y)) for y in shown],
        "box": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM},
    }


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers in [low, high], some `about` of them. Example: ticks(0.0, 1.0) = [0.0, 0.2, ..., 1.0]."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: Any) -> str:
    """A number for a reader; anything else as it is, nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.4g}"
