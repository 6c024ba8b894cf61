# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A collector that samples batches of later steps in a thread while the learner updates (`train.asynchronous`).

    ahead = Ahead(collector, schedule, stream, first=0, state=None)     # has the interface of Collector
    ahead.collect(5)         # waits for the batch of step 5

The wrapped collector makes a step's batch from the step's number, so prompts and random keys equal those of a
synchronous run. Only the version that draws it differs; see `rollout/asynchronous.py`. Finished batches are part of a
checkpoint. A resumed run samples an unfinished batch again: in lockstep to equal bits, because the checkpoint has the
version that drew it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from qarl_jax.data import PromptStream
from qarl_jax.loop import pipeline
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.rollout import continuation, dynamic_sampling
from qarl_jax.rollout.asynchronous import Schedule, StoppedError
from qarl_jax.rollout.dynamic_sampling import Collected
from qarl_jax.types import Prompt, RolloutGroup, UserError

_PATIENCE_S = 60.0  # for the thread, at the end of a run


class Collects(Protocol):
    """The interface of a collector: a source of the groups that each step trains on."""

    def collect(self, step: int, add: pipeline.Add | None = None) -> Collected:
        """Returns the graded groups that step `step` trains on. Steps must be asked for in order.

        Args:
          add: called with graded groups as they are complete (`Collector.collect`).
        """

    def keep(self) -> None:
        """Commits the step just collected, after it was trained on; its left-over responses become state of the run."""

    def state(self) -> dict[str, Any]:
        """Returns the state after the last step kept as JSON, for a checkpoint."""


class Ahead:
    """Samples and grades the batches of later steps in a thread.

    Args:
      collector: makes the batches; called from this thread only.
      schedule: decides when a batch may begin.
      timer: measures the seconds that the learner waits.
      behind: the collector's timer; its seconds are reported as `time/ahead_*`.
      first: the first step to train: 0, or the resumed one.
      state: a checkpoint's finished batches by step; None: none.
    """

    def __init__(
        self,
        collector: Collects,
        schedule: Schedule,
        stream: PromptStream,
        *,
        timer: PhaseTimer,
        behind: PhaseTimer,
        first: int = 0,
        state: Mapping[str, Any] | None = None,
    ):
        self._collector, self._schedule, self._stream = collector, schedule, stream
        self._timer, self._behind = timer, behind
        self._ready: dict[int, tuple[Collected, dict[str, int]]] = {}  # and the index of each prompt by its uid
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._at = first
        for step in range(first, schedule.steps):
            if state is None or str(step) not in state:
                break
            batch, indices = restored(stream, state[str(step)])
            if not _is_fresh(batch, step, schedule.max_staleness):
                break  # max_staleness was lowered: it is sampled anew
            self._ready[step] = batch, indices
        self._next = first + len(self._ready)
        if self._ready:
            schedule.end(self._next - 1)

    def collect(self, step: int, add: pipeline.Add | None = None) -> Collected:
        """Waits for the step's groups, and returns them. They stay until `keep`, in case the step is dropped.

        Args:
          add: never called, because the groups of a step are returned together.

        Raises:
          Exception: any error that ended the sampling thread.
        """
        if self._thread is None:
            self._schedule.started = True
            self._thread = threading.Thread(target=self._run, name="sampling ahead", daemon=True)
            self._thread.start()
        changed = self._schedule.changed
        with self._timer("rollout"), changed:
            changed.wait_for(lambda: step in self._ready or self._failure is not None)
            if step not in self._ready:
                assert self._failure is not None
                raise self._failure
            batch, waiting = self._ready[step][0], len(self._ready) - 1
        if not _is_fresh(batch, step, self._schedule.max_staleness):
            raise RuntimeError(f"the batch of step {step} holds tokens older than train.asynchronous.max_staleness")
        self._at = step
        responses = [completion for group in batch.groups for completion in group.completions]
        more = continuation.lags(responses, step) | {"time/ahead_batches": float(waiting)}
        return dataclasses.replace(batch, metrics=batch.metrics | more)

    def keep(self) -> None:
        """Removes the batch of the step just collected, after it was trained on."""
        with self._schedule.changed:
            del self._ready[self._at]

    def state(self) -> dict[str, Any]:
        """Returns the finished batches and the collector's state, for a checkpoint."""
        with self._schedule.changed:
            ready, behind = dict(self._ready), self._collector.state()
        return behind | {"ahead": {str(step): saved(*batch) for step, batch in ready.items()}}

    def close(self) -> None:
        """Ends the thread and drops the batch it samples. Idempotent."""
        self._schedule.stop()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        try:
            for step in range(self._next, self._schedule.steps):
                self._schedule.begin(step)
                self._behind.take()
                batch = self._collector.collect(step)
                seconds = {key.replace("time/", "time/ahead_"): value for key, value in self._behind.take().items()}
                ready = dataclasses.replace(batch, metrics=batch.metrics | seconds), _indices(self._stream, step, batch)
                with self._schedule.changed:  # what is ready, and what the collector made of it, are saved together
                    self._collector.keep()
                    self._ready[step] = ready
                self._schedule.end(step)
        except StoppedError:
            return
        except BaseException as failure:
            with self._schedule.changed:
                self._failure = failure
                self._schedule.changed.notify_all()
            self._schedule.stop()


def _is_fresh(batch: Collected, step: int, max_staleness: int) -> bool:
    versions = [c.policy_version for group in batch.groups for c in group.completions if c.versions]
    return min(versions, default=step) >= step - max_staleness


# ---- in a checkpoint ------------------------------------------------------------------------------------------------


def saved(batch: Collected, indices: Mapping[str, int]) -> dict[str, Any]:
    """Converts a batch to JSON, with prompts by index in the source; `restored` gives back every bit."""
    return {
        "sampled": [
            {
                "index": indices[group.prompt.uid],
                "rewards": [float(reward) for reward in group.rewards],
                "texts": list(group.texts),
                "responses": [continuation.response_state(completion) for completion in group.completions],
            }
            for group in batch.sampled
        ],
        "groups": [next(i for i, one in enumerate(batch.sampled) if one is group) for group in batch.groups],
        "parts": {name: [float(value) for value in values] for name, values in batch.parts.items()},
        "metrics": batch.metrics,
    }


def restored(stream: PromptStream, state: Mapping[str, Any]) -> tuple[Collected, dict[str, int]]:
    """Restores a batch from the JSON of `saved`.

    Raises:
      UserError: its responses are to prompts that the source does not have.
    """
    sampled = []
    for entry in state["sampled"]:
        if entry["index"] >= len(stream.source):
            raise UserError("cannot resume: the checkpoint holds responses to prompts that the data set has no longer.")
        prompt: Prompt = stream.source.prompt(entry["index"])
        sampled.append(
            RolloutGroup(
                prompt=prompt,
                completions=tuple(continuation.response_of(prompt, one) for one in entry["responses"]),
                rewards=np.array(entry["rewards"], np.float32),
                texts=tuple(entry["texts"]),
            )
        )
    batch = Collected(
        groups=[sampled[i] for i in state["groups"]],
        sampled=sampled,
        parts={name: np.array(values, np.float32) for name, values in state["parts"].items()},
        metrics=dict(state["metrics"]),
    )
    return batch, {group.prompt.uid: entry["index"] for group, entry in zip(sampled, state["sampled"], strict=True)}


def _indices(stream: PromptStream, step: int, batch: Collected) -> dict[str, int]:
    """Source index of each prompt that a step sampled, by its uid; further batches of dynamic sampling among them."""
    taken = stream.indices(step)
    for number in range(1, int(batch.metrics.get("rollout/batches", 1))):
        taken = [*taken, *dynamic_sampling.more_indices(stream, step, number, taken)]
    return {stream.source.prompt(i).uid: i for i in taken}
