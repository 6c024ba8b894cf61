# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The two backward products of a linear layer in eight bits (`quant.backward`), the straight-through rule unchanged.

    dX = dY W_q           contracts outputs:  dY' = dY s_w     W_q = s_w W'
    dMaster = dY^T x_q    contracts rows:     dY' = dY s_x     x_q = s_x x'

**What is rounded.** The forward's operands may be codes of the same format already, with one scale per output of the
weight and per row of the activations (`w8a8` under int8, `fp8` under fp8). These scales lie along the contraction. They
are multiplied into dY, and the codes are taken as they are: only dY is rounded. Every other operand gets codes of its
own here, with a scale per row or column across the contraction, from the largest magnitude in it.

**Grids.** int8: absmax / 127, codes in [-127, 127]. fp8: e4m3, absmax / 448. Whole rows and columns have one scale on
every mesh: a maximum has no order, so a mesh moves no code.

**Rounding.** Stochastic, with the bits of `numerics.stochastic`: a hash of the update's number, the micro-batch, the
layer, the operand and the position. Two rounded operands draw independent bits, so the mean of each product is the
product of what was rounded. A zero stays zero, and what is not finite spoils its whole row or column, which the
optimizer's guard sees.

**Sums.** int8 in int32, exact. e4m3 in float32: XLA's product without fast accumulation, since Hopper's tensor cores
alone keep some 14 bits of a sum. On a CPU both are summed in float64, where they are exact. Scales come after the sum.

**Left out.** Scales per block along the contraction (DeepSeek-V3, arXiv 2412.19437), which would keep one large row
from coarsening a column; e5m2; random rotations; experts' weights.

Sources: stochastic rounding, Gupta et al., arXiv 1502.02551; int8 training with it, SwitchBack (arXiv 2304.13013) and
Jetfire (arXiv 2403.12422).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import divide
from qarl_jax.numerics.stochastic import random_bits, rounding_seed
from qarl_jax.quant.contractions import codes_product
from qarl_jax.quant.qtensor import QTensor

Format = Literal["int8", "fp8"]
BACKWARDS = ("bf16", "fp8", "int8")
_TINY = 2.0**-100  # the least maximum that a scale is made of: its reciprocal is finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Backward:
    """A low-bit backward of one layer, or of a stack of layers.

    Attributes:
      format: of codes, static.
      seed: uint32 scalar, or [layers], another one for every layer and micro-batch.
    """

    format: Format = dataclasses.field(metadata={"static": True})
    seed: Any

    def part(self, number: int, of: int) -> Backward:
        """The same with the seed of one of `of` parts that are rounded apart."""
        return dataclasses.replace(self, seed=random_bits((of,), self.seed)[number])


def root_seed(updates: Any, micro_batch: Any) -> Array:
    """The uint32 scalar that all seeds of a micro-batch's backward are made of.

    Args:
      updates, micro_batch: int32 scalars: optimizer updates before this one, and its micro-batch's number.
    """
    return random_bits((), rounding_seed(updates, 0) + jnp.asarray(micro_batch).astype(jnp.uint32))


def layer_seeds(root: Any, number: int, layers: int) -> Array:
    """uint32 [layers] of the `number`-th stack of linear maps."""
    return random_bits((layers,), rounding_seed(root, number + 1))


def _to_int8(x: Float[Array, "*S"], bits: Array) -> Array:
    """The integer below or above."""
    low = jnp.floor(x)
    up = (bits >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24 < x - low
    return (low + up.astype(jnp.float32)).astype(jnp.int8)


def _to_e4m3(x: Float[Array, "*S"], bits: Array) -> Array:
    """The neighbour below or above: 3 bits of mantissa, or below 2^-6 multiples of 2^-9."""
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> jnp.uint32(12))
    normal = jax.lax.bitcast_convert_type(raised & jnp.uint32(0xFFF00000), jnp.float32)
    fraction = (bits >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24
    scaled = x * 512.0
    low = jnp.floor(scaled)
    subnormal = (low + (fraction < scaled - low).astype(jnp.float32)) * (1.0 / 512.0)
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, normal).astype(jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Codes of a format: their dtype, the largest one, and how a float32 of at most its magnitude is rounded."""

    dtype: Any
    largest: float
    rounded: Callable[[Array, Array], Array]


GRIDS: dict[str, Grid] = {
    "int8": Grid(jnp.int8, 127.0, _to_int8),
    "fp8": Grid(jnp.float8_e4m3fn, 448.0, _to_e4m3),
}


def codes_of(x: Float[Array, "A B"], axis: int, grid: Grid, seed: Any) -> tuple[Array, Array]:
    """Codes [A, B] of float32 x, and float32 scales of its rows [A, 1] or columns [1, B].

    Args:
      axis: that along which x will be contracted, and which shares a scale.
      seed: uint32 scalar.
    """
    amax = jnp.maximum(jnp.max(jnp.abs(x), axis=axis, keepdims=True), _TINY)
    largest = jnp.full_like(amax, grid.largest)
    y = jnp.clip(x * divide(largest, amax), -grid.largest, grid.largest)
    return grid.rounded(y, random_bits(x.shape, seed)), divide(amax, largest)


def _held(operand: Any, grid: Grid) -> tuple[Array, Array] | None:
    """(codes, scales along the first axis [C, 1]) of an operand [C, F] that the forward has in this format."""
    if isinstance(operand, QTensor):
        is_own = bool(operand.scheme.kernel) and operand.codes.dtype == grid.dtype
        return (operand.codes, operand.scales) if is_own else None
    if isinstance(operand, tuple) and operand[0].dtype == grid.dtype:
        return operand
    return None


def _values(operand: Any) -> Array:
    """float32 [C, F]."""
    if isinstance(operand, QTensor):
        return operand.scheme.dequantize(operand)
    if isinstance(operand, tuple):
        codes, scale = operand
        return codes.astype(jnp.float32) * scale
    return operand.astype(jnp.float32)


def _product(dy: Array, axis: int, operand: Any, dtype: Any, backward: Backward, numerics: Numerics) -> Array:
    """float32 dy, whose `axis` of size C is contracted with an operand [C, F] -> [R, F] in `dtype`."""
    grid = GRIDS[backward.format]
    seeds = random_bits((2,), backward.seed)
    if (held := _held(operand, grid)) is not None:
        codes, along = held
        dy, scale = dy * (along if axis == 0 else along.T), jnp.ones((codes.shape[1],), jnp.float32)
    else:
        codes, columns = codes_of(_values(operand), 0, grid, seeds[1])
        scale = columns[0]
    of_dy, rows = codes_of(dy, axis, grid, seeds[0])
    if axis == 0:
        of_dy, rows = of_dy.T, rows.T
    return codes_product(of_dy, rows, codes.T, scale, dtype, numerics)


def gradients(
    backward: Backward, dy: Float[Array, "M N"], used: Any, weight: Any, master: Any, numerics: Numerics
) -> tuple[Array, Array]:
    """(dX [M, K] in dY's dtype, dMaster [N, K] in `master`), each rounded once.

    Args:
      dy: cotangent of the layer's output.
      used: activations [M, K] as the forward used them: an array, or codes and scales [M, 1].
      weight: [N, K]: a QTensor, or an array in the compute dtype.
      master: dtype of the master.
      numerics: whether a GPU may take kernels of ours.
    """
    wide = dy.astype(jnp.float32)
    dx = _product(wide, 1, weight, dy.dtype, backward.part(0, 2), numerics)
    dw = _product(wide, 0, used, master, backward.part(1, 2), numerics)
    return dx, dw
