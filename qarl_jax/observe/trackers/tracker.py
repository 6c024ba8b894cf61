# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of a tracker, and the description of a run that it gets."""

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
    """The description of a run that a tracker gets.

    Attributes:
      id: the run's id in run.json; a resumed run keeps it.
      name: name of the run's folder.
      known: the tracker's id of this run, from an earlier process; empty for a new run.
      first: the first step that this process sends.
    """

    id: str
    name: str
    project: str
    folder: Path
    config: Mapping[str, Any]
    known: str = ""
    first: int = 0


class Tracker(Protocol):
    """Sends records to a service. It runs in a separate process, where it may block, raise or die.

    The constructor takes a `Tracked`, and imports the service's package.

    Attributes:
      known: the service's id of the run, with which a later process continues it.
      rewinds: True if a step may be sent again and then replaces the earlier one.
    """

    known: str
    rewinds: bool

    def __init__(self, run: Tracked): ...

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends one step's metrics; non-finite values are among them."""

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Sends one step's samples: rows with a value for each of `COLUMNS`."""

    def flush(self) -> None:
        """Sends buffered records; called when no more lines are waiting."""

    def close(self, *, ended: bool) -> None:
        """Ends the tracked run. ended: the run was not killed and raised no error."""


def row(sample: Mapping[str, Any]) -> list[Any]:
    """Converts a line of samples.jsonl to a row of the table. Lone surrogates, which no file can hold, become "?"."""
    values = [sample.get(column) for column in COLUMNS]
    return [v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a nested config to dotted names. Example: {"loss": {"name": "tbpo"}} -> {"loss.name": "tbpo"}."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out
