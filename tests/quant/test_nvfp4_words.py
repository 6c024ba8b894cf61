# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The layout that engine and learner hold a base in: the same bits in all three codes that read or write it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.numerics.engine import CPU
from qarl_jax.quant import QTensor
from qarl_jax.quant.schemes import nvfp4, nvfp4_words

LAYERS, K = 2, 256
WIDTHS = (32, 16, 16)


@pytest.fixture(scope="module")
def weights():
    """Three weights that an engine fuses, some of whose block scales are flushed, and zeros of either sign."""
    keys = jax.random.split(jax.random.key(0), len(WIDTHS))
    masters = [jax.random.normal(key, (LAYERS, n, K)) * 0.02 for key, n in zip(keys, WIDTHS, strict=True)]
    masters[1] = masters[1].at[:, 3].set(0).at[:, 5, :16].multiply(2e-5).at[0, 7, 20].set(-1e-9)
    made = [quant.quantize(w, nvfp4.Config(), beside=masters) for w in masters]
    assert any(bool((qt.scales.astype(jnp.float32) < nvfp4.FLUSHED).any()) for qt in made)
    return made


@pytest.fixture(scope="module")
def shared(weights):
    words = nvfp4_words.words(jnp.concatenate([qt.codes for qt in weights], axis=-2))
    scales = nvfp4_words.turned(jnp.concatenate([qt.scales for qt in weights], axis=-2))
    found, first = [], 0
    for qt, n in zip(weights, WIDTHS, strict=True):
        arrays = {"codes": words, "scales": scales, "divisor": qt.arrays["divisor"]}
        found.append(QTensor(arrays, nvfp4_words.Config(first=first, end=first + n)))
        first += n
    return found


def same_bits(x, y):
    x, y = (np.asarray(a.astype(jnp.float32)) for a in (x, y))
    return np.array_equal(x.view(np.int32), y.view(np.int32))


def test_a_weight_of_the_engines_words_is_the_published_one_to_the_bit(weights, shared):
    for qt, ours in zip(weights, shared, strict=True):
        assert ours.shape == qt.shape
        assert ours.ndim == 3
        assert np.array_equal(nvfp4_words.unpacked(ours).codes, qt.codes)
        assert same_bits(quant.dequantize(ours, jnp.float32), quant.dequantize(qt, jnp.float32))


def test_forward_and_gradients_are_those_of_the_published_weight_to_the_bit(weights, shared):
    x = jax.random.normal(jax.random.key(1), (5, K)).astype(jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(2), (WIDTHS[1],))

    def of(qt):
        layer = jax.tree.map(lambda a: a[1], qt)
        master = jnp.zeros(layer.shape, jnp.float32)

        def loss(x, master):
            y = quant.dot(x, master, layer, bias, numerics=CPU)
            return jnp.sum(y.astype(jnp.float32) ** 2), y

        (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, master)
        return y, *grads

    for ours, theirs in zip(of(shared[1]), of(weights[1]), strict=True):
        assert same_bits(ours, theirs)


def test_words_are_those_of_the_engines_definition(weights):
    """Pair i of word 4 t + 2 f + h has inputs 64 h + 16 i + 8 f + 2 t and the next. It is bfloat16 times 2^-126."""
    codes = np.asarray(weights[0].codes[0])
    single = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)  # a code per input
    words = np.asarray(nvfp4_words.words(weights[0].codes)[0]).view(np.uint32)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([values, -values])
    for h, f, t in np.ndindex(2, 2, 4):
        w = words[:, :, 4 * t + 2 * f + h]
        rotated = [w >> n | w << 32 - n for n in (6, 3)]
        for i, pair in enumerate((w, *rotated, (w & 0x1B001B) * np.uint32(0x4108))):
            for e in range(2):
                half = ((pair & 0x81C081C0) >> 16 * e & 0xFFFF).astype(np.uint16).view(jnp.bfloat16)
                expected = values[single[:, 64 * h + 16 * i + 8 * f + 2 * t + e :: 128]]
                assert np.array_equal(half.T.astype(float) * 2.0**126, expected)
                assert np.array_equal(np.signbit(half.T), np.signbit(expected))


@pytest.mark.slow
def test_the_bridge_reads_words_as_what_was_published(weights):
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from qarl_bridge.engine.nvfp4_layers import packed

    qt = weights[1]
    words, scales = nvfp4_words.words(qt.codes)[0], nvfp4_words.turned(qt.scales)[0]
    codes, kept = packed(torch.from_numpy(np.array(words)), torch.from_numpy(np.array(scales)))
    assert np.array_equal(codes.numpy(), qt.codes[0])
    expected = jnp.where(qt.scales[0].astype(jnp.float32) < nvfp4.FLUSHED, 0, qt.scales[0].astype(jnp.float32))
    assert np.array_equal(kept.float().numpy(), expected)


def test_scales_reach_a_gpus_loop_over_layers_as_they_lie(shared):
    """Left to choose, XLA for GPUs copies the scales of all layers into another layout before the loop."""

    def total(x, qt):
        return jax.lax.scan(lambda x, layer: (x + jnp.sum(quant.dequantize(layer, jnp.float32)), None), x, qt)[0]

    lowered = jax.jit(total).trace(jnp.float32(0), shared[1]).lower(lowering_platforms=("cuda",))
    (line,) = [line for line in lowered.as_text().splitlines() if "@LayoutConstraint" in line]
    assert "result_layouts = [dense<[1, 0]>" in line  # the last dimension is the minor one
    assert f"tensor<{K // 64}x{WIDTHS[1]}xi32>" in line
