# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and quantizes a frozen base some layers at a time, so that a device needs no room for whole stacks of masters.

A stack of 64 layers of one 27648 x 5120 weight is 17 GiB in bfloat16, and nvfp4 needs gate and up together; the stack's
QTensor is 5 GiB. So stacks are cut into pieces of some layers. Each piece is quantized and written into the QTensor of
its stack, so that there is never a second QTensor of a stack.
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
    """A store outside of JAX for frozen weights, for example memory that the engine shares.

    Attributes:
      paths: paths, in the whole model, of the weights that it may take.
    """

    paths: frozenset[str]

    def put(self, weights: Mapping[str, Any], first: int) -> None:
        """Stores masters or QTensors by path: some layers of their stacks, from layer `first` on."""

    def finish(self, frozen: nnx.State) -> nnx.State:
        """Returns the frozen entries and, once all is read, entries for the stored weights."""

    def abstract(self) -> nnx.State:
        """Returns the entries of the stored weights as shapes and dtypes."""


def read(
    trainable: Trainable,
    config: models.ModelConfig,
    mesh: Mesh,
    read_leaves: Callable[..., Iterable[tuple[Any, Any]]],
    keeper: Keeper | None = None,
) -> tuple[Any, Any]:
    """Reads (masters, frozen entries) for `Learner.read`. read_leaves: (config, mesh=, frozen=) -> (keys, leaf)."""
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
    """Adds an entry of `config`; layers of a stack, from `first` on, are written into the stack and deleted.

    It waits for the device, because entries in flight would need memory of their own.
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
    """Makes a stack of `length` layers of zeros, sharded as a piece of it."""
    places = jax.tree.map(lambda x: x.sharding, piece)
    make = lambda: jax.tree.map(lambda x: jnp.zeros((length, *x.shape[1:]), x.dtype), piece)  # noqa: E731
    return jax.jit(make, out_shardings=places)()


@functools.partial(jax.jit, donate_argnums=0)
def _written(stack: Any, piece: Any, first: jax.Array) -> Any:
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, first, 0), stack, piece)


def groups(config: models.ModelConfig, state: nnx.State) -> list[tuple[nnx.State, nnx.State]]:
    """Groups masters whose QTensors share a scale; most groups have one master.

    Returns:
      Per group the piece that is read at once, as shapes in the compute dtype, and the group's entries of `state`.
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
    """Returns the config without adapters, its stacks cut so that masters of a weight have at most `BYTES` a piece."""
    config = config.base
    params = models.by_path(models.split(models.abstract_model(config))[1])
    starts = set(config.splits)
    for number, stack in enumerate(config.stacks):
        own = (like for path, like in params.items() if path.startswith(f"stacks.{number}."))
        step = max(1, BYTES // max(2 * math.prod(like.shape[1:]) for like in own))
        starts |= set(range(stack.start + step, stack.start + stack.length, step))
    return dataclasses.replace(config, splits=tuple(sorted(starts)))
