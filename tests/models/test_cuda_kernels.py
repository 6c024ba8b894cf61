# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Profile `cuda` against what vLLM's CUDA kernels gave on a real Hopper GPU, recorded: what a CPU can check of it.

tests/reference/cuda_kernels.npz holds inputs and outputs of vLLM 0.25.1's kernels on one H200, called directly:
rms_norm, fused_add_rms_norm, silu_and_mul (every bfloat16 there is), the rotary embedding and its table,
scaled_int8_quant and cutlass_scaled_mm with and without a bias, and FlashAttention-3 over a paged cache with one split.
bfloat16 arrays are stored as int16. Attention's sums have an order of their own, hence shares just below one there.
"""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qarl_jax import models, quant
from qarl_jax.models import attention as attention_module
from qarl_jax.models import layers
from qarl_jax.models.attention import _block_starts, attention
from qarl_jax.numerics.float32 import fused_multiply_add
from tests.reference.norms import rows_beside_a_midpoint
from tests.reference.qwen3 import qwen3

CUDA = quant.resolve("cuda")
FILE = pathlib.Path(__file__).parents[1] / "reference" / "cuda_kernels.npz"


@pytest.fixture(scope="module")
def recorded():
    with np.load(FILE) as file:
        return {
            name: file[name].view(ml_dtypes.bfloat16) if file[name].dtype == np.int16 else file[name] for name in file
        }


def equal(mine, theirs):
    """Share of elements that are equal to the last bit."""
    mine = np.asarray(mine)
    assert mine.shape == theirs.shape
    assert mine.dtype == theirs.dtype == ml_dtypes.bfloat16
    return np.mean(mine.view(np.int16) == theirs.view(np.int16))


def config(**changes):
    sizes = {"vocab": 32, "hidden": 64, "intermediate": 64, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 128}
    others = {"rope_theta": 1e6, "max_position_embeddings": 512, "tie_word_embeddings": False}
    values = qwen3(**sizes, **others) | changes
    return models.read_config(values, compute_dtype="bfloat16", param_dtype="float32", numerics=CUDA)


# ---- elementwise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [384, 4096])
def test_rms_norm_with_and_without_the_residual(recorded, width):
    norm = layers.RMSNorm(width, config=config(), stack={})
    norm.weight.set_value(jnp.asarray(recorded[f"norm{width}_w"], jnp.float32))
    x, residual = recorded[f"norm{width}_x"], recorded[f"add{width}_r"]
    # vLLM's own kernel sums in float32: an ulp of that moves an output in some 10^5. The bridge replaces it.
    assert equal(jax.jit(norm)(x), recorded[f"norm{width}_o"]) >= 0.9999
    y, total = jax.jit(norm.add)(x, residual)
    assert equal(total, recorded[f"add{width}_s"]) == 1
    assert equal(y, recorded[f"add{width}_o"]) >= 0.9999
    assert equal(jax.jit(norm)(x + residual.astype(np.float32)), recorded[f"add{width}_o"]) < 0.9  # not the float32 sum


@pytest.mark.parametrize("width", [30, 128, 896, 2560])
def test_a_batch_invariant_norm_is_the_same_in_every_order(width):
    """The formula in numpy; and with its inputs in another order, which a float32 sum does not survive."""
    x = np.random.default_rng(width).standard_normal((2000, width)).astype(ml_dtypes.bfloat16).astype(np.float32)
    mine = jax.jit(functools.partial(layers.inverse_rms, eps=1e-6, order="float64"))
    wide = x.astype(np.float64)
    expected = (1 / np.sqrt((wide * wide).mean(axis=1) + 1e-6)).astype(np.float32)
    np.testing.assert_array_equal(mine(x)[:, 0], expected)
    np.testing.assert_array_equal(mine(x[:, ::-1])[:, 0], expected)
    narrow = jax.jit(functools.partial(layers.inverse_rms, eps=1e-6, order="any"))
    assert np.mean(np.asarray(narrow(x)) == np.asarray(mine(x))) < 1


@pytest.mark.parametrize("width", [72, 4096])
def test_a_batch_invariant_norm_is_the_same_beside_a_midpoint(width):
    """There the last digits of eps, of the sum and of its root show: XLA's rsqrt in float64 is another function."""
    x, roots = rows_beside_a_midpoint(300, width, 1e-6)
    mine = jax.jit(functools.partial(layers.inverse_rms, eps=1e-6, order="float64"))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(width)
        np.testing.assert_array_equal(mine(x[:, order])[:, 0], roots)
    squares = np.mean(x.astype(np.float64) ** 2, axis=1)
    assert np.mean((1 / np.sqrt(squares + 1e-6)).astype(np.float32) != roots) > 0.2  # eps in float64
    assert "rsqrt" not in mine.lower(x).compile().as_text()
    for value in (0.0, 1e-42, 2.0**-60, 2.0**60):
        row = np.full((1, width), value, np.float32)
        np.testing.assert_allclose(mine(row)[0, 0], 1 / np.sqrt(float(row[0, 0]) ** 2 + 1e-6), rtol=1e-6)


def test_the_gradient_of_an_ordered_norm_is_that_of_the_norm():
    x = jax.random.normal(jax.random.key(0), (5, 384))

    def gradient(order):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(x * layers.inverse_rms(x, 1e-6, order=order)))))(x)

    np.testing.assert_allclose(gradient("float64"), gradient("any"), rtol=1e-5, atol=1e-6)


def test_silu_of_every_bfloat16(recorded):
    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(64, 1024)
    mine = np.asarray(jax.jit(lambda g: layers.silu_and_mul(g, jnp.ones_like(g), CUDA))(every))
    theirs = recorded["silu_all"]
    matters = np.isfinite(every.astype(np.float32)) & (np.abs(theirs.astype(np.float32)) > 1e-30)
    np.testing.assert_array_equal(mine.view(np.int16)[matters], theirs.view(np.int16)[matters])


def test_silu_of_bfloat16_is_looked_up_with_the_bits_of_the_division():
    every = jnp.asarray(np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(2, 32768))
    swiglu = functools.partial(layers.silu_and_mul, numerics=CUDA)
    mine = jax.jit(swiglu)(every, jnp.ones_like(every))
    divided = jax.jit(lambda x: layers.round_to(layers._divided_silu(x.astype(jnp.float32)), x.dtype))(every)
    np.testing.assert_array_equal(np.asarray(mine).view(np.int16), np.asarray(divided).view(np.int16))

    def total(gate, up):
        return swiglu(gate, up).astype(jnp.float32).sum()

    quotients = re.findall(r"f32\[([\d,]+)\] = div ", str(jax.make_jaxpr(jax.grad(total, (0, 1)))(every, every)))
    assert set(quotients) == {"65536"}


def test_silu_is_rounded_before_it_is_multiplied(recorded):
    gate, up = np.split(recorded["silu_x"], 2, axis=1)

    def share(numerics):
        return equal(jax.jit(functools.partial(layers.silu_and_mul, numerics=numerics))(gate, up), recorded["silu_o"])

    assert share(CUDA) == 1
    assert share(quant.resolve("plain")) < 0.8


@pytest.mark.slow
def test_the_gradient_of_a_divided_silu_is_that_of_silu():
    x = jnp.linspace(-9, 9, 99)
    mine = jax.grad(lambda x: layers.silu_and_mul(x, jnp.cos(x), CUDA).sum())(x)
    plain = jax.grad(lambda x: layers.silu_and_mul(x, jnp.cos(x)).sum())(x)
    np.testing.assert_allclose(mine, plain, rtol=1e-6, atol=1e-7)


def test_the_rotation_given_the_kernels_table(recorded):
    cos, sin = np.split(recorded["rope_rows"].astype(np.float32)[None, :, None], 2, axis=-1)
    q = recorded["rope_q"].reshape(1, 8, 4, 128)
    assert equal(jax.jit(layers.apply_rope)(q, (cos, sin))[0], recorded["rope_qo"].reshape(8, 4, 128)) == 1


@pytest.mark.parametrize(("theta", "head_dim", "name"), [(1e6, 128, "rope_table_1e6"), (1e4, 64, "rope_table_1e4")])
def test_the_table(recorded, theta, head_dim, name):
    """vLLM makes it on the GPU, whose power function is an ulp off for some frequencies: so the CPU's share is below
    one. On a GPU it must be the same table."""
    table = jax.jit(lambda p: layers.rope_table(config(rope_theta=theta, head_dim=head_dim), p))(jnp.arange(512)[None])
    mine = jnp.concatenate(table, axis=-1)[0, :, 0].astype(jnp.bfloat16)
    assert equal(mine, recorded[name]) >= (1 if jax.default_backend() == "gpu" else 0.9998)


# ---- int8 ------------------------------------------------------------------------------------------------------------


def int8_layer(recorded):
    scheme = quant.parse_scheme("w8a8")
    return quant.QTensor(
        {"codes": jnp.asarray(recorded["int8_w"]), "scales": jnp.asarray(recorded["int8_ws"])}, scheme=scheme
    )


@pytest.mark.parametrize("bias", [None, "int8_b"])
def test_int8_layers_are_equal_to_the_last_bit(recorded, bias):
    weight = int8_layer(recorded)
    master = jnp.zeros(weight.codes.shape, jnp.float32)
    run = jax.jit(lambda x, b: quant.dot(x, master, weight, b, numerics=CUDA))
    y = run(recorded["int8_x"], None if bias is None else jnp.asarray(recorded[bias]))
    assert equal(y, recorded["int8_y" if bias is None else "int8_yb"]) == 1


def test_the_bias_is_part_of_the_last_multiplication(recorded):
    """In two roundings it would be another number here and there: the recorded case can tell the two apart."""
    codes, weight = recorded["int8_xq"].astype(np.float32), recorded["int8_w"].astype(np.float32)
    y = recorded["int8_xs"] * (recorded["int8_ws"].T * (codes @ weight.T)) + recorded["int8_b"].astype(np.float32)
    assert equal(y.astype(ml_dtypes.bfloat16), recorded["int8_yb"]) < 1


def test_fused_multiply_add_rounds_once():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 200_000)).astype(np.float32)
    c = (-(a * b) * (1 + rng.standard_normal(200_000) * 10.0 ** rng.integers(-9, 3, 200_000))).astype(np.float32)
    exact = (a.astype(np.float64) * b + c).astype(np.float32)  # the product is exact in float64
    np.testing.assert_array_equal(jax.jit(fused_multiply_add)(a, b, c, np.abs(a)), exact)
    assert np.mean(a * b + c == exact) < 0.99


# ---- attention -------------------------------------------------------------------------------------------------------


def attend(q, k, v, numerics, **arguments):
    run = jax.jit(lambda q, k, v: attention(q[None], k[None], v[None], numerics=numerics, **arguments)[0])
    return run(q, k, v)


def prompt(recorded):
    """q, k, v of 300 tokens; the outputs of the last 48 were recorded."""
    q = np.concatenate([np.zeros((252, 8, 128), ml_dtypes.bfloat16), recorded["flash_prompt_q"]])
    return q, recorded["flash_128_300_k"], recorded["flash_128_300_v"]


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "keys"), [(128, 300), (64, 300), (64, 512)])
def test_a_decoded_token_attends_as_flash_attention_3(recorded, head_dim, keys, monkeypatch):
    # Recorded before the bridge kept heads of up to 64 at blocks of 128: the kernel took 192 for a single query.
    monkeypatch.setattr(attention_module, "flash_block", {128: 128, 64: 192}.__getitem__)
    q, k, v, theirs = (recorded[f"flash_{head_dim}_{keys}_{name}"] for name in "qkvo")
    slot = jnp.array([[keys - 1]])
    assert equal(attend(q, k, v, CUDA, q_slots=slot), theirs) >= 0.999
    assert equal(attend(q, k, v, quant.resolve("plain"), q_slots=slot), theirs) < 0.98


def almost_as_recorded(mine, recorded):
    """The recorded outputs but for a fiftieth of what plain attention gets wrong.

    A CPU's products of whole blocks add up in an order that depends on the CPU: of the same 49,152 outputs 43 differ
    with AVX2 and AVX-512, 45 with SSE, 54 on a third machine, and 6,127 under plain attention.
    """
    q, k, v = prompt(recorded)
    theirs = recorded["flash_prompt_o"]
    plain = attend(q, k, v, quant.resolve("plain"), implementation="xla")[252:]
    return 1 - equal(mine, theirs) <= (1 - equal(plain, theirs)) / 50


def test_a_prompt_attends_as_flash_attention_3(recorded):
    q, k, v = prompt(recorded)
    assert almost_as_recorded(attend(q, k, v, CUDA, implementation="xla")[252:], recorded)


def test_blocks_are_counted_from_the_begin_of_a_segment():
    np.testing.assert_array_equal(_block_starts(7, None, 3), [[0, 0, 0, 3, 3, 3, 6]])
    ids = jnp.array([[1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(_block_starts(7, ids, 3), [[0, 0, 2, 2, 2, 5, 6], [0, 0, 0, 3, 3, 5, 5]])


@pytest.mark.slow
def test_a_packed_row_attends_like_its_sequences(recorded):
    q, k, v = prompt(recorded)
    ahead = 37
    rows = [np.concatenate([x[:ahead], x]) for x in (q, k, v)]
    ids = jnp.repeat(jnp.array([1, 2]), jnp.array([ahead, 300]), total_repeat_length=ahead + 300)[None]
    y = attend(*rows, CUDA, implementation="xla", segment_ids=ids)
    assert almost_as_recorded(y[ahead + 252 :], recorded)


@pytest.mark.slow
def test_its_gradient_is_that_of_plain_attention(recorded):
    k, v = recorded["flash_128_300_k"][:140], recorded["flash_128_300_v"][:140]
    q = np.tile(recorded["flash_prompt_q"], (3, 1, 1))[:140]

    def gradients(numerics):
        def total(q, k, v):
            out = attention(q[None], k[None], v[None], numerics=numerics, implementation="xla")
            return jnp.sum(out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

        return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*(jnp.asarray(x) for x in (q, k, v)))

    for mine, plain in zip(gradients(CUDA), gradients(quant.resolve("plain")), strict=True):
        assert np.abs(np.asarray(plain, np.float32)).max() > 0
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(plain, np.float32))
