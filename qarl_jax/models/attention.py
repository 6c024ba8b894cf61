# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention, causal within segments, in one function for training, prefill and decoding.

The arithmetic is that of a one-pass flash kernel (and of vLLM's CPU kernel): scores in float32, p = exp(s - max) kept
unnormalized and rounded to the compute dtype for the second product, which accumulates in float32 and is divided at the
end by the float32 sum of the *unrounded* p. In float32 that is plain softmax attention. vLLM's kernel for CPUs without
AMX differs (`Numerics.vector_attention`): the queries are scaled first, p stays float32, and without bf16 instructions
the output is truncated (`Numerics.truncates`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qarl_jax.models.layers import matmul_precision, store, store_truncated
from qarl_jax.quant import Numerics

# Queries handled at once: bounds the live scores to [B, N, chunk, keys]. At most 16 chunks bound the compile time.
_QUERY_CHUNK = 512
_MAX_CHUNKS = 16


def use_cudnn(attention: str, dtype: jnp.dtype, head_dim: int, num_queries: int) -> bool:
    """The static choice: "cudnn" always, "auto" where the kernel exists (bf16 on a GPU, H <= 128, a multiple of 8)."""
    if attention != "auto":
        return attention == "cudnn"
    fits = dtype == jnp.bfloat16 and head_dim <= 128 and head_dim % 8 == 0 and num_queries > 1
    return fits and jax.default_backend() == "gpu"


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    q_slots: Int[Array, "B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str = "xla",
    numerics: Numerics = Numerics(),
) -> Float[Array, "B T N H"]:
    """Softmax attention of each query over the keys it may see; kv heads are shared by N/K query heads, never repeated.

    Args:
      q: queries, after RoPE. k, v: keys and values; S = T unless `q_slots` is given.
      q_slots: slot of each query among the S keys (decoding with a cache): key s is seen iff s <= slot. None: slot t.
      segment_ids: which packed sequence a position belongs to (only without q_slots): no key of another segment
        is seen.
        Padding (0) sees padding, so every query sees at least itself and nothing is NaN.
      implementation: "auto", "xla" or "cudnn" (see `use_cudnn`).
      numerics: whose roundings to make (xla only).

    Returns:
      [B, T, N, H] in q's dtype.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    if q_slots is None and use_cudnn(implementation, q.dtype, H, T):
        mask = None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")

    attend = functools.partial(_attend, numerics=numerics)
    q_BTKGH = q.reshape(B, T, K, N // K, H)
    if q_slots is not None:
        seen_BTS = jnp.arange(S)[None, None, :] <= q_slots[:, :, None]
        return attend(q_BTKGH, k, v, seen_BTS).reshape(B, T, N, H)

    chunk = max(_QUERY_CHUNK, -(-T // _MAX_CHUNKS))
    outs = []
    for start in range(0, T, chunk):
        stop = min(start + chunk, T)  # queries [start, stop) see keys [0, stop) at most
        seen_BTS = (jnp.arange(stop)[None, :] <= jnp.arange(start, stop)[:, None])[None]
        if segment_ids is not None:
            seen_BTS = seen_BTS & (segment_ids[:, start:stop, None] == segment_ids[:, None, :stop])
        # Scores are recomputed in the backward pass: T*S of them per head would dwarf every other residual.
        outs.append(jax.checkpoint(attend)(q_BTKGH[:, start:stop], k[:, :stop], v[:, :stop], seen_BTS))
    out = outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1)
    return out.reshape(B, T, N, H)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *, numerics: Numerics) -> jax.Array:
    """q [B, T, K, G, H], k, v [B, S, K, H], seen bool [B or 1, T, S] -> [B, T, K, G, H]."""
    dtype, scale = q.dtype, jnp.float32(q.shape[-1] ** -0.5)
    vector = numerics.vector_attention
    if vector:  # float32 throughout, the queries scaled first
        q, k, v = q.astype(jnp.float32) * scale, k.astype(jnp.float32), v.astype(jnp.float32)
    precision = matmul_precision(q.dtype)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores if vector else scores * scale, jnp.finfo(jnp.float32).min)
    # The maximum only guards exp against overflow; it cancels, so no gradient flows through it.
    p = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    total = jnp.moveaxis(p.sum(axis=-1), 3, 1)[..., None]
    p = p if vector else store(p, dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", p, v, precision=precision, preferred_element_type=jnp.float32)
    if vector:
        return (store_truncated if numerics.truncates else store)(out * (1 / total), dtype)
    return store(out / total, dtype)
