# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes updates on a step's complete mini-batches while the engine decodes the step's last groups.

    engine     |== groups of mini-batch 0 ==== of 1 ==== the last groups ==|            publish
    learner                                 |= update 0 =|= update 1 =|       |= update 2 =|

Until the step's publish the engine serves the version that the step began with, while the masters move. Mini-batches
are a function of the prompts' order. An update begins when its groups, and those of all updates before it, are graded.
So masters, metrics and samples equal those of a run without overlap, to the bit, and mini-batches are not biased
towards short responses.

`waits` names the options that prevent the overlap: those that need all of a step's groups before the first update, or
the masters of the step's start after it. Two kinds of steps never overlap:

    a process's first step   its programs are being compiled
    a checked step           later tokens are compared with the learner at the step's start (`proximal.py`)

A discarded first update leaves the masters unchanged, and the step then waits for its last group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from qarl_bridge.protocol.messages import Facts

from qarl_jax.learning.state import TrainState
from qarl_jax.metrics import Metric
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import processes
from qarl_jax.verify import alignment

# (state, mini-batch, its number) -> the state; the update's metrics, or None where it changed nothing.
Update = Callable[[TrainState, Any, int], tuple[TrainState, dict[str, Metric] | None]]


def waits(cfg: RunConfig, facts: Facts | None = None) -> str:
    """Returns the reason why a step's first update must wait for the step's last group; empty if it need not.

    Args:
      facts: the live engine's report; None if it has not started, or for the embedded sampler.
    """
    rollout, engine = cfg.rollout, cfg.rollout.engine
    chunked = isinstance(engine, VllmConfig) and engine.staging_buffers == 0 and engine.stages_on_gpu
    reasons = {
        "a step has one mini-batch (train.prompts_per_update)": (
            cfg.train.mini_batch_prompts == cfg.train.prompts_per_step
        ),
        "one process grades for all (distributed)": processes.count() > 1,
        "a step's batch is ready as a whole (train.asynchronous)": cfg.train.asynchronous.is_on,
        "a step takes the groups that were complete first (rollout.partial)": rollout.partial.is_on,
        "a step's groups are chosen by all their rewards (rollout.dynamic)": rollout.dynamic.max_batches > 1,
        "the critic judges all responses before its first update (critic)": cfg.critic is not None,
        "each width scores all responses before the first update (train.widths)": bool(cfg.train.widths),
        "the reference scores under the masters of the step's start (kl.reference)": (
            bool(cfg.kl.coef) and cfg.kl.reference == "masters"
        ),
        "an engine that is replaced gets its version from the masters (rollout.engine.staging_buffers)": chunked,
        "the learner scores all responses before the first update (train.proximal)": (
            not alignment.takes_samplers(cfg, facts)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Tail:
    """The updates that a step makes while its last groups are decoded.

    Args:
      state: the learner's state at the step's start.
      update: (state, mini-batch, number) -> state and metrics, or None if discarded; called from one thread at a time.

    Attributes:
      state: the learner's state after the updates made so far. has_begun: true if the first state was donated.
      done: (mini-batch, metrics) of each update made, in order.
    """

    def __init__(self, state: TrainState, update: Update):
        self.state, self.has_begun = state, False
        self.done: list[tuple[Any, dict[str, Metric]]] = []
        self._update, self._made = update, dict[int, Any]()
        self._lock, self._has_ended, self._seconds = threading.Lock(), False, 0.0

    def add(self, number: int, batch: Any) -> None:
        """Takes mini-batch `number`, and makes the updates that are next in order and whose mini-batches are here.

        It makes no update after `end` or after a discarded update.

        Raises:
          whatever `update` raises.
        """
        self._made[number] = batch
        while len(self.done) in self._made:
            with self._lock:
                if self._has_ended:
                    return
                self._one(self._made[len(self.done)])

    def _one(self, batch: Any) -> None:
        begin, self.has_begun, made = time.perf_counter(), True, None
        try:
            self.state, made = self._update(self.state, batch, len(self.done))
        finally:
            self._seconds += time.perf_counter() - begin
            self._has_ended |= made is None
        if made is not None:
            self.done.append((batch, made))

    def end(self) -> float:
        """Waits for the running update and allows no further one. Returns the seconds of updates before the call."""
        begin, self._has_ended = time.perf_counter(), True
        with self._lock:
            return self._seconds - (time.perf_counter() - begin)
