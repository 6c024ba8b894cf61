# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training (`train.asynchronous`): one thread samples with an engine, another publishes to it.

    schedule = Schedule(max_staleness, lockstep, steps)    # when a batch may begin, and when a publish
    engine = SharedEngine(engine, schedule)                # one call at a time; a waiting publish goes first

The batch of step s is begun when version s - max_staleness is being served. Versions come in where the engine is free:
between batches, or every `chunk` tokens. In lockstep a publish waits until the batches due under the served version
have been sampled (docs/asynchronous.md).

Sources: AReaL (arXiv 2505.24298), LlamaRL (arXiv 2505.24034).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from qarl_jax.rollout import Around, Drawn, PolicyWeights, Request, RolloutEngine, SamplingConfig, continuation
from qarl_jax.types import Completion, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Asynchronous training: the engine samples later steps while the learner updates.

    Attributes:
      max_staleness: k: step s trains on tokens of versions s - k and newer; 0: off, the sampler waits for the learner.
      chunk: tokens after which sequences are interrupted for a new version; 0: a version comes in between batches.
      lockstep: a version comes in after counted batches (on) or when ready (off); auto: on with the embedded sampler.
    """

    max_staleness: int = 0
    chunk: int = 0
    lockstep: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        for name in ("max_staleness", "chunk"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}; 0 turns it off.")
        if self.chunk and not self.max_staleness:
            raise UserError(f"chunk={self.chunk} decides nothing at max_staleness=0 (asynchronous training off).")
        if self.chunk and self.lockstep == "on":
            raise UserError(f"chunk={self.chunk} decides nothing in lockstep, where a batch has one version; set 0.")

    @property
    def is_on(self) -> bool:
        """Tells whether batches are sampled ahead of the learner."""
        return self.max_staleness > 0


class StoppedError(Exception):
    """Raised in a sampling thread when the run ends: its batch is not needed."""


class Schedule:
    """Decides when the sampling thread may begin a batch and when the learner may publish. One lock guards its state.

    Args:
      max_staleness: versions by which a batch may be older than its step.
      lockstep: True if a publish waits until the batches due under the served version are sampled.
      steps: the run's length; no batch is begun for later steps.
    """

    def __init__(self, max_staleness: int, lockstep: bool, steps: int):
        self.max_staleness, self.lockstep, self.steps = max_staleness, lockstep, steps
        self.changed = threading.Condition()
        self.version = -1  # being served
        self.sampled = -1  # the last step whose batch is complete
        self.started = False  # True once a thread samples: before, no batch is due
        self.stopped = False

    def begin(self, step: int) -> None:
        """Waits until the batch of a step may be begun. Raises `StoppedError`."""
        self._wait(lambda: self.version >= step - self.max_staleness)

    def end(self, step: int) -> None:
        """Records that the batches up to this step are complete."""
        with self.changed:
            self.sampled = max(self.sampled, step)
            self.changed.notify_all()

    def before_publish(self, version: int) -> None:
        """Waits until `version` may replace the served version."""
        if self.lockstep and self.started:
            due = min(self.version + self.max_staleness, self.steps - 1)
            with contextlib.suppress(StoppedError):
                self._wait(lambda: self.sampled >= due)

    def published(self, version: int) -> None:
        """Records that `version` is being served."""
        with self.changed:
            self.version = version
            self.changed.notify_all()

    def stop(self) -> None:
        """Wakes every waiting thread: the run ends."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def _wait(self, ready: Any) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or ready())
            if self.stopped:
                raise StoppedError


class SharedEngine(Around):
    """A RolloutEngine that two threads may call. Calls exclude each other; a waiting publish goes first.

    Args:
      engine: the sampler. Closing this engine closes it.
      schedule: asked before a publish and notified after it.
      chunk: tokens per sequence after which a sampling call lets another call in; 0: only when it has ended.
    """

    def __init__(self, engine: RolloutEngine, schedule: Schedule, chunk: int = 0):
        super().__init__(engine)
        self.schedule, self._chunk = schedule, chunk
        self._free = threading.Condition()
        self._taken, self._urgent = False, 0
        self._owner: threading.Thread | None = None  # that alone may call

    @contextlib.contextmanager
    def _alone(self, *, urgent: bool = False) -> Iterator[None]:
        mine = None, threading.current_thread()
        with self._free:
            self._urgent += urgent
            self._free.wait_for(lambda: not self._taken and self._owner in mine and (urgent or not self._urgent))
            self._urgent -= urgent
            self._taken = True
        try:
            yield
        finally:
            with self._free:
                self._taken = False
                self._free.notify_all()

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        if self.schedule.lockstep:  # a publish waits for the batches that are due, and no other is begun
            yield
            return
        with self._alone(urgent=True):
            self._owner = threading.current_thread()
        try:
            yield
        finally:
            with self._free:
                self._owner = None
                self._free.notify_all()

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        self.schedule.before_publish(version)
        with self._alone(urgent=True):
            report = super().publish(weights, version)
        self.schedule.published(version)
        return report

    def draw(self, requests: Sequence[Request], *, sampling: SamplingConfig) -> Drawn:
        if self._chunk:
            yield from continuation.in_chunks(self._piece, requests, sampling, self._chunk)
            return
        with self._alone(), contextlib.closing(self.engine.draw(requests, sampling=sampling)) as drawn:
            yield from drawn

    def _piece(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Completion]:
        if self.schedule.stopped and threading.current_thread() is not threading.main_thread():
            raise StoppedError
        with self._alone():
            return self.engine.extend(requests, sampling=sampling)
