# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped products for experts on a GPU, in Pallas' Triton: rows sorted by expert, each times its weight.

`jax.lax.ragged_dot` has no kernel on a GPU: XLA writes every row once per expert, with zeros for other experts' rows,
and multiplies these copies. At Qwen3-30B-A3B's shapes and 16,384 tokens the copies of one product take 69 GB. Here a
program computes a tile of rows of one expert, from a table that the device computes from the group sizes. The grid does
not depend on the group sizes; some tiles stay empty.

Products of int8 operands are summed exactly in int32, others in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Num

from qarl_jax.kernels.offsets import in_reach
from qarl_jax.runtime.mesh import on_one_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """The tile sizes of a Triton program, which computes [m, n] of the result, k inputs at a time; powers of two.

    Attributes:
      warps, stages: Triton's num_warps and num_stages (tiles of inputs in flight).
      group: number of row tiles that are scheduled together, so that they find their common weights in the L2 cache.
    """

    m: int = 128
    n: int = 128
    k: int = 64
    warps: int = 4
    stages: int = 3
    group: int = 8


# The fastest of those tried at Qwen3-30B-A3B's shapes on an H200 (grouped_h200.json; benchmarks/results/README.md).
FLOATS, INTEGERS, WEIGHTS = Tile(n=256, warps=8), Tile(stages=4), Tile()


def serves(*operands: jax.Array) -> bool:
    """Tells whether the kernels support these operands: bfloat16 or int8, of a size that they reach (`offsets`).

    They must be on one device (or inside of `jax.shard_map`), because XLA cannot partition a kernel."""
    return on_one_device() and all(x.dtype in (jnp.bfloat16, jnp.int8) and in_reach(x.size, x.dtype) for x in operands)


def _table(group_sizes: Int[Array, " E"], rows: int, height: int) -> tuple[Int[Array, " T"], ...]:
    """Group, first row and end of rows of each tile. Rows behind all groups are group E, tiles without rows E + 1."""
    groups = group_sizes.shape[0]
    sizes = jnp.append(group_sizes.astype(jnp.int32), jnp.maximum(0, rows - jnp.sum(group_sizes, dtype=jnp.int32)))
    starts = jnp.cumsum(sizes) - sizes
    tiles = (sizes + height - 1) // height
    ends = jnp.cumsum(tiles)
    number = jnp.arange(rows // height + groups + 1, dtype=jnp.int32)
    group = jnp.searchsorted(ends, number, side="right").astype(jnp.int32)
    known = jnp.minimum(group, groups)
    first = starts[known] + (number - (ends - tiles)[known]) * height
    end = starts[known] + sizes[known]
    return group, jnp.where(group > groups, end, first), end


def _accumulator(dtype: Any) -> Any:
    return jnp.int32 if dtype == jnp.int8 else jnp.float32


def _edge(start: Any, size: int, limit: int) -> tuple[jax.Array, jax.Array | None]:
    """Indices of a tile along a dimension, and which lie inside; None: all of them always do."""
    at = start + jnp.arange(size, dtype=jnp.int32)
    return at, None if limit % size == 0 else at < limit


def _mask(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    masks = [] if rows is None else [jnp.broadcast_to(rows[:, None], shape)]
    masks += [] if columns is None else [jnp.broadcast_to(columns[None], shape)]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _load(ref: Any, at: tuple[Any, ...], rows: jax.Array | None, columns: jax.Array | None) -> jax.Array:
    """A tile, zeros outside."""
    row, column = at[-2:]
    mask = _mask(rows, columns, (row.shape[0], column.shape[0]))
    where = ref.at[*at[:-2], row[:, None], column[None]]
    return plgpu.load(where) if mask is None else plgpu.load(where, mask=mask, other=0)


def _rows_kernel(
    group_ref: Any, first_ref: Any, end_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any, *, tile: Tile
) -> None:
    """x_ref [M, K], w_ref [E, N, K], out_ref [M, N]."""
    experts, width, depth = w_ref.shape
    tiles_m, tiles_n = group_ref.shape[0], pl.cdiv(width, tile.n)
    program = pl.program_id(0)
    above = program // (tile.group * tiles_n) * tile.group
    inside = program % (tile.group * tiles_n)
    height = jnp.minimum(tiles_m - above, tile.group)
    number, column_tile = above + inside % height, inside // height
    group, first, end = group_ref[number], first_ref[number], end_ref[number]

    @pl.when(first < end)
    def _some_rows() -> None:
        rows = first + jnp.arange(tile.m, dtype=jnp.int32)
        columns, columns_in = _edge(column_tile * tile.n, tile.n, width)
        expert = jnp.minimum(group, experts - 1)
        row, column = jnp.minimum(rows, end - 1), jnp.minimum(columns, width - 1)  # others are read again, not written

        def step(i: Any, acc: jax.Array) -> jax.Array:
            ks, ks_in = _edge(i * tile.k, tile.k, depth)
            x, w = _load(x_ref, (row, ks), None, ks_in), _load(w_ref, (expert, column, ks), None, ks_in)
            return acc + plgpu.dot(x, w, trans_b=True).astype(acc.dtype)

        # Rows behind all groups are multiplied with nothing.
        steps = pl.cdiv(depth, tile.k) * (group < experts).astype(jnp.int32)
        acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.m, tile.n), _accumulator(x_ref.dtype)))
        mask = _mask(rows < end, columns_in, (tile.m, tile.n))
        plgpu.store(out_ref.at[rows[:, None], columns[None]], acc.astype(out_ref.dtype), mask=mask)


def _weights_kernel(start_ref: Any, size_ref: Any, dy_ref: Any, x_ref: Any, out_ref: Any, *, tile: Tile) -> None:
    """dy_ref [M, N], x_ref [M, K], out_ref [E, N, K]. Here `tile.k` is of rows, `tile.m` of N and `tile.n` of K."""
    height, (_, outputs, inputs) = x_ref.shape[0], out_ref.shape
    tiles_m, tiles_n = pl.cdiv(outputs, tile.m), pl.cdiv(inputs, tile.n)
    program = pl.program_id(0)
    group, inside = program // (tiles_m * tiles_n), program % (tiles_m * tiles_n)
    start, size = start_ref[group], size_ref[group]
    ns, ns_in = _edge(inside // tiles_n * tile.m, tile.m, outputs)
    ks, ks_in = _edge(inside % tiles_n * tile.n, tile.n, inputs)

    def step(i: Any, acc: jax.Array) -> jax.Array:
        place = i * tile.k + jnp.arange(tile.k, dtype=jnp.int32)
        rows, rows_in = jnp.minimum(start + place, height - 1), place < size
        dy = _load(dy_ref, (rows, ns), rows_in, ns_in)
        x = _load(x_ref, (rows, ks), rows_in, ks_in)
        return acc + plgpu.dot(dy, x, trans_a=True)

    steps = (size + tile.k - 1) // tile.k
    acc = jax.lax.fori_loop(0, steps, step, jnp.zeros((tile.m, tile.n), jnp.float32))
    mask = _mask(ns_in, ks_in, (tile.m, tile.n))
    plgpu.store(out_ref.at[group, ns[:, None], ks[None]], acc.astype(out_ref.dtype), mask=mask)


def _call(
    kernel: Any, programs: Any, operands: list[jax.Array], out: Any, tile: Tile, interpret: bool, name: str
) -> jax.Array:
    return pl.pallas_call(
        functools.partial(kernel, tile=tile),
        grid=(programs,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name=name,
    )(*operands)


def product(
    x: Num[Array, "M K"],
    w: Num[Array, "E N K"],
    group_sizes: Int[Array, " E"],
    dtype: Any,
    *,
    tile: Tile | None = None,
    interpret: bool = False,
) -> Num[Array, "M N"]:
    """Multiplies each row by the weight of its group (expert).

    Args:
      x: bfloat16 or int8, rows sorted by group.
      w: in x's dtype.
      group_sizes: number of rows of each group; rows after the last group give zeros.
      dtype: the result's: int32 for int8 operands; float32 or bfloat16, rounded once, for others.
      tile: tile sizes; None: the default for the dtype. They can change last bits of floats, and no int32.
      interpret: run without a GPU in Pallas' interpreter (tests).
    """
    m, n = x.shape[0], w.shape[1]
    tile = tile or (INTEGERS if x.dtype == jnp.int8 else FLOATS)
    table = _table(group_sizes, m, tile.m)
    programs = table[0].shape[0] * pl.cdiv(n, tile.n)
    out = jax.ShapeDtypeStruct((m, n), dtype)
    return _call(_rows_kernel, programs, [*table, x, w], out, tile, interpret, "grouped_product")


def weight_gradient(
    dy: Float[Array, "M N"],
    x: Float[Array, "M K"],
    group_sizes: Int[Array, " E"],
    dtype: Any,
    *,
    tile: Tile = WEIGHTS,
    interpret: bool = False,
) -> Float[Array, "E N K"]:
    """Computes dy^T x of each group's rows, summed in float32 and rounded once to `dtype`; empty groups give zeros.

    Args:
      dy, x: bfloat16, rows sorted by group.
      group_sizes, dtype, tile, interpret: as in `product`.
    """
    sizes = group_sizes.astype(jnp.int32)
    (n, k), experts = (dy.shape[1], x.shape[1]), sizes.shape[0]
    programs = experts * pl.cdiv(n, tile.m) * pl.cdiv(k, tile.n)
    out = jax.ShapeDtypeStruct((experts, n, k), dtype)
    operands = [jnp.cumsum(sizes) - sizes, sizes, dy, x]
    return _call(_weights_kernel, programs, operands, out, tile, interpret, "grouped_gradient")
