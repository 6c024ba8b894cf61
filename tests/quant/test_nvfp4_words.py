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
    """Nibble i + 4 e of word 4 t + 2 f + h is input 64 h + 16 i + 8 f + 2 t + e."""
    codes = np.asarray(weights[0].codes[0])
    single = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)  # a code per input
    words = np.asarray(nvfp4_words.words(weights[0].codes)[0]).view(np.uint32)
    for h, i, f, t, e in np.ndindex(2, 4, 2, 4, 2):
        nibbles = words[:, :, 4 * t + 2 * f + h] >> np.uint32(4 * (i + 4 * e)) & 15
        assert np.array_equal(nibbles.T, single[:, 64 * h + 16 * i + 8 * f + 2 * t + e :: 128])


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
