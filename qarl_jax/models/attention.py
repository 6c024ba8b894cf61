# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention, causal within segments, in one function for training, prefill and decoding.

The implementation "xla" runs on every backend, a block of queries at a time, and can mirror an engine's order of sums
(`numerics/attention.py`). Fused kernels for GPUs and TPUs are in `kernels/attention_vendor.py`.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from qarl_jax.kernels.attention_vendor import (
    cudnn_attention,
    cudnn_packs,
    flash3_lacks,
    runs,
    segment_bounds,
    splash_attention,
    split_by_hand,
)
from qarl_jax.numerics.attention import (
    block_attention,
    flash_block,
    float64_attention,
    softmax_attention,
    with_plain_gradient,
)
from qarl_jax.numerics.float32 import round_to
from qarl_jax.quant import PLAIN, Numerics
from qarl_jax.runtime.remat import ATTENTION_OUTPUT

# Queries handled at once: bounds the live scores to [B, N, chunk, keys]. At most 16 chunks bound the compile time.
_QUERY_CHUNK = 512
_MAX_CHUNKS = 16


def choose(attention: str, dtype: Any, head_dim: int, length: int, numerics: Numerics = PLAIN) -> str:
    """Chooses an implementation at trace time: "xla", "cudnn", "splash" or "flash3".

    Args:
      attention: the config's value. "auto": flash3 where `numerics` sums in blocks and the GPU has it, else the
        backend's fused kernel, else xla. "flash3" becomes "xla", with a warning, where the GPU lacks it.
      dtype, head_dim, length: of the queries.
    """
    if attention == "flash3" and (lacks := flash3_lacks(dtype, head_dim)) is not None:
        warnings.warn(f"attention=flash3 needs {lacks}: attention=xla runs instead, in the same blocks", stacklevel=2)
        return "xla"
    if attention != "auto":
        return attention
    if dtype != jnp.bfloat16 or length == 1 or numerics.float64:
        return "xla"
    if numerics.block_attention and flash3_lacks(dtype, head_dim) is None:
        return "flash3"
    backend = jax.default_backend()
    if backend == "gpu" and head_dim <= 128 and head_dim % 8 == 0 and cudnn_packs():
        return "cudnn"
    return "splash" if backend == "tpu" and head_dim % 128 == 0 and length % 128 == 0 else "xla"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    q_slots: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    packed_runs: tuple[jax.Array, jax.Array] | None = None,
    implementation: str = "xla",
    numerics: Numerics = PLAIN,
) -> Float[Array, "B T N H"]:
    """Computes softmax attention of each query over the keys it may see; N/K query heads share a kv head.

    Args:
      q: queries, after RoPE. k, v: keys and values; S = T unless `q_slots` is given.
      q_slots: slot of each query among the S keys (decoding with a cache): key s is seen iff s <= slot. None: slot t.
      segment_ids: which packed sequence a position belongs to (only without q_slots): no key of another segment is
        seen. Padding (0) sees padding, so every query sees at least itself and nothing is NaN.
      packed_runs: `attention_vendor.runs` of the segment ids, for cudnn; None: computed here.
      implementation: "auto", "xla", "cudnn", "splash" or "flash3" (see `choose`); with q_slots always xla.
      numerics: the arithmetic of the mirrored engine; xla follows it, and "auto" chooses by it.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    chosen = "xla"
    if q_slots is None:
        chosen = choose(implementation, q.dtype, H, T, numerics)
    if chosen == "cudnn":
        if packed_runs is None:
            packed_runs = runs(jnp.ones((B, T), jnp.int32), 1) if segment_ids is None else runs(segment_ids, T)
        return cudnn_attention(q, k, v, packed_runs)
    if chosen == "splash":
        return splash_attention(q, k, v, segment_ids)
    if chosen == "flash3":
        backward = choose("auto", q.dtype, H, T)
        return checkpoint_name(_flash3(backward, False, q, k, v, segment_ids, packed_runs), ATTENTION_OUTPUT)

    attend = functools.partial(_attend, numerics=numerics)
    q_BTKGH = q.reshape(B, T, K, N // K, H)
    blocks_BS = _block_starts(S, segment_ids, flash_block(H)) if numerics.block_attention else None
    if q_slots is not None:
        seen_BTS = jnp.arange(S)[None, None, :] <= q_slots[:, :, None]
        return attend(q_BTKGH, k, v, seen_BTS, blocks_BS).reshape(B, T, N, H)

    chunk = max(_QUERY_CHUNK, -(-T // _MAX_CHUNKS))
    outs = []
    for start in range(0, T, chunk):
        stop = min(start + chunk, T)  # queries [start, stop) see keys [0, stop) at most
        seen_BTS = (jnp.arange(stop)[None, :] <= jnp.arange(start, stop)[:, None])[None]
        if segment_ids is not None:
            seen_BTS = seen_BTS & (segment_ids[:, start:stop, None] == segment_ids[:, None, :stop])
        # Scores are recomputed in the backward pass: T*S of them per head would dwarf every other residual.
        blocks_BT = None if blocks_BS is None else blocks_BS[:, :stop]
        outs.append(jax.checkpoint(attend)(q_BTKGH[:, start:stop], k[:, :stop], v[:, :stop], seen_BTS, blocks_BT))
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)
    return checkpoint_name(out.reshape(B, T, N, H), ATTENTION_OUTPUT)


def _flash3(
    backward: str,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    packed_runs: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """FlashAttention-3's order; the gradient is that of `backward`, another implementation, recomputed."""
    from qarl_jax.kernels.attention_flash3 import flash3_attention  # Pallas' Triton, which not every JAX has

    local = functools.partial(flash3_attention, block=flash_block(q.shape[-1]), interpret=interpret)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, packed_runs: Any) -> jax.Array:
        return attention(q, k, v, segment_ids=ids, packed_runs=packed_runs, implementation=backward)

    @with_plain_gradient(plain)
    def forward(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, packed_runs: Any) -> jax.Array:
        return split_by_hand(local, q, k, v, ids)

    return forward(q, k, v, segment_ids, packed_runs)


def _block_starts(size: int, segment_ids: jax.Array | None, block: int) -> Int[Array, "#B S"]:
    """Slot of the first key of every key's block; blocks are counted from the begin of a segment."""
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    begins, _ = segment_bounds(size, segment_ids)
    return slots - (slots - begins) % block


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, blocks: jax.Array | None = None, *, numerics: Numerics
) -> jax.Array:
    """Computes attention [B, T, K, G, H] of q [B, T, K, G, H], k and v [B, S, K, H]; seen: bool [B or 1, T, S].
    blocks: from `_block_starts` [B or 1, S] where the kernel works in blocks."""
    dtype = q.dtype
    if blocks is not None and dtype == jnp.bfloat16:
        return round_to(block_attention(q, k, v, seen, blocks), dtype)
    if numerics.float64:
        return round_to(float64_attention(q, k, v, seen), dtype)
    return round_to(softmax_attention(q, k, v, seen), dtype)
