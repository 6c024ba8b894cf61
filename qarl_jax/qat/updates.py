# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer updates of masters by one loss, with low-bit weights in the forward; a run can be resumed to the bit.

The masters are quantized once per update; the gradient passes the rounding unchanged, as in RL (`quant.dot`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from qarl_jax import models
from qarl_jax.optim import build, leafwise
from qarl_jax.quant import over_widths
from qarl_jax.run import checkpoint
from qarl_jax.types import DivergedError

_AHEAD = 8  # updates that a device has in its queue

Loss = Callable[..., jax.Array]
"""(params, qweights, *inputs) -> scalar."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The schedule of a training: the number of updates, and the rows of each update.

    Attributes:
      rows: number of rows. batch: rows per update. epochs: number of passes over all rows.
      seed: seed of the rows' order.
    """

    rows: int
    batch: int
    epochs: int
    seed: int

    @property
    def updates(self) -> int:
        """The number of updates; an update may take rows from the end of one epoch and the start of the next."""
        return max(1, self.rows * self.epochs // self.batch)

    def of(self, update: int) -> list[int]:
        """Returns the row numbers of an update; they depend on the seed and the update's number alone."""
        positions = range(update * self.batch, (update + 1) * self.batch)
        return [int(_order(self.seed, p // self.rows, self.rows)[p % self.rows]) for p in positions]


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, rows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Trainer:
    """Runs compiled optimizer updates under one scheme, with checkpoints.

    Args:
      graphdef: the model's graphdef, with the scheme. loss: (params, qweights, *inputs) -> scalar.
      optimizer: the optimizer's config. plan: the updates.
      every: updates between checkpoints.
      widths: bit widths cut out of an 8-bit grid, over which the loss is averaged; (): the scheme's width alone.
    """

    def __init__(
        self,
        graphdef: Any,
        loss: Loss,
        optimizer: build.Config,
        plan: Plan,
        every: int,
        widths: Sequence[int] = (),
    ):
        self.graphdef, self.plan = graphdef, plan
        self.loss = over_widths(loss, widths) if widths else loss
        self.optimizer = leafwise.Optimizer(optimizer, plan.updates)
        self.saving = checkpoint.Config(every=every, keep=2, asynchronous=False)
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.measure = jax.jit(self._measure)

    def _measure(self, params: Any, *inputs: Any) -> jax.Array:
        """Computes the loss without an update."""
        return self.loss(params, models.quantize_params(self.graphdef, params), *inputs)

    def _step(self, params: Any, opt_state: Any, *inputs: Any) -> tuple[Any, Any, jax.Array]:
        qweights = models.quantize_params(self.graphdef, params)
        loss, grads = jax.value_and_grad(self.loss)(params, qweights, *inputs)
        params, opt_state, _ = leafwise.update(self.optimizer, grads, opt_state, params)
        return params, opt_state, loss

    def fit(
        self, params: nnx.State, inputs: Callable[[list[int]], tuple[Any, ...]], folder: pathlib.Path, task: Any
    ) -> tuple[nnx.State, list[float]]:
        """Runs all updates, starting from the newest checkpoint in `folder`.

        Args:
          params: the initial masters; they are donated.
          inputs: function from row numbers to the loss's further arguments.
          task: counts the updates (`progress.Task`).

        Returns:
          The masters after the last update, and the loss of each update.

        Raises:
          DivergedError: the loss is not finite.
        """
        # placed as the masters are: the first update has the program of the others
        opt_state, losses, running = leafwise.init(self.optimizer, params), list[float](), list[jax.Array]()

        def wait(left: int) -> None:  # for updates, until no more than `left` of them run
            while len(running) > left:
                losses.append(float(running.pop(0)))
                if not math.isfinite(losses[-1]):
                    raise DivergedError(f"update {len(losses) - 1}: the loss is {losses[-1]}; lower optimizer.lr.")
                task.done += 1

        with checkpoint.Checkpoints(folder, self.saving) as saved:
            if saved.steps():
                back = saved.restore({"params": params, "opt_state": opt_state})
                params, opt_state, losses = back.state["params"], back.state["opt_state"], back.extra["losses"]
            task.done += len(losses)
            for update in range(len(losses), self.plan.updates):
                params, opt_state, loss = self.step(params, opt_state, *inputs(self.plan.of(update)))
                running.append(loss)
                if saved.should_save(update + 1):
                    wait(0)
                    saved.save(update + 1, {"params": params, "opt_state": opt_state}, {"losses": losses})
                wait(_AHEAD)
            wait(0)
        return params, losses
