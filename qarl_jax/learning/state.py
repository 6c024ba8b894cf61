# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`TrainState`, the state of the policy or of the critic between two optimizer updates."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from qarl_jax.optim import by_stack, leafwise
from qarl_jax.runtime import processes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything an optimizer update reads and writes.

    Attributes:
      params: nnx.State of the masters that learn (float32 by default).
      opt_state: `leafwise.State`.
      updates: int32 scalar, optimizer updates applied so far.
    """

    params: Any
    opt_state: Any
    updates: Any

    def entries(self) -> dict[str, Any]:
        """Returns the state as named entries of a checkpoint, so that the params can be read alone."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def fresh_state(update: by_stack.Update, params: Any, places: Any, replicated: NamedSharding) -> TrainState:
    """Makes the state before the first update: `params` placed by the shardings `places`, and zero moments."""
    params = jax.device_put(params, places)
    opt_state = leafwise.init(update.optimizer, params)
    return update.placed(TrainState(params=params, opt_state=opt_state, updates=processes.put(np.int32(0), replicated)))
