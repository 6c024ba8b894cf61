# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts a run's files to JSON for the web page: everything for a report, only the news for a live page.

    data = RunData(folder, "a")
    part, have = data.part({})           # everything
    part, have = data.part(have)         # later: what is new

A section without news is left out. `metrics` and `samples` are sent from index `from` on. The other sections are small
and sent whole. If a file was cut or replaced, as when a run resumes, `fresh` is true and everything is sent again.

Every text passes `visible`, because a policy may write hostile text.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qarl_jax.loss.common.diagnostics import EDGES
from qarl_jax.loss.common.token_effects import FATES
from qarl_jax.observe.tail import Tail
from qarl_jax.observe.terminal import held_out_score
from qarl_jax.observe.trackers.tracker import flat
from qarl_jax.types import UserError

COLUMNS = 120
"""Most columns of a picture over the steps of a run; neighbouring steps share one."""

STEPS_TIMED = 60
"""Steps of a timeline, the newest."""

HEAD = 120
"""Characters of a prompt or response in a list of samples."""

DROPPED = ("above", "below", "rejected")
"""Fates of a token that had a signal and lost its gradient."""

POSITIONS = sorted({round(2 ** (k / 2)) for k in range(36)})
"""Upper ends of bins of token positions, counted from 1."""

_FILES = ("metrics", "eval", "samples", "histograms", "timeline")
_OPTIONS = (
    "clip_low",
    "clip_high",
    "neg_clip_low",
    "neg_clip_high",
    "dual_clip",
    "mismatch",
    "mismatch_cap",
    "bands",
    "divergence",
)
_JOINERS = "\u200c\u200d"  # part of words in some scripts, and of emoji


class RunData:
    """The data of one run that the page shows, updated from the run's files.

    Args:
      name: the run's name in legends.
      steps: number of steps, spread over the run, whose samples are kept in full (for a report). None: one line for
        each sample of every step.
      most: most bytes of a file that one call of `look` reads; -1: all. `part` has `more` if bytes are left.
    """

    def __init__(self, folder: Path, name: str, *, steps: int | None = None, most: int = -1):
        self.folder, self.name, self._steps, self._most = folder, name, steps, most
        self._generation = 0
        self._begin()

    def _begin(self) -> None:
        self._tails = {name: Tail(self.folder / f"{name}.jsonl", self._most) for name in _FILES}
        self._records: dict[str, list[dict[str, Any]]] = {name: [] for name in _FILES if name != "samples"}
        self._samples: list[dict[str, Any]] = []
        self._offsets: list[int] = []
        self._positions: dict[int, np.ndarray] = {}
        self._about: tuple[tuple[int, ...], dict[str, Any]] = ((), {})
        self._told = 0  # counts what `_about` has been

    def look(self) -> None:
        """Reads the lines that were written since the last call."""
        for name, tail in self._tails.items():
            anew, lines = tail.read()
            if anew:
                self._generation += 1
                self._begin()
                return self.look()
            for offset, line in lines:
                record = _parsed(line, tail.path)
                if name != "samples":
                    self._records[name].append(record)
                    continue
                self._samples.append(summary(record))
                self._offsets.append(offset)
                _add_positions(self._positions, record)
        return None

    def part(self, have: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
        """Returns (news since `have`, the new `have`). `have`: counts returned by an earlier call; {} at first.

        Raises:
          UserError: a file is damaged.
        """
        self.look()
        fresh = have.get("generation") != self._generation
        have = {} if fresh else have
        counts = {name: len(records) for name, records in self._records.items()} | {"samples": len(self._samples)}
        new = {name: counts[name] > have.get(name, 0) for name in counts}
        out: dict[str, Any] = {"name": self.name, "fresh": fresh}
        if any(tail.more for tail in self._tails.values()):
            out["more"] = True
        changed = self._mtime("run.json"), counts["eval"], self._mtime("config.yaml")
        if self._about[0] != changed:
            self._about = changed, about(self.folder, self._records["eval"])
            self._told += 1
        if fresh or have.get("about") != self._told:
            out["about"] = self._about[1]
        at = have.get("metrics", 0)
        if new["metrics"]:
            out["metrics"] = columns(self._records["metrics"][at:]) | {"from": at}
        if new["eval"]:
            out["eval"] = [numbers(record) for record in self._records["eval"]]
        if new["samples"]:
            at = 0 if self._steps is not None else have.get("samples", 0)
            out["samples"] = {"from": at, "rows": self._full() if self._steps is not None else self._samples[at:]}
            out["positions"] = positions(self._positions)
        if new["histograms"]:
            out["band"] = band(self._records["histograms"], self._about[1].get("loss", {}))
            out["flips"] = flips(self._records["histograms"])
        if new["timeline"]:
            out["timeline"] = self._records["timeline"][-STEPS_TIMED:]
        age = self._mtime("metrics.jsonl")
        out["written"] = age / 1e9 if age else None
        return out, counts | {"generation": self._generation, "about": self._told}

    def sample(self, index: int) -> dict[str, Any]:
        """Returns a sample with all its texts and tokens. Raises IndexError if no sample has this number."""
        if not 0 <= index < len(self._offsets):
            raise IndexError(index)
        with self._tails["samples"].path.open("rb") as file:
            file.seek(self._offsets[index])
            return full(json.loads(file.readline()))

    def find(self, text: str) -> list[int]:
        """Finds the numbers of samples with a text in prompt, response, answer or uid; ignores case."""
        wanted, out = text.casefold(), []
        raw = wanted.encode() if wanted.isascii() and wanted.isprintable() and not set(wanted) & set('"\\') else b""
        with self._tails["samples"].path.open("rb") as file:
            for number, offset in enumerate(self._offsets):
                file.seek(offset)
                line = file.readline()
                if raw not in line.lower():  # JSON has such a text as it is
                    continue
                record = json.loads(line)
                said = (str(record.get(key) or "") for key in ("uid", "prompt", "response", "answer"))
                if any(wanted in one.casefold() for one in said):
                    out.append(number)
        return out

    def _full(self) -> list[dict[str, Any]]:
        shown = set(spread(sorted({row["step"] for row in self._samples}), self._steps or 0))
        return [row | {"full": self.sample(number)} for number, row in enumerate(self._samples) if row["step"] in shown]

    def _mtime(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_mtime_ns
        except OSError:
            return 0


def _parsed(line: bytes, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("step", record.get("version")), int):
            return record
    except ValueError:
        pass
    raise UserError(f"{path} is damaged: it has a line that is no record of a step.")


# ---- metrics --------------------------------------------------------------------------------------------------------


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a record."""
    return {key: value for key, value in record.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Converts lines of metrics.jsonl to `steps` and `values` by metric, each [steps]; None for a missing number."""
    rows = [numbers(record) for record in records]
    names = sorted({key for row in rows for key in row} - {"step"})
    values = {name: [_short(row.get(name)) for row in rows] for name in names}
    return {"steps": [record["step"] for record in records], "values": values}


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def buckets(steps: Sequence[Any], most: int = COLUMNS) -> list[tuple[int, int]]:
    """Divides the steps into at most `most` ranges of indices, one per column of a picture."""
    width = max(1, math.ceil(len(steps) / most))
    return [(at, min(at + width, len(steps))) for at in range(0, len(steps), width)]


# ---- pictures -------------------------------------------------------------------------------------------------------


def limits(loss: Mapping[str, Any]) -> dict[str, Any]:
    """Computes the loss's band from its options: `level`, and edges of log-ratios by the advantage's sign.

    Example: TBPO -> {"level": "response", "pos": [None, 4e-4], "neg": [-3e-4, 7e-4]}. Empty if the loss has no single
    band: DPPO's edges are divergences, and `bands` other than fixed differ from response to response.
    """
    varies = loss.get("bands", "fixed") != "fixed" or loss.get("name") == "dppo"
    if not loss.get("name") or not loss.get("clip_high") or varies:
        return {}
    high, low = math.log1p(loss["clip_high"]), loss.get("neg_clip_low") or loss.get("clip_low")
    above = math.log1p(loss["neg_clip_high"]) if loss.get("neg_clip_high") else None
    if above is None and loss.get("dual_clip"):
        above = math.log(loss["dual_clip"])
    below = math.log1p(-low) if low and low < 1 else None
    level = "response" if loss["name"] in ("tbpo", "gspo") else "token"
    return {"level": level, "pos": [None, high], "neg": [below, above]}


def band(records: Sequence[Mapping[str, Any]], loss: Mapping[str, Any]) -> dict[str, Any]:
    """Sums histograms of log-ratios for the page: counts [bins] per kind and range of steps, with the loss's band."""
    records = [record for record in records if any(key.startswith("hist/") for key in record)]
    ranges = buckets(records)
    kinds = sorted({key for record in records for key in record if key.startswith("hist/")})
    summed = {
        kind.removeprefix("hist/"): [
            np.sum([r[kind] for r in records[a:b] if kind in r] or np.zeros((1, len(EDGES) + 1), int), axis=0).tolist()
            for a, b in ranges
        ]
        for kind in kinds
    }
    steps = [(records[a]["step"], records[b - 1]["step"]) for a, b in ranges]
    return {"edges": [float(f"{edge:.5g}") for edge in EDGES], "steps": steps, "kinds": summed, "limits": limits(loss)}


def flips(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Averages shares of changed codes for the page: per weight and range of steps, a share [layers]."""
    records = [record for record in records if any(key.startswith("flips/") for key in record)]
    ranges = buckets(records)
    names = sorted({key for record in records for key in record if key.startswith("flips/")})
    out = {}
    for name in names:
        rows = [[r[name] for r in records[a:b] if name in r] for a, b in ranges]
        out[name.removeprefix("flips/")] = [
            [None if None in layer else float(f"{sum(layer) / len(layer):.3g}") for layer in zip(*group, strict=True)]
            for group in rows
        ]
    return {"steps": [(records[a]["step"], records[b - 1]["step"]) for a, b in ranges], "weights": out}


def _add_positions(sums: dict[int, np.ndarray], record: Mapping[str, Any]) -> None:
    """Adds a sample's tokens to the sums of its step: [bins, 3] of |log-ratio|, its maximum, and tokens."""
    tokens = record.get("tokens") or {}
    found = tokens.get("mismatch") or []
    at, left_out = tokens.get("left_out", [len(found), 0])
    mine = sums.setdefault(record["step"], np.zeros((len(POSITIONS), 3)))
    index, value = _logs(found)
    if not len(index):
        return
    index = np.where(index < at, index, index + left_out)
    bins = np.minimum(np.searchsorted(POSITIONS, index + 1), len(POSITIONS) - 1)
    np.add.at(mine[:, 0], bins, value)
    np.maximum.at(mine[:, 1], bins, value)
    np.add.at(mine[:, 2], bins, 1)


def positions(sums: Mapping[int, np.ndarray]) -> dict[str, Any]:
    """Computes mean and maximum of |log learner - log sampler| by token position, for both halves of a run."""
    steps = sorted(sums)
    halves = [steps[: len(steps) // 2], steps[len(steps) // 2 :]]
    out = []
    for half in filter(None, halves):
        stacked = np.stack([sums[step] for step in half])
        total, most, count = stacked[..., 0].sum(0), stacked[..., 1].max(0), stacked[..., 2].sum(0)
        rows = [(POSITIONS[i], total[i] / count[i], most[i], int(count[i])) for i in np.flatnonzero(count)]
        words = f"step {half[0]}" if len(half) == 1 else f"steps {half[0]} to {half[-1]}"
        out.append({"label": words, "rows": [[p, float(f"{m:.4g}"), float(f"{x:.4g}"), n] for p, m, x, n in rows]})
    return {"halves": out}


# ---- samples --------------------------------------------------------------------------------------------------------


def spread(values: Sequence[int], most: int) -> list[int]:
    """Picks at most `most` of the values, evenly, with both ends. Example: spread([0, 1, 2, 3, 4], 3) = [0, 2, 4]."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[-1:]) * most
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a sample's entry in the page's list. Its `strong` shows how far tokens are from neutral."""
    advantage, cut, tokens = record.get("advantage"), record.get("cut") or {}, record.get("tokens") or {}
    length = record.get("response_len")
    out = {
        "step": record["step"],
        "uid": visible(str(record.get("uid", ""))),
        "head": visible(str(record.get("response") or "")[:HEAD]).replace("↵\n", "↵ "),
        "reward": record.get("reward"),
        "advantage": advantage,
        "sign": "unknown" if advantage is None else "pos" if advantage > 0 else "neg" if advantage < 0 else "zero",
        "length": length,
        "finish": record.get("finish_reason"),
        "ratio": record.get("seq_ratio"),
        "mismatch": record.get("seq_mismatch"),
        "cut": cut,
        "dropped": sum(cut.get(fate, 0) for fate in DROPPED),
    }
    if tokens:
        out["strong"] = strong(tokens, advantage)
    return out


def strong(tokens: Mapping[str, Sequence[float | None]], advantage: float | None) -> list[float]:
    """Computes 95th percentiles over a sample's tokens: |log| of ratio, mismatch and weight, and |advantage * gain|."""
    found = [_logs(tokens.get(key) or ())[1] for key in ("ratio", "mismatch", "weight")]
    gains = np.array(tokens.get("gain") or (), float)
    found.append(np.abs(gains[(gains != 0) & np.isfinite(gains)]) * abs(advantage or 0.0))
    return [float(f"{np.sort(x)[int(0.95 * (len(x) - 1))]:.3g}") if len(x) else 0.0 for x in found]


def _logs(ratios: Sequence[float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Finds positive numbers, and the |log| of each. Arguments: a column of a sample, None where unknown."""
    values = np.array(ratios, float)  # None becomes NaN
    where = np.flatnonzero(values > 0)
    return where, np.abs(np.log(values[where]))


def full(record: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a sample's detailed view: its texts, and columns of numbers for its tokens."""
    found = dict(record.get("tokens") or {})
    texts, fates = found.pop("text", []), found.get("fate", [])
    at, count = found.pop("left_out", [len(texts), 0])
    advantage = record.get("advantage")
    if "gain" in found and advantage is not None:
        found["push"] = [None if gain is None else round(advantage * gain, 5) for gain in found["gain"]]
    turns = [turn | {key: visible(turn[key]) for key in ("text", "observation")} for turn in record.get("turns") or ()]
    return summary(record) | {
        "prompt": visible(record.get("prompt") or ""),
        "response": visible(record.get("response") or ""),
        "answer": visible(str(record.get("answer") or "")),
        "version": record.get("policy_version"),
        "update": record.get("update"),
        "updates": record.get("updates"),
        "tokens": [visible(text) or "·" for text in texts],
        "fates": [FATES[fate] for fate in fates],
        "left_out": [at, count],
        "turns": turns,
        "observed": observed(turns, at, count),
        "columns": {key: values for key, values in found.items() if key != "fate"},
    }


def observed(turns: Sequence[Mapping[str, Any]], at: int, left_out: int) -> dict[int, str]:
    """Maps the index of a shown token to the observation before it. `left_out` drawn tokens from `at` on are not shown.

    Args:
      turns: a response's turns in order, with "tokens" (number drawn) and "observation" (text after them, or "").

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
    """Makes invisible characters visible: control characters as symbols, others (such as those that reverse text) as
    [U+202E]; lone surrogates become U+FFFD. Line breaks still break.
    """
    out = []
    for character in text:
        code = ord(character)
        if 0x20 <= code < 0x7F:
            out.append(character)
        elif character == "\n":
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


# ---- the run --------------------------------------------------------------------------------------------------------


def about(folder: Path, held_out: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Describes a run: `rows` of (label, text), `config` as text, `settings` by name, `loss`, and `total` steps.

    Raises:
      UserError: run.json is damaged.
    """
    manifest: dict[str, Any] = {}
    if (folder / "run.json").is_file():
        try:
            manifest = json.loads((folder / "run.json").read_text())
        except ValueError as error:
            raise UserError(f"{folder / 'run.json'} is not JSON ({error}).") from None
    cfg, starts = manifest.get("config") or {}, manifest.get("starts") or []
    start = starts[-1] if starts else {}
    quant, loss = cfg.get("quant") or {}, cfg.get("loss") or {}
    rows = [("folder", str(folder))]
    if start.get("command"):
        rows.append(("command", " ".join(["train", *start["command"][1:]])))
    if cfg.get("model"):
        size = f", {start['parameters']:,} parameters" if "parameters" in start else ""
        rows.append(("policy", f"{cfg['model']['path']}{size}"))
    if quant:
        sampler = quant.get("rollout") or quant["forward"]
        same = sampler == quant["forward"]
        rows.append(("scheme", quant["forward"] if same else f"{quant['forward']}; sampler {sampler}"))
        if quant.get("backward", "bf16") != "bf16":
            rows.append(("backward", quant["backward"]))
    if loss:
        options = ", ".join(f"{key} {number(value)}" for key, value in loss.items() if key in _OPTIONS and value)
        rows.append(("loss", f"{loss['name']} ({options})" if options else loss["name"]))
    rows += [(f"from step {step}", "; ".join(changed)) for step, changed in _changes(starts)]
    if len(held_out) > 1:
        rows.append(("held out", f"{held_out_score(held_out[0])} → {held_out_score(held_out[-1])}"))
    if start.get("git"):
        rows.append(("code", start["git"]))
    if start.get("devices"):
        devices = start["devices"]
        rows.append(("devices", devices if isinstance(devices, str) else ", ".join(devices)))
    file = folder / "config.yaml"
    return {
        "rows": [(label, visible(text)) for label, text in rows],
        "config": file.read_text(errors="replace") if file.is_file() else "",
        "settings": {key: number(value) for key, value in flat(cfg).items()},
        "loss": loss,
        "total": (cfg.get("train") or {}).get("steps"),
    }


def _changes(starts: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[str]]]:
    """(step, settings that changed with it) of the starts whose steps no later start trained anew."""
    out: list[tuple[int, list[str]]] = []
    for start in starts:
        step = start.get("step", 0)
        out = [*(one for one in out if one[0] < step), (step, start.get("changed") or [])]
    return [one for one in out if one[1]]


def number(value: Any) -> str:
    """Formats a number with at most 4 digits after rounding; None as a dash, any other value as text."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.4g}"
