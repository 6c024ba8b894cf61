# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of a matrix to codes, along rows and, transposed, along columns, in Pallas' Triton.

The two products of a low-bit backward contract dY along its columns and along its rows. Tensor cores need eight-bit
operands that are contiguous along the contracted axis. For the second product XLA writes and reads a transposed float32
copy of dY several times: 4 GB for 16,384 tokens and 12,288 outputs. Here a tile is read once for the maxima of rows and
columns, and once to be written twice, a byte per element each. An element is hashed once for both directions, since
integer instructions bound the kernel.

Every operation is exact or correctly rounded, so maxima and codes are XLA's to the bit.
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
from qarl_jax.numerics.stochastic import halves, hashed
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
      factor: float32, one number per index of `axis`, by which elements are multiplied first; None: no factor.
      inverse: float32, reciprocals of the scales, one per index of the other axis, by which they are multiplied next;
        `maxima` reads none.
    """

    axis: int
    factor: Any = None
    inverse: Any = None

    @property
    def kind(self) -> tuple[bool, bool]:
        """Tells whether it goes along columns, and whether it has a factor."""
        return self.axis == 0, self.factor is not None

    @property
    def numbers(self) -> list[Any]:
        """Returns factor and inverse as the kernel reads them, without those that are None."""
        return [part.reshape(-1) for part in (self.factor, self.inverse) if part is not None]


def serves(x: Num[Array, "A B"], numerics: Numerics) -> bool:
    """Tells whether the kernels round x to codes of eight bits, or transpose it, on this host's devices.

    They need one Hopper GPU, `own_kernels`, and codes that they reach (`offsets`).
    """
    return numerics.own_kernels and is_hopper() and on_one_device() and in_reach(x.size, jnp.dtype(jnp.int8))


def maxima(
    x: Num[Array, "A B"], along: Sequence[Along], *, tile: Tile = Tile(), interpret: bool = False
) -> list[Array]:
    """Finds the largest magnitudes of x, times each direction's factor: float32 [A] along rows, [B] along columns."""
    (a, b), by = x.shape, tuple(each.kind for each in along)
    rows, columns = pl.cdiv(a, tile.m), pl.cdiv(b, tile.n)
    shapes = [jax.ShapeDtypeStruct((rows, b) if turned else (columns, a), jnp.int32) for turned, _ in by]
    operands = [number for each in along for number in each.numbers]
    found = _over_tiles(
        functools.partial(_maxima_kernel, by=by), "tiles_maxima", [x, *operands], shapes, tile, interpret
    )
    return [jax.lax.bitcast_convert_type(jnp.max(part, axis=0), jnp.float32) for part in found]


def codes(
    x: Num[Array, "A B"],
    seed: Any,
    along: Sequence[Along],
    rounded: Callable[[Array, Array], Array],
    dtype: Any,
    *,
    tile: Tile = Tile(),
    interpret: bool = False,
) -> list[Array]:
    """Rounds x to codes in each direction: [A, B] along rows, and [B, A] along columns.

    Args:
      x: floats, or codes.
      seed: uint32 scalar.
      along: one or two directions. The first has the upper half of an element's random bits, the second the lower.
      rounded: function that rounds float32 with random bits and clips (`stochastic.to_int8`).
      dtype: the codes' dtype. tile: shape of a program's block.
      interpret: run without a GPU in Pallas' interpreter (tests).
    """
    (a, b), by = x.shape, tuple(each.kind for each in along)
    shapes = [jax.ShapeDtypeStruct((b, a) if turned else (a, b), dtype) for turned, _ in by]
    operands = [jnp.asarray(seed).reshape(-1), *(number for each in along for number in each.numbers)]
    kernel = functools.partial(_kernel, rounded=rounded, by=by)
    return _over_tiles(kernel, "rounded_codes", [x, *operands], shapes, tile, interpret)


def transposed(x: Num[Array, "A B"], *, tile: Tile = Tile(), interpret: bool = False) -> Num[Array, "B A"]:
    """Transposes a matrix of codes in memory, so that its columns become contiguous."""
    shapes = [jax.ShapeDtypeStruct(x.shape[::-1], x.dtype)]
    (out,) = _over_tiles(_transpose_kernel, "transposed_codes", [x], shapes, tile, interpret)
    return out


def _over_tiles(
    kernel: Callable[..., None],
    name: str,
    operands: Sequence[Any],
    shapes: Sequence[jax.ShapeDtypeStruct],
    tile: Tile,
    interpret: bool,
) -> list[Array]:
    """Runs a kernel on each tile of the first operand, [A, B]; it reads operands and writes results where they lie."""
    a, b = operands[0].shape
    made = pl.pallas_call(
        functools.partial(kernel, tile=tile),
        grid=(pl.cdiv(a, tile.m), pl.cdiv(b, tile.n)),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(shapes),
        out_shape=list(shapes),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*operands)
    return list(made)


def _place(shape: tuple[int, int], tile: Tile) -> tuple[Array, Array, Array | None, tuple[Array, Array]]:
    """Rows and columns of this program's tile, which of it lies inside, and the rows and columns to read.

    All of it lies inside (None) where tiles divide the shape. Loads and stores are several bytes wide there.
    """
    a, b = shape
    row = pl.program_id(0) * tile.m + jnp.arange(tile.m, dtype=jnp.int32)
    column = pl.program_id(1) * tile.n + jnp.arange(tile.n, dtype=jnp.int32)
    if a % tile.m == 0 and b % tile.n == 0:
        return row, column, None, (row, column)
    inside = (row < a)[:, None] & (column < b)[None]
    return row, column, inside, (jnp.minimum(row, a - 1), jnp.minimum(column, b - 1))


def _store(ref: Any, x: Array, row: Array, column: Array, inside: Array | None, turned: bool) -> None:
    """Writes a tile, transposed if `turned`."""
    if turned:
        x, row, column, inside = x.T, column, row, None if inside is None else inside.T
    plgpu.store(ref.at[row[:, None], column[None]], x, mask=inside)


def _transpose_kernel(x_ref: Any, out_ref: Any, *, tile: Tile) -> None:
    row, column, inside, (rows, columns) = _place(x_ref.shape, tile)
    _store(out_ref, plgpu.load(x_ref.at[rows[:, None], columns[None]]), row, column, inside, True)


def _each(ref: Any, at: tuple[Array, Array], of_columns: bool) -> Array:
    """Reads a number per row or column of the tile."""
    return plgpu.load(ref.at[at[1]])[None] if of_columns else plgpu.load(ref.at[at[0]])[:, None]


def _maxima_kernel(*refs: Any, tile: Tile, by: tuple[tuple[bool, bool], ...]) -> None:
    """Finds a tile's maxima, as the bits of floats without a sign: their order is that of integers, NaN the largest.

    refs: x, then the factors that there are, then each direction's maxima. by: as in `_kernel`.
    """
    x_ref, *others = refs
    factors, outs = iter(others), others[-len(by) :]
    row, column, inside, at = _place(x_ref.shape, tile)  # what is outside is read again
    x = plgpu.load(x_ref.at[at[0][:, None], at[1][None]]).astype(jnp.float32)
    for out, (along_columns, has_factor) in zip(outs, by, strict=True):
        y = x * _each(next(factors), at, not along_columns) if has_factor else x
        size = jax.lax.bitcast_convert_type(y, jnp.int32) & jnp.int32(0x7FFFFFFF)
        mine, place = (column, pl.program_id(0)) if along_columns else (row, pl.program_id(1))
        mask = None if inside is None else mine < out.shape[1]
        plgpu.store(out.at[place, mine], jnp.max(size, axis=0 if along_columns else 1), mask=mask)


def _kernel(*refs: Any, tile: Tile, rounded: Any, by: tuple[tuple[bool, bool], ...]) -> None:
    """Rounds a tile.

    Args:
      refs: x and seed, then each direction's factor, if it has one, and inverse, then each one's codes.
      by: `Along.kind` of each direction.
    """
    x_ref, seed, *others = refs
    operands, outs = iter(others), others[-len(by) :]
    row, column, inside, at = _place(x_ref.shape, tile)  # what is outside is read again, and not written
    x = plgpu.load(x_ref.at[at[0][:, None], at[1][None]]).astype(jnp.float32)
    place = row[:, None].astype(jnp.uint32) * jnp.uint32(x_ref.shape[1]) + column[None].astype(jnp.uint32)
    bits = halves(hashed(place + seed[0]))

    for number, (along_columns, has_factor) in enumerate(by):
        y = x * _each(next(operands), at, not along_columns) if has_factor else x
        y = y * _each(next(operands), at, along_columns)
        _store(outs[number], rounded(y, bits[number]), row, column, inside, along_columns)
