# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An optimizer update as a program of its own, or one per stack of weights; its state on the devices or on the host.

    host    | state 1 | state 2 | state 3 | ...            a float per parameter under Muon, two under AdamW
                 |         ^ 1'      ^ 2'
    device       v 1       | 2       | 3                   masters and gradients stay

The update of one stack of weights does not need the moments of another. So the parameters of a model that is not small
are dealt into groups, a large leaf alone, others together up to `GROUP_BYTES`, and each group has a program that
updates masters and moments in place. In a stack it walks the layers: beside its arguments it holds what one layer
takes, where a single program for all parameters holds a float32 number for each of them. A state that rests on the host
(`optimizer.offload`) comes to the device group by group and goes back; the next group's arrives, and the last one's
leaves, while one is updated, so that no more than two groups' moments are there.

What looks at all leaves is computed once, before or after: the gradients' norm, which clipping goes by and which says
whether anything moves, and the norms of updates and masters, from the squares that each group returns. Counters are
given to every group and advance alike in each. The random bits of a rounding are those of a leaf's place in the whole.

Groups depend on the parameters' shapes alone, and the programs are the same ones wherever the state rests, so that no
number depends on that. One program for all gives other last bits than several: what XLA makes of one leaf's arithmetic
depends on what stands beside it (a division by a scalar that others use too stays one, alone it becomes a product).

Left out: masters or gradients on the host, and copies by the compiler within a program (memory kinds inside of `jit`),
which are up to each backend.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from qarl_jax.optim import build as optimizers
from qarl_jax.optim.eight_bit import Blocks

GROUP_BYTES = 2**30
"""Float32 bytes of the parameters that a group of several holds at most; a leaf that alone has more is one group.
Models below it are updated by one program. Another value is another compilation, and with it other last bits."""


def _is_moment(x: Any) -> bool:
    return isinstance(x, Blocks)


# --------------------------------------------------------------------------------------------------------- two memories


def moved_to(kind: Literal["device", "pinned_host"], state: Any) -> Any:
    """A frozen dataclass with its `opt_state` in memory of that kind; what was elsewhere is deleted.

    Waits for copies, so that neither memory ever holds two. jax.device_put outside of any program, which every
    backend has.
    """
    return dataclasses.replace(state, opt_state=_arrived(state.opt_state, _sent(state.opt_state, kind)))


def _sent(tree: Any, kind: str) -> Any:
    """Copies, under way, in memory of that kind; what is there already stays itself."""
    return jax.tree.map(
        lambda x: x if x.sharding.memory_kind == kind else jax.device_put(x, x.sharding.with_memory_kind(kind)), tree
    )


def _kept(x: Any, kind: str) -> jax.ShapeDtypeStruct:
    """An abstract array in memory of that kind."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(kind))


def _arrived(origin: Any, copies: Any) -> Any:
    """`copies`; those that are others than their origin are complete, and the origin's memory is given back."""
    pairs = zip(jax.tree.leaves(origin), jax.tree.leaves(copies), strict=True)
    moved = [(x, copy) for x, copy in pairs if x is not copy]
    jax.block_until_ready([copy for _, copy in moved])
    for x, _ in moved:
        x.delete()
    return copies


# --------------------------------------------------------------------------------------------------------------- groups


class Group(NamedTuple):
    """Leaves that are updated together, by number: of the parameters, and of the moments that belong to them."""

    params: tuple[int, ...]
    moments: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The map from leaves of an optimizer state to parameters; the same for abstract and real trees.

    Attributes:
      params, state: their structures; in the state a `Blocks` is one leaf.
      groups: every parameter is in one.
      counters: leaves of the state that belong to no parameter.
      numbers: for each parameter its place among those whose moments stand in the same tree.
    """

    params: Any
    state: Any
    groups: tuple[Group, ...]
    counters: tuple[int, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, params: Any, opt_state: Any) -> Layout:
        """The layout of `params` and an optimizer's state around them."""
        leaves, structure = jax.tree.flatten(params)
        stored_structure = jax.tree.structure(opt_state, is_leaf=_is_moment)
        owners = optimizers.owners(opt_state, params)

        def moments(group: Sequence[int]) -> tuple[int, ...]:
            return tuple(i for i, owner in enumerate(owners) if owner is not None and owner.param in group)

        numbers, seen = [0] * len(leaves), dict[str, int]()
        for owner in owners:
            if owner is not None:
                numbers[owner.param] = seen.get(owner.tree, 0)
                seen[owner.tree] = numbers[owner.param] + 1
        return cls(
            params=structure,
            state=stored_structure,
            groups=tuple(Group(params=tuple(group), moments=moments(group)) for group in _by_size(leaves)),
            counters=tuple(i for i, owner in enumerate(owners) if owner is None),
            numbers=tuple(numbers),
        )

    def leaves(self, opt_state: Any) -> list[Any]:
        """The leaves of a state that `Group.moments` and `counters` number."""
        found: list[Any] = self.state.flatten_up_to(opt_state)
        return found


def _by_size(leaves: Sequence[Any]) -> list[list[int]]:
    """Neighbours together up to `GROUP_BYTES`, a larger leaf alone; by number."""
    groups: list[list[int]] = []
    room = 0
    for i, leaf in enumerate(leaves):
        size = 4 * math.prod(leaf.shape)
        if size > room:
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(i)
        room -= size
    return groups


def is_stack(shape: Sequence[int]) -> bool:
    """Tells whether a leaf that is a group of its own is updated layer by layer."""
    return len(shape) > 2


def _picked(some: Sequence[Any], where: Sequence[int]) -> list[Any]:
    return [some[i] for i in where]


def _placed(structure: Any, where: Sequence[int], what: Sequence[Any]) -> Any:
    """A tree of `structure` with `what` at the leaves numbered `where`, and holes elsewhere."""
    leaves: list[Any] = [optax.MaskedNode()] * structure.num_leaves
    for i, x in zip(where, what, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


class _Leaves:
    """The leaves of a state while its groups are updated, one after the other."""

    def __init__(self, layout: Layout, state: Any):
        self.layout, self.state = layout, state
        self.params, self.moments = jax.tree.leaves(state.params), layout.leaves(state.opt_state)
        self._sums: tuple[list[Any], list[Any]] = [None] * len(self.params), [None] * len(self.params)

    def put(self, group: Group, params: list[Any], moments: list[Any], squares: tuple[list[Any], list[Any]]) -> None:
        """Stores the result of `Update._group_fn` for a group."""
        for i, *found in zip(group.params, params, *squares, strict=True):
            self.params[i], self._sums[0][i], self._sums[1][i] = found
        for i, x in zip(group.moments, moments, strict=True):
            self.moments[i] = x

    def finished(self, counters: list[Any], norm: Any, finish: Callable[..., tuple[Any, Any]]) -> tuple[Any, Any]:
        """The state after all groups, and its metrics by `Update._finish_fn`."""
        for i, x in zip(self.layout.counters, counters, strict=True):
            self.moments[i] = x
        sums = tuple(jax.tree.unflatten(self.layout.params, part) for part in self._sums)
        count, metrics = finish(norm, sums, self.state.updates)
        params = jax.tree.unflatten(self.layout.params, self.params)
        opt_state = jax.tree.unflatten(self.layout.state, self.moments)
        return dataclasses.replace(self.state, params=params, opt_state=opt_state, updates=count), metrics


class Part(NamedTuple):
    """The inputs of a group's update.

    Attributes:
      params, moments, grads: leaves of the group, or a cut of its only one.
      counters: of the whole state.
      norms: of all gradients, `build.global_norm` and `build.clipping_norm`.
    """

    params: list[Any]
    moments: list[Any]
    counters: list[Any]
    grads: list[Any]
    norms: tuple[Array, Array]


# --------------------------------------------------------------------------------------------------------------- update


class Update:
    """`build.advance` outside of any program: `update(state, grads)` -> (the state after it, metrics).

    `state` is a frozen dataclass with `params`, `opt_state` and `updates`; params and opt_state are donated.

    Args:
      optimizer: one of `build.make_optimizer`. Any other knows of no parts and is updated by one program, for which
        all of a state on the host comes to the device.
      describe: (stats of `build.update`, count of the updates before it) -> metrics; traceable.
      offload: leave the state on the host.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        describe: Callable[[dict[str, Any], Any], Any],
        *,
        offload: bool = False,
    ):
        self.optimizer, self.describe, self.offload = optimizer, describe, offload
        self._whole = jax.jit(self.whole, donate_argnums=(0,))
        self._norms = jax.jit(self._norms_fn)
        self._finish = jax.jit(self._finish_fn)
        self._programs: dict[Any, list[Any]] = {}

    def whole(self, state: Any, grads: Any) -> tuple[Any, Any]:
        """The update as one program, or as a part of one."""
        after, stats = optimizers.advance(self.optimizer, state, grads)
        return after, self.describe(stats, state.updates)

    def placed(self, state: Any) -> Any:
        """`state` with its `opt_state` where it rests."""
        return moved_to("pinned_host" if self.offload else "device", state)

    def resting(self, state: Any) -> Any:
        """`placed` of an abstract state."""
        if not self.offload:
            return state
        return dataclasses.replace(state, opt_state=jax.tree.map(lambda x: _kept(x, "pinned_host"), state.opt_state))

    def compile_ahead(self, state: Any, grads: Any) -> list[jax.stages.Compiled]:
        """Compiles what a call with such a state and such gradients runs; those programs.

        Args:
          state, grads: abstract, with their shardings; the state as `resting` gives it.
        """
        there = dataclasses.replace(state, opt_state=jax.tree.map(lambda x: _kept(x, "device"), state.opt_state))
        layout = self.layout(there)
        if layout is None:
            return [self._whole.lower(there, grads).compile()]
        norms = self._norms.lower(grads).compile()
        scalar = lambda place: jax.ShapeDtypeStruct((), jnp.float32, sharding=place)  # noqa: E731
        abstract_norms = jax.tree.map(scalar, norms.output_shardings)
        leaves, grads = _Leaves(layout, there), jax.tree.leaves(grads)
        counters = _picked(leaves.moments, layout.counters)
        compiled = [norms]
        for group, program in zip(layout.groups, self.programs(layout, there), strict=True):
            own = _picked(leaves.params, group.params), _picked(leaves.moments, group.moments)
            lowered = program.lower(*own, counters, _picked(grads, group.params), abstract_norms)
            compiled.append(lowered.compile())
        return compiled

    # ---- what a group's program computes -----------------------------------------------------------------------------

    def _norms_fn(self, grads: Any) -> tuple[Array, Array]:
        return optimizers.global_norm(grads), optimizers.clipping_norm(grads)

    def _step(self, layout: Layout, group: Group, part: Part, **where: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """(updates, moments, counters) of a group, or of a cut of its only leaf."""
        stored = (*group.moments, *layout.counters)
        updates, state = self.optimizer.update(
            _placed(layout.params, group.params, part.grads),
            _placed(layout.state, stored, [*part.moments, *part.counters]),
            _placed(layout.params, group.params, part.params),
            numbers=_placed(layout.params, group.params, _picked(layout.numbers, group.params)),
            norm=part.norms[1],
            **where,
        )
        new = dict(zip(sorted(stored), jax.tree.leaves(state, is_leaf=_is_moment), strict=True))
        return jax.tree.leaves(updates), [new[i] for i in group.moments], [new[i] for i in layout.counters]

    def _group_fn(
        self, layout: Layout, group: Group, *operands: Any
    ) -> tuple[list[Any], list[Any], list[Any], tuple[list[Array], list[Array]]]:
        """(params, moments, counters, squares of updates and of params before) of a group's update; a stack's by layer.

        Args:
          operands: those of `Part`.
        """
        part = Part(*operands)
        advanced = functools.partial(self._advanced, layout, group)
        if len(part.params) > 1 or not is_stack(part.params[0].shape):
            return advanced(part)

        layers, *matrix = part.params[0].shape

        def layer(i: Array, carry: Any) -> Any:
            stacks, _, before = carry
            cut = functools.partial(jax.tree.map, lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1))
            first = i.astype(jnp.uint32) * jnp.uint32(math.prod(matrix) % 2**32)
            params, moments = cut(stacks)
            *new, after, sums = advanced(
                part._replace(params=params, moments=moments, grads=cut(part.grads)), first=first
            )
            written = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i, 0), stacks, tuple(new))
            return written, after, jax.tree.map(jnp.add, before, sums)

        nothing = [jnp.zeros((), jnp.float32)]
        start = (part.params, part.moments), part.counters, (nothing, nothing)
        (new_params, new_moments), after, sums = jax.lax.fori_loop(0, layers, layer, start)
        return new_params, new_moments, after, sums

    def _advanced(self, layout: Layout, group: Group, part: Part, **where: Any) -> Any:
        """`_group_fn` of all elements given, at once; `where` they are, as `build.Optimizer` has it."""
        updates, *new = self._step(layout, group, part, **where)
        sums = optimizers.squares(updates), optimizers.squares(part.params)
        seed = optimizers.masters_seed(self.optimizer, part.counters, where.get("first"))
        own = None if seed is None else lambda i: seed(group.params[i])
        after = [optimizers.apply_updates(part.params, updates, own), *new]
        moved = jnp.isfinite(part.norms[0]) & (part.norms[0] > 0)
        return *optimizers.select(moved, after, list(part[:3])), sums

    def _finish_fn(self, grad_norm: Float[Array, ""], sums: Any, updates: Any) -> tuple[Array, Any]:
        stats = optimizers.statistics(grad_norm, *sums)
        return updates + stats["moved"].astype(jnp.int32), self.describe(stats, updates)

    # ---- compiling, and the walk -------------------------------------------------------------------------------------

    def layout(self, state: Any) -> Layout | None:
        """The groups of a state, abstract or not; None: one program updates it as a whole."""
        if not isinstance(self.optimizer, optimizers.Optimizer):
            return None  # it knows of no parts
        layout = Layout.of(state.params, state.opt_state)
        return layout if len(layout.groups) > 1 else None

    def programs(self, layout: Layout, state: Any) -> list[Any]:
        """Jits `_group_fn(params, moments, counters, grads, norms)` for each group, in place of the first two."""
        params, moments = jax.tree.leaves(state.params), layout.leaves(state.opt_state)
        places = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), (params, moments))
        key = layout, tuple(jax.tree.leaves(places))
        if key not in self._programs:
            self._programs[key] = [
                jax.jit(
                    functools.partial(self._group_fn, layout, group),
                    donate_argnums=(0, 1),
                    out_shardings=(
                        _picked(places[0], group.params),
                        _picked(places[1], group.moments),
                        _picked(places[1], layout.counters),
                        None,
                    ),
                )
                for group in layout.groups
            ]
        return self._programs[key]

    def __call__(self, state: Any, grads: Any) -> tuple[Any, Any]:
        layout = self.layout(state)
        if layout is not None:
            return self._walk(layout, state, grads)
        if self.offload:
            jax.block_until_ready(grads)  # as in `_walk`
            state = moved_to("device", state)
        state, metrics = self._whole(state, grads)
        return (self.placed(state) if self.offload else state), metrics

    def _walk(self, layout: Layout, state: Any, grads: Any) -> tuple[Any, Any]:
        home = "pinned_host" if self.offload else "device"
        programs = self.programs(layout, state)
        norms = self._norms(grads)
        if self.offload:
            jax.block_until_ready(norms)  # what the backward holds is given back before the state arrives
        leaves, grads = _Leaves(layout, state), jax.tree.leaves(grads)
        resting = _picked(leaves.moments, layout.counters)
        counters = after = _arrived(resting, _sent(resting, "device"))
        visits = self._visits(layout, leaves.moments)
        nobody: tuple[list[Any], list[Any]] = [], []
        here, leaving = next(visits), nobody
        for group, program in zip(layout.groups, programs, strict=True):
            own = _picked(leaves.params, group.params), _arrived(*here)
            params, updated, after, squares = program(*own, counters, _picked(grads, group.params), norms)
            _arrived(*leaving)  # the last group's moments are gone when the next one's come
            here = next(visits, nobody)
            leaving = updated, _sent(updated, home)
            leaves.put(group, params, leaving[1], squares)
        _arrived(*leaving)
        after = _arrived(after, _sent(after, home))
        for x in counters:
            x.delete()
        return leaves.finished(after, norms[0], self._finish)

    @staticmethod
    def _visits(layout: Layout, moments: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
        """Group by group, its moments where they rest, and copies of them under way to the device."""
        for group in layout.groups:
            origin = _picked(moments, group.moments)
            yield origin, _sent(origin, "device")
