# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Orders of sums of an engine on CUDA: in which parts K is summed, and how vLLM's fp8 product is rescaled."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from qarl_bridge.protocol import split_k

from qarl_jax import quant
from qarl_jax.models.config import ModelConfig
from qarl_jax.models.transformer import MLP, Attention
from qarl_jax.quant import resolve
from qarl_jax.quant.contractions import Dense
from qarl_jax.quant.schemes import fp8, w4a16
from tests.reference import quant_reference as ref

# ---- in which parts K is summed ------------------------------------------------------------------------------------


def test_parts_are_whole_steps_that_cover_all_inputs_in_order():
    assert split_k.cuts(1280, 3) == [(0, 512), (512, 896), (896, 1280)]
    for inputs, splits in ((4864, 2), (2000, 3), (9728, 2), (128, 1)):
        found = split_k.cuts(inputs, splits)
        assert (found[0][0], found[-1][1], len(found)) == (0, inputs, splits)
        assert all(a[1] == b[0] and a[1] % split_k.STEP == 0 for a, b in itertools.pairwise(found))


def test_only_narrow_layers_with_many_inputs_are_cut():
    # Qwen3-4B, as the engine fuses its layers: o and down are narrow, q|k|v and gate|up are not.
    assert [split_k.splits_of(*shape) for shape in ((2560, 4096), (2560, 9728), (6144, 2560), (19456, 2560))] == [
        2,
        2,
        1,
        1,
    ]
    assert split_k.splits_of(896, 896) == 1  # seven steps
    assert [split_k.splits_of(outputs, 5120) for outputs in (5120, 7168)] == [2, 1]


def test_the_parts_of_an_adapter_are_equally_long_and_few():
    found = {inputs: split_k.splits_of_adapter(inputs) for inputs in (576, 1536, 4096, 5120, 8960, 12288, 18944, 27648)}
    assert found == {576: 1, 1536: 3, 4096: 8, 5120: 8, 8960: 7, 12288: 8, 18944: 4, 27648: 8}
    for inputs, parts in found.items():
        lengths = {end - first for first, end in split_k.cuts(inputs, parts)}
        assert len(lengths) == 1
        assert lengths.pop() >= min(inputs, 4 * split_k.STEP)
    assert resolve("plain").of_adapter(4096).splits == 1
    assert (resolve("cuda").of_adapter(4096).splits, resolve("cpu").of_adapter(4096).splits) == (8, 1)


# ---- w4a16 split along K --------------------------------------------------------------------------------------------


def test_parts_are_summed_by_themselves_and_added_in_float32():
    x, w = np.ones((1, 256), np.float32), np.zeros((16, 256), np.float32)
    w[:, :2], w[:, 128:131] = 2.0**23, 1.0
    nothing = jnp.zeros((1, 16))  # with a bias the sum stays float32
    numerics = dataclasses.replace(resolve("plain"), splits=2)
    y = Dense().floating(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), nothing, numerics)
    # 2^24 + 3 is between two float32 numbers; one after the other three ones would be lost.
    np.testing.assert_array_equal(y, np.full((1, 16), 2.0**24 + 4))


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_in_parts_lowers_to_a_float32_product_for_each(bias):
    w = jnp.zeros((16, 1024))
    qt = quant.quantize(w, w4a16.Config(128))
    x = jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16)

    def layer(x, splits):
        b = jnp.ones((16,)) if bias else None
        return quant.dot(x, w, qt, b, numerics=dataclasses.replace(resolve("cuda"), splits=splits))

    # A bias is added to the float32 sum.
    for splits, result in ((1, "f32" if bias else "bf16"), (2, "f32"), (3, "f32")):
        text = jax.jit(layer, static_argnums=1).trace(x, splits).lower(lowering_platforms=("cuda",)).as_text()
        dots = re.findall(r"stablehlo\.dot_general.*", text)
        inputs = [int(re.search(r"\(tensor<8x(\d+)xbf16>", dot).group(1)) for dot in dots]
        assert inputs == [b - a for a, b in split_k.cuts(1024, splits)]
        assert all(dot.endswith(f"-> tensor<8x16x{result}>") for dot in dots)


@pytest.mark.slow
def test_a_layers_parts_are_those_of_the_weight_the_engine_fuses_it_into():
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=67,
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=1,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        numerics=resolve("cuda"),
    )

    def build(config):
        attention = Attention(config=config, rngs=nnx.Rngs(0), stack={})
        mlp = MLP(config=config, rngs=nnx.Rngs(0), stack={})
        layers = (attention.q, attention.k, attention.o, mlp.gate, mlp.down)
        return [layer.numerics.splits for layer in layers]

    assert build(dataclasses.replace(config, numerics=resolve("plain"))) == [1] * 5
    # q|k|v 768 outputs and gate|up 8,192; gate alone would be cut.
    assert split_k.splits_of(4096, 1024) == 2
    assert build(config) == [2, 2, 1, 1, 2]
    assert resolve("cuda").of_layer(384, 1024) == dataclasses.replace(resolve("cuda"), splits=2)
    assert resolve("cpu").of_layer(384, 1024) == resolve("cpu")


# ---- fp8 -------------------------------------------------------------------------------------------------------------


def fp8_layer(m, n, k):
    """(x, its weight quantized, exact sums of codes, s_x, s_w)."""
    rng = np.random.default_rng(m)

    def numbers(*shape):  # of a row within a factor of two: no code is small, and sums of products are exact
        values = rng.uniform(0.5, 1.0, shape) * rng.choice([-1.0, 1.0], shape) * rng.uniform(0.1, 3.0, (shape[0], 1))
        return ref.bf(values)

    x, w = numbers(m, k), numbers(n, k)
    codes, s_w = ref.fp8_weight(w)
    x_codes, s_x = ref.fp8_rows(x, "cuda")
    exact = x_codes.astype(np.float64) @ codes.astype(np.float64).T
    assert (exact == exact.astype(np.float32)).all()  # so no order of sums can matter
    return x, quant.quantize(w, fp8.Config()), exact.astype(np.float32), s_x, s_w[:, 0]


def fp8_product(x, qt):
    numerics = resolve("cuda")
    used = qt.scheme.activations(x, numerics=numerics)
    return qt.scheme.multiply(used, qt, None, numerics=numerics, product=Dense())


@pytest.mark.slow
def test_fp8_meets_the_scales_in_the_kernels_order():
    x, qt, acc, s_x, s_w = fp8_layer(64, 48, 16)
    w_first, x_first = s_x * (s_w[None] * acc), s_w[None] * (s_x * acc)
    assert (w_first != x_first).any()
    y = fp8_product(jnp.asarray(x), qt)
    np.testing.assert_array_equal(y, w_first)


def test_fp8_asks_for_no_accumulation_by_name():
    x, qt, *_ = fp8_layer(64, 48, 16)
    for platform in ("cuda", "cpu"):
        text = jax.jit(fp8_product).trace(x, qt).lower(lowering_platforms=(platform,)).as_text()
        assert "allow_imprecise_accumulation = true" not in text
