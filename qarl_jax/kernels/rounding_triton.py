# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of a matrix to codes, along rows and, transposed, along columns, in Pallas' Triton.

The two products of a low-bit backward contract dY along its columns and along its rows. Tensor cores need eight-bit
operands that are contiguous along the contracted axis. For the second product XLA writes and reads a transposed float32
copy of dY several times: 4 GB for 16,384 tokens and 12,288 outputs. Here a tile is read once and written twice, a byte
per element each.

Every operation is exact or correctly rounded, so the codes are XLA's to the bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Num

from qarl_jax.kernels.offsets import in_reach
from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.stochastic import hashed
from qarl_jax.runtime.mesh import is_hopper, on_one_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """The rows and columns of a Triton program's tile, powers of two, and its warps. Codes do not depend on them."""

    m: int = 64
    n: int = 128
    warps: int = 8


class Along(NamedTuple):
    """A direction along which elements share a scale, with the numbers to round along it.

    Attributes:
      axis: 1: along rows; 0: along columns, whose codes are written transposed.
      factor: float32, one number per index of `axis`, by which elements are multiplied first.
      inverse: float32, reciprocals of the scales, one per index of the other axis, by which they are multiplied next.
      seed: uint32 scalar.
    """

    axis: int
    factor: Any
    inverse: Any
    seed: Any


def serves(x: Num[Array, "A B"], numerics: Numerics) -> bool:
    """Tells whether the kernels round x to codes of eight bits, or transpose it, on this host's devices.

    They need one Hopper GPU, `own_kernels`, and codes that they reach (`offsets`).
    """
    return numerics.own_kernels and is_hopper() and on_one_device() and in_reach(x.size, jnp.dtype(jnp.int8))


def codes(
    x: Num[Array, "A B"],
    along: Sequence[Along],
    rounded: Callable[[Array, Array], Array],
    dtype: Any,
    largest: float,
    *,
    tile: Tile = Tile(),
    interpret: bool = False,
) -> list[Array]:
    """Rounds x to codes in each direction: [A, B] along rows, and [B, A] along columns.

    Args:
      x: floats, or codes.
      rounded: function that rounds float32 of magnitude at most `largest`, with random bits (`stochastic.to_int8`).
      dtype: the codes' dtype. tile: shape of a program's block.
      interpret: run without a GPU in Pallas' interpreter (tests).
    """
    a, b = x.shape
    by = tuple(each.axis == 0 for each in along)
    operands = [jnp.asarray(part).reshape(-1) for each in along for part in each[1:]]
    kernel = functools.partial(_kernel, tile=tile, rounded=rounded, largest=largest, by=by)
    made = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(a, tile.m), pl.cdiv(b, tile.n)),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * (1 + len(operands)),
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(by),
        out_shape=[jax.ShapeDtypeStruct((b, a) if turned else (a, b), dtype) for turned in by],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="rounded_codes",
    )(x, *operands)
    return list(made)


def transposed(x: Num[Array, "A B"], *, tile: Tile = Tile(), interpret: bool = False) -> Num[Array, "B A"]:
    """Transposes a matrix of codes in memory, so that its columns become contiguous."""
    a, b = x.shape
    return pl.pallas_call(
        functools.partial(_transpose_kernel, tile=tile),
        grid=(pl.cdiv(a, tile.m), pl.cdiv(b, tile.n)),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((b, a), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="transposed_codes",
    )(x)


def _place(shape: tuple[int, int], tile: Tile) -> tuple[Array, Array, Array, tuple[Array, Array]]:
    """Rows and columns of this program's tile, which of it lies inside, and the rows and columns to read."""
    a, b = shape
    row = pl.program_id(0) * tile.m + jnp.arange(tile.m, dtype=jnp.int32)
    column = pl.program_id(1) * tile.n + jnp.arange(tile.n, dtype=jnp.int32)
    inside = (row < a)[:, None] & (column < b)[None]
    return row, column, inside, (jnp.minimum(row, a - 1), jnp.minimum(column, b - 1))


def _transpose_kernel(x_ref: Any, out_ref: Any, *, tile: Tile) -> None:
    row, column, inside, (rows, columns) = _place(x_ref.shape, tile)
    x = plgpu.load(x_ref.at[rows[:, None], columns[None]])
    plgpu.store(out_ref.at[column[:, None], row[None]], x.T, mask=inside.T)


def _kernel(*refs: Any, tile: Tile, rounded: Any, largest: float, by: tuple[bool, ...]) -> None:
    """refs: x, then factor, inverse and seed of each direction, then its codes. by: whether each goes along columns."""
    x_ref, outs = refs[0], refs[1 + 3 * len(by) :]
    row, column, inside, at = _place(x_ref.shape, tile)  # what is outside is read again, and not written
    x = plgpu.load(x_ref.at[at[0][:, None], at[1][None]]).astype(jnp.float32)
    place = row[:, None].astype(jnp.uint32) * jnp.uint32(x_ref.shape[1]) + column[None].astype(jnp.uint32)

    def of_rows(ref: Any) -> Array:
        return plgpu.load(ref.at[at[0]])[:, None]

    def of_columns(ref: Any) -> Array:
        return plgpu.load(ref.at[at[1]])[None]

    for number, along_columns in enumerate(by):
        factor, inverse, seed = refs[1 + 3 * number : 4 + 3 * number]
        y = x * of_rows(factor) * of_columns(inverse) if along_columns else x * of_columns(factor) * of_rows(inverse)
        y = jnp.minimum(jnp.maximum(y, -largest), largest)
        made = rounded(y, hashed(place + seed[0]))
        if along_columns:
            plgpu.store(outs[number].at[column[:, None], row[None]], made.T, mask=inside.T)
        else:
            plgpu.store(outs[number].at[row[:, None], column[None]], made, mask=inside)
