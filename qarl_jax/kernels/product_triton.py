# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Two kernels of Pallas' Triton for `w8a8` on a GPU: codes of the activations, and the product with its rescale.

`product` rescales the accumulator in registers, by the operations of `w8a8.rescale` in their order, and writes
bfloat16. int32 sums are exact in any order, so every tile gives the same bits. Triton waits for each tile of inputs to
be multiplied where the sums are int32 (float32 sums may be one tile behind), so the tile chosen is small enough for two
programs to a multiprocessor, which fill each other's waits.

`quantize_rows` reads a row once and writes codes and scale; XLA reads it once for the maximum and once for the codes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from qarl_jax.numerics.float32 import divide, fused_multiply_add


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What a program computes and how; no result depends on it.

    Attributes:
      m, n: rows and outputs of a program, powers of two.
      k: inputs it multiplies at a time, a power of two.
      warps, stages: of Triton; stages: tiles of inputs in flight.
      group: rows of tiles that take turns, so that the weights they share are still in the L2 cache.
    """

    m: int = 128
    n: int = 128
    k: int = 128
    warps: int = 4
    stages: int = 3
    group: int = 8


# Least M, least N, tile: a product takes the first row whose bounds it reaches.
TILES: tuple[tuple[int, int, Tile], ...] = (
    (128, 128, Tile()),
    (0, 0, Tile(m=64, n=64, warps=4)),
)


def tile_for(m: int, n: int) -> Tile:
    """The tile of a product of M rows and N outputs."""
    return next(tile for least_m, least_n, tile in TILES if m >= least_m and n >= least_n)


def _place(tile: Tile, rows: int, outputs: int) -> tuple[jax.Array, jax.Array]:
    """Which tile row and tile column this program has."""
    tiles_m, tiles_n = pl.cdiv(rows, tile.m), pl.cdiv(outputs, tile.n)
    program = pl.program_id(0)
    per_group = tile.group * tiles_n
    first = program // per_group * tile.group
    inside = program % per_group
    height = jnp.minimum(tiles_m - first, tile.group)
    return first + inside % height, inside // height


def _product_kernel(*refs: Any, tile: Tile, bias: bool) -> None:
    """One tile of the result. x_ref [M, K], sx_ref [M], w_ref [N, K], sw_ref [N], b_ref [N] if any, out_ref [M, N]."""
    x_ref, sx_ref, w_ref, sw_ref, *b_ref, out_ref = refs
    (height, depth), width = x_ref.shape, w_ref.shape[0]
    row_tile, column_tile = _place(tile, height, width)
    rows = row_tile * tile.m + jnp.arange(tile.m, dtype=jnp.int32)
    columns = column_tile * tile.n + jnp.arange(tile.n, dtype=jnp.int32)
    # Rows past the end read the last one again and are not written.
    row = jnp.minimum(rows, height - 1) if height % tile.m else rows
    column = jnp.minimum(columns, width - 1) if width % tile.n else columns

    def load(ref: Any, at: jax.Array, start: Any, ragged: bool) -> jax.Array:
        ks = start + jnp.arange(tile.k, dtype=jnp.int32)
        if not ragged:
            return plgpu.load(ref.at[at[:, None], ks[None]])
        inside = jnp.broadcast_to((ks < depth)[None], (at.shape[0], tile.k))
        return plgpu.load(ref.at[at[:, None], ks[None]], mask=inside, other=0)

    def step(i: Any, acc: jax.Array, ragged: bool = False) -> jax.Array:
        start = i * tile.k
        return acc + plgpu.dot(load(x_ref, row, start, ragged), load(w_ref, column, start, ragged), trans_b=True)

    whole = depth // tile.k
    acc = jax.lax.fori_loop(0, whole, step, jnp.zeros((tile.m, tile.n), jnp.int32))
    if depth % tile.k:
        acc = step(whole, acc, ragged=True)
    s_x, s_w = plgpu.load(sx_ref.at[row])[:, None], plgpu.load(sw_ref.at[column])[None]
    total = acc.astype(jnp.float32)
    first = s_w * total
    if bias:
        whole_tile = (tile.m, tile.n)
        b = jnp.broadcast_to(plgpu.load(b_ref[0].at[column])[None], whole_tile)
        s_x = jnp.broadcast_to(s_x, whole_tile)
        y = fused_multiply_add(first, s_x, b, s_x)
    else:
        y = s_x * first
    mask = None
    if height % tile.m or width % tile.n:
        mask = (rows < height)[:, None] & (columns < width)[None]
    plgpu.store(out_ref.at[rows[:, None], columns[None]], y.astype(out_ref.dtype), mask=mask)


def product(
    x_q: Int[Array, "M K"],
    s_x: Float[Array, "M 1"],
    w_q: Int[Array, "N K"],
    s_w: Float[Array, " N"],
    bias: Float[Array, " N"] | None = None,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Float[Array, "M N"]:
    """bf16 of `w8a8.rescale(x_q w_q^T, ...)`, equal to the bit.

    Args:
      x_q, w_q: int8.
      s_x, s_w, bias: float32.
      tile: None: `tile_for` the shape.
      interpret: without a GPU, step by step (tests).
    """
    m, n = x_q.shape[0], w_q.shape[0]
    tile = tile_for(m, n) if tile is None else tile
    operands = [x_q, s_x.reshape(m), w_q, s_w, *([] if bias is None else [bias])]
    kernel = functools.partial(_product_kernel, tile=tile, bias=bias is not None)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(m, tile.m) * pl.cdiv(n, tile.n),),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="int8_product",
    )(*operands)


# ---- activations -----------------------------------------------------------------------------------------------------


def _codes(scaled: jax.Array, interpret: bool) -> jax.Array:
    """float32 -> int32, to nearest, ties to even, in [-128, 127]."""
    if interpret:
        codes = jnp.round(scaled).astype(jnp.int32)
    else:
        # A single instruction; adding and subtracting 1.5 * 2^23 could be fused with the multiplication before it.
        result = [jax.ShapeDtypeStruct(scaled.shape, jnp.int32)]
        (codes,) = plgpu.elementwise_inline_asm(
            "cvt.rni.s32.f32 $0, $1;", args=(scaled,), constraints="=r,f", pack=1, result_shape_dtypes=result
        )
    return jnp.clip(codes, -128, 127)


def _rows_kernel(x_ref: Any, codes_ref: Any, scale_ref: Any, *, widths: tuple[int, ...], interpret: bool) -> None:
    """One row: x_ref [M, K], codes_ref [M, K], scale_ref [M]."""
    row = pl.program_id(0) + jnp.arange(1, dtype=jnp.int32)
    depth = x_ref.shape[1]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    parts = []
    for start, width in zip(starts, widths, strict=True):
        ks = start + jnp.arange(width, dtype=jnp.int32)
        at = row[:, None], ks[None]
        inside = (ks < depth)[None] if start + width > depth else None
        x = plgpu.load(x_ref.at[at], mask=inside, other=None if inside is None else 0.0)
        parts.append((at, inside, x.astype(jnp.float32)))
    amax = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=1) for _, _, x in parts])
    full = jnp.full_like(amax, 127.0)
    inverse = divide(full, jnp.where(amax == 0, 1.0, amax))
    plgpu.store(scale_ref.at[row], divide(amax, full))
    for at, inside, x in parts:
        plgpu.store(codes_ref.at[at], _codes(x * inverse[:, None], interpret).astype(jnp.int8), mask=inside)


def quantize_rows(x: Float[Array, "M K"], *, interpret: bool = False) -> tuple[Int[Array, "M K"], Float[Array, "M 1"]]:
    """`int8.quantize_rows` without a floor and from the exact scale, equal to the bit.

    Args:
      x: bfloat16 or float32.
      interpret: without a GPU, step by step (tests).

    Returns:
      int8 codes and float32 scales.
    """
    m, k = x.shape
    whole = [1 << bit for bit in reversed(range(k.bit_length())) if k >> bit & 1]
    # Triton's shapes are powers of two. A width of many ones in binary is padded instead of cut.
    widths = tuple(whole) if len(whole) <= 3 and min(whole) >= 256 else (pl.next_power_of_2(k),)
    codes, scale = pl.pallas_call(
        functools.partial(_rows_kernel, widths=widths, interpret=interpret),
        grid=(m,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
        out_shape=[jax.ShapeDtypeStruct((m, k), jnp.int8), jax.ShapeDtypeStruct((m,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=4 if k <= 4096 else 8, num_stages=1),
        interpret=interpret,
        name="int8_rows",
    )(x)
    return codes, scale[:, None]
