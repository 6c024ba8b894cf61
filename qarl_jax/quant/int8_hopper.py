# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`w8a8`'s product with its rescale in Pallas' Mosaic GPU, for Hopper alone: `int8_kernels.product` to the last bit.

A persistent kernel, one block of three warpgroups per multiprocessor: one copies tiles of activations and weights by
TMA, ahead of the two that multiply them (wgmma), each its half of the block's tile. Those two wait for inputs but not
for each other, so one may rescale and write while the other multiplies, and the next tile's inputs are on their way
meanwhile. Triton's kernel has nothing of this. What it has and this one lacks: a bias, and sizes that the tile does not
divide.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxtyping import Array, Float, Int

_MULTIPROCESSORS = 132  # of an H100 or H200 (SXM), where no device is there to be asked
_COPY_REGISTERS = 40  # of a thread that only starts copies; the others take what it leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What a block computes and how; no result depends on it.

    Attributes:
      m, n: rows and outputs of a block.
      k: inputs it multiplies at a time; 128 bytes are the widest swizzle.
      split: which of the two the warpgroups share out.
      steps: tiles of inputs in shared memory.
      delay: tiles whose products may still run when the next one's are started.
      out_n: outputs that are written at a time; slots: such writes in flight, per warpgroup.
      width: rows of tiles walked together, so that the weights they share are still in the L2 cache.
    """

    m: int = 128
    n: int = 256
    k: int = 128
    split: Literal["m", "n"] = "m"
    steps: int = 4
    delay: int = 0
    out_n: int = 64
    slots: int = 2
    width: int = 8

    @property
    def part(self) -> tuple[int, int]:
        """Rows and outputs of one warpgroup."""
        return (self.m // 2, self.n) if self.split == "m" else (self.m, self.n // 2)


CHOSEN = Tile()


def fits(m: int, n: int, k: int, tile: Tile = CHOSEN) -> bool:
    """Whether a product [M, K] x [N, K] is made of whole tiles, at least as many along K as are kept in flight."""
    return m % tile.m == 0 and n % tile.n == 0 and k % tile.k == 0 and k >= tile.steps * tile.k


def _load(ref: Any, at: tuple[Any, ...], layout: Any, interpret: bool) -> jax.Array:
    """Scales, in the registers of those who need them; JAX before 0.11 wants the index apart."""
    if interpret:
        return ref[at]
    load: Any = mgpu.load
    if inspect.signature(load).parameters["idx"].default is inspect.Parameter.empty:
        return load(ref, at, layout=layout, optimized=False)
    return load(ref.at[at], layout=layout, optimized=False)


def _kernel(
    x_ref: Any, s_x_ref: Any, w_ref: Any, s_w_ref: Any, out_ref: Any, *, tile: Tile, x_first: bool, interpret: bool
) -> None:
    """x_ref [M, K], s_x_ref [M], w_ref [N, K] (interpreted: [K, N]), s_w_ref [N], out_ref [M, N]: in global memory."""
    (height, depth), (width,) = x_ref.shape, s_w_ref.shape
    tiles = height // tile.m, width // tile.n
    part_m, part_n = tile.part
    swizzled = mgpu.TilingTransform((8, tile.k)), mgpu.SwizzleTransform(tile.k)
    written = mgpu.TilingTransform((8, tile.out_n)), mgpu.SwizzleTransform(2 * tile.out_n)

    def block(*shape: int, k: int = 1) -> mgpu.BlockSpec:
        """Tiles one after the other along dimension k."""
        index = (lambda i: (0, i)) if k else (lambda i: (i, 0))
        return mgpu.BlockSpec(shape, index, transforms=swizzled, memory_space=mgpu.SMEM, delay_release=tile.delay)

    w_block = block(tile.k, tile.n, k=0) if interpret else block(tile.n, tile.k)

    def pipeline(step: Any, context: Any) -> Any:
        return mgpu.emit_pipeline_warp_specialized(
            step,
            grid=(depth // tile.k,),
            memory_registers=_COPY_REGISTERS,
            in_specs=[block(tile.m, tile.k), w_block],
            wg_axis="warpgroup",
            num_compute_wgs=2,
            max_concurrent_steps=tile.steps,
            compute_context=context,
        )

    def nothing(*_: Any, **__: Any) -> None:
        """What a pipeline allocates does not depend on what it does."""

    def walk(allocations: Any, out_smem: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        inner_m, inner_n = (warpgroup * part_m, 0) if tile.split == "m" else (0, warpgroup * part_n)

        @mgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
        def _one_tile(place: Any) -> None:
            row, column = mgpu.planar_snake(place.index[0], tiles, 0, tile.width)
            rows, columns = row * tile.m, column * tile.n

            def context(run: Any) -> None:
                @functools.partial(pl.run_scoped, acc=mgpu.ACC((part_m, part_n), jnp.int32))
                def _one_part(acc: Any) -> None:
                    run(acc)
                    finish(acc)

            def finish(acc: Any) -> None:
                first_m, first_n = rows + inner_m, columns + inner_n
                by_row = _load(s_x_ref, (pl.ds(first_m, part_m),), mgpu.Layout.WGMMA.reduce(1), interpret)
                by_column = _load(s_w_ref, (pl.ds(first_n, part_n),), mgpu.Layout.WGMMA.reduce(0), interpret)
                s_x = lax.broadcast_in_dim(by_row, (part_m, part_n), (0,))
                s_w = lax.broadcast_in_dim(by_column, (part_m, part_n), (1,))
                total = acc[...].astype(jnp.float32)
                y = (s_w * (total * s_x) if x_first else s_x * (s_w * total)).astype(jnp.bfloat16)
                for i in range(part_n // tile.out_n):
                    mgpu.wait_smem_to_gmem(tile.slots - 1, wait_read_only=True)
                    slot = out_smem.at[warpgroup, i % tile.slots]
                    slot[...] = y[:, i * tile.out_n : (i + 1) * tile.out_n]
                    mgpu.commit_smem()
                    at = pl.ds(first_m, part_m), pl.ds(first_n + i * tile.out_n, tile.out_n)
                    mgpu.copy_smem_to_gmem(slot, out_ref.at[at])
                mgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def step(_: Any, x_tile: Any, w_tile: Any, acc: Any) -> Any:
                x = x_tile.at[pl.ds(inner_m, part_m)] if tile.split == "m" else x_tile
                half = pl.ds(inner_n, part_n)
                if interpret:
                    w = w_tile.at[:, half] if tile.split == "n" else w_tile
                else:
                    w = (w_tile.at[half] if tile.split == "n" else w_tile).transpose((1, 0))
                mgpu.wgmma(acc, x, w)
                mgpu.wgmma_wait(tile.delay)
                return acc

            x, w = x_ref.at[pl.ds(rows, tile.m)], w_ref.at[pl.ds(columns, tile.n)]
            if interpret:
                w = w_ref.at[:, pl.ds(columns, tile.n)]
            pipeline(step, context)(x, w, allocations=allocations)

    pl.run_scoped(
        walk,
        pipeline(nothing, nothing).get_allocations(x_ref, w_ref),
        mgpu.SMEM((2, tile.slots, part_m, tile.out_n), jnp.bfloat16, transforms=written),
        collective_axes="warpgroup",
    )


def product(
    x_q: Int[Array, "M K"],
    s_x: Float[Array, "M 1"],
    w_q: Int[Array, "N K"],
    s_w: Float[Array, " N"],
    *,
    rescale_order: str = "w_then_x",
    tile: Tile = CHOSEN,
    blocks: int | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """bf16 of `w8a8.rescale(x_q w_q^T, ...)` without a bias, equal to the bit, for sizes that `fits` the tile.

    Args:
      x_q, w_q: int8.
      s_x, s_w: float32.
      rescale_order: as in `Numerics`.
      tile: its shared memory must be there.
      blocks: None: one per multiprocessor.
      interpret: parameters of Pallas' GPU interpreter, which runs it step by step on a CPU (tests); the interpreter
        cannot transpose in shared memory and gets the weight as [K, N].

    Raises:
      ValueError: a size that the tile does not divide.
    """
    (m, k), n = x_q.shape, w_q.shape[0]
    if not fits(m, n, k, tile):
        raise ValueError(f"a product of {m} x {k} and {n} x {k} is not made of whole tiles {tile}")
    if blocks is None:
        blocks = jax.local_devices()[0].core_count if jax.default_backend() == "gpu" else _MULTIPROCESSORS
    interpreted = interpret is not None
    kernel = functools.partial(_kernel, tile=tile, x_first=rescale_order == "x_then_w", interpret=interpreted)
    kernel.__name__ = "int8_hopper"  # type: ignore[attr-defined]  # what traces show
    return mgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
    )(x_q, s_x.reshape(m), w_q.T if interpreted else w_q, s_w)
