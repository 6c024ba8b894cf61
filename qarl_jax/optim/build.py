# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizers of masters: Muon for matrices and AdamW for the rest, or AdamW for all; schedules; the guarded update.

* Muon (`muon.py`) takes matrices only. Embeddings, head, norms, biases and routers take AdamW at the same lr
  (`label`); a stack of norm scales [L, D] is two-dimensional and would otherwise be orthogonalised.
* Arithmetic, and the state unless told otherwise (`moments.py`), are float32, whatever the master's dtype. A bfloat16
  master has a spacing of 1.2e-4 near 0.02: rounded to nearest at lr 1e-6 it never moves. Keep masters in float32, or
  round them stochastically (`master_rounding`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from qarl_jax.optim import eight_bit, muon
from qarl_jax.optim.eight_bit import Blocks
from qarl_jax.optim.moments import MomentDtype, leaf_by_leaf, round_stochastically, rounding_seed
from qarl_jax.typed_config.annotations import internal
from qarl_jax.types import UserError, at_least

# -------------------------------------------------------------------------------------------------------- configuration


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate as a function of the update (not the rollout step: one step may hold several updates).

    Attributes:
      kind: "constant", "linear" or "cosine", after the warm-up.
      warmup_updates: lr rises linearly and reaches its full value at the last of these updates; 0 = none.
      decay_updates: the update at which the decay ends; None: the end of the run.
      end_ratio: lr at the end of the decay, relative to the peak.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    decay_updates: int | None = None
    end_ratio: float = 0.0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, ("constant", "linear", "cosine"))
        at_least(self, 0, "warmup_updates")
        if self.decay_updates is not None and self.decay_updates <= self.warmup_updates:
            raise UserError(
                f"decay_updates ({self.decay_updates}) must lie beyond warmup_updates ({self.warmup_updates})."
            )
        if not 0.0 <= self.end_ratio <= 1.0:
            raise UserError(f"end_ratio must lie in [0, 1], got {self.end_ratio}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """The options of both optimizers.

    Attributes:
      lr: peak learning rate.
      weight_decay: decoupled, multiplied by lr.
      moment_dtype: dtype of the stored momentum and first moments: "float32", "bfloat16", or "int8", a code per element
        and a scale per block of 256 (`eight_bit`). Norms, biases and vectors are float32 then; they are few.
      second_moment_dtype: of the stored second moments, likewise. "bfloat16" is rounded stochastically
        (`moments.round_stochastically`): rounded to nearest, an average of 8 bits with b2 = 0.999 would absorb no new
        square.
      master_rounding: how bfloat16 masters (`model.param_dtype`) are rounded after an update: "nearest", by which they
        stand still where an update is below half their spacing; "stochastic", from the update's number, so that they
        move by the update in the mean. Float32 masters are added to as they are.
      offload: keep the state in the host's memory; an update takes it to the device stack by stack (`by_stack`). The
        same numbers as an update outside of the gradient's program gives, less device memory, and two transfers of the
        state per update. auto: where the run would not fit its GPU otherwise (training runs alone; elsewhere false).
      clip_norm: bound on the global gradient norm; None: no clipping.
      schedule: the shape of lr over updates.
    """

    lr: float = 1e-6
    weight_decay: float = 0.01
    moment_dtype: MomentDtype = "float32"
    second_moment_dtype: MomentDtype = "float32"
    master_rounding: Literal["nearest", "stochastic"] = "nearest"
    offload: bool | Literal["auto"] = False
    clip_norm: float | None = 1.0
    schedule: Schedule = dataclasses.field(default_factory=Schedule)

    def __post_init__(self) -> None:
        for field in ("moment_dtype", "second_moment_dtype"):
            _one_of(field, getattr(self, field), get_args(MomentDtype))
        _one_of("master_rounding", self.master_rounding, ("nearest", "stochastic"))
        if not 0 <= self.lr < float("inf"):
            raise UserError(f"lr must be 0 or more, and finite, got {self.lr}.")
        at_least(self, 0, "weight_decay")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm must be positive, or null for no clipping; got {self.clip_norm}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Common):
    """Muon on matrices, AdamW on everything else. Defaults: QaRL (arXiv 2604.07853): lr 1e-6, weight decay 0.01.

    Attributes:
      momentum: decay of the gradient's running average.
      nesterov: look one gradient ahead (not from a config).
      newton_schulz_steps: rounds of the iteration (not from a config).
      scale: "match_rms" or "original"; see `muon.py`.
      matmul_precision: of the iteration's products. "default" is what an accelerator does fastest with float32 (TF32 on
        a GPU, one pass of bfloat16 on a TPU), "highest" is float32, a tenth as fast on a GPU. "bfloat16" rounds what is
        multiplied, as Muon's authors do: twice as fast on a GPU.
      eps: added to the Frobenius norm; a zero gradient gives a zero update (not from a config).
      adamw_lr: peak learning rate of the other parameters; None: `lr`.
      adamw_b1, adamw_b2, adamw_eps, adamw_weight_decay: AdamW on the other parameters. Norms and biases never decay.
    """

    momentum: float = 0.95
    nesterov: bool = internal(True)
    newton_schulz_steps: int = internal(5)
    scale: Literal["match_rms", "original"] = "match_rms"
    matmul_precision: muon.Precision = "default"
    eps: float = internal(1e-8)
    adamw_lr: float | None = None
    adamw_b1: float = 0.9
    adamw_b2: float = 0.95
    adamw_eps: float = 1e-8
    adamw_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _in_unit_interval(self, "momentum", "adamw_b1", "adamw_b2")
        _one_of("scale", self.scale, tuple(muon.SCALES))
        _one_of("matmul_precision", self.matmul_precision, get_args(muon.Precision))
        at_least(self, 1, "newton_schulz_steps")
        at_least(self, 0, "adamw_lr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Common):
    """AdamW on everything (Loshchilov & Hutter, arXiv 1711.05101); norms and biases never decay. Defaults: what RL
    recipes for LLMs use.

    Attributes:
      b1, b2, eps: decay of the two moments, and the term added to the root of the second.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _in_unit_interval(self, "b1", "b2")


Config = Muon | AdamW

OPTIMIZERS: dict[str, type[Muon] | type[AdamW]] = {
    "muon": Muon,
    "adamw": AdamW,
}


def _one_of(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UserError(f"{field} is {value!r}; it must be one of {', '.join(known)}.")


def _in_unit_interval(cfg: Any, *names: str) -> None:
    for name in names:
        if not 0.0 <= getattr(cfg, name) < 1.0:
            raise UserError(f"{name} must lie in [0, 1), got {getattr(cfg, name)}.")


# --------------------------------------------------------------------------------------------------------------- labels

_NOT_A_MATRIX = re.compile(r"(^|\.)(embed\w*|\w*head|\w*norm\w*|\w*bias|router\w*)(\.|$)")
_NO_DECAY = re.compile(r"(^|\.)(\w*norm\w*|\w*bias)(\.|$)")


def path_name(path: Sequence[Any]) -> str:
    """A key path of `jax.tree_util`, or a tuple of strings, as "layers.mlp.up_proj.kernel".

    The last step into an nnx.Variable (`.value`) says nothing about the parameter and is dropped.
    """
    parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    while parts and parts[-1] in ("value", "raw_value"):
        parts.pop()
    return ".".join(parts)


def label(path: Sequence[Any] | str, ndim: int) -> str:
    """Names the rule that updates a parameter: "muon" (a matrix, or a stack of them) or "adamw" (all else).

    Embeddings, the head, norms, biases and routers are recognised by name, vectors by `ndim`.
    """
    name = path if isinstance(path, str) else path_name(path)
    return "adamw" if ndim < 2 or _NOT_A_MATRIX.search(name) else "muon"


def labels(params: Any) -> Any:
    """The label of every leaf, as a tree of the same structure. Leaves need `ndim` only: abstract trees will do."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: label(path, leaf.ndim), params)


def _decays(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: not _NO_DECAY.search(path_name(path)), params)


# ------------------------------------------------------------------------------------------------------------ schedules


def make_schedule(lr: float, cfg: Schedule, total_updates: int | None = None) -> Callable[[Any], Float[Array, ""]]:
    """`update index (0, 1, ...) -> lr` as a float32 scalar; traceable. Warm-up never wastes update 0 on lr = 0.

    Raises:
      UserError: a decaying schedule without an end (neither `cfg.decay_updates` nor `total_updates`), or an end before
        the warm-up's.
    """
    end = cfg.decay_updates if cfg.decay_updates is not None else total_updates
    if cfg.kind != "constant":
        if end is None:
            raise UserError(f"optimizer.schedule.kind={cfg.kind} needs optimizer.schedule.decay_updates.")
        if end <= cfg.warmup_updates:
            raise UserError(
                f"optimizer.schedule.warmup_updates ({cfg.warmup_updates}) leaves no update to decay over: the decay "
                f"ends at {end}."
            )

    def schedule(update: Any) -> Float[Array, ""]:
        t = jnp.asarray(update, jnp.float32)
        warm = jnp.minimum((t + 1.0) / cfg.warmup_updates, 1.0) if cfg.warmup_updates else jnp.float32(1.0)
        if cfg.kind == "constant":
            return jnp.float32(lr) * warm
        assert end is not None
        done = jnp.clip((t - cfg.warmup_updates) / (end - cfg.warmup_updates), 0.0, 1.0)
        left = 1.0 - done if cfg.kind == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        return jnp.float32(lr) * warm * (cfg.end_ratio + (1.0 - cfg.end_ratio) * left)

    return schedule


# --------------------------------------------------------------------------------------------------------------- AdamW


def _is_few(path: Sequence[Any], ndim: int) -> bool:
    """Norms, biases and vectors: not worth eight bits."""
    return ndim < 2 or bool(_NO_DECAY.search(path_name(path)))


def _adamw(
    cfg: Muon | AdamW, *, b1: float, b2: float, eps: float, weight_decay: float, schedule: Any
) -> optax.GradientTransformation:
    float_dtypes = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=float_dtypes.get(cfg.moment_dtype))

    def step(grads: Any, state: Any) -> tuple[Any, Any]:
        # Both moments are float32 here: optax multiplies a bfloat16 one by b1 in bfloat16, which has no 0.9. And it
        # raises a Python float to an int32 counter, which strict promotion (ours) refuses.
        with jax.numpy_dtype_promotion("standard"):
            return adam.update(grads, state)

    def init(params: Any) -> Any:
        def zeros(dtype: MomentDtype, grid: eight_bit.Grid) -> Any:
            def of(path: Sequence[Any], p: Any) -> Any:
                if dtype == "int8" and not _is_few(path, p.ndim):
                    return eight_bit.zeros(p.shape, grid)
                return jnp.zeros_like(p, dtype=float_dtypes.get(dtype, jnp.float32))

            return jax.tree_util.tree_map_with_path(of, params)

        mu, nu = zeros(cfg.moment_dtype, eight_bit.SIGNED), zeros(cfg.second_moment_dtype, eight_bit.UNSIGNED)
        return optax.ScaleByAdamState(count=jnp.zeros((), jnp.int32), mu=mu, nu=nu)

    def one(count: Any, seed: Array, grad: Array, stored_mu: Any, stored_nu: Any) -> tuple[Array, Any, Any]:
        """One parameter's update and moments."""
        quantized = isinstance(stored_mu, Blocks) or isinstance(stored_nu, Blocks)
        if quantized and grad.ndim > 2:  # a matrix at a time, so that few moments are decoded at once
            firsts = jnp.arange(grad.shape[0], dtype=jnp.uint32) * jnp.uint32(grad[0].size % 2**32)
            rows = (seed + firsts, grad, stored_mu, stored_nu)
            return jax.lax.map(lambda row: one(count, *row), rows)
        mu = eight_bit.decode(stored_mu, eight_bit.SIGNED) if isinstance(stored_mu, Blocks) else stored_mu
        nu = eight_bit.decode(stored_nu, eight_bit.UNSIGNED) if isinstance(stored_nu, Blocks) else stored_nu
        update, new = step(grad, optax.ScaleByAdamState(count=count, mu=_float32(mu), nu=_float32(nu)))
        mu, nu = new.mu, new.nu
        if isinstance(stored_mu, Blocks):
            mu = eight_bit.encode(mu, eight_bit.SIGNED, ~seed)
        if isinstance(stored_nu, Blocks):
            nu = eight_bit.encode(nu, eight_bit.UNSIGNED, seed)
        elif stored_nu.dtype == jnp.bfloat16:
            nu = round_stochastically(nu, seed)
        return update, mu, nu

    def all_at_once(grads: Any, state: Any, seed: Callable[[int], Array]) -> tuple[Any, Any]:
        """Moments in floats. One by one is the same arithmetic, but compiled to other last bits: recorded policies
        could not be made again."""
        updates, new = step(grads, state._replace(mu=_float32(state.mu), nu=_float32(state.nu)))
        if cfg.second_moment_dtype == "bfloat16":
            rounded = leaf_by_leaf(lambda i, x: (round_stochastically(x, seed(i)),), 1, new.nu)
            new = new._replace(nu=rounded[0])
        return updates, new

    def update(
        grads: Any, state: Any, params: Any = None, *, numbers: Any = None, first: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        del params
        whose = range(len(jax.tree.leaves(grads))) if numbers is None else jax.tree.leaves(numbers)

        def seed(i: int) -> Array:
            return rounding_seed(state.count, whose[i], first)

        if "int8" not in (cfg.moment_dtype, cfg.second_moment_dtype):
            return all_at_once(grads, state, seed)
        updates, mu, nu = leaf_by_leaf(lambda i, *leaf: one(state.count, seed(i), *leaf), 3, grads, state.mu, state.nu)
        return updates, optax.ScaleByAdamState(count=optax.safe_increment(state.count), mu=mu, nu=nu)

    return optax.chain(
        optax.GradientTransformationExtraArgs(init, update),
        optax.add_decayed_weights(weight_decay, mask=_decays),
        optax.scale_by_learning_rate(schedule),
    )


# ------------------------------------------------------------------------------------------------------------- builders


def _build_adamw(cfg: AdamW, total_updates: int | None) -> optax.GradientTransformation:
    return _adamw(
        cfg,
        b1=cfg.b1,
        b2=cfg.b2,
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
        schedule=make_schedule(cfg.lr, cfg.schedule, total_updates),
    )


def _build_muon(cfg: Muon, total_updates: int | None) -> optax.GradientTransformation:
    other_lr = cfg.lr if cfg.adamw_lr is None else cfg.adamw_lr
    matrices = optax.chain(
        muon.scale_by_muon(
            momentum=cfg.momentum,
            nesterov=cfg.nesterov,
            steps=cfg.newton_schulz_steps,
            scale=cfg.scale,
            precision=cfg.matmul_precision,
            eps=cfg.eps,
            moment_dtype=cfg.moment_dtype,
        ),
        optax.add_decayed_weights(cfg.weight_decay),
        optax.scale_by_learning_rate(make_schedule(cfg.lr, cfg.schedule, total_updates)),
    )
    others = _adamw(
        cfg,
        b1=cfg.adamw_b1,
        b2=cfg.adamw_b2,
        eps=cfg.adamw_eps,
        weight_decay=cfg.adamw_weight_decay,
        schedule=make_schedule(other_lr, cfg.schedule, total_updates),
    )
    # `numbers` goes to each rule as its parameters do.
    return optax.partition({"muon": matrices, "adamw": others}, labels, mask_compatible_extra_args=True)


_BUILDERS: dict[type, Callable[[Any, int | None], optax.GradientTransformation]] = {
    Muon: _build_muon,
    AdamW: _build_adamw,
}


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _clip(bound: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm, of the leaves that are given or by the norm that is."""
    whole = optax.clip_by_global_norm(bound)

    def update(grads: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any) -> tuple[Any, Any]:
        if norm is None:
            return whole.update(grads, state, params)
        # optax's formula, so that the bits are those of a clipping of all leaves at once.
        return jax.tree.map(lambda g: jax.lax.select(norm < bound, g, (g / norm) * bound), grads), state

    return optax.GradientTransformationExtraArgs(whole.init, update)


class Optimizer(optax.GradientTransformationExtraArgs):
    """`make_optimizer`'s: `update(grads, state, params)` of all parameters at once, or of a part of them with

      norm: float32 scalar, `clipping_norm` of all gradients.
      numbers: a tree of ints like the parameters: each leaf's place among all that its rule updates.
      first: uint32 scalar; the leaf given begins at this of its elements (some layers of a stack). None: at 0.

    The state then holds the part's moments, in trees with an `optax.MaskedNode` for every parameter that is elsewhere.

    Attributes:
      rounds_stochastically: whether bfloat16 masters are rounded so.
    """

    rounds_stochastically: bool = False


def _in_float32(inner: optax.GradientTransformation) -> Optimizer:
    """State, gradients and parameters reach `inner` as float32, whatever the master's dtype."""
    inner = optax.with_extra_args_support(inner)

    def update(grads: Any, state: Any, params: Any = None, **part: Any) -> tuple[Any, Any]:
        return inner.update(_float32(grads), state, _float32(params), **part)

    return Optimizer(lambda params: inner.init(_float32(params)), update)


def clipping_norm(grads: Any) -> Float[Array, ""]:
    """The global norm that `make_optimizer`'s clipping goes by."""
    return optax.global_norm(_float32(grads))


def make_optimizer(cfg: Config, total_updates: int | None = None) -> Optimizer:
    """The optimizer of a run: clip by global norm, then Muon and AdamW, or AdamW alone.

    Labels come from the paths of the parameters given to `init` (an nnx.State or any tree), so that one optimizer
    serves every model. Updates are float32; apply them with `apply_updates` (which knows about bfloat16 masters).

    Args:
      cfg: `Muon` or `AdamW`.
      total_updates: length of the run in updates, where a decaying schedule names no end of its own.
    """
    inner = _BUILDERS[type(cfg)](cfg, total_updates)
    if cfg.clip_norm is not None:
        inner = optax.chain(_clip(cfg.clip_norm), inner)
    made = _in_float32(inner)
    made.rounds_stochastically = cfg.master_rounding == "stochastic"
    return made


class Owner(NamedTuple):
    """The owner of a moment: the number of its parameter's leaf, and the name of its tree of moments."""

    param: int
    tree: str


def owners(state: Any, params: Any) -> list[Owner | None]:
    """Finds the owner of each leaf of an optimizer state (a `Blocks` is one); None: a counter.

    Args:
      state, params: abstract or not.
    """
    named = {
        path_name(path): (i, leaf.shape) for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(params))
    }

    def of(path: Sequence[Any], leaf: Any) -> Owner | None:
        shape = leaf.codes.shape if isinstance(leaf, Blocks) else leaf.shape
        # A moment's path is the optimizer's own keys followed by the parameter's, e.g. "0.muon.momentum.layers.kernel".
        parts = path_name(path).split(".")
        for start in range(len(parts)):
            number, wanted = named.get(".".join(parts[start:]), (0, None))
            if wanted == shape:
                return Owner(param=number, tree=".".join(parts[:start]))
        return None

    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, Blocks))
    return [of(*leaf) for leaf in leaves]


def state_shardings(abstract_state: Any, params: Any) -> Any:
    """Places each leaf of an optimizer state: with the parameter it belongs to, or, for counters, everywhere.

    Args:
      abstract_state: `jax.eval_shape(optimizer.init, params)`.
      params: the parameters, or ShapeDtypeStructs of them; every leaf has a `.sharding`.
    """
    places = [leaf.sharding for leaf in jax.tree.leaves(params)]
    anywhere = places[0]
    if isinstance(anywhere, jax.sharding.NamedSharding):
        anywhere = jax.sharding.NamedSharding(anywhere.mesh, jax.sharding.PartitionSpec())

    def of(leaf: Any, owner: Owner | None) -> Any:
        place = anywhere if owner is None else places[owner.param]
        return Blocks(codes=place, scale=_of_scales(place, leaf.codes.shape)) if isinstance(leaf, Blocks) else place

    leaves, structure = jax.tree.flatten(abstract_state, is_leaf=lambda x: isinstance(x, Blocks))
    return jax.tree.unflatten(structure, map(of, leaves, owners(abstract_state, params)))


def _of_scales(place: Any, shape: Sequence[int]) -> Any:
    """Places the scales of codes of `shape` at `place`: with them, or whole along an axis that cuts blocks."""
    if not isinstance(place, jax.sharding.NamedSharding) or len(place.spec) < len(shape):
        return place
    if place.shard_shape(tuple(shape))[-1] % eight_bit.BLOCK == 0:
        return place
    return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec(*place.spec[: len(shape) - 1]))


def init(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """A fresh optimizer state, each moment born in its parameter's sharding (a plain jit replicates zeros)."""
    shardings = state_shardings(jax.eval_shape(optimizer.init, params), params)
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


# ------------------------------------------------------------------------------------------------------------- applying

_MASTERS = 1 << 16  # first number of masters' seeds: moments, which have those below, draw other bits


def squares(tree: Any) -> Any:
    """The sum of squares of each leaf, in float32."""
    return jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), tree)


def root(sums: Any) -> Float[Array, ""]:
    """Computes the norm from the sum of all leaves' `squares`."""
    return jnp.sqrt(sum(jax.tree.leaves(sums), jnp.float32(0)))


def global_norm(tree: Any) -> Float[Array, ""]:
    """Euclidean norm over all leaves, summed in float32. NaN or infinite as soon as one entry is."""
    return root(squares(tree))


def apply_updates(params: Any, updates: Any, seed: Callable[[int], Array] | None = None) -> Any:
    """params + updates, added in float32 and rounded to each parameter's dtype.

    Args:
      seed: of a leaf's number; bfloat16 parameters are rounded stochastically by it. None: to nearest.
    """

    def one(i: int, p: Array, u: Array) -> tuple[Array]:
        total = p.astype(jnp.float32) + u.astype(jnp.float32)
        if seed is None or p.dtype != jnp.bfloat16:
            return (total.astype(p.dtype),)
        return (round_stochastically(total, seed(i)),)

    return leaf_by_leaf(one, 1, params, updates)[0]


def masters_seed(optimizer: Any, counters: Sequence[Array], first: Any = None) -> Callable[[int], Array] | None:
    """Seeds for `apply_updates`, by a parameter's place among all; None: masters are rounded to nearest.

    Args:
      counters: of an optimizer state before the update. All of its counters count updates.
      first: as in `Optimizer`.
    """
    if not getattr(optimizer, "rounds_stochastically", False):
        return None
    return lambda i: rounding_seed(counters[0], _MASTERS + i, first)


def select(condition: Any, new: Any, old: Any) -> Any:
    """Leaf by leaf, `new` where the scalar `condition` holds and `old` elsewhere: a bad step leaves no trace."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def update(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """One guarded update of the masters. Pure; safe to jit with `state` and `params` donated.

    A gradient that is not finite changes neither parameters nor state; the caller sees `grad_norm` and decides to stop.
    Nor does one that is zero: every source of signal is gone, and momentum and weight decay must not move on.

    Returns:
      (params, state, stats): float32 scalars `grad_norm` (before clipping) and `update_norm` (0 where nothing moved),
      bool scalars `finite` and `moved`, and `squares`: two trees of float32 scalars like the parameters, of what was to
      be added to each and of itself before.
    """
    grad_norm = global_norm(grads)
    updates, new_state = optimizer.update(grads, state, params)
    stats = statistics(grad_norm, squares(updates), squares(params))
    moved = stats["moved"]
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Blocks))
    counters = [x for x, owner in zip(leaves, owners(state, params), strict=True) if owner is None]
    after = apply_updates(params, updates, masters_seed(optimizer, counters))
    return select(moved, after, params), select(moved, new_state, state), stats


def statistics(grad_norm: Any, of_updates: Any, of_params: Any) -> dict[str, Any]:
    """`update`'s stats from the gradients' norm and the `squares` of updates and parameters."""
    finite = jnp.isfinite(grad_norm)
    moved = finite & (grad_norm > 0)
    return {
        "grad_norm": grad_norm,
        "update_norm": jnp.where(moved, root(of_updates), 0.0),
        "finite": finite,
        "moved": moved,
        "squares": (of_updates, of_params),
    }


def advance(optimizer: optax.GradientTransformation, state: Any, grads: Any) -> tuple[Any, dict[str, Any]]:
    """`update` for a frozen dataclass with `params`, `opt_state` and `updates`, the count of those that moved it.

    Returns:
      (the state after it, `update`'s stats).
    """
    params, opt_state, stats = update(optimizer, grads, state.opt_state, state.params)
    count = state.updates + stats["moved"].astype(jnp.int32)
    return dataclasses.replace(state, params=params, opt_state=opt_state, updates=count), stats
