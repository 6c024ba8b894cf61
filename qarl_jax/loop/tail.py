# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates of a step's complete mini-batches while its last groups are decoded.

    engine     |== groups of mini-batch 0 ==== of 1 ==== the last groups ==|            publish
    learner                                 |= update 0 =|= update 1 =|       |= update 2 =|

The engine serves the version that the step began with until the step's publish. Meanwhile the masters move. The
mini-batches are those of a run that waits: a function of the prompts' order. An update begins when its own groups, and
those of all updates before it, are graded. So masters, metrics and samples are those of a run that waits, to the bit,
and no order of completion can bias a mini-batch towards short responses.

`waits` names what keeps a run from it: whatever needs all of a step's groups, or the masters of the step's start, after
the first update. Two kinds of steps of other runs wait, too:

    a process's first        its programs are being compiled
    one that is checked      later tokens are compared with the learner at the step's start (`proximal.py`)

A first update that is discarded leaves the masters as they were, and the step waits.
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
    """The reason why every step's first update waits for the step's last group; empty: it need not.

    Args:
      facts: of the live engine; None: not started yet, or the embedded sampler's.
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
      state: the learner's at the step's start.
      update: makes an update; called from one thread at a time.

    Attributes:
      state: after the updates made so far. has_begun: the first state is donated.
      done: mini-batches and metrics of the updates made, in their order.
    """

    def __init__(self, state: TrainState, update: Update):
        self.state, self.has_begun = state, False
        self.done: list[tuple[Any, dict[str, Metric]]] = []
        self._update, self._made = update, dict[int, Any]()
        self._lock, self._has_ended, self._seconds = threading.Lock(), False, 0.0

    def add(self, number: int, batch: Any) -> None:
        """Takes a mini-batch, and makes the updates whose turn it is.

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
        """Waits for the update under way; no other begins. Returns the seconds that updates took before the wait."""
        begin, self._has_ended = time.perf_counter(), True
        with self._lock:
            return self._seconds - (time.perf_counter() - begin)
