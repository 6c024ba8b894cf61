# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.observe.trackers.follower TRACKER RUN_DIR PROJECT`: sends a run's records to a tracker.

The trainer starts one per tracker. A byte on standard input says that the run ended: "0" without an error, else with
one. If the trainer is killed, the process sends what was written, and ends.

`<run_dir>/trackers/<tracker>-<id>.json` holds the last step sent. Its output is in `<tracker>.log` beside.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qarl_jax.observe.tail import Tail
from qarl_jax.observe.trackers import TRACKERS, Tracked, Tracker
from qarl_jax.observe.trackers.tracker import row

POLL_S = 0.5
"""Seconds between two looks at the files."""

LEAVE_S = 600.0
"""Seconds that a tracker may take to finish once the run has ended."""


class Follower:
    """Sends new lines of a run's files to its tracker.

    Args:
      kind: a key of `TRACKERS`.
      folder: folder of a run that has a run.json.
      project: project or experiment of the run in the tracker.
    """

    def __init__(self, kind: str, folder: Path, project: str):
        record = json.loads((folder / "run.json").read_text())
        self._state = folder / "trackers" / f"{kind}-{record['id']}.json"
        state = json.loads(self._state.read_text()) if self._state.exists() else {}
        begun = record["starts"][-1].get("step", 0)
        self._last = {name: state.get(name, -1) for name in ("metrics", "samples")}
        made = TRACKERS[kind]
        if made.rewinds:
            self._last = {name: min(step, begun - 1) for name, step in self._last.items()}
        run = Tracked(
            id=record["id"],
            name=folder.name,
            project=project,
            folder=folder,
            config=record["config"],
            known=state.get("known", ""),
            first=self._last["metrics"] + 1,
        )
        self._tracker: Tracker = made(run)
        self._files = {name: Tail(folder / f"{name}.jsonl") for name in self._last}
        self._keep()

    def look(self) -> None:
        """Sends the lines that were written since the last call."""
        steps: dict[int, dict[str, list[dict[str, Any]]]] = {}
        for name, tail in self._files.items():
            for _, line in tail.read()[1]:
                record = json.loads(line)
                if record["step"] > self._last[name]:
                    steps.setdefault(record["step"], {}).setdefault(name, []).append(record)
        for step, found in sorted(steps.items()):
            for record in found.get("metrics", ()):
                self._tracker.numbers(step, numbers(record))
            if "samples" in found:
                self._tracker.samples(step, [row(sample) for sample in found["samples"]])
            self._last |= dict.fromkeys(found, step)
        self._tracker.flush()
        if steps:
            self._keep()

    def close(self, *, ended: bool) -> None:
        """Sends the remaining lines and closes the tracker. ended: the run ended without an error."""
        self.look()
        self._tracker.close(ended=ended)

    def _keep(self) -> None:
        fresh = self._state.with_suffix(".new")
        fresh.write_text(json.dumps({"known": self._tracker.known, **self._last}))
        fresh.replace(self._state)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line of metrics.jsonl, with non-finite ones (null in the file) restored."""
    lost = {key: float(text) for key, text in record.get("nonfinite", {}).items()}
    return {key: v for key, v in record.items() if isinstance(v, (int, float)) and key != "step"} | lost


def main() -> None:
    """Follows a run until it ends or its trainer is gone."""
    kind, folder, project = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    trainer, over, said = os.getppid(), threading.Event(), []

    def listen() -> None:
        said.append(os.read(0, 1))
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    with (folder / "trackers" / f"{kind}.lock").open("a") as lock:
        with contextlib.suppress(OSError):  # not on every file system
            fcntl.lockf(lock, fcntl.LOCK_EX)  # that of a trainer killed before may still be finishing
        follower = Follower(kind, folder, project)
        while not over.wait(POLL_S) and os.getppid() == trainer:
            follower.look()
        timer = threading.Timer(LEAVE_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        follower.close(ended=said == [b"0"])


if __name__ == "__main__":
    main()
