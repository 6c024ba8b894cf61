# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Configs of the optimizers, schedules, and the choice of Muon or AdamW for each parameter.

* Muon (`muon.py`) updates matrices only. Embeddings, head, norms, biases and routers are updated by AdamW (`label`); a
  stack of norm scales [L, D] is two-dimensional and would otherwise be orthogonalised.
* Arithmetic is float32, whatever the master's dtype; so are moments, unless a `moment_dtype` is set. A bfloat16 master
  has a spacing of 1.2e-4 near 0.02: rounded to nearest at lr 1e-6 it never moves. Keep masters in float32, or round
  them stochastically (`master_rounding`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.optim import muon
from qarl_jax.optim.eight_bit import MomentDtype
from qarl_jax.typed_config.annotations import internal
from qarl_jax.types import UserError, at_least

# -------------------------------------------------------------------------------------------------------- configuration


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate as a function of the update's number; a rollout step may have several updates.

    Attributes:
      kind: "constant", "linear" or "cosine", after the warm-up and to the end of the run.
      warmup_updates: lr rises linearly and reaches its full value at the last of these updates; 0 = none.
      end_ratio: lr at the end of the decay, relative to the peak.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    end_ratio: float = 0.0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, ("constant", "linear", "cosine"))
        at_least(self, 0, "warmup_updates")
        if not 0.0 <= self.end_ratio <= 1.0:
            raise UserError(f"end_ratio must lie in [0, 1], got {self.end_ratio}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """The options of both optimizers.

    Attributes:
      lr: peak learning rate.
      weight_decay: decoupled, multiplied by lr.
      moment_dtype: dtype of the stored momentum and first moments: "float32", "bfloat16", or "int8", a code per element
        and a scale per block of 256 (`eight_bit`). Moments of norms, biases and vectors stay float32 under int8.
      second_moment_dtype: dtype of the stored second moments, with the same choices. "bfloat16" is rounded
        stochastically: rounded to nearest, an average of 8 bits with b2 = 0.999 would never change.
      master_rounding: rounding of bfloat16 masters (`model.param_dtype`) after an update. "nearest" drops updates below
        half their spacing. "stochastic", seeded by the update's number, moves masters by the update in expectation. It
        does not concern float32 masters.
      offload: keep the state in the host's memory; an update moves it to the device stack by stack (`by_stack`). This
        takes less device memory and two transfers per update, with the bits of an update outside of the gradient's
        program. auto: offload if the run would not fit its GPU otherwise (in training runs; elsewhere false).
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

    def check_masters(self, name: str, dtype: str = "float32", bfloat16: str = "") -> None:
        """Checks that stochastic rounding is set only for bfloat16 masters. `name`, `bfloat16`: words for the message.

        Raises:
          UserError: `master_rounding` is "stochastic" and `dtype`, the masters', is float32.
        """
        if self.master_rounding == "stochastic" and dtype == "float32":
            todo = f"set {bfloat16}, or leave master_rounding out" if bfloat16 else "these are float32, so leave it out"
            raise UserError(f"{name}.master_rounding=stochastic is for bfloat16 masters: {todo}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(Common):
    """Muon on matrices, AdamW on everything else. Defaults: QaRL (arXiv 2604.07853): lr 1e-6, weight decay 0.01.

    Attributes:
      momentum: decay of the gradient's running average (not from a config).
      nesterov: look one gradient ahead (not from a config).
      matmul_precision: precision of Newton-Schulz's products. "default" rounds the operands to bfloat16 on a GPU and a
        TPU, as Muon's authors do, and is float32 on a CPU; "bfloat16" rounds them everywhere. On a GPU "high" is TF32,
        half as fast, and "highest" float32, a tenth as fast.
      adamw_lr: peak learning rate of the other parameters (`AdamW`, without decay); None: `lr`.
    """

    momentum: float = internal(0.95)
    nesterov: bool = internal(True)
    matmul_precision: muon.Precision = "default"
    adamw_lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _in_unit_interval(self, "momentum")
        _one_of("matmul_precision", self.matmul_precision, get_args(muon.Precision))
        at_least(self, 0, "adamw_lr")

    @property
    def adamw(self) -> AdamW:
        """The AdamW config for parameters that Muon does not update."""
        return AdamW(lr=self.lr if self.adamw_lr is None else self.adamw_lr, b2=0.95, weight_decay=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Common):
    """AdamW on all parameters (Loshchilov & Hutter, arXiv 1711.05101), without decay of norms and biases. The defaults
    are common in RL recipes for LLMs.

    Attributes:
      b1, b2, eps: decay of the two moments, and the term added to the root of the second.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _in_unit_interval(self, "b1", "b2")
        if not self.eps > 0:
            raise UserError(f"eps must be positive, got {self.eps}: a weight without a gradient would be divided by 0.")

    @property
    def adamw(self) -> AdamW:
        """The AdamW config of all parameters: this one."""
        return self


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
    """Joins a key path of `jax.tree_util`, or a tuple of strings, to "layers.mlp.up_proj.kernel".

    The last step into an nnx.Variable (`.value`) says nothing about the parameter and is dropped.
    """
    parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    while parts and parts[-1] in ("value", "raw_value"):
        parts.pop()
    return ".".join(parts)


def label(path: Sequence[Any] | str, ndim: int) -> str:
    """Names the optimizer that updates a parameter: "muon" (a matrix, or a stack of matrices) or "adamw" (all else).

    Embeddings, the head, norms, biases and routers are recognised by name, vectors by `ndim`.
    """
    name = path if isinstance(path, str) else path_name(path)
    return "adamw" if ndim < 2 or _NOT_A_MATRIX.search(name) else "muon"


def labels(params: Any) -> Any:
    """Maps `label` over a tree of parameters, arrays or abstract ones."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: label(path, leaf.ndim), params)


def decays(path: Sequence[Any]) -> bool:
    """Tells whether weight decay applies to a parameter: norms and biases never decay."""
    return not _NO_DECAY.search(path_name(path))


# ------------------------------------------------------------------------------------------------------------ schedules


def make_schedule(lr: float, cfg: Schedule, total_updates: int | None = None) -> Callable[[Any], Float[Array, ""]]:
    """Makes a traceable function from the update's index (0, 1, ...) to lr, a float32 scalar; lr is not 0 at update 0.

    Raises:
      UserError: the schedule decays and `total_updates` is not known, or does not exceed the warm-up.
    """
    if cfg.kind != "constant":
        if total_updates is None:
            raise UserError(f"optimizer.schedule.kind={cfg.kind} needs the number of updates of the run.")
        if total_updates <= cfg.warmup_updates:
            raise UserError(
                f"optimizer.schedule.warmup_updates ({cfg.warmup_updates}) leaves no update to decay over: the decay "
                f"ends at {total_updates}. Lower it, or train for more updates."
            )

    def schedule(update: Any) -> Float[Array, ""]:
        t = jnp.asarray(update, jnp.float32)
        warm = jnp.minimum((t + 1.0) / cfg.warmup_updates, 1.0) if cfg.warmup_updates else jnp.float32(1.0)
        if cfg.kind == "constant":
            return jnp.float32(lr) * warm
        assert total_updates is not None
        done = jnp.clip((t - cfg.warmup_updates) / (total_updates - cfg.warmup_updates), 0.0, 1.0)
        left = 1.0 - done if cfg.kind == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        return jnp.float32(lr) * warm * (cfg.end_ratio + (1.0 - cfg.end_ratio) * left)

    return schedule
