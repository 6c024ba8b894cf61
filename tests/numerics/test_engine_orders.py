# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Orders of sums of vLLM's CUDA kernels: where Machete cuts K, and how its fp8 product is accumulated and rescaled."""

import dataclasses
import itertools
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qarl_jax import quant
from qarl_jax.models.config import ModelConfig
from qarl_jax.models.transformer import MLP, Attention
from qarl_jax.numerics import machete
from qarl_jax.numerics.machete import Tile, plan
from qarl_jax.quant import resolve
from qarl_jax.quant.dot import Dense
from qarl_jax.quant.schemes import fp8, w4a16
from tests.reference import quant_reference as ref

# ---- where Machete cuts K --------------------------------------------------------------------------------------------


def test_eight_steps_of_64_inputs_are_never_cut():
    assert {plan(m, n, 512).mode for m in (1, 64, 300, 5000) for n in (128, 384, 24576)} == {"data-parallel"}


def test_few_tiles_are_cut_in_equal_parts():
    # 3 tiles of 16 steps; thread blocks have 8 steps at least: two to a tile.
    assert plan(16, 384, 1024).parts(2, 0) == [(0, 8), (8, 16)]
    # 16 tiles of 32 steps: 64 thread blocks with 8 steps each.
    assert plan(16, 2048, 2048).parts(0, 0) == [(0, 8), (8, 16), (16, 24), (24, 32)]
    assert machete.equal_parts(17, 3) == [(0, 6), (6, 12), (12, 17)]
    assert machete.inputs_of(1024 + 32, 2) == [(0, 576), (576, 1056)]


def test_a_wave_half_full_is_not_cut():
    assert plan(2048, 384, 1024).mode == "split-K"  # 4 (3 and one of padding) x 16 tiles: 64 of 132
    assert plan(2049, 384, 1024).mode == "data-parallel"  # 4 x 17: 68


def test_thread_blocks_get_equal_runs_of_steps_where_tiles_do_not_come_out_even():
    # 32 tiles of 64 steps = 2048 steps for 132 thread blocks: 68 get 16 (four to a tile, 17 tiles), 64 get 15.
    p = plan(16, 4096, 4096)
    assert (p.mode, p.splits) == ("stream-K", 5)
    assert p.parts(16, 0) == [(0, 16), (16, 32), (32, 48), (48, 64)]
    # 60 of 64 would leave four steps: the cut moves to the end of the tile.
    assert p.parts(17, 0) == [(0, 15), (15, 30), (30, 45), (45, 64)]
    assert p.parts(18, 0) == [(0, 11), (11, 26), (26, 41), (41, 56), (56, 64)]


def test_a_schedule_asked_for_by_name_has_its_own_tiles():
    assert plan(64, 4096, 2048).mode == "data-parallel"  # 128 tiles of 128 x 16
    assert plan(64, 4096, 2048, tile=Tile(256, 128, 2)).parts(0, 0) == [(8 * i, 8 * i + 8) for i in range(4)]  # 16


@pytest.mark.parametrize("multiprocessors", [132, 114, 78])
def test_parts_follow_each_other_and_cover_every_tile(multiprocessors):
    rng, modes = random.Random(multiprocessors), set()
    for _ in range(200):
        m, n, k = rng.randint(1, 9000), 128 * rng.randint(1, 200), 64 * rng.randint(1, 200)
        p = plan(m, n, k, multiprocessors=multiprocessors)
        modes.add(p.mode)
        assert p.grid[0] % p.tile.cluster == 0
        for place in p.cuts or {(0, 0): None}:
            parts = p.parts(*place)
            assert parts[0][0] == 0
            assert parts[-1][1] == p.steps
            assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
            assert len(parts) == 1 or min(b - a for a, b in parts) >= 8
    assert modes >= {"data-parallel", "stream-K"}


def test_only_an_order_that_no_number_of_rows_changes_is_named():
    assert machete.parts(384, 1024) == 2  # the down projection of the alignment experiment's policy
    assert machete.parts(384, 1024, rows=4096) == 1  # 2049 rows are not cut
    assert machete.parts(640, 384) == 1
    assert machete.parts(2048, 2048) == 1  # four parts for 16 rows, stream-K for 64, whole for 2048


# ---- w4a16 in parts --------------------------------------------------------------------------------------------------


def test_parts_are_summed_by_themselves_and_added_in_float32():
    x, w = np.ones((1, 256), np.float32), np.zeros((16, 256), np.float32)
    w[:, :2], w[:, 128:131] = 2.0**23, 1.0
    y = Dense().floating(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), parts=2)
    # 2^24 + 3 is between two float32 numbers; one after the other three ones would be lost.
    np.testing.assert_array_equal(y, np.full((1, 16), 2.0**24 + 4))


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_in_parts_lowers_to_a_float32_product_for_each_part(bias):
    w = jnp.zeros((16, 1024))
    qt = quant.quantize(w, w4a16.Config(128))
    x = jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16)

    def layer(x, parts):
        b = jnp.ones((16,)) if bias else None
        return quant.dot(x, w, qt, b, numerics=dataclasses.replace(resolve("cuda"), parts=parts))

    for parts, result in ((1, "bf16"), (2, "f32"), (3, "f32")):
        text = jax.jit(layer, static_argnums=1).trace(x, parts).lower(lowering_platforms=("cuda",)).as_text()
        dots = re.findall(r"stablehlo\.dot_general.*", text)
        inputs = [int(re.search(r"\(tensor<8x(\d+)xbf16>", dot).group(1)) for dot in dots]
        assert inputs == [b - a for a, b in machete.inputs_of(1024, parts)]
        assert all(dot.endswith(f"-> tensor<8x16x{result}>") for dot in dots)


@pytest.mark.slow
def test_a_layers_parts_are_those_of_the_weight_the_engine_fuses_it_into():
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=67,
        hidden_size=1024,
        intermediate_size=640,
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
        return [layer.numerics.parts for layer in layers]

    assert build(dataclasses.replace(config, numerics=resolve("plain"))) == [1] * 5
    alone = [machete.parts(*shape) for shape in ((512, 1024), (128, 1024), (1024, 512), (640, 1024), (1024, 640))]
    assert alone == [2, 2, 1, 1, 1]
    assert build(config) == [machete.parts(768, 1024)] * 2 + alone[2:]
    assert machete.parts(768, 1024) == 1
    assert resolve("cuda").of_layer(384, 1024) == dataclasses.replace(resolve("cuda"), parts=2)
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


@pytest.mark.slow
def test_fp8_meets_the_scales_in_the_kernels_order():
    x, qt, acc, s_x, s_w = fp8_layer(64, 48, 16)
    w_first, x_first = s_x * (s_w[None] * acc), s_w[None] * (s_x * acc)
    assert (w_first != x_first).any()
    y, _ = fp8.forward(jnp.asarray(x), qt, None, numerics=resolve("cuda"), product=Dense())
    np.testing.assert_array_equal(y, w_first)


def test_fp8_asks_for_no_accumulation_by_name():
    x, qt, *_ = fp8_layer(64, 48, 16)

    def layer(x):
        return fp8.forward(x, qt, None, numerics=resolve("cuda"), product=Dense())[0]

    for platform in ("cuda", "cpu"):
        text = jax.jit(layer).trace(x).lower(lowering_platforms=(platform,)).as_text()
        assert "allow_imprecise_accumulation = true" not in text
