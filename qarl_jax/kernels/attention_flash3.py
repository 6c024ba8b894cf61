# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with the bits of FlashAttention-3's forward on Hopper (arXiv 2407.08608), which vLLM runs there.

Per query, keys come in blocks counted from the start of its segment, the last block first. S = Q K^T; m = max(m, rowmax
S); P = exp2(S c - m c) with c = scale log2(e), one fused multiply-add and the GPU's approximate exp2. The accumulator
is rescaled by exp2((m_old - m) c), and P, rounded to bf16, times V is added. At the end it is multiplied by the
approximate reciprocal of the row sum. Four threads share a row of a wgmma accumulator, and with it the row sum: thread
q holds columns 8 j + 2 q and 8 j + 2 q + 1, and adds its weights (float32, unrounded) one after the other, from block
to block. At the very end the four sums are added as (l0 + l2) + (l1 + l3).

Products by wgmma have equal bits for every tile, so tiles can be chosen freely as long as wgmma runs: at least 64
queries to four warps. The kernel is written in Pallas' Triton. For the backward see `models/attention.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from qarl_jax.kernels.attention_vendor import segment_bounds

QUERIES, WARPS, STAGES = 128, 8, 2
"""Queries, warps and pipeline stages of a program; 16 queries to a warp. Other numbers give the same result."""


# ---- arithmetic of one instruction -----------------------------------------------------------------------------------


class _Instructions:
    """Single PTX instructions, so that no compiler joins or splits them, exp2 and the reciprocal as nvcc's
    --use_fast_math has them (FlashAttention's build); plain operations under the interpreter."""

    def __init__(self, interpret: bool) -> None:
        self.interpret = interpret

    def _asm(self, text: str, *args: jax.Array) -> jax.Array:
        shape = jnp.broadcast_shapes(*(x.shape for x in args))
        constraints = ",".join(["=f"] + ["f"] * len(args))
        args = tuple(jnp.broadcast_to(x, shape) for x in args)
        result = jax.ShapeDtypeStruct(shape, jnp.float32)
        (out,) = plgpu.elementwise_inline_asm(
            text, args=args, constraints=constraints, pack=1, result_shape_dtypes=[result]
        )
        return out

    def fma(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return a * b + c if self.interpret else self._asm("fma.rn.ftz.f32 $0, $1, $2, $3;", a, b, c)

    def exp2(self, x: jax.Array) -> jax.Array:
        return jnp.exp2(x) if self.interpret else self._asm("ex2.approx.ftz.f32 $0, $1;", x)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        return 1.0 / x if self.interpret else self._asm("rcp.approx.ftz.f32 $0, $1;", x)


# ---- row sums --------------------------------------------------------------------------------------------------------


def _by_thread(p: Float[Array, "M n"]) -> Float[Array, "M 4 n4"]:
    """Columns dealt to the four threads of a row of a wgmma accumulator, each one's in order."""
    rows, columns = p.shape
    dealt = jnp.transpose(p.reshape(rows, columns // 8, 4, 2), (0, 2, 1, 3))
    return dealt.reshape(rows, 4, columns // 4)


def _add_block(
    sums: Float[Array, "M 4 1"], scale: Float[Array, " M"] | None, p: Float[Array, "M n"], ops: _Instructions
) -> Float[Array, "M 4 1"]:
    """The threads' sums after a block's weights p, term after term; scale: of what was carried, None: 1."""
    dealt = _by_thread(p)
    first, *others = jax.lax.split(dealt, (1,) * dealt.shape[-1], axis=2)
    sums = sums + first if scale is None else ops.fma(sums, scale[:, None, None], first)
    for term in others:
        sums = sums + term
    return sums


def _meet(sums: Float[Array, "M 4 1"]) -> Float[Array, " M"]:
    """(l0 + l2) + (l1 + l3); of two terms the order of a sum does not matter."""
    return sums.reshape(sums.shape[0], 2, 2).sum(axis=1).sum(axis=1)


# ---- the kernel ------------------------------------------------------------------------------------------------------


def _kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    begins_ref: Any,
    ends_ref: Any,
    o_ref: Any,
    *,
    widths: tuple[int, ...],
    interpret: bool,
) -> None:
    """One tile of queries of one head, segment by segment. q_ref, o_ref [T, H], k_ref, v_ref [S, H], begins_ref,
    ends_ref [T]: of each position's segment, the end exclusive. widths: a block's keys, in parts that are powers of two
    (there is no other size of a tile in Triton)."""
    ops = _Instructions(interpret)
    length, head_dim = q_ref.shape
    padded = 64 if head_dim <= 64 else 128  # zeros added to a product change nothing
    block = sum(widths)
    c = jnp.float32(head_dim**-0.5) * jnp.float32(math.log2(math.e))
    first_row = (pl.num_programs(1) - 1 - pl.program_id(1)) * QUERIES  # most keys first
    rows = first_row + jnp.arange(QUERIES, dtype=jnp.int32)
    dims = jnp.arange(padded, dtype=jnp.int32)
    stop = jnp.minimum(first_row + QUERIES, length)

    def there(slots: jax.Array) -> jax.Array:
        """bool [slots, padded]."""
        mask = jnp.broadcast_to(slots[:, None], (slots.shape[0], padded))
        return mask if padded == head_dim else mask & (dims < head_dim)[None]

    def load(ref: Any, slots: jax.Array, last: jax.Array | int) -> jax.Array:
        return plgpu.load(ref.at[slots[:, None], dims[None]], mask=there(slots < last), other=0.0)

    q = load(q_ref, rows, length)

    def segment(first: jax.Array) -> jax.Array:
        """Queries [first, last) of the tile, those of one segment; returns last."""
        begin = begins_ref[first]
        last = jnp.minimum(ends_ref[first], stop)
        blocks = (last - begin + (block - 1)) // block

        def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            m, sums, acc = carry
            starts = [begin + (blocks - 1 - i) * block + sum(widths[:part]) for part in range(len(widths))]
            keys = [at + jnp.arange(width, dtype=jnp.int32) for at, width in zip(starts, widths, strict=True)]
            scores = []
            for slots in keys:
                s = plgpu.dot(q, load(k_ref, slots, last), trans_b=True)
                scores.append(jnp.where(slots[None] <= rows[:, None], s, -jnp.inf))
            new = functools.reduce(jnp.maximum, [s.max(axis=1) for s in scores], m)
            finite = jnp.where(new == -jnp.inf, 0.0, new)
            scale = ops.exp2((m - finite) * c)
            offset = -(finite * c)
            acc = acc * scale[:, None]
            rescale: jax.Array | None = scale
            for s, slots in zip(scores, keys, strict=True):
                p = ops.exp2(ops.fma(s, jnp.broadcast_to(c, s.shape), offset[:, None]))
                sums = _add_block(sums, rescale, p, ops)
                rescale = None
                acc = acc + plgpu.dot(p.astype(jnp.bfloat16), load(v_ref, slots, last))
            return new, sums, acc

        empty = (
            jnp.full((QUERIES,), -jnp.inf, jnp.float32),
            jnp.zeros((QUERIES, 4, 1), jnp.float32),
            jnp.zeros((QUERIES, padded), jnp.float32),
        )
        _, sums, acc = jax.lax.fori_loop(0, blocks, step, empty)
        out = acc * ops.reciprocal(_meet(sums))[:, None]
        mine = there((rows >= first) & (rows < last))
        plgpu.store(o_ref.at[rows[:, None], dims[None]], out.astype(o_ref.dtype), mask=mine)
        return last

    jax.lax.while_loop(lambda first: first < stop, segment, first_row)


def flash3_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    block: int,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Computes causal attention within segments; it defines no gradient.

    Args:
      q, k, v: bfloat16, H at most 128; N/K query heads share a kv head.
      segment_ids: as in `attention.attention`; None: one sequence per row.
      block: keys of a block (`numerics.attention.flash_block`), a multiple of 64.
      interpret: run on any backend in Pallas' interpreter, slowly, with the backend's exp2 and reciprocal.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    widths = tuple(1 << bit for bit in reversed(range(block.bit_length())) if block >> bit & 1)
    begins, ends = (jnp.broadcast_to(x, (B, T)) for x in segment_bounds(T, segment_ids))
    heads = pl.BlockSpec((None, T, None, H), lambda n, t, b: (b, 0, n, 0))
    shared = pl.BlockSpec((None, T, None, H), lambda n, t, b: (b, 0, n // (N // K), 0))
    slots = pl.BlockSpec((None, T), lambda n, t, b: (b, 0))
    return pl.pallas_call(
        functools.partial(_kernel, widths=widths, interpret=interpret),
        grid=(N, pl.cdiv(T, QUERIES), B),
        in_specs=[heads, shared, shared, slots, slots],
        out_specs=heads,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name="flash3",
    )(q, k, v, begins, ends)
