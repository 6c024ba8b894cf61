# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rung "between the linear layers": RMSNorm, residual add, SwiGLU, rope and attention, against the ops vLLM CPU calls.

Each test states the fraction of bit-equal outputs it demands, under the profile of this host. Where one ulp of float32
can differ (the order of a sum inside attention), a truncated or rounded bf16 differs about once in 10^4.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.models import layers
from qarl_jax.models.attention import attention

pytestmark = pytest.mark.vllm

NUMERICS = quant.resolve("cpu")


@pytest.fixture(scope="module")
def vllm():
    """What the engine calls: torch, vLLM's custom ops and its eager RMSNorm."""
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    import vllm.platforms

    if not vllm.platforms.current_platform.is_cpu():
        pytest.skip("compares CPU ops")
    vllm.platforms.current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # without the kernel's leave, the first tile instruction ends the process
    import vllm._custom_ops as ops
    from vllm.ir.ops import layernorm  # noqa: F401  registers ir.ops.rms_norm
    from vllm import ir  # isort: skip

    return types.SimpleNamespace(torch=torch, ops=ops, ir=ir)


def bf16(vllm, x):
    """(torch, jax) bfloat16 of the same values."""
    tensor = vllm.torch.from_numpy(np.asarray(x, np.float32)).to(vllm.torch.bfloat16)
    return tensor, jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16)


def equal(got, want):
    """Fraction of bit-equal values."""
    return float((np.asarray(got, np.float32).ravel() == want.float().numpy().ravel()).mean())


def rms_norm(width, weight):
    config = types.SimpleNamespace(
        param_dtype=jnp.float32,
        rms_norm_eps=1e-6,
        numerics=NUMERICS,
        norm_order=NUMERICS.norm_order,
        compute_dtype=jnp.bfloat16,
    )
    module = layers.RMSNorm(width, config=config, stack={})
    module.weight.set_value(weight.astype(jnp.float32))
    return module


@pytest.mark.parametrize("width", [64, 128, 256, 1536, 4096])
def test_rms_norm_equals_the_engines_on_every_element(vllm, width):
    rng = np.random.default_rng(width)
    x, x_jax = bf16(vllm, rng.normal(size=(300, width)) * np.exp(rng.normal(size=(300, 1))))
    w, w_jax = bf16(vllm, 1 + 0.3 * rng.normal(size=width))
    got = jax.jit(rms_norm(width, w_jax))(x_jax)
    assert equal(got, vllm.ir.ops.rms_norm(x, w, 1e-6)) == 1


@pytest.mark.parametrize("width", [64, 256, 1536])
def test_residual_add_and_norm_equal_the_engines_on_every_element(vllm, width):
    rng = np.random.default_rng(width)
    x, x_jax = bf16(vllm, rng.normal(size=(300, width)))
    r, r_jax = bf16(vllm, 8 * rng.normal(size=(300, width)))
    w, w_jax = bf16(vllm, 1 + 0.3 * rng.normal(size=width))
    got, residual = jax.jit(rms_norm(width, w_jax).add)(x_jax, r_jax)
    want, want_residual = vllm.ir.ops.fused_add_rms_norm(x, r.clone(), w, 1e-6)
    assert equal(residual, want_residual) == 1
    assert equal(got, want) == 1


@pytest.mark.parametrize("width", [32, 64, 96, 1536, 4096, 5120])
def test_the_inverse_rms_is_torchs_to_the_last_bit(vllm, width):
    x = np.random.default_rng(width).normal(size=(500, width)).astype(np.float32)
    want = vllm.torch.rsqrt(vllm.torch.from_numpy(x).pow(2).mean(-1, keepdim=True) + 1e-6).numpy()
    exact = jax.jit(functools.partial(layers.inverse_rms, eps=1e-6, order="torch"))(x)
    np.testing.assert_array_equal(exact, want)
    usual = jax.jit(functools.partial(layers.inverse_rms, eps=1e-6))(x)
    assert (np.asarray(usual) == want).mean() < 0.95, "XLA's own sum and rsqrt would do"


def test_silu_and_mul_equals_the_engines_on_every_element(vllm):
    rng = np.random.default_rng(0)
    gate, gate_jax = bf16(vllm, 3 * rng.normal(size=(512, 256)))
    up, up_jax = bf16(vllm, rng.normal(size=(512, 256)))
    got = jax.jit(functools.partial(layers.silu_and_mul, rounded=NUMERICS.round_silu))(gate_jax, up_jax)
    assert equal(got, vllm.torch.nn.functional.silu(gate) * up) == 1


@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 64), (1e6, 128)])
def test_rope_equals_the_engines_on_every_element(vllm, theta, head_dim):
    torch, length, heads = vllm.torch, 2048, 4
    rng = np.random.default_rng(0)
    x, x_jax = bf16(vllm, rng.normal(size=(length, heads * head_dim)))
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    angle = torch.outer(torch.arange(length, dtype=torch.float), inverse)
    table = torch.cat((angle.cos(), angle.sin()), dim=-1).to(torch.bfloat16)
    want, key = x.clone(), x.clone()
    vllm.ops.rotary_embedding(torch.arange(length), want, key, head_dim, table, True)
    config = types.SimpleNamespace(
        head_dim=head_dim, rope_theta=theta, rope_scaling=None, numerics=NUMERICS, compute_dtype=jnp.bfloat16
    )

    @jax.jit
    def learner(x):
        cos_sin = layers.rope_table(config, jnp.arange(length, dtype=jnp.int32)[None])
        rotated = layers.apply_rope(x.reshape(1, length, heads, head_dim), cos_sin, truncate=NUMERICS.truncates)
        return rotated, jnp.concatenate(cos_sin, axis=-1)

    got, mine = learner(x_jax)
    assert equal(mine, table) > 0.9999
    assert equal(got, want) > 0.9999


def test_the_frequencies_of_rope_are_torchs_on_every_host(vllm):
    """numpy's float32 power is another on CPUs with AVX-512: a fifth of the frequencies was an ulp or two off."""
    torch = vllm.torch
    for theta, head_dim in [(1e4, 64), (1e6, 128), (1e6, 64), (5e6, 64)]:
        config = types.SimpleNamespace(head_dim=head_dim, rope_theta=theta, rope_scaling=None)
        want = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)).numpy()
        off = np.abs(layers.rope_frequencies(config).view(np.int32) - want.view(np.int32))
        # torch's own power is not always the nearest float32: one frequency of 64 for theta = 1e6.
        assert off.max() <= 1
        assert np.mean(off > 0) < 0.02


def engine_attention(vllm, q, k, v):
    """vLLM's op on one request without a past: q [T, N, H], k, v [T, K, H] -> [T, N, H]."""
    torch, ops = vllm.torch, vllm.ops
    (length, heads, head_dim), kv_heads, block = q.shape, k.shape[1], 128
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    blocks = -(-length // block)
    cache = torch.zeros((blocks, kv_heads, 2 * block, head_dim), dtype=torch.bfloat16)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(length), isa)
    starts, lengths = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, seq_lens=lengths, dtype=torch.bfloat16,
        query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa, enable_kv_split=True,
    )  # fmt: skip
    out = torch.empty_like(q)
    ops.cpu_attention_with_kv_cache(
        query=q, key_cache=keys, value_cache=values, output=out, query_start_loc=starts, seq_lens=lengths,
        scale=head_dim**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
        block_table=torch.arange(blocks, dtype=torch.int32)[None], softcap=0.0, scheduler_metadata=plan, s_aux=None,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("length", "head_dim"), [(1, 64), (40, 64), (100, 128), (300, 64)])
def test_attention_equals_the_engines_on_nearly_every_element(vllm, length, head_dim):
    rng = np.random.default_rng(length)
    q, q_jax = bf16(vllm, 2 * rng.normal(size=(length, 4, head_dim)))
    k, k_jax = bf16(vllm, rng.normal(size=(length, 2, head_dim)))
    v, v_jax = bf16(vllm, rng.normal(size=(length, 2, head_dim)))
    want = engine_attention(vllm, q, k, v)
    run = jax.jit(functools.partial(attention, numerics=NUMERICS))
    share = equal(run(q_jax[None], k_jax[None], v_jax[None])[0], want)
    assert share == 1 if NUMERICS.polynomial_exp else share > 0.999
    plain = attention(q_jax[None], k_jax[None], v_jax[None])[0]
    if NUMERICS.vector_attention and length > 1:
        assert equal(plain, want) < 0.8, "the profile changes nothing"
