# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Splits the leaves of a policy into trainable and frozen ones, and converts the frozen ones to the form that is kept.

    of a leaf    that learns                        that is frozen
    ---------    -------------------------------    ----------------------------------------------------------
    master       `TrainState.params`                none
    gradient     one per master                     none
    moments      beside the master                  none
    forward      its QTensor, new at every update   its QTensor, made once; where no scheme covers it, its value
    checkpoint   master and moments                 nothing: the model's folder has it
    published    with every version                 the same in every version (`PolicyWeights.fixed`)
    code flips   counted                            not counted

The tree `qweights` holds the QTensors of trainable weights and all frozen leaves. So every program takes the arguments
`params` (masters) and `qweights`, whatever is trainable. A reference policy is one without trainable leaves: it has no
masters.

    ADAPTERS = Trainable(freeze=("",), train=(r"\\.lora_",))      # all is frozen but the adapters

Left out: parts of a leaf (some layers of a stack), which share one array.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qarl_jax import models
from qarl_jax.models.params import part_of, united
from qarl_jax.numerics.float32 import dtype_in
from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Trainable:
    """Decides from a leaf's path ("stacks.0.mlp.up.kernel") whether it is trainable or frozen.

    Attributes:
      freeze: regular expressions; a leaf is frozen if one of them is found in its path.
      train: regular expressions of exceptions; a leaf is trainable if one of them is found in its path.
    """

    freeze: tuple[str, ...] = ()
    train: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in (*self.freeze, *self.train):
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"trainable: {pattern!r} is no regular expression ({error}).") from None

    def learns(self, path: str) -> bool:
        """Tells whether the leaf at this path is trainable, and so has a master."""
        found = lambda patterns: any(re.search(pattern, path) for pattern in patterns)  # noqa: E731
        return not found(self.freeze) or found(self.train)

    def check(self, paths: Collection[str]) -> None:
        """Checks the patterns against the paths of a policy's leaves.

        Raises:
          UserError: a pattern is found in no path, or no leaf is trainable.
        """
        for pattern in (*self.freeze, *self.train):
            if not any(re.search(pattern, path) for path in paths):
                known = ", ".join(sorted(paths))
                raise UserError(f"trainable: {pattern!r} is found in no weight's path; take one of {known}.")
        if not any(map(self.learns, paths)):
            raise UserError(f"trainable: nothing learns where {', '.join(map(repr, self.freeze))} is frozen.")

    def learned(self, state: nnx.State) -> nnx.State:
        """Returns the trainable entries of `params` or `qweights`; the State itself if nothing is frozen."""
        return part_of(state, self.learns) if self.freeze else state

    def frozen(self, state: nnx.State) -> nnx.State:
        """Returns the frozen entries of `params` or `qweights`."""
        return part_of(state, lambda path: not self.learns(path))

    def held(self, graphdef: Any, params: nnx.State) -> nnx.State:
        """Converts the frozen leaves of `params` to entries of `qweights`. It can be traced by jit, and copies.

        A leaf that the graphdef's scheme covers becomes a QTensor. Any other leaf is cast to the compute dtype, to
        which the forward rounds masters anyway. The forward's bits do not change.
        """
        frozen, dtype = self.frozen(params), models.config_of(graphdef).compute_dtype
        qtensors = models.quantize_params(graphdef, frozen)
        covered = models.by_path(qtensors)
        plain = part_of(frozen, lambda path: path not in covered)
        return united(qtensors, jax.tree.map(lambda x: jnp.array(x, dtype_in(x, dtype), copy=True), plain))


@functools.lru_cache(maxsize=32)
def holder(trainable: Trainable, graphdef: Any) -> Any:
    """Returns `trainable.held` of a graphdef under jit, cached, so that learners of one policy share its programs."""
    return jax.jit(functools.partial(trainable.held, graphdef))


ALL = Trainable()
NOTHING = Trainable(freeze=("",))
"""A policy that stays as it is."""


def joined(params: nnx.State, qweights: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Moves frozen leaves that are no QTensors from `qweights` to `params`, as `models.merge` takes them."""
    flat = nnx.to_flat_state(qweights)
    plain = [(keys, leaf) for keys, leaf in flat if not isinstance(leaf, models.Quantized)]
    if not plain:
        return params, qweights
    qtensors = [(keys, leaf) for keys, leaf in flat if isinstance(leaf, models.Quantized)]
    return united(params, nnx.from_flat_state(plain)), nnx.from_flat_state(qtensors)
