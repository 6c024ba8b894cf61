# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Softmax attention with three orders of sums and roundings: plain, float64 and blockwise; all have plain gradients.

Plain attention has the roundings of a one-pass flash kernel. Scores are float32. p = exp(s - max) stays unnormalized
and is rounded to the compute dtype for the second product. This accumulates in float32 and is divided at the end by the
float32 sum of the *unrounded* p. In float32 the result is ordinary softmax attention.

All functions take q [B, T, K, G, H], k, v [B, S, K, H] and the bool mask seen [B or 1, T, S]; a query attends to the
keys that it sees. They return float32 [B, T, K, G, H].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qarl_jax.numerics.float32 import from_float64, matmul_precision, round_bf16, round_to

Attention = Callable[..., jax.Array]


def with_plain_gradient(plain: Attention) -> Callable[[Attention], Attention]:
    """Decorates an attention f(q, k, v, *rest): keeps its values, with the gradient of `plain`, which is recomputed."""

    def decorate(forward: Attention) -> Attention:
        run = jax.custom_vjp(forward)

        def fwd(*args: Any) -> tuple[jax.Array, Any]:
            return run(*args), args

        def bwd(saved: Any, g: jax.Array) -> tuple[Any, ...]:
            q, k, v, *rest = saved
            dq, dk, dv = jax.vjp(lambda q, k, v: plain(q, k, v, *rest), q, k, v)[1](g)
            return dq, dk, dv, *[None] * len(rest)

        run.defvjp(fwd, bwd)
        return run

    return decorate


def flash_block(head_dim: int) -> int:
    """Returns the keys per block of vLLM's FlashAttention-3 on Hopper over a paged cache (tile_size.h and outputs).
    For heads of up to 64 the bridge configures vLLM so (`versions.keep_sequences_whole`)."""
    for most, keys in ((128, 128), (192, 96)):
        if head_dim <= most:
            return keys
    return 80


def softmax_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, *_: Any) -> jax.Array:
    """Computes plain attention (above); further arguments, which other orders need, are ignored."""
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


@with_plain_gradient(softmax_attention)
def float64_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Computes softmax(q . k H^-1/2) v in float64, rounded to float32, as the CPU engine does (`Numerics.float64`)."""
    scale = q.shape[-1] ** -0.5

    def formula(q, k, v, seen):  # type: ignore[no-untyped-def]
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * scale
        p = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("bkgts,bskh->btkgh", p, v)

    return from_float64(formula, q, k, v, seen)


@with_plain_gradient(softmax_attention)
def block_attention(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, blocks: jax.Array) -> jax.Array:
    """Computes attention with the roundings of FlashAttention-3's kernel.

    The kernel reads a sequence's keys in blocks, the last block first. It rounds a block's weights, exp(s - m), to
    bf16. There m is the largest score in this block and the blocks read before it. When m grows, the sums so far are
    rescaled. Plain attention subtracts the maximum of all keys. Here m is a running maximum from the right, and
    the rounded weights are then brought to one scale. 99.9 to 100 % of outputs equal the kernel's to the last bit
    (tests/models/test_cuda_kernels.py). The rest differs by the order of sums within a product.

    Args:
      q, k, v, seen: as in `softmax_attention`.
      blocks: int [B or 1, S]: for each key, the slot of the first key of its block.
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


def _exp2(x: jax.Array) -> jax.Array:
    """2^x for x <= 0, to an ulp: XLA has no exp2, and exp(x log 2) rounds the argument. Below 2^-126: zero."""
    whole = jnp.maximum(jnp.round(x), -126.0)
    power = jax.lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(x < -126, 0.0, jnp.exp((x - whole) * jnp.float32(math.log(2))) * power)
