# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention, causal within segments, in one function for training, prefill and decoding.

The arithmetic is that of a one-pass flash kernel: scores in float32, p = exp(s - max) kept unnormalized and rounded to
the compute dtype for the second product, which accumulates in float32 and is divided at the end by the float32 sum of
the *unrounded* p. In float32 that is plain softmax attention. With vLLM's CPU engine (`Numerics.float64`) it is softmax
attention in float64, rounded once. GPUs and TPUs have kernels of their own (`fused_attention.py`); what is here runs
everywhere, a block of queries at a time, and is what mirrors an engine.
"""

from __future__ import annotations

import functools
import math
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
from qarl_jax.numerics.float32 import from_float64, matmul_precision, round_bf16, round_to
from qarl_jax.quant import PLAIN, Numerics
from qarl_jax.runtime.remat import ATTENTION_OUTPUT

# Queries handled at once: bounds the live scores to [B, N, chunk, keys]. At most 16 chunks bound the compile time.
_QUERY_CHUNK = 512
_MAX_CHUNKS = 16


def choose(attention: str, dtype: Any, head_dim: int, length: int, *, packed: bool, numerics: Numerics = PLAIN) -> str:
    """The static choice among "xla", "cudnn", "splash" and "flash3"; "auto": the backend's fused kernel if it has one,
    and the one in the engine's order where an engine is mirrored and there is one.

    Args:
      attention: what the config says. "flash3" where it cannot be had is "xla", with a warning that says why.
      dtype, head_dim, length: of the queries.
      packed: rows hold several segments.
      numerics: whose roundings to make.
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
    if backend == "gpu" and head_dim <= 128 and head_dim % 8 == 0 and (not packed or cudnn_packs()):
        return "cudnn"
    return "splash" if backend == "tpu" and head_dim % 128 == 0 and length % 128 == 0 else "xla"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    q_slots: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    implementation: str = "xla",
    numerics: Numerics = PLAIN,
) -> Float[Array, "B T N H"]:
    """Softmax attention of each query over the keys it may see; kv heads are shared by N/K query heads, never repeated.

    Args:
      q: queries, after RoPE. k, v: keys and values; S = T unless `q_slots` is given.
      q_slots: slot of each query among the S keys (decoding with a cache): key s is seen iff s <= slot. None: slot t.
      segment_ids: which packed sequence a position belongs to (only without q_slots): no key of another segment
        is seen.
        Padding (0) sees padding, so every query sees at least itself and nothing is NaN.
      segments: `fused_attention.runs` of the segment ids, for cudnn; None: made here, for as many runs as positions.
      implementation: "auto", "xla", "cudnn", "splash" or "flash3" (see `choose`); with q_slots always xla.
      numerics: whose roundings to make (xla; with "auto" also what is chosen).

    Returns:
      [B, T, N, H] in q's dtype.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    chosen = "xla"
    if q_slots is None:
        chosen = choose(implementation, q.dtype, H, T, packed=segment_ids is not None, numerics=numerics)
    if chosen == "cudnn":
        if segments is None and segment_ids is not None:
            segments = runs(segment_ids, T)
        return cudnn_attention(q, k, v, segments)
    if chosen == "splash":
        return splash_attention(q, k, v, segment_ids)
    if chosen == "flash3":
        backward = choose("auto", q.dtype, H, T, packed=segment_ids is not None)
        return checkpoint_name(_flash3(backward, False, q, k, v, segment_ids, segments), ATTENTION_OUTPUT)

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash3(
    backward: str,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    segments: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """FlashAttention-3's order; the gradient is that of `backward`, another implementation, recomputed."""
    from qarl_jax.kernels.attention_flash3 import flash3_attention  # Pallas' Triton, which not every JAX has

    local = functools.partial(flash3_attention, block=flash_block(q.shape[-1]), interpret=interpret)
    return split_by_hand(local, q, k, v, segment_ids)


def _flash3_fwd(backward: str, interpret: bool, *args: Any) -> tuple[jax.Array, Any]:
    return _flash3(backward, interpret, *args), args


def _flash3_bwd(backward: str, interpret: bool, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    del interpret
    q, k, v, segment_ids, segments = saved
    arguments: dict[str, Any] = {"segment_ids": segment_ids, "segments": segments, "implementation": backward}
    return (*jax.vjp(lambda q, k, v: attention(q, k, v, **arguments), q, k, v)[1](g), None, None)


_flash3.defvjp(_flash3_fwd, _flash3_bwd)


def flash_block(head_dim: int) -> int:
    """Keys of a block of vLLM's FlashAttention-3 on Hopper over a paged cache (tile_size.h, and outputs of its kernel);
    for heads of up to 64 as the bridge asks for it (`versions.keep_sequences_whole`)."""
    for most, keys in ((128, 128), (192, 96)):
        if head_dim <= most:
            return keys
    return 80


def _block_starts(size: int, segment_ids: jax.Array | None, block: int) -> Int[Array, "#B S"]:
    """Slot of the first key of every key's block; blocks are counted from the begin of a segment."""
    slots = jnp.arange(size, dtype=jnp.int32)[None]
    begins, _ = segment_bounds(size, segment_ids)
    return slots - (slots - begins) % block


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, blocks: jax.Array | None = None, *, numerics: Numerics
) -> jax.Array:
    """q [B, T, K, G, H], k, v [B, S, K, H], seen bool [B or 1, T, S], blocks as of `_block_starts` [B or 1, S], where
    the kernel works in blocks -> [B, T, K, G, H]."""
    dtype = q.dtype
    if blocks is not None and dtype == jnp.bfloat16:
        return round_to(_block_attention(q, k, v, seen, blocks), dtype)
    if numerics.float64:
        return round_to(_float64_attention(q, k, v, seen), dtype)
    return round_to(_softmax_attention(q, k, v, seen), dtype)


def _softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """As `_attend`, float32: products in the compute dtype with float32 sums, exp(s - max) rounded to it."""
    dtype, scale = q.dtype, jnp.float32(q.shape[-1] ** -0.5)
    precision = matmul_precision(dtype)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores * scale, jnp.finfo(jnp.float32).min)
    # The maximum only guards exp against overflow; it cancels, so no gradient flows through it.
    p = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = jnp.moveaxis(p.sum(axis=-1), 3, 1)[..., None]
    out = jnp.einsum(
        "bkgts,bskh->btkgh", round_to(p, dtype), v, precision=precision, preferred_element_type=jnp.float32
    )
    return out / total


@jax.custom_vjp
def _float64_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """softmax(q . k H^-1/2) v in float64, rounded to float32 [B, T, K, G, H]; arguments as in `_attend`. The backward
    is that of plain attention."""
    scale = q.shape[-1] ** -0.5

    def formula(q, k, v, seen):  # type: ignore[no-untyped-def]
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * scale
        p = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bkgts,bskh->btkgh", p, v)

    return from_float64(formula, q, k, v, seen)


def _float64_fwd(*args: jax.Array) -> tuple[jax.Array, Any]:
    return _float64_attention(*args), args


def _plain_bwd(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, seen = saved
    return (*jax.vjp(lambda q, k, v: _softmax_attention(q, k, v, seen), q, k, v)[1](g), None)


_float64_attention.defvjp(_float64_fwd, _plain_bwd)


@jax.custom_vjp
def _block_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, blocks: jax.Array) -> jax.Array:
    """Attention as FlashAttention-3 rounds it, float32 [B, T, K, G, H]; arguments as in `_attend`.

    The kernel meets the keys of a sequence in blocks, the last one first. The weights of a block are exp(s - m), with m
    the maximum of all blocks met so far, rounded to bf16; what was added before is rescaled when m grows. So what
    differs from plain attention is which maximum a weight was rounded against: that of all keys from its block on. Here
    that is a running maximum from the right, and the weights are put on a common scale after their rounding. Of the
    kernel's outputs 99.9 to 100 % are equal to the last bit (tests/models/test_cuda_kernels.py); what is left is the
    order of sums within a product. The backward is that of plain attention.
    """
    scale = jnp.float32(q.shape[-1] ** -0.5) * jnp.float32(math.log2(math.e))
    if jax.default_backend() == "cpu":  # whose own bf16 dot products (AVX-512) round more than a tensor core's
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    from_here = jax.lax.cummax(scores, axis=4, reverse=True)
    index = jnp.broadcast_to(blocks[:, None, None, None], (*blocks.shape[:1], 1, 1, 1, blocks.shape[1]))
    met = jnp.take_along_axis(from_here, jnp.broadcast_to(index, (*scores.shape[:4], index.shape[-1])), axis=4)
    p = jnp.where(seen[:, None, None], _exp2(scores * scale - met * scale), 0.0)
    rescaled = _exp2((met - from_here[..., :1]) * scale)
    total = jnp.moveaxis((p * rescaled).sum(axis=-1), 3, 1)[..., None]
    weights = round_bf16(p) * rescaled
    highest = jax.lax.Precision.HIGHEST
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(jnp.float32), precision=highest)
    return out * (1 / total)


def _block_fwd(*args: jax.Array) -> tuple[jax.Array, Any]:
    return _block_attention(*args), args


def _block_bwd(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    return (*_plain_bwd(saved[:4], g), None)


_block_attention.defvjp(_block_fwd, _block_bwd)


def _exp2(x: jax.Array) -> jax.Array:
    """2^x for x <= 0, to an ulp: XLA has no exp2, and exp(x log 2) rounds the argument. Below 2^-126: zero."""
    whole = jnp.maximum(jnp.round(x), -126.0)
    power = jax.lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(x < -126, 0.0, jnp.exp((x - whole) * jnp.float32(math.log(2))) * power)
