# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer updates parameter by parameter: one function updates a whole model, a group of leaves or one layer.

    gradient ──► float32 ──► clipped ──► Muon's direction, or AdamW's ──► + decay ──► x -lr ──► master, rounded once
                                          moments, in the dtype they are stored in

A parameter's update depends on its gradient, master and moments, the number of earlier updates, and the norm of all
gradients. The norm is for clipping; 0 or NaN skips the update. So parameters can be updated in one program, in groups
(`by_stack`), or layer by layer, by one formula. The last bits may differ, because XLA compiles a parameter's arithmetic
differently beside other parameters.

Scalars that several parameters share (learning rates, AdamW's bias corrections) are computed once per program: XLA
keeps a division by a scalar with several users, and turns one with a single user into a product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from qarl_jax.numerics.stochastic import round_stochastically, rounding_seed
from qarl_jax.optim import build, eight_bit, muon
from qarl_jax.optim.eight_bit import Blocks, MomentDtype

_HOLE = optax.MaskedNode()  # where a parameter has no such moment: a tree without leaves
_MASTERS = 1 << 16  # first number of masters' seeds: moments, which have those below, draw other bits


class Leaf(NamedTuple):
    """The static facts of one parameter that its update needs.

    Attributes:
      rule: "muon" or "adamw" (`build.label`).
      decays: whether weight decay applies.
      number: its index among the parameters with this rule; it seeds the rounding of low-bit moments.
      place: its index among all parameters; it seeds the rounding of the master.
    """

    rule: str
    decays: bool
    number: int
    place: int


class State(NamedTuple):
    """The state of an optimizer. Its trees have the parameters' structure; a parameter without a moment has an
    `optax.MaskedNode` there.

    Attributes:
      count: int32, updates so far.
      momentum: Muon's momentum. mu, nu: AdamW's first and second moments.
    """

    count: Any
    momentum: Any
    mu: Any
    nu: Any


class Scalars(NamedTuple):
    """The numbers that all parameters of an update share.

    Attributes:
      updates: int32, the number of earlier updates.
      lr: the negative learning rate by rule, float32.
      corrections: AdamW's bias corrections, 1 - b1^t and 1 - b2^t.
      norm: float32, the norm of all gradients, for clipping.
    """

    updates: Array
    lr: dict[str, Array]
    corrections: tuple[Array, Array]
    norm: Array


class Optimizer:
    """Muon or AdamW: makes the moments of a tree of masters, and updates one master at a time.

    Args:
      cfg: `build.Muon` or `build.AdamW`.
      total_updates: number of updates of the run, at which a decaying schedule ends.
    """

    def __init__(self, cfg: build.Config, total_updates: int | None = None):
        self.cfg = cfg
        self._adamw = cfg.adamw
        self._schedules = {"adamw": build.make_schedule(self._adamw.lr, cfg.schedule, total_updates)}
        if isinstance(cfg, build.Muon):
            self._schedules["muon"] = build.make_schedule(cfg.lr, cfg.schedule, total_updates)
            self._muon = functools.partial(
                muon.step, momentum=cfg.momentum, nesterov=cfg.nesterov, precision=cfg.matmul_precision
            )

    def leaves(self, params: Any) -> list[Leaf]:
        """Makes a `Leaf` for every parameter of a tree, whose leaves may be abstract."""
        out, seen = list[Leaf](), dict[str, int]()
        for place, (path, param) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
            rule = build.label(path, param.ndim) if "muon" in self._schedules else "adamw"
            out.append(Leaf(rule, build.decays(path), seen.get(rule, 0), place))
            seen[rule] = seen.get(rule, 0) + 1
        return out

    def init(self, params: Any) -> State:
        """Makes the state before the first update. It can be traced by jit; `leafwise.init` also places its arrays."""

        def zeros(dtype: MomentDtype, grid: eight_bit.Grid, param: Any, is_few: bool) -> Any:
            if dtype == "int8":
                return jnp.zeros(param.shape, jnp.float32) if is_few else eight_bit.zeros(param.shape, grid)
            return jnp.zeros_like(param, dtype=dtype)

        def of(leaf: Leaf, param: Any) -> tuple[Any, Any, Any]:
            # Norms, biases and vectors are not worth eight bits.
            first, second = self.cfg.moment_dtype, self.cfg.second_moment_dtype
            if leaf.rule == "muon":
                return zeros(first, eight_bit.LINEAR, param, False), _HOLE, _HOLE
            is_few = param.ndim < 2 or not leaf.decays
            return (
                _HOLE,
                zeros(first, eight_bit.SIGNED, param, is_few),
                zeros(second, eight_bit.UNSIGNED, param, is_few),
            )

        made = [of(*each) for each in zip(self.leaves(params), jax.tree.leaves(params), strict=True)]
        return with_moments(params, jnp.zeros((), jnp.int32), made)

    def scalars(self, count: Array, norm: Array) -> Scalars:
        """Computes the `Scalars` of update number `count` from `norm`, the `clipping_norm` of all gradients."""
        lr = {rule: -1 * schedule(count) for rule, schedule in self._schedules.items()}
        return Scalars(count, lr, self._corrections(count), norm)

    def _corrections(self, count: Array) -> tuple[Array, Array]:
        with jax.numpy_dtype_promotion("standard"):  # a Python float to an int32 counter, which ours refuses
            t = optax.safe_increment(count)
            return 1 - self._adamw.b1**t, 1 - self._adamw.b2**t

    def step(
        self, leaf: Leaf, scalars: Scalars, grad: Array, param: Array, moments: tuple[Any, Any, Any], first: Any = None
    ) -> tuple[Array, tuple[Any, Any, Any]]:
        """Computes one parameter's update, float32, and its new moments.

        Args:
          leaf: the parameter's rule and number. scalars: `scalars` of the update.
          grad, param: arrays of one shape, in any float dtype. moments: as they are stored.
          first: uint32 scalar: number of the parameter's element at which `param` begins, if it is a slice of layers.
        """
        grad, param = grad.astype(jnp.float32), param.astype(jnp.float32)
        bound = self.cfg.clip_norm
        if bound is not None:  # optax.clip_by_global_norm's formula
            grad = jax.lax.select(scalars.norm < bound, grad, (grad / scalars.norm) * bound)
        if leaf.rule == "muon":
            update, momentum = self._muon(grad, moments[0])
            moments, decay = (momentum, _HOLE, _HOLE), self.cfg.weight_decay
        else:
            seed = rounding_seed(scalars.updates, leaf.number, first)
            update, *pair = self._adam(scalars, seed, grad, *moments[1:])
            moments, decay = (_HOLE, *pair), self._adamw.weight_decay if leaf.decays else 0.0
        if decay:
            update = update + decay * param
        return scalars.lr[leaf.rule] * update, moments

    def added(self, leaf: Leaf, count: Array, param: Array, update: Array, first: Any = None) -> Array:
        """Adds an update to a master in float32, and rounds the sum to the master's dtype by `master_rounding`.

        Args:
          count: int32, number of earlier updates. leaf, param, first: as in `step`. update: what it computed.
        """
        total = param.astype(jnp.float32) + update
        if param.dtype != jnp.bfloat16 or self.cfg.master_rounding == "nearest":
            return total.astype(param.dtype)
        return round_stochastically(total, rounding_seed(count, _MASTERS + leaf.place, first))

    def _adam(self, scalars: Scalars, seed: Array, grad: Array, stored_mu: Any, stored_nu: Any) -> tuple[Any, ...]:
        """AdamW's direction, and both moments as they are stored."""
        blocks = isinstance(stored_mu, Blocks) or isinstance(stored_nu, Blocks)
        if blocks and grad.ndim > 2:  # a matrix at a time, so that few moments are decoded at once
            firsts = jnp.arange(grad.shape[0], dtype=jnp.uint32) * jnp.uint32(grad[0].size % 2**32)
            rows = (seed + firsts, grad, stored_mu, stored_nu)
            return jax.lax.map(lambda row: self._adam(scalars, *row), rows)
        b1, b2 = self._adamw.b1, self._adamw.b2
        mu = (1 - b1) * grad + b1 * _decoded(stored_mu, eight_bit.SIGNED)
        nu = (1 - b2) * grad**2 + b2 * _decoded(stored_nu, eight_bit.UNSIGNED)
        # With int8 moments each parameter has corrections of its own: recorded runs keep their last bits.
        shared = "int8" not in (self.cfg.moment_dtype, self.cfg.second_moment_dtype)
        corrections = scalars.corrections if shared else self._corrections(scalars.updates)
        over = [x / correction for x, correction in zip((mu, nu), corrections, strict=True)]
        direction = over[0] / (jnp.sqrt(over[1]) + self._adamw.eps)
        # An average that moves by a thousandth needs a stochastic rounding; the two draw different bits.
        if isinstance(stored_mu, Blocks):
            first: Any = eight_bit.encode(mu, eight_bit.SIGNED, ~seed)
        else:
            first = mu.astype(stored_mu.dtype)
        if isinstance(stored_nu, Blocks):
            return direction, first, eight_bit.encode(nu, eight_bit.UNSIGNED, seed)
        return direction, first, round_stochastically(nu, seed) if stored_nu.dtype == jnp.bfloat16 else nu


def _decoded(stored: Any, grid: eight_bit.Grid) -> Array:
    return eight_bit.decode(stored, grid) if isinstance(stored, Blocks) else stored.astype(jnp.float32)


# --------------------------------------------------------------------------------------------------------------- states


def moments_of(params: Any, state: State) -> list[tuple[Any, Any, Any]]:
    """Lists (momentum, mu, nu) of every parameter, as stored; a moment that it lacks is an `optax.MaskedNode`.

    Args:
      params: any tree with the parameters' structure. state: their state, which may be abstract.
    """
    structure: Any = jax.tree.structure(params)
    momentum, mu, nu = (structure.flatten_up_to(tree) for tree in state[1:])
    return list(zip(momentum, mu, nu, strict=True))


def with_moments(params: Any, count: Any, moments: Sequence[tuple[Any, Any, Any]]) -> State:
    """Makes a `State` of a count and a list of (momentum, mu, nu): the inverse of `moments_of`."""
    structure = jax.tree.structure(params)
    return State(count, *(jax.tree.unflatten(structure, [each[kind] for each in moments]) for kind in range(3)))


def state_shardings(abstract_state: State, params: Any) -> State:
    """Returns the shardings of an optimizer state: moments are sharded as their parameter, the count is replicated.

    Args:
      abstract_state: `jax.eval_shape(optimizer.init, params)`.
      params: the parameters, or ShapeDtypeStructs of them; every leaf has a `.sharding`.
    """
    places = [leaf.sharding for leaf in jax.tree.leaves(params)]
    anywhere = places[0]
    if isinstance(anywhere, jax.sharding.NamedSharding):
        anywhere = jax.sharding.NamedSharding(anywhere.mesh, jax.sharding.PartitionSpec())

    def of(moment: Any, place: Any) -> Any:
        if isinstance(moment, Blocks):
            return Blocks(codes=place, scale=_of_scales(place, moment.codes.shape))
        return place if isinstance(moment, jax.ShapeDtypeStruct | jax.Array) else moment

    moments = zip(moments_of(params, abstract_state), places, strict=True)
    return with_moments(params, anywhere, [tuple(of(x, place) for x in each) for each, place in moments])


def _of_scales(place: Any, shape: Sequence[int]) -> Any:
    """Places the scales of codes of `shape` at `place` lie: with them, or whole along an axis that cuts blocks."""
    if not isinstance(place, jax.sharding.NamedSharding) or len(place.spec) < len(shape):
        return place
    if place.shard_shape(tuple(shape))[-1] % eight_bit.BLOCK == 0:
        return place
    return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec(*place.spec[: len(shape) - 1]))


def init(optimizer: Optimizer, params: Any) -> State:
    """Makes a fresh optimizer state, with each moment in its parameter's sharding (a plain jit would replicate it)."""
    shardings = state_shardings(jax.eval_shape(optimizer.init, params), params)
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


# ------------------------------------------------------------------------------------------------------------- applying


def clipping_norm(grads: Any) -> Float[Array, ""]:
    """Computes the global norm of gradients by optax's formula, for clipping."""
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), grads))


def squares(tree: Any) -> Any:
    """The sum of squares of each leaf, in float32."""
    return jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree)


def root(sums: Any) -> Float[Array, ""]:
    """Computes the norm from the sum of all leaves' `squares`."""
    return jnp.sqrt(sum(jax.tree.leaves(sums), jnp.float32(0)))


def global_norm(tree: Any) -> Float[Array, ""]:
    """Computes the Euclidean norm over all leaves in float32; it is NaN or infinite if any entry is."""
    return root(squares(tree))


def norms(grads: Any) -> tuple[Array, Array]:
    """Computes (`global_norm`, `clipping_norm`) of all gradients, float32 scalars."""
    return global_norm(grads), clipping_norm(grads)


def select(condition: Any, new: Any, old: Any) -> Any:
    """Returns the tree `new` if the scalar `condition` holds, else `old`, so that a skipped update changes nothing."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def advance(
    optimizer: Optimizer,
    leaves: Sequence[Leaf],
    count: Array,
    norms: tuple[Array, Array],
    params: Sequence[Array],
    moments: Sequence[tuple[Any, Any, Any]],
    grads: Sequence[Array],
    first: Any = None,
) -> tuple[list[Array], list[tuple[Any, Any, Any]], tuple[list[Array], list[Array]]]:
    """Updates some masters in float32 and rounds them to their dtypes, unless the gradient is zero or not finite.

    A gradient that is not finite changes neither masters nor moments; the caller sees its norm and decides to stop. A
    gradient of zero changes nothing either: without a signal, momentum and weight decay must not move masters.

    Args:
      leaves, params, moments, grads: one entry per master, in one order; `moments` as they are stored.
      count: int32, number of earlier updates.
      norms: `norms` of all gradients of the model, not of `grads` alone.
      first: as in `Optimizer.step`.

    Returns:
      (masters, moments, (`squares` of the computed updates, `squares` of the masters before)).
    """
    scalars = optimizer.scalars(count, norms[1])
    each = zip(leaves, grads, params, moments, strict=True)
    made = [optimizer.step(leaf, scalars, grad, param, held, first) for leaf, grad, param, held in each]
    updates, stored = [update for update, _ in made], [held for _, held in made]

    added = zip(leaves, params, updates, strict=True)
    after = [optimizer.added(leaf, count, param, update, first) for leaf, param, update in added]
    sums = squares(updates), squares(list(params))
    return *select(_moves(norms[0]), (after, stored), (list(params), list(moments))), sums


def counted(count: Array, grad_norm: Array) -> Array:
    """Adds an update to the count, int32, unless the norm of its gradients is 0, inf or NaN."""
    return jnp.where(_moves(grad_norm), optax.safe_increment(count), count)


def _moves(grad_norm: Array) -> Array:
    return jnp.isfinite(grad_norm) & (grad_norm > 0)


def statistics(grad_norm: Any, of_updates: Any, of_params: Any) -> dict[str, Any]:
    """Computes the statistics of an update: float32 scalars `grad_norm` (before clipping) and `update_norm` (0 if it
    was skipped), and bool scalars `finite` and `moved`. `squares` are two trees of float32 scalars like the parameters.

    Args:
      of_updates, of_params: `squares` of the computed updates, and of the parameters before.
    """
    moved = _moves(grad_norm)
    return {
        "grad_norm": grad_norm,
        "update_norm": jnp.where(moved, root(of_updates), 0.0),
        "finite": jnp.isfinite(grad_norm),
        "moved": moved,
        "squares": (of_updates, of_params),
    }


def update(
    optimizer: Optimizer, grads: Any, state: State, params: Any, keep: Any = True
) -> tuple[Any, State, dict[str, Any]]:
    """Updates all masters by `advance`. It can be jitted with `state` and `params` donated.

    Args:
      grads, params: trees of equal structure.
      keep: bool scalar; if it is false the update is skipped, as under a gradient of zero.

    Returns:
      (params, state, `statistics`).
    """
    leaves, structure = jax.tree.flatten(params)
    norm, clipping = norms(grads)
    both, moments = (jnp.where(keep, norm, 0.0), clipping), moments_of(params, state)
    after, stored, sums = advance(
        optimizer, optimizer.leaves(params), state.count, both, leaves, moments, jax.tree.leaves(grads)
    )
    stats = statistics(both[0], *(jax.tree.unflatten(structure, part) for part in sums))
    return jax.tree.unflatten(structure, after), with_moments(params, counted(state.count, both[0]), stored), stats
