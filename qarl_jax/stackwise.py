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

from qarl_jax import one_pass
from qarl_jax import optimizer as optimizers
from qarl_jax.blockwise import Blocks
from qarl_jax.sharding import is_hopper

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
    """Which leaf of an optimizer state belongs to which parameter; the same for abstract and real trees.

    Attributes:
      params, state: their structures; in the state a `Blocks` is one leaf.
      groups: every parameter is in one, in their order.
      counters: leaves of the state that belong to no parameter.
      numbers: for each parameter its place among those whose moments stand in the same tree.
    """

    params: Any
    state: Any
    groups: tuple[Group, ...]
    counters: tuple[int, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, params: Any, opt_state: Any, apart: Sequence[int] | None = None) -> Layout:
        """The layout of `params` and an optimizer's state around them.

        Args:
          apart: leaves that are a group each, all others being one; None: groups go by size.
        """
        leaves, structure = jax.tree.flatten(params)
        owners = optimizers.owners(opt_state, params)
        groups: list[list[int]] = []
        room = 0
        for i, leaf in enumerate(leaves):
            size = 4 * math.prod(leaf.shape)
            if size > room:
                groups.append([])
                room = GROUP_BYTES
            groups[-1].append(i)
            room -= size
        if apart is not None:
            groups = [*([i] for i in apart), [i for i in range(len(leaves)) if i not in apart]]
            groups = [group for group in groups if group]
        numbers, seen = [0] * len(leaves), dict[str, int]()
        for owner in owners:
            if owner is not None:
                numbers[owner.param] = seen.get(owner.tree, 0)
                seen[owner.tree] = numbers[owner.param] + 1
        return cls(
            params=structure,
            state=jax.tree.structure(opt_state, is_leaf=_is_moment),
            groups=tuple(
                Group(
                    params=tuple(group),
                    moments=tuple(i for i, owner in enumerate(owners) if owner is not None and owner.param in group),
                )
                for group in groups
            ),
            counters=tuple(i for i, owner in enumerate(owners) if owner is None),
            numbers=tuple(numbers),
        )

    def leaves(self, opt_state: Any) -> list[Any]:
        """The leaves of a state that `Group.moments` and `counters` number."""
        found: list[Any] = self.state.flatten_up_to(opt_state)
        return found


def is_stack(shape: Sequence[int]) -> bool:
    """Whether a leaf that is a group of its own is updated layer by layer."""
    return len(shape) > 2


def _picked(some: Sequence[Any], where: Sequence[int]) -> list[Any]:
    return [some[i] for i in where]


def _placed(structure: Any, where: Sequence[int], what: Sequence[Any]) -> Any:
    """A tree of `structure` with `what` at the leaves numbered `where`, and holes elsewhere."""
    leaves: list[Any] = [optax.MaskedNode()] * structure.num_leaves
    for i, x in zip(where, what, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


# --------------------------------------------------------------------------------------------------------------- update


class Update:
    """`optimizer.advance` outside of any program: `update(state, grads)` -> (the state after it, metrics).

    `state` is a frozen dataclass with `params`, `opt_state` and `updates`; params and opt_state are donated.

    Args:
      optimizer: one of `optimizer.make_optimizer`. Any other knows of no parts and is updated by one program, for which
        all of a state on the host comes to the device.
      describe: (stats of `optimizer.update`, count of the updates before it) -> metrics; traceable.
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
        self._norms = jax.jit(lambda grads: (optimizers.global_norm(grads), optimizers.clipping_norm(grads)))
        self._finish = jax.jit(self._finish_fn)
        self._programs: dict[Any, list[Any]] = {}

    def whole(self, state: Any, grads: Any) -> tuple[Any, Any]:
        """The update as one program, or as a part of one."""
        apart = self._apart(state, grads)
        if not apart:
            after, stats = optimizers.advance(self.optimizer, state, grads)
            return after, self.describe(stats, state.updates)
        layout = Layout.of(state.params, state.opt_state, apart)
        norms = optimizers.global_norm(grads), optimizers.clipping_norm(grads)
        params, moments = jax.tree.leaves(state.params), layout.leaves(state.opt_state)
        grads, counters = jax.tree.leaves(grads), _picked(moments, layout.counters)
        after = counters
        sums: Any = [None] * len(params), [None] * len(params)
        for group in layout.groups:
            own = _picked(params, group.params), _picked(moments, group.moments)
            *new, updated, after, squares = self._group_fn(
                layout, group, *own, counters, _picked(grads, group.params), norms
            )
            for i, *found in zip(group.params, *new, *squares, strict=True):
                params[i], sums[0][i], sums[1][i] = found
            for i, x in zip(group.moments, updated, strict=True):
                moments[i] = x
        for i, x in zip(layout.counters, after, strict=True):
            moments[i] = x
        return self._finished(layout, state, params, moments, norms[0], sums, self._finish_fn)

    def _apart(self, state: Any, grads: Any) -> list[int]:
        """The leaves that `in_one_pass` takes."""
        if not (isinstance(self.optimizer, optimizers.Optimizer) and is_hopper()):
            return []
        params, grads = jax.tree.leaves(state.params), jax.tree.leaves(grads)
        layout = Layout.of(state.params, state.opt_state, range(len(params)))
        moments = layout.leaves(state.opt_state)

        def taken(i: int, group: Group) -> bool:
            return self._takes_one_pass(layout, [i], [params[i]], _picked(moments, group.moments), [grads[i]])

        return [i for i, group in enumerate(layout.groups) if taken(i, group)]

    def _finished(
        self, layout: Layout, state: Any, params: Any, moments: Any, norm: Any, sums: Any, finish: Callable[..., Any]
    ) -> tuple[Any, Any]:
        """The state of these leaves, and the metrics."""
        sums = tuple(jax.tree.unflatten(layout.params, part) for part in sums)
        count, metrics = finish(norm, sums, state.updates)
        params, opt_state = jax.tree.unflatten(layout.params, params), jax.tree.unflatten(layout.state, moments)
        return dataclasses.replace(state, params=params, opt_state=opt_state, updates=count), metrics

    def placed(self, state: Any) -> Any:
        """`state` with its `opt_state` where it rests."""
        return moved_to("pinned_host" if self.offload else "device", state)

    # ---- what a group's program computes -----------------------------------------------------------------------------

    def _step(
        self,
        layout: Layout,
        group: Group,
        params: list[Any],
        moments: list[Any],
        counters: list[Any],
        grads: list[Any],
        **part: Any,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """(updates, moments, counters) of a group, or of one layer of its only leaf."""
        where = (*group.moments, *layout.counters)
        updates, state = self.optimizer.update(
            _placed(layout.params, group.params, grads),
            _placed(layout.state, where, [*moments, *counters]),
            _placed(layout.params, group.params, params),
            numbers=_placed(layout.params, group.params, _picked(layout.numbers, group.params)),
            **part,
        )
        new = dict(zip(sorted(where), jax.tree.leaves(state, is_leaf=_is_moment), strict=True))
        return jax.tree.leaves(updates), [new[i] for i in group.moments], [new[i] for i in layout.counters]

    def _group_fn(
        self,
        layout: Layout,
        group: Group,
        params: list[Any],
        moments: list[Any],
        counters: list[Any],
        grads: list[Any],
        norms: tuple[Array, Array],
    ) -> tuple[list[Any], list[Any], list[Any], tuple[list[Array], list[Array]]]:
        """(params, moments, counters, squares of updates and of params before) of a group's update.

        Args:
          norms: of all gradients, `optimizer.global_norm` and `optimizer.clipping_norm`.
        """
        by_xla = functools.partial(self._by_xla, layout, group)
        operands = params, moments, counters, grads, norms
        if not self._takes_one_pass(layout, group.params, params, moments, grads):
            return by_xla(*operands)
        by_kernel = functools.partial(self.in_one_pass, layout, group)
        found: Any = jax.lax.platform_dependent(*operands, cuda=by_kernel, default=by_xla)
        return found

    def _advanced(
        self,
        layout: Layout,
        group: Group,
        params: list[Any],
        moments: list[Any],
        counters: list[Any],
        grads: list[Any],
        norms: tuple[Array, Array],
        **part: Any,
    ) -> Any:
        """`_group_fn` of all elements given, at once; `part` as in `optimizer.Optimizer`."""
        updates, *new = self._step(layout, group, params, moments, counters, grads, norm=norms[1], **part)
        sums = optimizers.squares(updates), optimizers.squares(params)
        after = [optimizers.apply_updates(params, updates), *new]
        moved = jnp.isfinite(norms[0]) & (norms[0] > 0)
        return *optimizers.select(moved, after, [params, moments, counters]), sums

    def _takes_one_pass(
        self, layout: Layout, where: Sequence[int], params: list[Any], moments: list[Any], grads: list[Any]
    ) -> bool:
        """Whether `in_one_pass` serves here, and takes the leaf at `where`: these, if they are of one."""
        if len(where) > 1 or not (isinstance(self.optimizer, optimizers.Optimizer) and is_hopper()):
            return False
        names = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(layout.params, layout.numbers))
        path = names[where[0]][0]
        return self.optimizer.elementwise(path, params[0].ndim) and one_pass.serves(*params, *moments, *grads)

    def in_one_pass(
        self,
        layout: Layout,
        group: Group,
        params: list[Any],
        moments: list[Any],
        counters: list[Any],
        grads: list[Any],
        norms: tuple[Array, Array],
        *,
        interpret: bool = False,
    ) -> Any:
        """`_group_fn` of a leaf whose update is elementwise, by `one_pass.run`."""
        advanced = functools.partial(self._advanced, layout, group)

        def step(scalars: Any, first: Array, stacks: list[Array], reads: list[Array]) -> Any:
            params, moments, _, sums = advanced(stacks[:1], stacks[1:], scalars[0], reads, scalars[1], first=first)
            return [*params, *moments], [*sums[0], *sums[1]]

        stacks, (update, param) = one_pass.run(step, (counters, norms), [*params, *moments], grads, interpret=interpret)
        after = advanced(params, moments, counters, grads, norms)[2]  # nothing else of it is computed
        return stacks[:1], stacks[1:], after, ([update], [param])

    def _by_xla(
        self,
        layout: Layout,
        group: Group,
        params: list[Any],
        moments: list[Any],
        counters: list[Any],
        grads: list[Any],
        norms: tuple[Array, Array],
    ) -> Any:
        """`_group_fn`, a stack layer by layer."""
        advanced = functools.partial(self._advanced, layout, group)
        if len(params) > 1 or not is_stack(params[0].shape):
            return advanced(params, moments, counters, grads, norms)

        layers, *matrix = params[0].shape

        def layer(i: Array, carry: Any) -> Any:
            stacks, _, before = carry
            cut = functools.partial(jax.tree.map, lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1))
            first = i.astype(jnp.uint32) * jnp.uint32(math.prod(matrix) % 2**32)
            params, moments = cut(stacks)
            *new, after, sums = advanced(params, moments, counters, cut(grads), norms, first=first)
            written = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i, 0), stacks, tuple(new))
            return written, after, jax.tree.map(jnp.add, before, sums)

        nothing = [jnp.zeros((), jnp.float32)]
        start = (params, moments), counters, (nothing, nothing)
        (new_params, new_moments), after, sums = jax.lax.fori_loop(0, layers, layer, start)
        return new_params, new_moments, after, sums

    def _finish_fn(self, grad_norm: Float[Array, ""], sums: Any, updates: Any) -> tuple[Array, Any]:
        stats = optimizers.statistics(grad_norm, *sums)
        return updates + stats["moved"].astype(jnp.int32), self.describe(stats, updates)

    # ---- compiling, and the walk -------------------------------------------------------------------------------------

    def layout(self, state: Any) -> Layout | None:
        """The groups of a state, abstract or not; None: one program updates it as a whole."""
        if not isinstance(self.optimizer, optimizers.Optimizer):
            return None
        layout = Layout.of(state.params, state.opt_state)
        return layout if len(layout.groups) > 1 else None

    def programs(self, layout: Layout, state: Any) -> list[Any]:
        """For each group a jitted `_group_fn(params, moments, counters, grads, norms)`, in place of the first two."""
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
        params, grads, moments = jax.tree.leaves(state.params), jax.tree.leaves(grads), layout.leaves(state.opt_state)
        resting = _picked(moments, layout.counters)
        counters = after = _arrived(resting, _sent(resting, "device"))
        sums: Any = [None] * len(params), [None] * len(params)
        visits = self._visits(layout, moments)
        nobody: tuple[list[Any], list[Any]] = [], []
        here, leaving = next(visits), nobody
        for group, program in zip(layout.groups, programs, strict=True):
            own = _picked(params, group.params), _arrived(*here)
            *new, updated, after, squares = program(*own, counters, _picked(grads, group.params), norms)
            _arrived(*leaving)  # the last group's moments are gone when the next one's come
            here = next(visits, nobody)
            leaving = updated, _sent(updated, home)
            for i, *found in zip(group.params, *new, *squares, strict=True):
                params[i], sums[0][i], sums[1][i] = found
            for i, x in zip(group.moments, leaving[1], strict=True):
                moments[i] = x
        _arrived(*leaving)
        for i, x in zip(layout.counters, _arrived(after, _sent(after, home)), strict=True):
            moments[i] = x
        for x in counters:
            x.delete()
        return self._finished(layout, state, params, moments, norms[0], sums, self._finish)

    @staticmethod
    def _visits(layout: Layout, moments: list[Any]) -> Iterator[tuple[list[Any], list[Any]]]:
        """Group by group, its moments where they rest, and copies of them under way to the device."""
        for group in layout.groups:
            origin = _picked(moments, group.moments)
            yield origin, _sent(origin, "device")
