# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of one decoded token per row over a cache of keys and values: the embedded sampler's kernel on a GPU.

XLA copies a layer's part of the stacked cache before it multiplies it, and reads all slots of all rows, written or not.
Here a program per row and kv head reads the slots that the row has filled, once, with a running maximum (online
softmax, arXiv 1805.02867), and sums in float32. Scores and weighted values are sums of elementwise float32 products,
because a few queries per kv head do not fill tensor cores.

Left out: splitting a long row over several programs, so a few long rows do not fill a GPU; gradients; and the roundings
of engines, so profiles that mirror an engine use XLA.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

_KEYS = 32  # met at a time


def _kernel(layers_ref: Any, slots_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, *, scale: float) -> None:
    """One row and kv head, [G, H] queries."""
    row, head = pl.program_id(0), pl.program_id(1)
    layer, last = plgpu.load(layers_ref.at[row]), plgpu.load(slots_ref.at[row])
    group, width = q_ref.shape[2:]
    q_GH = plgpu.load(q_ref.at[row, head]).astype(jnp.float32) * scale

    def block(start: Any, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top_G, total_G, out_GH = carry
        slots = start * _KEYS + jnp.arange(_KEYS)
        seen_S = slots <= last
        at = (layer, row, pl.ds(start * _KEYS, _KEYS), head)
        mask = jnp.broadcast_to(seen_S[:, None], (_KEYS, width))
        k_SH, v_SH = (plgpu.load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32) for ref in (k_ref, v_ref))
        scores_GS = (q_GH[:, None, :] * k_SH[None]).sum(-1)
        scores_GS = jnp.where(seen_S[None], scores_GS, -jnp.inf)
        new_G = jnp.maximum(top_G, scores_GS.max(-1))
        kept_G, p_GS = jnp.exp(top_G - new_G), jnp.exp(scores_GS - new_G[:, None])
        out_GH = out_GH * kept_G[:, None] + (p_GS[:, :, None] * v_SH[None]).sum(1)
        return new_G, total_G * kept_G + p_GS.sum(-1), out_GH

    # The first block holds slot 0, which every row sees: no maximum stays at -inf, and nothing is NaN.
    zeros = jnp.zeros(group, jnp.float32)
    start = jnp.full(group, -jnp.inf, jnp.float32), zeros, jnp.zeros((group, width), jnp.float32)
    _, total_G, out_GH = jax.lax.fori_loop(0, last // _KEYS + 1, block, start)
    plgpu.store(out_ref.at[row, head], (out_GH / total_G[:, None]).astype(out_ref.dtype))


def decode_attention(
    q: Float[Array, "B 1 N H"],
    keys: Float[Array, "L B S K H"],
    values: Float[Array, "L B S K H"],
    layer: Int[Array, ""],
    slots: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> Float[Array, "B 1 N H"]:
    """Computes softmax attention of one query per row over slots 0 .. slots[b] of one layer of a cache.

    Args:
      q: queries after RoPE; N is a multiple of K.
      keys, values: the stacked cache, read in place.
      layer: the layer's index in the cache.
      slots: the last slot that a row's query sees, clipped to the cache.
      interpret: run without a GPU in Pallas' interpreter (tests).

    Returns:
      [B, 1, N, H] in q's dtype; sums in float32.
    """
    B, _, N, H = q.shape
    S, K = keys.shape[2:4]
    group = N // K
    padded = pl.next_power_of_2(group)  # Triton's shapes are powers of two
    q_BKGH = jnp.pad(q.reshape(B, K, group, H), ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    last = jnp.clip(slots, 0, S - 1).astype(jnp.int32)
    out = pl.pallas_call(
        functools.partial(_kernel, scale=H**-0.5),
        grid=(B, K),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 5,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((B, K, padded, H), q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(jnp.full(B, layer, jnp.int32), last, q_BKGH, keys, values)
    return out[:, :, :group].reshape(B, 1, N, H)
