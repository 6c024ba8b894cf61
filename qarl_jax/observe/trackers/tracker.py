# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of a tracker, and the run that it is told about."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

COLUMNS = (
    *("step", "uid", "prompt", "response", "answer", "reward", "advantage", "finish_reason", "response_len"),
    *("policy_version", "seq_ratio", "seq_mismatch"),
)
"""Columns of the table of samples; tokens and their numbers stay in samples.jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracked:
    """A run, as a tracker is given it.

    Attributes:
      id: stands in run.json; a resumed run keeps it.
      name: the folder's.
      known: the tracker's own name for this run, from an earlier process; empty: it is new there.
      first: the step that this process begins with.
    """

    id: str
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    known: str = ""
    first: int = 0


class Tracker(Protocol):
    """Hands records on. It lives in a process of its own, where it may block, raise or die.

    Made with a `Tracked`. A module imports its package when this is done, not before.

    Attributes:
      known: the tracker's own name for the run, with which a later process finds it again.
      rewinds: True if steps that were sent may be sent again, and then replace what was sent.
    """

    known: str
    rewinds: bool

    def __init__(self, run: Tracked): ...

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """One step's metrics, those that are not finite among them."""

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """One step's samples, a value for each of `COLUMNS`."""

    def flush(self) -> None:
        """There is nothing more for the moment."""

    def close(self, *, ended: bool) -> None:
        """There is nothing more at all. ended: the run was not killed and raised no error."""


def row(sample: Mapping[str, Any]) -> list[Any]:
    """A line of samples.jsonl as a row of the table. Half a character, which no file can hold, becomes "?"."""
    values = [sample.get(column) for column in COLUMNS]
    return [v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config with dotted names. Example: {"loss": {"name": "tbpo"}} -> {"loss.name": "tbpo"}."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out
