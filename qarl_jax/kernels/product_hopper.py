# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products for Hopper GPUs in Pallas' Mosaic GPU: of 8-bit codes with their rescaling (`w8a8`, `fp8`), and of
bfloat16, split along K as in the engine (`float_product`).

The kernel is persistent, with one block of three warpgroups per multiprocessor. One warpgroup copies tiles of
activations and weights by TMA, ahead of the two that multiply them (wgmma), each one half of the block's tile. These
two do not wait for each other: one may rescale and write while the other multiplies. Pallas' Triton cannot do this.

int8 codes are summed in int32, exactly. e4m3 codes are summed in float32 within the tensor cores, 32 inputs after the
other through all of K, and never added up outside. vLLM's CUTLASS kernel does so too. This decides the bits, because
the cores keep some 14 bits of a sum (docs/concepts/engines.md). The tile does not change them, and neither do zeros
after the last input, with which CUTLASS pads its last tile.

bfloat16 products have an accumulator for each part of K (`qarl_bridge.protocol.split_k`). One pass over the inputs
fills all of them; at the end they are added in float32. So the parts cost no further pass over memory. The parts of an
adapter's product are many. They lie side by side in the result, as if they were further outputs, and XLA adds them.
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
from jaxtyping import Array, Float, Num
from qarl_bridge.protocol import split_k

from qarl_jax.numerics.float32 import fused_multiply_add

_MULTIPROCESSORS = 132  # of an H100 or H200 (SXM), where no device is there to be asked
SUMS = {  # of products
    jnp.dtype(jnp.int8): jnp.int32,
    jnp.dtype(jnp.float8_e4m3fn): jnp.float32,
    jnp.dtype(jnp.bfloat16): jnp.float32,
}
_COPY_REGISTERS = 40  # of a thread that only starts copies; the others take what it leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """The tile sizes of a thread block; results do not depend on them.

    wgmma needs parts of a multiple of 64 rows and of 8 outputs, 256 at most.

    Attributes:
      m, n: rows and outputs of a block.
      k: inputs multiplied at a time; 128 bytes are the widest swizzle.
      split: the dimension, m or n, along which the two multiplying warpgroups divide the tile.
      steps: tiles of inputs in shared memory, at most.
      out_n: outputs that are written at a time; slots: such writes in flight, per warpgroup.
      width: rows of tiles scheduled together, so that they find their common weights in the L2 cache.
    """

    m: int = 128
    n: int = 256
    k: int = 128
    split: Literal["m", "n"] = "m"
    steps: int = 4
    out_n: int = 64
    slots: int = 2
    width: int = 8

    @property
    def part(self) -> tuple[int, int]:
        """The rows and outputs of one warpgroup's part of the tile."""
        return (self.m // 2, self.n) if self.split == "m" else (self.m, self.n // 2)


CHOSEN = Tile()
# Other shapes than its own: outputs that 256 does not divide, and few rows.
NARROW = Tile(n=128)
LOW = Tile(m=64, n=128, split="n")
# Of bfloat16: 64 inputs are 128 bytes. Two parts have two accumulators.
FLOAT = Tile(k=64)
FLOAT_SPLIT = Tile(n=128, k=64, steps=3)
# Of adapters: many parts, few outputs, sums in float32.
FLOAT_PARTS = Tile(n=64, k=64, out_n=32)


def tile_for(m: int, n: int) -> Tile:
    """The tile of a product of M rows and N outputs, which it need not divide."""
    if m <= LOW.m:
        return LOW
    return CHOSEN if n % CHOSEN.n == 0 else NARROW


def _load(ref: Any, at: tuple[Any, ...], layout: Any, interpret: bool) -> jax.Array:
    """Scales, in the registers of those who need them; JAX before 0.11 wants the index apart."""
    if interpret:
        return ref[at]
    load: Any = mgpu.load
    if inspect.signature(load).parameters["idx"].default is inspect.Parameter.empty:
        return load(ref, at, layout=layout, optimized=False)
    return load(ref.at[at], layout=layout, optimized=False)


def _kernel(
    *refs: Any,
    tile: Tile,
    scaled: bool,
    bias: bool,
    factor: bool = False,
    splits: int = 1,
    parts: int = 1,
    promoted: bool = False,
    interpret: bool = False,
) -> None:
    """All in global memory.

    Args:
      refs: x [M, K], w [N, K] (interpreted: [K, N]), scales s_x [M] and s_w [N] if `scaled`, factors [N] and a bias [N]
        if any, and the result [M, parts N].
      tile: divides them.
      scaled: codes, whose sum is rescaled.
      bias: whether there is one. factor: whether there are factors, which the sum meets before it is rounded.
      splits: of K, equal ones, each with an accumulator of its own.
      parts: of K, equal ones, each with N columns of the result.
      promoted: the sum of every tile of inputs is added up in float32 registers, outside of the tensor cores.
      interpret: whether on a CPU.
    """
    x_ref, w_ref, *vectors, out_ref = refs
    s_x_ref, s_w_ref = vectors[:2] if scaled else (None, None)
    f_ref = vectors[:1] if factor else []
    b_ref = vectors[-1:] if bias else []
    (height, depth), width = x_ref.shape, w_ref.shape[1 if interpret else 0]
    tiles = height // tile.m, parts * (width // tile.n)
    steps = depth // tile.k // splits // parts
    part_m, part_n = tile.part
    swizzled = mgpu.TilingTransform((8, tile.k)), mgpu.SwizzleTransform(tile.k * x_ref.dtype.itemsize)
    written = mgpu.TilingTransform((8, tile.out_n)), mgpu.SwizzleTransform(out_ref.dtype.itemsize * tile.out_n)

    def block(*shape: int, part: int, k: int = 1) -> mgpu.BlockSpec:
        """Tiles one after the other along dimension k, of a part of it."""
        index = (lambda i: (0, part * steps + i)) if k else (lambda i: (part * steps + i, 0))
        return mgpu.BlockSpec(shape, index, transforms=swizzled, memory_space=mgpu.SMEM)

    def w_block(part: int) -> mgpu.BlockSpec:
        return block(tile.k, tile.n, part=part, k=0) if interpret else block(tile.n, tile.k, part=part)

    def pipeline(step: Any, context: Any) -> Any:
        return mgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            memory_registers=_COPY_REGISTERS,
            in_specs=[*(block(tile.m, tile.k, part=p) for p in range(splits)), *map(w_block, range(splits))],
            wg_axis="warpgroup",
            num_compute_wgs=2,
            max_concurrent_steps=min(tile.steps, steps),
            compute_context=context,
        )

    def nothing(*_: Any, **__: Any) -> None:
        """Does nothing: the allocations of a pipeline do not depend on its body."""

    def walk(allocations: Any, out_smem: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        inner_m, inner_n = (warpgroup * part_m, 0) if tile.split == "m" else (0, warpgroup * part_n)

        @mgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
        def _one_tile(place: Any) -> None:
            row, column = mgpu.planar_snake(place.index[0], tiles, 0, tile.width)
            rows, written_at = row * tile.m, column * tile.n
            part = lax.div(column, jnp.int32(width // tile.n)) if parts > 1 else 0
            columns = written_at - part * width

            accumulator = mgpu.ACC((part_m, part_n), SUMS[x_ref.dtype])

            def context(run: Any) -> None:
                def one_tile(*accs: Any) -> None:
                    run(accs)
                    finish([acc[...].astype(jnp.float32) for acc in accs])

                if promoted:
                    zeros = jnp.zeros((part_m, part_n), jnp.float32)
                    finish([run(zeros if interpret else mgpu.layout_cast(zeros, mgpu.Layout.WGMMA))])
                else:
                    pl.run_scoped(one_tile, *[accumulator] * splits)

            def of_outputs(ref: Any, first_n: Any) -> jax.Array:
                by_column = _load(ref, (pl.ds(first_n, part_n),), mgpu.Layout.WGMMA.reduce(0), interpret)
                return lax.broadcast_in_dim(by_column, (part_m, part_n), (1,))

            def finish(sums: Any) -> None:
                first_m, first_n, first_out = rows + inner_m, columns + inner_n, written_at + inner_n
                total = functools.reduce(jnp.add, sums)
                b = [of_outputs(ref, first_n) for ref in b_ref]
                if scaled:
                    by_row = _load(s_x_ref, (pl.ds(first_m, part_m),), mgpu.Layout.WGMMA.reduce(1), interpret)
                    s_x = lax.broadcast_in_dim(by_row, (part_m, part_n), (0,))
                    s_w = of_outputs(s_w_ref, first_n)
                    total = s_w * total
                    total = fused_multiply_add(total, s_x, b[0], s_x) if bias else s_x * total
                for ref in f_ref:
                    total = total * of_outputs(ref, first_n)
                    total = total.astype(jnp.bfloat16).astype(jnp.float32) if bias else total
                if bias and not scaled:
                    total = total + b[0]
                y = total.astype(out_ref.dtype)
                for i in range(part_n // tile.out_n):
                    mgpu.wait_smem_to_gmem(tile.slots - 1, wait_read_only=True)
                    slot = out_smem.at[warpgroup, i % tile.slots]
                    slot[...] = y[:, i * tile.out_n : (i + 1) * tile.out_n]
                    mgpu.commit_smem()
                    at = pl.ds(first_m, part_m), pl.ds(first_out + i * tile.out_n, tile.out_n)
                    mgpu.copy_smem_to_gmem(slot, out_ref.at[at])
                mgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def step(_: Any, *tiles_and_sums: Any) -> Any:
                *inputs, accs = tiles_and_sums
                if promoted:

                    def alone(acc: Any) -> Any:
                        multiply(inputs, [acc])
                        return acc[...]

                    return accs + pl.run_scoped(alone, accumulator)
                multiply(inputs, accs)
                return accs

            def multiply(inputs: Any, accs: Any) -> None:
                half = pl.ds(inner_n, part_n)
                for acc, x_tile, w_tile in zip(accs, inputs[:splits], inputs[splits:], strict=True):
                    x = x_tile.at[pl.ds(inner_m, part_m)] if tile.split == "m" else x_tile
                    if interpret:
                        w = w_tile.at[:, half] if tile.split == "n" else w_tile
                    else:
                        w = (w_tile.at[half] if tile.split == "n" else w_tile).transpose((1, 0))
                    mgpu.wgmma(acc, x, w)
                # All of them: a pipeline's end does not wait for products that still run, and the next tile's inputs
                # would be copied over theirs.
                mgpu.wgmma_wait(0)

            inputs = pl.ds(part * (depth // parts), depth // parts) if parts > 1 else slice(None)
            x = x_ref.at[pl.ds(rows, tile.m), inputs]
            w = w_ref.at[inputs, pl.ds(columns, tile.n)] if interpret else w_ref.at[pl.ds(columns, tile.n), inputs]
            pipeline(step, context)(*[x] * splits, *[w] * splits, allocations=allocations)

    pl.run_scoped(
        walk,
        pipeline(nothing, nothing).get_allocations(*[x_ref] * splits, *[w_ref] * splits),
        mgpu.SMEM((2, tile.slots, part_m, tile.out_n), out_ref.dtype, transforms=written),
        collective_axes="warpgroup",
    )


def product(
    x_q: Num[Array, "M K"],
    s_x: Float[Array, "M 1"],
    w_q: Num[Array, "N K"],
    s_w: Float[Array, " N"],
    bias: Float[Array, " N"] | None = None,
    *,
    promoted: bool = False,
    tile: Tile | None = None,
    blocks: int | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """Multiplies 8-bit codes and rescales: bf16(`w8a8.rescale(x_q w_q^T, ...)`), with sums as described above.

    For int8 codes all bits equal XLA's. Operands whose sizes the tile does not divide are copied, padded with zeros.

    Args:
      x_q, w_q: int8, or both float8_e4m3fn.
      s_x, s_w, bias: float32.
      promoted: add the sums of e4m3 codes up outside of the tensor cores, which keeps all float32 bits; engines do not.
      tile: tile sizes, which must fit into shared memory; None: `tile_for` the shape.
      blocks: number of thread blocks; None: one per multiprocessor.
      interpret: parameters of Pallas' GPU interpreter, which runs the kernel on a CPU (tests); the interpreter cannot
        transpose in shared memory, gets the weight as [K, N] and adds in numpy's order.
    """
    m, n = x_q.shape[0], w_q.shape[0]
    if tile is None:
        tile = NARROW if promoted else tile_for(m, n)
    scales = s_x.reshape(m), s_w
    kind = "int8" if x_q.dtype == jnp.int8 else "e4m3"
    return _launch(x_q, w_q, scales, bias, tile, blocks, interpret, f"hopper_{kind}", scaled=True, promoted=promoted)


def float_product(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    bias: Float[Array, " N"] | None = None,
    factor: Float[Array, " N"] | None = None,
    *,
    splits: int = 1,
    tile: Tile | None = None,
    blocks: int | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """Computes bf16(acc + b), or bf16(bf16(acc f) + b), where acc is x w^T: float32 sums of parts of K, added in order.

    Args:
      x, w: bfloat16. bias, factor: float32.
      splits: one or two (`split_k.splits_of`), or more without bias and factor (`split_k.splits_of_adapter`).
      tile, blocks, interpret: as in `product`.

    Raises:
      ValueError: more than two splits, and a bias or a factor.
    """
    if splits > 2:
        if bias is not None or factor is not None:
            raise ValueError(f"a product of {splits} parts takes no bias and no factor")
        tile, n = tile or FLOAT_PARTS, w.shape[0]
        x, w = _filled(x, 1, split_k.STEP * splits), _filled(w, tile.n, split_k.STEP * splits)
        sums = _launch(x, w, (), None, tile, blocks, interpret, "hopper_bf16", scaled=False, factor=False, parts=splits)
        each = (lax.slice_in_dim(sums, p * w.shape[0], p * w.shape[0] + n, axis=1) for p in range(splits))
        return functools.reduce(jnp.add, each).astype(jnp.bfloat16)
    if tile is None:
        tile = FLOAT if splits == 1 and w.shape[0] % FLOAT.n == 0 else FLOAT_SPLIT
    multiple = max(1, split_k.STEP * splits)  # both parts of the same length: behind the last input there are zeros
    x, w = _filled(x, 1, multiple), _filled(w, 1, multiple)
    factors = () if factor is None else (factor,)
    options = {"scaled": False, "factor": factor is not None, "splits": splits}
    return _launch(x, w, factors, bias, tile, blocks, interpret, "hopper_bf16", **options)


def _launch(
    x: jax.Array,
    w: jax.Array,
    scales: tuple[jax.Array, ...],
    bias: jax.Array | None,
    tile: Tile,
    blocks: int | None,
    interpret: Any,
    name: str,
    parts: int = 1,
    **static: Any,
) -> jax.Array:
    """The kernel on operands filled up to whole tiles.

    scales: of rows and outputs, or of outputs alone. parts, static: of `_kernel`.
    """
    m, n = x.shape[0], w.shape[0]
    if blocks is None:
        blocks = jax.local_devices()[0].core_count if jax.default_backend() == "gpu" else _MULTIPROCESSORS
    x, w = _filled(x, tile.m, tile.k), _filled(w, tile.n, tile.k)
    (rows, _), outputs = x.shape, parts * w.shape[0]
    interpreted = interpret is not None
    vectors = [_filled(of_rows, tile.m) for of_rows in scales[:-1]] + [_filled(s, tile.n) for s in scales[-1:]]
    if bias is not None:
        vectors.append(_filled(bias, tile.n))
    kernel = functools.partial(_kernel, tile=tile, bias=bias is not None, parts=parts, interpret=interpreted, **static)
    kernel.__name__ = f"{name}_{w.shape[0]}x{x.shape[1]}"  # type: ignore[attr-defined]  # in traces
    y = mgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, outputs), jnp.bfloat16 if parts == 1 else jnp.float32),
        grid=(min(blocks, rows // tile.m * (outputs // tile.n)),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
    )(x, w.T if interpreted else w, *vectors)
    return y if (rows, outputs) == (m, n) else y[:m, : parts * n]


def _filled(x: jax.Array, *multiples: int) -> jax.Array:
    """x with zeros after its end in every dimension, up to the next multiple."""
    padding = [(0, -size % multiple) for size, multiple in zip(x.shape, multiples, strict=True)]
    if not any(after for _, after in padding):
        return x
    if x.dtype == jnp.float8_e4m3fn:  # as bytes, which every compiler can fill up
        return lax.bitcast_convert_type(jnp.pad(lax.bitcast_convert_type(x, jnp.int8), padding), x.dtype)
    return jnp.pad(x, padding)
