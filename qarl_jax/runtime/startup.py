# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs and times the concurrent work before a run's first step (`time/start_*`).

    starting = SideBySide()
    starting.background("programs", compile_them)      # in a thread
    with starting.span("weights"):
        ...
    starting.join()                                    # raises what a thread raised
    starting.seconds()   # {"time/start_programs_s": 31.0, "time/start_weights_s": 9.0, "time/start_s": 33.0}

Other processes (the bridge) report their seconds separately. Spans overlap, so their sum exceeds `time/start_s`, the
time that the user waited.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from qarl_jax.metrics import TIME


class SideBySide:
    """Timed blocks and background threads of a start.

    Args:
      clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = clock()
        self._spans: dict[str, float] = {}
        self._threads: list[threading.Thread] = []
        self._raised: list[BaseException] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times a block."""
        start = self._clock()
        try:
            yield
        finally:
            self._spans[name] = self._spans.get(name, 0.0) + self._clock() - start

    def background(self, name: str, call: Callable[[], object]) -> None:
        """Runs `call` in a thread and times it."""

        def run() -> None:
            try:
                with self.span(name):
                    call()
            except BaseException as error:  # told by `join`, where somebody needs what was to be made
                self._raised.append(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def wait(self) -> None:
        """Waits until all threads have ended, and ignores their errors. Call it before the process exits."""
        for thread in self._threads:
            thread.join()

    def join(self) -> None:
        """Waits as `wait` does, and raises the first error of a thread. Idempotent."""
        self.wait()
        if self._raised:
            raise self._raised[0]

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of every span, and since the start."""
        spans = {f"{TIME}start_{name}_s": seconds for name, seconds in self._spans.items()}
        return spans | {f"{TIME}start_s": self._clock() - self._start}


def words(seconds: dict[str, float]) -> str:
    """Describes the start: "ready after 33.0 s, side by side: programs 31.0 s, weights 9.0 s"."""
    prefix = f"{TIME}start_"
    parts = {key.removeprefix(prefix).removesuffix("_s"): value for key, value in seconds.items()}
    whole = parts.pop("s")
    listed = ", ".join(f"{name} {value:.1f} s" for name, value in parts.items())
    return f"ready after {whole:.1f} s, side by side: {listed}" if listed else f"ready after {whole:.1f} s"
