# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a policy whose base is frozen: some layers of a weight at a time, each written where its stack has it.

A stack of 64 layers of one 27648 x 5120 weight is 17 GiB in bfloat16, and nvfp4 needs gate and up together. The stack's
QTensor is 5 GiB. A device that has room for the base must not need room for two masters of such a stack, nor for two
QTensors of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from qarl_jax import models
from qarl_jax.learning.trainable import Trainable, holder
from qarl_jax.models.params import path_keys, path_of, place_in
from qarl_jax.models.transformer import partners, quantizable
from qarl_jax.numerics.float32 import dtype_in
from qarl_jax.runtime import mesh as sharding

BYTES = 1 << 30  # of the masters of one weight that are there at once, in bfloat16


class Keeper(Protocol):
    """Memory for frozen weights outside of JAX's.

    Attributes:
      paths: leaves, in the whole model, that go there or stand beside those.
    """

    paths: frozenset[str]

    def put(self, weights: Mapping[str, Any], first: int) -> None:
        """Takes masters or QTensors, some layers of stacks from layer `first` on, by path."""

    def finish(self, frozen: nnx.State) -> nnx.State:
        """Adds entries for what was put to the other frozen ones, once all is read."""

    def abstract(self) -> nnx.State:
        """The shapes of those entries."""


def read(
    trainable: Trainable,
    config: models.ModelConfig,
    mesh: Mesh,
    read_leaves: Callable[..., Iterable[tuple[Any, Any]]],
    keeper: Keeper | None = None,
) -> tuple[Any, Any]:
    """`Learner.read`. read_leaves: of a config, a mesh, and whether a path is frozen."""
    learns = trainable.learns
    options: dict[str, Any] = {"mesh": mesh, "frozen": lambda path: not learns(path)}
    if not trainable.freeze:
        return nnx.from_flat_state(list(read_leaves(config, **options))), None
    parts, graphdef = cut(config), models.split(models.abstract_model(config.base))[0]
    options["frozen"] = lambda path: not learns(".".join(map(str, place_in(config, path_keys(path), parts)[0])))
    beside, hold = partners(config, quantizable(models.abstract_model(config.base))), holder(trainable, graphdef)
    learned: dict[Any, Any] = {}
    frozen: dict[Any, Any] = {}
    waiting: dict[str, Any] = {}
    for keys, variable in read_leaves(parts, **options):
        keys, first = place_in(config, keys, parts)  # so that no program depends on the piece
        path = path_of(keys, variable)
        if learns(path) or (keeper is None and _is_released(variable)):
            with sharding.launching(mesh):
                _write(learned if learns(path) else frozen, keys, variable, first, config)
            continue
        waiting[path] = keys, variable
        group = path, *beside.get(path, ())
        if waiting.keys() >= set(group):
            own = {path: waiting.pop(path) for path in group}
            with sharding.launching(mesh):
                if keeper is not None and path.endswith(".kernel") and own.keys() <= keeper.paths:
                    keeper.put({path: variable.get_value() for path, (_, variable) in own.items()}, first)
                else:
                    released = [own.pop(path) for path, (_, leaf) in [*own.items()] if _is_released(leaf)]
                    made = nnx.to_flat_state(hold(nnx.from_flat_state(list(own.values())))) if own else []
                    for keys, variable in [*released, *made]:
                        _write(frozen, keys, variable, first, config)
            for _, master in own.values():
                jax.tree.map(lambda x: x.delete(), master.get_value())  # and not when a collector comes
    if waiting:  # for one that learns: refused
        hold(nnx.from_flat_state(list(waiting.values())))
    held = nnx.from_flat_state(list(frozen.items()))
    return nnx.from_flat_state(list(learned.items())), held if keeper is None else keeper.finish(held)


def _is_released(variable: Any) -> bool:
    """Tells whether a leaf came as a QTensor."""
    return isinstance(variable, models.Quantized)


def _write(entries: dict[Any, Any], keys: Any, variable: Any, first: int, config: models.ModelConfig) -> None:
    """Takes an entry of `config`, or the layers of its stack from `first` on; these are written and deleted.

    Waits: what is made before the last entry is finished needs room of its own.
    """
    piece = variable.get_value()
    layers = jax.tree.leaves(piece)[0].shape[0]
    if keys[0] != "stacks" or layers == (length := config.stacks[keys[1]].length):
        entries[keys] = variable
    else:
        stack = entries[keys].get_value() if keys in entries else _zeros(piece, length)
        entries[keys] = variable.replace(_written(stack, piece, np.int32(first)))
        jax.tree.map(lambda x: x.delete(), piece)
    jax.block_until_ready(entries[keys].get_value())


def _zeros(piece: Any, length: int) -> Any:
    """A stack of so many layers, which lies as a piece of it does."""
    places = jax.tree.map(lambda x: x.sharding, piece)
    make = lambda: jax.tree.map(lambda x: jnp.zeros((length, *x.shape[1:]), x.dtype), piece)  # noqa: E731
    return jax.jit(make, out_shardings=places)()


@functools.partial(jax.jit, donate_argnums=0)
def _written(stack: Any, piece: Any, first: jax.Array) -> Any:
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, first, 0), stack, piece)


def groups(config: models.ModelConfig, state: nnx.State) -> list[tuple[nnx.State, nnx.State]]:
    """Groups masters whose QTensors share a number; most groups have one.

    Returns:
      Per group what is read of it at once, as shapes in the dtype of what is frozen, and its entries of `state`.
    """
    beside, parts = partners(config, quantizable(models.abstract_model(config))), cut(config)
    layers: dict[int, int] = {}
    for number, part in enumerate(parts.stacks):
        layers.setdefault(place_in(config, ("stacks", number), parts)[0][1], part.length)

    def at_once(keys: tuple[Any, ...], variable: Any) -> tuple[Any, Any]:
        x = variable.get_value()
        shape = (layers[keys[1]], *x.shape[1:]) if keys[0] == "stacks" else x.shape
        like = jax.ShapeDtypeStruct(shape, dtype_in(x, config.compute_dtype), sharding=x.sharding)
        return keys, variable.replace(like)

    found: dict[frozenset[str], list[Any]] = {}
    for keys, variable in nnx.to_flat_state(state):
        path = path_of(keys, variable)
        found.setdefault(frozenset((path, *beside.get(path, ()))), []).append((keys, variable))
    made = [([at_once(*entry) for entry in group], group) for group in found.values()]
    return [(nnx.from_flat_state(part), nnx.from_flat_state(whole)) for part, whole in made]


def cut(config: models.ModelConfig) -> models.ModelConfig:
    """The config without adapters, with its stacks cut where a weight would be larger than `BYTES`."""
    config = config.base
    params = models.by_path(models.split(models.abstract_model(config))[1])
    starts = set(config.splits)
    for number, stack in enumerate(config.stacks):
        own = (like for path, like in params.items() if path.startswith(f"stacks.{number}."))
        step = max(1, BYTES // max(2 * math.prod(like.shape[1:]) for like in own))
        starts |= set(range(stack.start + step, stack.start + stack.length, step))
    return dataclasses.replace(config, splits=tuple(sorted(starts)))
