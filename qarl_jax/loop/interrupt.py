# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Catches Ctrl-C and SIGTERM, so that a run saves a checkpoint before it ends."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Any

from qarl_jax.runtime import processes


class Interrupt:
    """Sets a flag at the first SIGINT/SIGTERM, which the loop checks; a second signal raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread (a notebook's executor, a test)
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def agreed(self) -> bool:
        """Tells whether any process was asked to stop; all processes get one answer, and all must call it."""
        return processes.any_of(self.requested)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print(f"\n{signal.Signals(number).name}: saving at the next safe point (again: stop at once)", file=sys.stderr)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
