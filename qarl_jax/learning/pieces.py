# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Cuts large stacks of layers, so that a frozen base is made some layers at a time, and joins what was made.

A stack of 64 layers of one 27648 x 5120 weight is 17 GiB in bfloat16, and nvfp4 needs gate and up together. The stack's
QTensor is 5 GiB. A device that has room for the base must not need room for two masters of such a stack.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qarl_jax import models

BYTES = 4 << 30  # of the masters of one weight, in bfloat16


def cut(config: models.ModelConfig) -> models.ModelConfig:
    """The config without adapters, with its stacks cut where a weight of one would be larger than `BYTES`."""
    config = config.base
    params = models.by_path(models.split(models.abstract_model(config))[1])
    starts = set(config.splits)
    for number, stack in enumerate(config.stacks):
        own = (like for path, like in params.items() if path.startswith(f"stacks.{number}."))
        layer = max(2 * math.prod(like.shape[1:]) for like in own)
        starts |= set(range(stack.start, stack.start + stack.length, max(1, BYTES // layer))) - {stack.start}
    return dataclasses.replace(config, splits=tuple(sorted(starts)))


def joined(state: nnx.State, parts: models.ModelConfig, config: models.ModelConfig) -> nnx.State:
    """Entries of `parts`, which `cut` made of `config`, as those of `config`; pieces are deleted as they are joined."""
    if len(parts.stacks) == len(config.stacks):
        return state
    number_of = [
        next(n for n, whole in enumerate(config.stacks) if whole.start <= part.start < whole.start + whole.length)
        for part in parts.stacks
    ]
    found: dict[Any, dict[int, Any]] = {}  # pieces by their number
    for keys, variable in nnx.to_flat_state(state):
        if keys[0] == "stacks":
            number: Any = keys[1]
            found.setdefault((keys[0], number_of[number], *keys[2:]), {})[number] = variable
        else:
            found[keys] = {0: variable}
    made = []
    for keys, held in found.items():
        first, *others = (held[number] for number in sorted(held))
        if others:
            values = [variable.get_value() for variable in (first, *others)]
            first = first.replace(_concatenated(values))
            jax.tree.map(lambda x: x.delete(), values)
        made.append((keys, first))
    return nnx.from_flat_state(made)


@jax.jit
def _concatenated(values: list[Any]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *values)
