# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tracks a run with Trackio: on this machine under TRACKIO_DIR (`trackio show`), or in the Space TRACKIO_SPACE_ID."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qarl_jax.observe.trackers.tracker import COLUMNS, Tracked


class Tracker:
    """Sends records to Trackio, which finds a run by name: the name ends with the run's id. See `tracker.Tracker`."""

    rewinds = False

    def __init__(self, run: Tracked):
        import trackio

        self._trackio, self.known = trackio, run.known or f"{run.name}-{run.id}"
        trackio.init(project=run.project, name=self.known, config=dict(run.config), resume="allow", embed=False)

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._trackio.log(dict(numbers), step=step)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = self._trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._trackio.log({"samples": table}, step=step)

    def flush(self) -> None: ...

    def close(self, *, ended: bool) -> None:
        self._trackio.finish()
