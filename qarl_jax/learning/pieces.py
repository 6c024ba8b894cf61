# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and quantizes a frozen base some layers at a time, so that a device needs no room for whole stacks of masters.

A stack of 64 layers of one 27648 x 5120 weight is 17 GiB in bfloat16, and nvfp4 needs gate and up together; the stack's
QTensor is 5 GiB. So stacks are cut into pieces of some layers, quantized one by one, and concatenated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from qarl_jax import models
from qarl_jax.learning.trainable import Trainable, holder
from qarl_jax.models.params import path_of, united
from qarl_jax.models.transformer import partners, quantizable
from qarl_jax.runtime import mesh as sharding

BYTES = 4 << 30  # of the masters of one weight, in bfloat16
BYTES_OF_A_KEEPER = 1 << 30  # where none of a stack stays on the device


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
    parts = cut(config, keeper is not None)
    abstract = models.abstract_model(parts)
    graphdef, beside = models.split(abstract)[0], partners(parts, quantizable(abstract))
    hold = holder(trainable, graphdef)
    learned: list[nnx.State] = []
    frozen: list[nnx.State] = []
    waiting: dict[str, Any] = {}
    for keys, variable in read_leaves(parts, **options):
        path = path_of(keys, variable)
        if keeper is not None and not learns(path) and path not in beside:  # without a program for each piece
            variable = variable.replace(variable.get_value().astype(config.compute_dtype))
            frozen.append(nnx.from_flat_state([(keys, variable)]))
            continue
        if learns(path) or (keeper is None and _is_released(variable)):
            (learned if learns(path) else frozen).append(nnx.from_flat_state([(keys, variable)]))
            continue
        waiting[path] = keys, variable
        group = path, *beside.get(path, ())
        if waiting.keys() >= set(group):
            own = {path: waiting.pop(path) for path in group}
            with sharding.launching(mesh):
                if keeper is None or not _kept(keeper, own, parts, config):
                    released = [own.pop(path) for path, (_, leaf) in [*own.items()] if _is_released(leaf)]
                    frozen.append(nnx.from_flat_state(released))
                    frozen += [hold(nnx.from_flat_state(list(own.values())))] if own else []
            for _, master in own.values():
                jax.tree.map(lambda x: x.delete(), master.get_value())  # and not when a collector comes
    if waiting:  # for one that learns: refused
        frozen.append(hold(nnx.from_flat_state(list(waiting.values()))))
    with sharding.launching(mesh):
        held = joined(united(*frozen), parts, config)
        return joined(united(*learned), parts, config), held if keeper is None else keeper.finish(held)


def _is_released(variable: Any) -> bool:
    """Tells whether a leaf came as a QTensor."""
    return isinstance(variable, models.Quantized)


def _kept(keeper: Keeper, own: Mapping[str, Any], parts: models.ModelConfig, config: models.ModelConfig) -> bool:
    """Gives weights of `parts` to a keeper that takes them, and tells whether it does.

    No program depends on the piece: a stack of many pieces compiles those of one.
    """
    found, first = {}, 0
    for path, (_, variable) in own.items():
        if not path.startswith("stacks."):
            return False
        _, number, rest = path.split(".", 2)
        start = parts.stacks[int(number)].start
        whole = _whole_of(start, config)
        first = start - config.stacks[whole].start
        found[f"stacks.{whole}.{rest}"] = variable.get_value()
    if not (path.endswith(".kernel") and found.keys() <= keeper.paths):
        return False
    keeper.put(found, first)
    return True


def _whole_of(layer: int, config: models.ModelConfig) -> int:
    """The number of the stack that has this layer."""
    return next(n for n, whole in enumerate(config.stacks) if whole.start <= layer < whole.start + whole.length)


def together(config: models.ModelConfig, state: nnx.State) -> list[nnx.State]:
    """Groups the entries of `state` whose QTensors share a scale; most groups have one entry."""
    beside = partners(config, quantizable(models.abstract_model(config)))
    groups: dict[frozenset[str], list[Any]] = {}
    for keys, variable in nnx.to_flat_state(state):
        path = path_of(keys, variable)
        groups.setdefault(frozenset((path, *beside.get(path, ()))), []).append((keys, variable))
    return [nnx.from_flat_state(group) for group in groups.values()]


def cut(config: models.ModelConfig, keeper: bool = False) -> models.ModelConfig:
    """Returns the config without adapters, its stacks cut so that the masters of a weight in one piece have at most
    `BYTES`, or, with a keeper, `BYTES_OF_A_KEEPER`."""
    most = BYTES_OF_A_KEEPER if keeper else BYTES
    config = config.base
    params = models.by_path(models.split(models.abstract_model(config))[1])
    starts = set(config.splits)
    for number, stack in enumerate(config.stacks):
        own = (like for path, like in params.items() if path.startswith(f"stacks.{number}."))
        layer = max(2 * math.prod(like.shape[1:]) for like in own)
        starts |= set(range(stack.start, stack.start + stack.length, max(1, most // layer))) - {stack.start}
    return dataclasses.replace(config, splits=tuple(sorted(starts)))


def joined(state: nnx.State, parts: models.ModelConfig, config: models.ModelConfig) -> nnx.State:
    """Concatenates pieces of stacks, the entries under `parts` = `cut(config)`, and deletes them."""
    if len(parts.stacks) == len(config.stacks):
        return state
    number_of = [_whole_of(part.start, config) for part in parts.stacks]
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
