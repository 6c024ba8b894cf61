# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes event files for TensorBoard to the run's folder `tensorboard/`, with samples as text."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qarl_jax.observe.trackers.tracker import COLUMNS, Tracked


class Tracker:
    """Writes records as TensorBoard events; see `tracker.Tracker`."""

    rewinds = True

    def __init__(self, run: Tracked):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar, text

        folder = run.folder / "tensorboard"
        before = folder.is_dir() and any(folder.iterdir())
        folder.mkdir(exist_ok=True)
        self.known = str(folder)
        self._event, self._scalar, self._text = Event, scalar, text
        self._writer = EventsWriter(str(folder / "events"))
        if before:  # readers drop older events from this step on
            self._writer.write_event(Event(step=run.first, file_version="brain.Event:2"))
            self._writer.write_event(Event(step=run.first, session_log=SessionLog(status=SessionLog.START)))

    def numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            if math.isfinite(value):
                self._write(step, self._scalar(key, value))

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        for number, row in enumerate(rows):
            words = json.dumps(dict(zip(COLUMNS, row, strict=True)), indent=1, ensure_ascii=False)
            self._write(step, self._text(f"samples/{number}", f"~~~\n{words}\n~~~"))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, *, ended: bool) -> None:
        self._writer.close()

    def _write(self, step: int, summary: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
