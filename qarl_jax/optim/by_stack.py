# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer updates group by group of parameters, to save memory, with the state on the devices or on the host.

    host    | state 1 | state 2 | state 3 | ...            a float per parameter under Muon, two under AdamW
                 |         ^ 1'      ^ 2'
    device       v 1       | 2       | 3                   masters and gradients stay

The update of one stack of weights does not need the moments of another. So the parameters of a larger model are divided
into groups: a large leaf alone, smaller leaves together up to `GROUP_BYTES`. Each group has a program that updates
masters and moments in place. A stack is updated layer by layer, with temporaries for one layer; a single program for
all parameters needs a float32 number for each parameter. With `optimizer.offload` each group's moments are copied from
the host to the device and back. Copies overlap with updates; the device holds moments of at most two groups.

Three things need all leaves, and are computed once: the norm of the gradients, which clips and guards the update; the
norms of updates and masters, from squares that each group returns; and the count of updates. A rounding's random bits
depend on a leaf's index among all parameters.

Groups depend on the parameters' shapes alone, and the programs do not depend on where the state is kept: offloading
changes no bits. One program for all parameters and several programs differ in last bits, because XLA compiles a leaf's
arithmetic differently beside other leaves (`leafwise`).

Left out: masters or gradients on the host, and copies by the compiler within a program (memory kinds inside of `jit`),
which differ between backends.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.optim import leafwise
from qarl_jax.optim.leafwise import Leaf, Optimizer

GROUP_BYTES = 2**30
"""Float32 bytes of the parameters that a group of several holds at most; a leaf that alone has more is one group.
Models below it are updated by one program. Another value is another compilation, and with it other last bits."""


# --------------------------------------------------------------------------------------------------------- two memories


def moved_to(kind: Literal["device", "pinned_host"], state: Any) -> Any:
    """Moves the `opt_state` of a frozen dataclass to memory of that kind, and deletes the arrays it had elsewhere.

    It waits for the copies, so that neither memory holds two states for long. It calls jax.device_put outside of jit,
    which every backend supports.
    """
    return dataclasses.replace(state, opt_state=_completed(state.opt_state, _copied(state.opt_state, kind)))


def _copied(tree: Any, kind: str) -> Any:
    """Starts to copy arrays to memory of that kind; returns an array that lies there already as it is."""
    return jax.tree.map(
        lambda x: x if x.sharding.memory_kind == kind else jax.device_put(x, x.sharding.with_memory_kind(kind)), tree
    )


def _kept(x: Any, kind: str) -> jax.ShapeDtypeStruct:
    """Makes an abstract array in memory of that kind."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(kind))


def _completed(origin: Any, copies: Any) -> Any:
    """Waits for `copies` of `origin`, deletes the arrays of `origin` that were copied, and returns `copies`."""
    pairs = zip(jax.tree.leaves(origin), jax.tree.leaves(copies), strict=True)
    moved = [(x, copy) for x, copy in pairs if x is not copy]
    jax.block_until_ready([copy for _, copy in moved])
    for x, _ in moved:
        x.delete()
    return copies


# --------------------------------------------------------------------------------------------------------------- groups


def groups_of(params: Any) -> tuple[tuple[int, ...], ...]:
    """Divides parameters, by index, into groups updated together: neighbours up to `GROUP_BYTES`, a larger leaf alone.

    Args:
      params: the tree of parameters, whose leaves may be abstract.
    """
    groups: list[list[int]] = []
    room = 0
    for i, leaf in enumerate(jax.tree.leaves(params)):
        size = 4 * math.prod(leaf.shape)
        if size > room:
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(i)
        room -= size
    return tuple(map(tuple, groups))


def is_stack(shape: Sequence[int]) -> bool:
    """Tells from its shape whether a leaf that is alone in its group is updated layer by layer."""
    return len(shape) > 2


def _picked(some: Sequence[Any], where: Sequence[int]) -> list[Any]:
    return [some[i] for i in where]


# --------------------------------------------------------------------------------------------------------------- update


class Update:
    """An optimizer update `update(state, grads)` -> (new state, metrics) in one or several programs; it skips gradients
    that are zero or not finite.

    `state` is a frozen dataclass with `params`, `opt_state` and `updates`; params and opt_state are donated.

    Args:
      optimizer: the arithmetic.
      describe: (`leafwise.statistics`, number of earlier updates) -> metrics; traceable.
      offload: keep the optimizer state on the host.
    """

    def __init__(self, optimizer: Optimizer, describe: Callable[[dict[str, Any], Any], Any], *, offload: bool = False):
        self.optimizer, self.describe, self.offload = optimizer, describe, offload
        self._whole = jax.jit(self.whole, donate_argnums=(0,))
        self._norms = jax.jit(leafwise.norms)
        self._finish = jax.jit(self._finish_fn)
        self._programs: dict[Any, list[Any]] = {}

    def whole(self, state: Any, grads: Any, keep: Any = True) -> tuple[Any, Any]:
        """Computes the update of all parameters; call it under jit. keep: bool scalar; false skips the update."""
        params, opt_state, stats = leafwise.update(self.optimizer, grads, state.opt_state, state.params, keep)
        count = state.updates + stats["moved"].astype(jnp.int32)
        after = dataclasses.replace(state, params=params, opt_state=opt_state, updates=count)
        return after, self.describe(stats, state.updates)

    def placed(self, state: Any) -> Any:
        """Moves the `opt_state` of `state` to the memory where it is kept between updates, host or device."""
        return moved_to("pinned_host" if self.offload else "device", state)

    def resting(self, state: Any) -> Any:
        """Returns an abstract state with the shardings that `placed` gives a state."""
        if not self.offload:
            return state
        return dataclasses.replace(state, opt_state=jax.tree.map(lambda x: _kept(x, "pinned_host"), state.opt_state))

    def compile_ahead(self, state: Any, grads: Any) -> list[jax.stages.Compiled]:
        """Compiles and returns the programs of a call with such a state and such gradients.

        A call in several groups ends with a small program that makes the metrics. It is compiled in the first call.

        Args:
          state, grads: abstract arrays with shardings; the state as `resting` returns it.
        """
        there = dataclasses.replace(state, opt_state=jax.tree.map(lambda x: _kept(x, "device"), state.opt_state))
        groups = groups_of(state.params)
        if len(groups) == 1:
            return [self._whole.lower(there, grads).compile()]
        norms = self._norms.lower(grads).compile()
        scalar = lambda place: jax.ShapeDtypeStruct((), jnp.float32, sharding=place)  # noqa: E731
        abstract_norms = jax.tree.map(scalar, norms.output_shardings)
        rows = jax.tree.leaves(there.params), leafwise.moments_of(there.params, there.opt_state), jax.tree.leaves(grads)
        compiled = [norms]
        for group, program in zip(groups, self.programs(there), strict=True):
            own = [_picked(row, group) for row in rows]
            compiled.append(program.lower(*own, there.opt_state.count, abstract_norms).compile())
        return compiled

    # ---- what a group's program computes -----------------------------------------------------------------------------

    def _group_fn(
        self, leaves: Sequence[Leaf], params: list[Any], moments: list[Any], grads: list[Any], count: Array, norms: Any
    ) -> Any:
        """`leafwise.advance` of a group; a stack by itself is updated layer by layer."""
        advanced = functools.partial(leafwise.advance, self.optimizer, leaves, count, norms)
        if len(params) > 1 or not is_stack(params[0].shape):
            return advanced(params, moments, grads)

        layers, *matrix = params[0].shape

        def layer(i: Array, carry: Any) -> Any:
            stacks, before = carry
            cut = functools.partial(jax.tree.map, lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1))
            first = i.astype(jnp.uint32) * jnp.uint32(math.prod(matrix) % 2**32)
            masters, stored, sums = advanced(cut(stacks[0]), cut(stacks[1]), cut(grads), first)
            new = masters, stored
            written = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i, 0), stacks, new)
            return written, jax.tree.map(jnp.add, before, sums)

        nothing = [jnp.zeros((), jnp.float32)]
        (params, moments), sums = jax.lax.fori_loop(0, layers, layer, ((params, moments), (nothing, nothing)))
        return params, moments, sums

    def _finish_fn(
        self, count: Array, grad_norm: Float[Array, ""], sums: Any, updates: Any
    ) -> tuple[Array, Array, Any]:
        stats = leafwise.statistics(grad_norm, *sums)
        after = updates + stats["moved"].astype(jnp.int32)
        return leafwise.counted(count, grad_norm), after, self.describe(stats, updates)

    # ---- compiling, and the walk -------------------------------------------------------------------------------------

    def programs(self, state: Any) -> list[Any]:
        """Makes, or finds in a cache, a jitted program for each group of `groups_of`, in order.

        A program maps a group's masters, moments and gradients, the count and `norms` to (masters, moments, sums of
        squares), as `leafwise.advance` does. Masters and moments are donated.

        Args:
          state: a state, which may be abstract; its parameters and moments have shardings.
        """
        params, moments = jax.tree.leaves(state.params), leafwise.moments_of(state.params, state.opt_state)
        places = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), (params, moments))
        groups, leaves = groups_of(state.params), self.optimizer.leaves(state.params)
        key = groups, tuple(leaves), tuple(jax.tree.leaves(places))
        if key not in self._programs:
            self._programs[key] = [
                jax.jit(
                    functools.partial(self._group_fn, _picked(leaves, group)),
                    donate_argnums=(0, 1),
                    out_shardings=(_picked(places[0], group), _picked(places[1], group), None),
                )
                for group in groups
            ]
        return self._programs[key]

    def __call__(self, state: Any, grads: Any) -> tuple[Any, Any]:
        groups = groups_of(state.params)
        if len(groups) > 1:
            return self._walk(groups, state, grads)
        if self.offload:
            jax.block_until_ready(grads)  # as in `_walk`
            state = moved_to("device", state)
        state, metrics = self._whole(state, grads)
        return (self.placed(state) if self.offload else state), metrics

    def _walk(self, groups: Sequence[tuple[int, ...]], state: Any, grads: Any) -> tuple[Any, Any]:
        home = "pinned_host" if self.offload else "device"
        programs, structure = self.programs(state), jax.tree.structure(state.params)
        norms = self._norms(grads)
        if self.offload:
            jax.block_until_ready(norms)  # what the backward holds is given back before the state arrives
        params, grads = jax.tree.leaves(state.params), jax.tree.leaves(grads)
        moments = leafwise.moments_of(state.params, state.opt_state)
        sums: tuple[list[Any], list[Any]] = [None] * len(params), [None] * len(params)
        count = _completed(state.opt_state.count, _copied(state.opt_state.count, "device"))
        visits = ((_picked(moments, group), _copied(_picked(moments, group), "device")) for group in groups)
        nobody: tuple[list[Any], list[Any]] = [], []
        here, leaving = next(visits), nobody
        for group, program in zip(groups, programs, strict=True):
            own = _picked(params, group), _completed(*here), _picked(grads, group)
            new, updated, squares = program(*own, count, norms)
            _completed(*leaving)  # the last group's moments are gone when the next one's come
            here = next(visits, nobody)
            leaving = updated, _copied(updated, home)
            for i, *found in zip(group, new, leaving[1], *squares, strict=True):
                params[i], moments[i], sums[0][i], sums[1][i] = found
        _completed(*leaving)
        trees = tuple(jax.tree.unflatten(structure, part) for part in sums)
        after, updates, metrics = self._finish(count, norms[0], trees, state.updates)
        count.delete()
        opt_state = leafwise.with_moments(state.params, _completed(after, _copied(after, home)), moments)
        params = jax.tree.unflatten(structure, params)
        return dataclasses.replace(state, params=params, opt_state=opt_state, updates=updates), metrics
