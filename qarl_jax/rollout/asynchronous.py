# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous training (`train.asynchronous`): an engine that samples in one thread and is published to from another.

    schedule = Schedule(cfg, steps)                    who may begin what, and when
    engine = SharedEngine(engine, schedule)            publishing and sampling take turns; publishing goes first

The batch of step s is begun when version s - max_staleness is being served. Versions come in where the engine is free:
between batches, or every `chunk` tokens. In lockstep a publish waits until the batches that are due under the version
before it have been sampled (docs/asynchronous.md).

Sources: AReaL (arXiv 2505.24298), LlamaRL (arXiv 2505.24034).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jax.sharding import Mesh

from qarl_jax.rollout import Drawn, PolicyWeights, Request, RolloutEngine, SamplingConfig, continuation
from qarl_jax.types import Completion, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sampling that goes on while the learner updates.

    Attributes:
      max_staleness: k: step s trains on tokens of versions s - k and newer; 0: off, the sampler waits for the learner.
      chunk: tokens after which sequences are interrupted for a new version; 0: a version comes in between batches.
      lockstep: versions by count ("on") or by the clock ("off"); "auto": on with the embedded sampler.
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
        """Tells whether anything is sampled ahead."""
        return self.max_staleness > 0


class StoppedError(Exception):
    """The run is ending: nobody wants what was being sampled."""


class Schedule:
    """The conditions that the two threads wait for, under one lock.

    Args:
      max_staleness: k.
      lockstep: True if a publish waits for the batches that are due before it.
      steps: the run's length; no batch is begun for later steps.
    """

    def __init__(self, max_staleness: int, lockstep: bool, steps: int):
        self.max_staleness, self.lockstep, self.steps = max_staleness, lockstep, steps
        self.changed = threading.Condition()
        self.version = -1  # being served
        self.sampled = -1  # the last step whose batch is complete
        self.stopped = False

    def begin(self, step: int) -> None:
        """Returns when the batch of a step may be begun. Raises `StoppedError`."""
        self._wait(lambda: self.version >= step - self.max_staleness)

    def end(self, step: int) -> None:
        """The batches up to this step are complete."""
        with self.changed:
            self.sampled = max(self.sampled, step)
            self.changed.notify_all()

    def before_publish(self, version: int) -> None:
        """Returns when a version may take the place of the one that is served."""
        if self.lockstep and self.version >= 0:
            due = min(self.version + self.max_staleness, self.steps - 1)
            with contextlib.suppress(StoppedError):
                self._wait(lambda: self.sampled >= due)

    def published(self, version: int) -> None:
        """A version is being served."""
        with self.changed:
            self.version = version
            self.changed.notify_all()

    def stop(self) -> None:
        """Nobody is to wait any longer."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def _wait(self, ready: Any) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or ready())
            if self.stopped:
                raise StoppedError


class SharedEngine(RolloutEngine):
    """A RolloutEngine for two threads. Calls take turns, and a publish goes before every other call that waits.

    Args:
      engine: the sampler. Closing this engine closes it.
      schedule: is asked before a publish, and notified after it.
      chunk: tokens per sequence after which a sampling call lets another call in; 0: at its end.
    """

    def __init__(self, engine: RolloutEngine, schedule: Schedule, chunk: int = 0):
        self.engine, self.schedule, self._chunk = engine, schedule, chunk
        self.version = engine.version
        self._free = threading.Condition()
        self._taken, self._urgent = False, 0

    @property
    def facts(self) -> Any:
        return self.engine.facts

    @contextlib.contextmanager
    def _alone(self, *, urgent: bool = False) -> Iterator[None]:
        with self._free:
            self._urgent += urgent
            self._free.wait_for(lambda: not self._taken and (urgent or not self._urgent))
            self._urgent -= urgent
            self._taken = True
        try:
            yield
        finally:
            with self._free:
                self._taken = False
                self._free.notify_all()

    def prepare(self, graphdef: Any) -> None:
        self.engine.prepare(graphdef)

    def hold_once(self, graphdef: Any, mesh: Mesh) -> Any:
        return self.engine.hold_once(graphdef, mesh)

    def publish(self, weights: PolicyWeights, version: int) -> dict[str, float]:
        self.schedule.before_publish(version)
        with self._alone(urgent=True):
            report = self.engine.publish(weights, version)
            self.version = self.engine.version
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

    def close(self) -> None:
        self.engine.close()
