# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The decoding kernel against the formula, and against the model's own decoding."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.kernels import attention_decode
from qarl_jax.kernels.attention_vendor import can_decode
from qarl_jax.models import abstract_model, transformer
from qarl_jax.quant import PLAIN, resolve
from tests.reference.tiny import model_config

LAYERS, ROWS, SLOTS, HEADS, KV_HEADS = 3, 6, 75, 6, 2  # three queries to a kv head; SLOTS is no multiple of a block
LAST = np.array([0, 31, 32, 40, 74, 200])  # a single slot, both sides of a block's end, the last slot, and beyond


def operands(width, dtype=np.float32, heads=HEADS, kv_heads=KV_HEADS):
    rng = np.random.default_rng(width)
    q = rng.standard_normal((ROWS, 1, heads, width)).astype(dtype)
    cache = [rng.standard_normal((LAYERS, ROWS, SLOTS, kv_heads, width)).astype(dtype) for _ in "kv"]
    return q, *cache


def formula(q, keys, values, layer):
    """softmax(q k / sqrt(H)) v over the slots that are seen, in float64."""
    out = np.zeros(q.shape)
    for row, last in enumerate(LAST):
        for head in range(q.shape[2]):
            shared = head * keys.shape[3] // q.shape[2]
            k, v = (x[layer, row, : last + 1, shared].astype(np.float64) for x in (keys, values))
            scores = k @ q[row, 0, head].astype(np.float64) / np.sqrt(q.shape[-1])
            p = np.exp(scores - scores.max())
            out[row, 0, head] = p @ v / p.sum()
    return out


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("layer", [0, 2])
def test_the_kernel_is_softmax_attention_over_the_filled_slots_of_one_layer(width, layer):
    q, keys, values = operands(width)
    unseen = np.arange(SLOTS)[None, :] > LAST[:, None]
    keys[:, unseen], values[:, unseen] = np.nan, np.inf  # what nobody has written is not read
    out = attention_decode.decode_attention(q, keys, values, jnp.asarray(layer), jnp.asarray(LAST), interpret=True)
    np.testing.assert_allclose(out, formula(q, keys, values, layer), rtol=0, atol=2e-6)


def test_a_bfloat16_cache_is_summed_in_float32():
    q, keys, values = (jnp.asarray(x, jnp.bfloat16) for x in operands(64))
    out = attention_decode.decode_attention(q, keys, values, jnp.asarray(1), jnp.asarray(LAST), interpret=True)
    assert out.dtype == jnp.bfloat16
    exact = formula(*(np.asarray(x, np.float32) for x in (q, keys, values)), 1)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=2**-8, atol=1e-6)


def test_it_serves_one_gpu_that_mirrors_no_engine(monkeypatch):
    assert not can_decode("auto", 64, PLAIN)  # a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert can_decode("auto", 64, PLAIN)
    assert not can_decode("xla", 64, PLAIN)
    assert not can_decode("auto", 96, PLAIN)
    assert not can_decode("auto", 64, resolve("cuda"))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not can_decode("auto", 64, PLAIN)


def lowered(monkeypatch, kernel):
    """A decoding step of the tiny model for CUDA, as StableHLO."""
    monkeypatch.setattr(transformer, "can_decode", lambda *_: kernel)
    config = dataclasses.replace(model_config(), attention="auto")
    model = abstract_model(config)
    cache = jax.eval_shape(lambda: model.init_cache(4, 40))
    graphdef, state = transformer.nnx.split(model)

    def step(state, tokens, positions, cache):
        return transformer.nnx.merge(graphdef, state).decode(tokens, positions, cache)

    ints = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    return jax.jit(step).trace(state, ints, ints, cache).lower(lowering_platforms=("cuda",)).as_text()


def test_a_decoding_step_takes_no_layer_out_of_the_cache(monkeypatch):
    """XLA's form slices [B, S, K, H] out of [L, B, S, K, H] in every layer; with the kernel nothing does."""
    config = model_config()
    layer = rf"1x4x40x{config.num_kv_heads}x{config.head_dim}x"
    sliced = re.compile(rf"dynamic_slice.*-> tensor<{layer}")
    assert sliced.search(lowered(monkeypatch, kernel=False))
    text = lowered(monkeypatch, kernel=True)
    assert not sliced.search(text)
    assert "decode_attention" in text


def check_heads(width, dtype, heads, kv_heads, **options):
    q, keys, values = (jnp.asarray(x, dtype) for x in operands(width, heads=heads, kv_heads=kv_heads))
    out = attention_decode.decode_attention(q, keys, values, jnp.asarray(1), jnp.asarray(LAST), **options)
    exact = formula(*(np.asarray(x, np.float32) for x in (q, keys, values)), 1)
    tolerance = {"rtol": 2**-8, "atol": 1e-6} if dtype == jnp.bfloat16 else {"rtol": 0, "atol": 2e-6}
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "dtype"), [(64, np.float32), (128, np.float32), (64, jnp.bfloat16)])
def test_on_a_gpu(width, dtype):
    check_heads(width, dtype, HEADS, KV_HEADS)


GROUPS = [(14, 2), (8, 8), (64, 4)]  # seven, one and sixteen queries to a kv head


@pytest.mark.parametrize("heads", GROUPS, ids=str)
def test_any_number_of_queries_shares_a_kv_head(heads):
    check_heads(16, jnp.bfloat16, *heads, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "heads"),
    [(16, (64, 4)), (64, (14, 2)), (128, (8, 8)), (128, (64, 4)), (256, (8, 8)), (256, (16, 8))],
    ids=str,
)
def test_any_number_of_queries_shares_a_kv_head_on_a_gpu(width, heads):
    check_heads(width, jnp.bfloat16, *heads)


def check_far_rows(rows, slots, kv_heads, width, **options):
    """Checks that queries of zeros give each row's and kv head's own number, of the last layer's filled slots.

    Every row's unseen slots are NaN, the first layer is 0. All sums are of integers below 2^24, and so exact.
    """
    shape = (2, rows, slots, kv_heads, width)
    last = jnp.linspace(0, slots - 1, rows).astype(jnp.int32)

    def run():
        layer, row, slot, head = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(4))
        seen = slot <= last[None, :, None, None, None]
        cache = jnp.where(seen, (layer * (row * kv_heads + head)).astype(jnp.bfloat16), jnp.bfloat16(jnp.nan))
        q = jnp.zeros((rows, 1, 2 * kv_heads, width), jnp.bfloat16)
        return attention_decode.decode_attention(q, cache, cache, jnp.int32(1), last, **options)

    out = np.asarray(jax.jit(run)(), np.float32)
    own = np.arange(rows * kv_heads).reshape(rows, kv_heads).repeat(2, axis=1)
    np.testing.assert_array_equal(out, np.broadcast_to(own[:, None, :, None], out.shape))


def test_every_row_finds_its_own_slots():
    check_far_rows(5, 70, 2, 16, interpret=True)


@pytest.mark.gpu
def test_a_cache_of_more_than_2_to_the_31_elements_is_read_on_a_gpu():
    """4.6 GB, as 36 layers of 8 heads have them at 32 rows of 2,048 slots."""
    check_far_rows(17, 2**16, 8, 128)
