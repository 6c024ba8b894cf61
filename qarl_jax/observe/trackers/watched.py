# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts the trackers' processes from the trainer, warns if one dies, and waits for them at the run's end."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from qarl_jax.observe.trackers import PACKAGES

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""Seconds that a run waits at its end for its trackers; one that takes longer finishes by itself."""


def missing(kinds: Iterable[str]) -> list[str]:
    """Lists the trackers whose package is not installed, without importing any."""
    return [kind for kind in kinds if importlib.util.find_spec(PACKAGES.get(kind, kind)) is None]


class Watched:
    """A tracker's process, as the trainer sees it. No method raises, and only `wait` waits.

    Args:
      kind: a key of `TRACKERS`.
      folder: folder of a run that has a run.json.
      project: project or experiment of the run in the tracker.
    """

    def __init__(self, kind: str, folder: Path, project: str):
        self._kind, self._log = kind, folder / "trackers" / f"{kind}.log"
        self._process: subprocess.Popen[bytes] | None = None
        package = str(Path(__file__).parents[3])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "qarl_jax.observe.trackers.follower", kind, str(folder), project]
        try:
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab") as said:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=said,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                    start_new_session=True,  # Ctrl-C is the trainer's
                )
        except OSError as error:
            self._lost(error.strerror or str(error))

    def check(self) -> None:
        """Logs a warning, once, if the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._hang_up(b"")
            self._lost(_last_line(self._log))

    def end(self, *, ended: bool) -> None:
        """Tells the tracker to send the remaining records and finish. ended: the run was not stopped by an error."""
        self.check()
        self._hang_up(b"0" if ended else b"1")

    def wait(self, seconds: float) -> None:
        """Waits at most `seconds` for a tracker that was told to end."""
        process = self._process
        if process is None:
            return
        try:
            if process.wait(max(seconds, 0.0)):
                self._lost(_last_line(self._log))
        except subprocess.TimeoutExpired:
            log.warning("%s is still busy and finishes by itself (process %d, %s).", self._kind, process.pid, self._log)
        self._process = None

    def _hang_up(self, word: bytes) -> None:
        pipe = self._process.stdin if self._process is not None else None
        if pipe is not None:
            with contextlib.suppress(OSError):  # it is gone
                pipe.write(word)
                pipe.flush()
            with contextlib.suppress(OSError):
                pipe.close()

    def _lost(self, why: str) -> None:
        self._process = None
        log.warning(
            "%s: %s. The run goes on without it; metrics.jsonl and samples.jsonl have everything, and a resumed run"
            " hands on what is missing (%s).",
            *(self._kind, why.rstrip("."), self._log),
        )


def close(trackers: Sequence[Watched], *, ended: bool) -> None:
    """Ends all trackers at once, and waits for them for `PATIENCE_S` seconds in all."""
    for tracker in trackers:
        tracker.end(ended=ended)
    deadline = time.monotonic() + PATIENCE_S
    for tracker in trackers:
        tracker.wait(deadline - time.monotonic())


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError as error:
        return error.strerror or str(error)
    return lines[-1] if lines else "it ended without a word"
