# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention without AMX has float32 weights; without bf16 instructions, it and rope store by truncation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.models.attention import attention
from qarl_jax.models.layers import apply_rope
from qarl_jax.numerics.float32 import truncate_to
from qarl_jax.quant import PLAIN, resolve


def truncated(x):
    return (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def test_truncate_to_drops_the_low_bits_and_passes_the_gradient_through():
    x = jax.random.normal(jax.random.key(0), (4096,), jnp.float32) * 100
    got = jax.jit(lambda x: truncate_to(x, jnp.bfloat16))(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), truncated(x))
    np.testing.assert_array_equal(jax.grad(lambda x: truncate_to(x, jnp.bfloat16).astype(jnp.float32).sum())(x), 1)
    assert truncate_to(x, jnp.float32) is x


def test_rope_truncates_on_request():
    x, angle = normal(1, 2, 5, 3, 8), jnp.arange(40, dtype=jnp.float32).reshape(2, 5, 1, 4)
    cos, sin = (f(angle).astype(jnp.bfloat16).astype(jnp.float32) for f in (jnp.cos, jnp.sin))
    first, second = np.split(np.asarray(x, np.float32), 2, axis=-1)
    want = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    got = np.asarray(apply_rope(x, (cos, sin), truncate=True), np.float32)
    # One float32 ulp (a fused multiply-add, or not) moves a value across a truncation boundary about once in 10^4.
    assert (got == truncated(want)).mean() > 0.99


@pytest.mark.slow
def test_attention_keeps_its_weights_in_float32_and_truncates_the_output():
    q, k, v = normal(2, 1, 7, 4, 8), normal(3, 1, 7, 2, 8), normal(4, 1, 7, 2, 8)
    qf, kf, vf = (np.asarray(x, np.float64)[0] for x in (q, k, v))
    kf, vf = np.repeat(kf, 2, axis=1), np.repeat(vf, 2, axis=1)
    scores = np.einsum("tnh,snh->nts", qf, kf) * 8**-0.5
    scores = np.where(np.tril(np.ones((7, 7), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), vf)
    got = np.asarray(attention(q, k, v, numerics=resolve("cpu_avx2")), np.float32)[0]
    assert (got == truncated(want)).mean() > 0.98
    nearest = np.asarray(jnp.asarray(want, jnp.float32).astype(jnp.bfloat16), np.float32)
    got = np.asarray(attention(q, k, v, numerics=resolve("cpu_avx512_bf16")), np.float32)[0]
    assert (got == nearest).mean() > 0.98
    amx = np.asarray(attention(q, k, v, numerics=resolve("cpu_amx")), np.float32)[0]
    assert (amx == nearest).mean() < 0.95  # its weights are rounded
    rounded = np.asarray(attention(q, k, v), np.float32)[0]
    assert (rounded == truncated(want)).mean() < 0.7


@pytest.mark.slow
def test_the_kernels_order_of_sums_changes_no_gradient():
    q, k, v, g = (jax.random.normal(jax.random.key(i), (2, 9, n, 16), jnp.float32) for i, n in enumerate((4, 2, 2, 4)))
    segments = jnp.asarray([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2], jnp.int32)

    def value(numerics):
        def run(q, k, v):
            return (attention(q, k, v, segment_ids=segments, numerics=numerics) * g).sum()

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(q, k, v)

    wanted = value(PLAIN)
    for profile in ("cpu_avx512_bf16", "cpu_avx2"):
        found = value(resolve(profile))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_the_tile_kernel_has_the_gradient_of_plain_attention():
    q, k, v, g = (normal(i, 2, 9, n, 16) for i, n in enumerate((4, 2, 2, 4)))
    segments = jnp.asarray([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2], jnp.int32)

    def grads(profile):
        def run(q, k, v):
            out = attention(q, k, v, segment_ids=segments, numerics=resolve(profile))
            return (out.astype(jnp.float32) * g.astype(jnp.float32)).sum()

        return jax.jit(jax.grad(run, argnums=(0, 1, 2)))(q, k, v)

    # Under `cuda` attention is the plain one, its weights rounded to bfloat16 as the tile kernel's are.
    for found, wanted in zip(grads("cpu_amx"), grads("cuda"), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
