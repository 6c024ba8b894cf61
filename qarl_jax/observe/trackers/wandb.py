# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tracks a run with Weights & Biases; WANDB_BASE_URL, WANDB_ENTITY, WANDB_MODE=offline choose where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qarl_jax.observe.trackers.tracker import COLUMNS, Tracked


class Tracker:
    """Sends records to Weights & Biases; see `tracker.Tracker`. Its files are in the run's folder `wandb/`."""

    rewinds = False

    def __init__(self, run: Tracked):
        import wandb

        settings = wandb.Settings(console="off")
        where: dict[str, Any] = {"project": run.project, "name": run.name, "dir": str(run.folder)}
        self._wandb, self.known = wandb, run.id
        self._run = wandb.init(**where, id=run.id, resume="allow", config=dict(run.config), settings=settings)

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({"samples": table}, step=step)

    def flush(self) -> None: ...

    def close(self, *, ended: bool) -> None:
        self._run.finish(exit_code=0 if ended else 1)
