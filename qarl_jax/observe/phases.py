# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the seconds of a step's phases (rollout, reward, update, ...), and when each began and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from qarl_jax.metrics import TIME, phases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
    """Begin and end of a step's phases, for the timeline of the report.

    Attributes:
      spans: (phase, begin, end) in seconds since the step's begin; phases of other threads have the prefix `beside/`.
      seconds: length of the step. ended: its end, in seconds since 1970.
    """

    spans: Sequence[tuple[str, float, float]] = ()
    seconds: float = 0.0
    ended: float = 0.0


def _add(spans: list[tuple[str, float, float]], new: tuple[str, float, float]) -> None:
    """Appends a span, or extends the phase's last span if the gap between them is too small to draw."""
    last = next((at for at in range(len(spans) - 1, max(-1, len(spans) - 9), -1) if spans[at][0] == new[0]), None)
    if last is not None and (len(spans) >= _MOST_SPANS or 0 <= new[1] - spans[last][2] < _GAP_S):
        spans[last] = (new[0], spans[last][1], max(new[2], spans[last][2]))
    elif len(spans) < _MOST_SPANS:
        spans.append(new)


_MOST_SPANS, _GAP_S = 500, 0.01


class _Picture:
    """The spans of a step, of all threads. A span that is open at the step's end continues in the next step."""

    def __init__(self, now: float):
        self._lock, self._start = threading.Lock(), now
        self._spans: list[tuple[str, float, float]] = []
        self._open: dict[object, tuple[str, float]] = {}

    def begin(self, name: str, at: float) -> object:
        key = object()
        with self._lock:
            self._open[key] = name, at
        return key

    def end(self, key: object, at: float) -> None:
        with self._lock:
            name, begin = self._open.pop(key)
            _add(self._spans, (name, max(begin - self._start, 0.0), at - self._start))

    def take(self, now: float) -> list[tuple[str, float, float]]:
        with self._lock:
            for name, begin in self._open.values():
                _add(self._spans, (name, max(begin - self._start, 0.0), now - self._start))
            spans, self._spans, self._start = self._spans, [], now
        return spans


class PhaseTimer:
    """Measures seconds per phase of a step, separately for the owner thread and for other threads (`beside/`).

    The owner is the thread that called `take` last; at first, the thread that made the timer. Every second of the owner
    is in one phase: a nested phase is subtracted from the outer one, and uncovered time is `other`. The owner's phases
    sum to `time/step_s`; those of other threads do not count there.

    Example:
      timer = PhaseTimer()
      with timer("rollout"):
          ...                     # meanwhile another thread: with timer("reward"): ...
      timer.take()   # {"time/rollout_s": 1.21, "time/beside/reward_s": 0.4, "time/other_s": 0.09, "time/step_s": 1.30}
      timer.taken    # Spans(spans=[("beside/reward", 0.7, 1.1), ("rollout", 0.0, 1.21)], ...)

    Args:
      clock: returns seconds.
      beside: a timer whose `taken` also gets this timer's spans, as those of another thread.

    Attributes:
      taken: spans of the phases between the last two calls of `take`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, beside: PhaseTimer | None = None):
        self._clock, self._owner, self._lock = clock, threading.get_ident(), threading.Lock()
        self._seconds: dict[str, float] = {}
        self._inside: list[float] = []  # per open phase, the seconds of phases within it
        self._start = clock()
        self._is_beside = beside is not None
        self._picture: _Picture = beside._picture if beside is not None else _Picture(self._start)
        self.taken = Spans()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times a block. A phase entered several times adds up; its time counts even if the block raises."""
        beside = threading.get_ident() != self._owner
        name = f"beside/{phase}" if beside else phase
        start = self._clock()
        shown = self._picture.begin(f"beside/{phase}" if self._is_beside else name, start)
        if not beside:
            self._inside.append(0.0)
        try:
            yield
        finally:
            took = self._clock() - start
            own = took
            if not beside:
                own -= self._inside.pop()
                if self._inside:
                    self._inside[-1] += took
            self._picture.end(shown, start + took)
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + own

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase and, as `time/step_s`, of the whole, since the last call; then resets."""
        now, self._owner = self._clock(), threading.get_ident()
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        out = {f"{TIME}{phase}_s": value for phase, value in seconds.items()}
        whole = now - self._start
        out[f"{TIME}other_s"] = whole - sum(phases(out).values())
        out[f"{TIME}step_s"] = whole
        if not self._is_beside:
            self.taken = Spans(spans=self._picture.take(now), seconds=whole, ended=time.time())
        self._start = now
        return out
