# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tracks a run with MLflow at MLFLOW_TRACKING_URI: a server, or by default a database in the working folder."""

from __future__ import annotations

import collections
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qarl_jax.observe.tail import Tail
from qarl_jax.observe.trackers.tracker import COLUMNS, Tracked, flat, row

_TABLE = "samples.json"
_NEWEST = 1000
"""Samples in the table, which is one file that is sent whole."""

_EVERY_S = 60.0
"""Seconds between two of its versions."""

_PARAMS, _LONGEST = 100, 500
"""Parameters in one call, and characters of one, that every server takes."""


class Tracker:
    """Sends records to MLflow; see `tracker.Tracker`."""

    rewinds = False

    def __init__(self, run: Tracked):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        if run.known:
            self.known = run.known
            self._client.update_run(self.known, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(run.project)
            experiment = found.experiment_id if found else self._client.create_experiment(run.project)
            self.known = self._client.create_run(experiment, run_name=run.name, tags={"qarl.id": run.id}).info.run_id
            tables = json.dumps([{"path": _TABLE, "type": "table"}])
            self._client.set_tag(self.known, "mlflow.loggedArtifacts", tables)  # as a table in its pages
            values = [Param(key, str(value)[:_LONGEST]) for key, value in flat(run.config).items()]
            for at in range(0, len(values), _PARAMS):
                self._client.log_batch(self.known, params=values[at : at + _PARAMS])
        self._rows: collections.deque[list[Any]] = collections.deque(maxlen=_NEWEST)
        for _, line in Tail(run.folder / "samples.jsonl").read()[1] if run.known else ():
            if (sample := json.loads(line))["step"] < run.first:
                self._rows.append(row(sample))
        self._sent_at, self._unsent = 0.0, False

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(key, float(value), now, step) for key, value in numbers.items()]
        for at in range(0, len(metrics), 1000):  # the most that a server takes at once
            self._client.log_batch(self.known, metrics=metrics[at : at + 1000])

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        self._rows.extend(list(row) for row in rows)
        self._unsent = True

    def flush(self) -> None:
        if self._unsent and time.monotonic() - self._sent_at > _EVERY_S:
            self._send()

    def close(self, *, ended: bool) -> None:
        if self._unsent:
            self._send()
        self._client.set_terminated(self.known, "FINISHED" if ended else "FAILED")

    def _send(self) -> None:
        self._client.log_dict(self.known, {"columns": list(COLUMNS), "data": list(self._rows)}, _TABLE)
        self._sent_at, self._unsent = time.monotonic(), False
