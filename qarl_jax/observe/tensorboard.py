# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers of metrics.jsonl as TensorBoard's event files.

`tensorboardX.SummaryWriter` hands events to a thread through a queue. An error of the disk ends that thread unseen, and
the trainer then waits for room in the queue for ever. Here the trainer writes each step itself, with the same library's
file format; what cannot be written is told once, and the run goes on without these files.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl_jax.types import UserError

log = logging.getLogger(__name__)

_FLUSH_S = 10
"""Seconds between flushes, each of which waits for the disk."""


class EventFile:
    """One event file of a run. Created by the first step.

    Args:
      folder: where TensorBoard looks.
      first: the step that the run goes on with; readers drop older events from it on. 0: a fresh start.
    """

    def __init__(self, folder: Path, first: int = 0):
        self._folder, self._first = folder, first
        self._writer: Any = None
        self._flushed, self._given_up = time.monotonic(), False

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends every number of a line of metrics.jsonl. Never raises what the disk raises."""
        if self._given_up:
            return
        try:
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.summary import scalar
        except ImportError:
            raise UserError(
                "tensorboardX is missing: pip install tensorboardX, or set log.tensorboard=false."
            ) from None
        try:
            writer = self._writer = self._writer or self._opened()
            for key, value in record.items():
                if isinstance(value, (int, float)) and key != "step":
                    writer.write_event(Event(wall_time=time.time(), step=record["step"], summary=scalar(key, value)))
            if time.monotonic() - self._flushed > _FLUSH_S:
                writer.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            self._given_up = True
            log.warning(
                "Cannot write %s: %s. The run goes on without TensorBoard's files; metrics.jsonl has the same numbers.",
                *(self._folder, error.strerror or error),
            )

    def close(self) -> None:
        """Writes what is left to the disk. Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()

    def _opened(self) -> Any:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder.mkdir(parents=True, exist_ok=True)
        writer = EventsWriter(str(self._folder / "events"))
        if self._first:
            writer.write_event(Event(step=self._first, file_version="brain.Event:2"))
            writer.write_event(Event(step=self._first, session_log=SessionLog(status=SessionLog.START)))
        return writer
