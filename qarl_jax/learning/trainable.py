# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Which leaves of a policy learn, and what is kept of the others.

    of a leaf    that learns                        that is frozen
    ---------    -------------------------------    ----------------------------------------------------------
    master       `TrainState.params`                none
    gradient     one per master                     none
    moments      beside the master                  none
    forward      its QTensor, new at every update   its QTensor, made once; where no scheme covers it, its value
    checkpoint   master and moments                 nothing: the model's folder has it
    published    with every version                 the same in every version (`PolicyWeights.fixed`)

What a forward reads in place of masters is one tree, `qweights`: QTensors of what learns, and all that is frozen. So a
program takes masters and `qweights`, whatever learns. A policy of which nothing learns has no masters at all: that is a
reference policy.

Left out: parts of a leaf (some layers of a stack), which share one array.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qarl_jax import models
from qarl_jax.models.params import part_of, united


@dataclasses.dataclass(frozen=True)
class Trainable:
    """Tells leaves that learn from those that are frozen, by their paths.

    Attributes:
      freeze: regular expressions, searched in a leaf's path ("layers.mlp.up.kernel"); where one is found it is frozen.
    """

    freeze: tuple[str, ...] = ()

    def learns(self, path: str) -> bool:
        """Whether the leaf at this path has a master."""
        return not any(re.search(pattern, path) for pattern in self.freeze)

    def learned(self, state: nnx.State) -> nnx.State:
        """The part of `params` or `qweights` that learns; the state itself where all of it does."""
        return part_of(state, self.learns) if self.freeze else state

    def frozen(self, state: nnx.State) -> nnx.State:
        """The part of `params` or `qweights` that is frozen."""
        return part_of(state, lambda path: not self.learns(path))

    def held(self, graphdef: Any, params: nnx.State) -> nnx.State:
        """What is kept of the frozen leaves of `params`, as an entry of `qweights`. Traceable; copies.

        A QTensor where the graphdef's scheme covers a leaf, else its value in the compute dtype, to which every master
        is rounded before it is used: both compute what the masters would.
        """
        frozen, dtype = self.frozen(params), models.config_of(graphdef).compute_dtype
        qtensors = models.quantize_params(graphdef, frozen)
        covered = models.by_path(qtensors)
        plain = part_of(frozen, lambda path: path not in covered)
        return united(qtensors, jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), plain))


ALL = Trainable()
NOTHING = Trainable(freeze=("",))
"""A policy that stays as it is."""


def joined(params: nnx.State, qweights: nnx.State) -> tuple[nnx.State, nnx.State]:
    """(params, QTensors) as `models.merge` takes them: frozen values that are no QTensors stand among the masters."""
    flat = nnx.to_flat_state(qweights)
    plain = [(keys, leaf) for keys, leaf in flat if not isinstance(leaf, models.Quantized)]
    if not plain:
        return params, qweights
    qtensors = [(keys, leaf) for keys, leaf in flat if isinstance(leaf, models.Quantized)]
    return united(params, nnx.from_flat_state(plain)), nnx.from_flat_state(qtensors)
