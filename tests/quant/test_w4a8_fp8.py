# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""int4 x fp8 on Hopper: what vLLM makes of our scales when it loads them is what we trained with, bit for bit."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qarl_bridge.engine import engine
from qarl_bridge.protocol import formats
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models, quant
from qarl_jax.quant import Rules, resolve
from qarl_jax.quant.schemes import w4a8, w4a8_fp8, w4a16
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.types import UserError
from tests.reference import quant_reference as ref
from tests.reference import tiny

CONFIG = w4a8_fp8.Config()
N, K = 256, 1024


def weight(kind="gaussian", seed=0):
    """[N, K]: rows of different sizes; "sparse" has empty groups and an empty row, "tiny" meets the engine's floor."""
    rng = np.random.default_rng(seed)
    w = 0.02 * rng.standard_normal((N, K)) * np.exp(rng.normal(size=(N, 1)))
    if kind == "heavy":
        w = 0.02 * rng.standard_t(2, size=(N, K)) * np.exp(2 * rng.normal(size=(N, K // 128))).repeat(128, 1)
    if kind == "sparse":
        w *= (rng.random((N, K // 128)) < 0.5).repeat(128, 1)
        w[3] = 0
    if kind == "tiny":
        w *= np.geomspace(1e-6, 0.1, N)[:, None]
    return w.astype(np.float32)


def published(w):
    """Codes [N, K] and bfloat16 scales [N, K/128], as numpy, and the QTensor."""
    qt = quant.quantize(jnp.asarray(w), CONFIG)
    return np.asarray(quant.unpack_int4(qt.qvalue)), np.asarray(qt.scale), qt


KINDS = ["gaussian", "heavy", "sparse", "tiny"]


# ---- the grid ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_equal_the_numpy_formula_and_the_weight_is_what_the_kernel_multiplies_with(kind):
    w = weight(kind)
    codes, scale, qt = published(w)
    want_codes, want_scale = ref.w4a8_fp8_weight(w)
    np.testing.assert_array_equal(scale.view(np.int16), want_scale.view(np.int16))
    np.testing.assert_array_equal(codes, want_codes)
    channel, table = ref.cutlass_int4_fp8(np.asarray(qt.qvalue), scale)
    np.testing.assert_array_equal(np.asarray(quant.dequantize(qt, jnp.float32)), channel * table)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["divide", "reciprocal", "one ulp up", "one ulp down"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_engines_factoring_gives_back_the_factors_the_scales_were_made_of(kind, way):
    """Group scales however it divides; channel scales where it divides (eager CUDA code) and not by a reciprocal."""
    w = weight(kind)
    _, scale, qt = published(w)
    channel, group = w4a8_fp8.factors(qt.scale)
    c, v = ref.factor_scales(scale, way)
    np.testing.assert_array_equal(v, np.asarray(group))
    if way == "divide":
        np.testing.assert_array_equal(c, np.asarray(channel))
    else:
        np.testing.assert_array_max_ulp(c, np.asarray(channel), 1)
    # What was meant is what was found: the factors of the quantizer, which never saw these scales rounded.
    meant_c, meant_v = ref.w4a8_fp8_factors(w)
    np.testing.assert_array_equal(np.asarray(channel), meant_c)
    np.testing.assert_array_equal(np.asarray(group), meant_v)


def test_above_the_engines_floor_scales_are_the_product_of_their_factors_and_weights_are_bfloat16_numbers():
    w = weight("heavy")
    _, scale, qt = published(w)
    channel, group = w4a8_fp8.factors(qt.scale)
    free = np.asarray(channel)[:, 0] > 8 / (448 * 512)
    assert free.mean() > 0.9
    exact = np.asarray(channel, np.float64) * np.asarray(group, np.float64)
    np.testing.assert_array_equal(scale[free].astype(np.float64), exact[free])
    value = np.asarray(quant.dequantize(qt, jnp.float32))[free]
    np.testing.assert_array_equal(value, ref.bf(value))


@pytest.mark.slow
def test_every_largest_scale_there_can_be_is_divided_exactly():
    """448 c for every c of 4 significant bits, over bfloat16's range above the floor."""
    c = (np.arange(8, 16)[:, None] * 2.0 ** np.arange(-20, 90)[None, :]).astype(np.float32).reshape(-1)
    c = c[c * np.float32(448) >= 2.0**-9]
    largest = (c * np.float32(448)).astype(ref.BF16)
    np.testing.assert_array_equal(largest.astype(np.float32), c * np.float32(448))
    np.testing.assert_array_equal(ref.factor_scales(largest[:, None])[0][:, 0], 8 * c)
    np.testing.assert_array_equal(np.asarray(w4a8_fp8.factors(jnp.asarray(largest)[:, None])[0])[:, 0], 8 * c)


def test_each_code_is_the_nearest_of_the_levels():
    w = weight("gaussian")
    _, _, qt = published(w)
    channel, group = (np.asarray(x, np.float64) for x in w4a8_fp8.factors(qt.scale))
    levels = (group[..., None] * np.arange(-8, 8)).astype(ref.F8).astype(np.float64) * channel[..., None]
    blocks = ref.bf(w).reshape(N, K // 128, 128).astype(np.float64)
    best = np.abs(blocks[..., None] - levels[:, :, None, :]).min(-1)
    got = np.abs(np.asarray(quant.dequantize(qt, jnp.float32)).reshape(blocks.shape) - blocks)
    np.testing.assert_allclose(got, best, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_the_grid_costs_one_percent_more_error_than_w4a16_and_less_than_letting_the_engine_regrid_its_scales():
    w = (0.02 * np.random.default_rng(0).standard_normal((128, 4096))).astype(np.float32)

    def error(value):
        return np.linalg.norm(np.asarray(value, np.float64) - ref.bf(w)) / np.linalg.norm(ref.bf(w))

    mine = error(quant.dequantize(quant.quantize(jnp.asarray(w), CONFIG), jnp.float32))
    other = quant.quantize(jnp.asarray(w), w4a16.Config())
    plain = error(quant.dequantize(other, jnp.float32))
    channel, table = ref.cutlass_int4_fp8(np.asarray(other.qvalue), np.asarray(other.scale))
    assert plain == pytest.approx(0.1110, abs=1e-4)
    assert mine == pytest.approx(0.1118, abs=1e-4)
    assert error(channel * table) == pytest.approx(0.1158, abs=1e-4)


def test_a_zero_row_gives_zeros_and_a_positive_scale():
    codes, scale, qt = published(weight("sparse"))
    assert (scale.astype(np.float32) > 0).all()
    assert not codes[3].any()
    assert not np.asarray(quant.dequantize(qt, jnp.float32))[3].any()


# ---- vLLM's own Python ---------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("kind", KINDS)
def test_vllms_own_factoring_of_the_published_tensors_gives_back_our_factors_and_codes(kind):
    """Its functions ask for CUDA tensors and use none of CUDA: tensors that say they are run on a CPU."""
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.quant_utils")
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.input_quant_fp8")
    config = pytest.importorskip("vllm.config")

    class OnCuda(torch.Tensor):
        is_cuda = True

    with config.set_current_vllm_config(config.VllmConfig()):
        rows = fp8.QuantFP8(static=False, group_shape=utils.GroupShape.PER_TOKEN).forward_native
    codes, scale, qt = published(weight(kind))
    loaded = torch.from_numpy(scale.view(np.int16).copy()).view(torch.bfloat16).as_subclass(OnCuda)
    group, channel = utils.convert_bf16_scales_to_fp8(rows, loaded)
    mine = w4a8_fp8.factors(qt.scale)
    np.testing.assert_array_equal(group.as_subclass(torch.Tensor).float().numpy(), np.asarray(mine[1]))
    np.testing.assert_array_equal(channel.as_subclass(torch.Tensor).numpy(), np.asarray(mine[0]))
    words = torch.from_numpy(np.array(qt.qvalue)).as_subclass(OnCuda)
    signed = utils.convert_packed_uint4b8_to_signed_int4_inplace(words).as_subclass(torch.Tensor).numpy()
    nibbles = (signed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 0xF
    back = np.where(nibbles >= 8, nibbles.astype(np.int8) - 16, nibbles.astype(np.int8)).reshape(codes.shape)
    np.testing.assert_array_equal(back, codes)


# ---- the layer -----------------------------------------------------------------------------------------------------


def activations(m=24, k=K, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * np.exp(rng.normal(size=(m, 1)))
    x[7] = 0
    return ref.bf(x)


@pytest.mark.slow
@pytest.mark.parametrize("profile", quant.PROFILES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_layer_equals_its_formula_bit_for_bit_where_the_sum_is_exact(profile, with_bias):
    """Few non-zero activations per row, all of a size: the float32 sum is exact in any order, so nothing may differ."""
    rng = np.random.default_rng(1)
    x = np.zeros((32, K), np.float32)
    for row in x:
        row[rng.choice(K, 6, replace=False)] = rng.choice([-1, 1], 6) * 2.0 ** rng.integers(-2, 1, 6)
        row[rng.integers(K)] = 1.5  # so that s_x is no power of two
    w, bias = weight("gaussian"), ref.bf(0.1 * rng.standard_normal(N)) if with_bias else None
    codes, scale, qt = published(w)
    x_q, table = ref.fp8_rows(x, profile)[0].astype(np.float64), ref.cutlass_int4_fp8(ref.pack(codes), scale)[1]
    # Codes are multiples of 8, levels of 1, so sums are multiples of 8, and below 2^24 of them.
    assert not (x_q % 8).any()
    assert not (table % 1).any()
    assert (np.abs(x_q) @ np.abs(table).T.astype(np.float64)).max() < 8 * 2.0**24
    y = quant.dot(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w), qt, bias, numerics=resolve(profile))
    want = ref.w4a8_fp8_layer(x, codes, scale, profile, bias)
    if with_bias:  # one operation or two: XLA may fuse the last multiplication with the bias, and the kernel does
        off = np.asarray(y, np.float32) != want
        assert off.mean() < 1e-3
        fused = ref.w4a8_fp8_layer(x, codes, scale, profile, bias, fused=True)
        np.testing.assert_array_equal(np.asarray(y, np.float32)[off], fused[off])
    else:
        np.testing.assert_array_equal(np.asarray(y, np.float32), want)


@pytest.mark.parametrize("profile", ["plain", "cuda"])
def test_the_layer_equals_its_formula_up_to_the_order_of_the_sum(profile):
    x, w = activations(), weight("heavy")
    codes, scale, qt = published(w)
    y = quant.dot(jnp.asarray(x), jnp.asarray(w), qt, numerics=resolve(profile))
    x_q, s_x = ref.fp8_rows(x, profile)
    channel, table = ref.cutlass_int4_fp8(ref.pack(codes), scale)
    want = s_x * (x_q.astype(np.float64) @ table.astype(np.float64).T) * channel[:, 0]
    limit = s_x * (np.abs(x_q.astype(np.float64)) @ np.abs(table.astype(np.float64)).T) * channel[:, 0]
    assert (np.abs(np.asarray(y) - want) <= 1e-6 * limit + 1e-30).all()
    np.testing.assert_array_equal(np.asarray(y)[7], 0)


def test_on_a_gpu_the_product_is_one_of_two_float8_operands():
    x, w = jnp.zeros((32, K), jnp.bfloat16), jnp.zeros((N, K))
    qt = quant.quantize(w, CONFIG)
    lowered = jax.jit(lambda x, w, qt: quant.dot(x, w, qt, numerics=resolve("cuda"))).trace(x, w, qt)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    (product,) = [line for line in text.splitlines() if "dot_general" in line and f"{N}x{K}" in line]
    assert product.count("f8E4M3FN") == 2
    assert "-> tensor<32x256xf32>" in product


@pytest.mark.slow
def test_gradients_are_those_of_the_dequantized_operands():
    x, w = jnp.asarray(activations()), jnp.asarray(weight())
    qt = quant.quantize(w, CONFIG)
    numerics = resolve("cuda")
    target = jnp.asarray(np.random.default_rng(0).standard_normal((24, N)), jnp.float32)
    dx, dw = jax.grad(lambda x, w: jnp.sum(quant.dot(x, w, qt, numerics=numerics) * target), (0, 1))(x, w)
    x_q, s_x = ref.fp8_rows(np.asarray(x), "cuda")
    served = np.asarray(quant.dequantize(qt, jnp.float32), np.float64)
    for got, want in (
        (dx, np.asarray(target, np.float64) @ served),
        (dw, np.asarray(target, np.float64).T @ (x_q.astype(np.float32) * s_x).astype(np.float64)),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


# ---- names, limits -------------------------------------------------------------------------------------------------


def test_w4a8_means_fp8_activations_on_cuda_alone():
    for profile in quant.PROFILES:
        got = quant.on_engine(w4a8.Config(128), resolve(profile))
        assert got == (CONFIG if profile == "cuda" else w4a8.Config(128))
        assert quant.on_engine(w4a16.Config(64), resolve(profile)) == w4a16.Config(64)
        assert quant.on_engine(None, resolve(profile)) is None
    with pytest.raises(UserError, match=r"groups of 128 only, not 64: set quant.group_size=128"):
        quant.on_engine(w4a8.Config(64), resolve("cuda"))
    with pytest.raises(UserError, match="groups of 128 only"):
        quant.parse_scheme("w4a8_fp8:g32")
    assert Rules.parse([{"match": "x", "scheme": "w4a8_fp8"}]).scheme_for("x") == CONFIG


@pytest.mark.slow
def test_a_models_w4a8_layers_and_its_config_json_are_those_of_its_engine():
    for profile, kind in (("plain", "int"), ("cpu", "int"), ("cuda", "float")):
        config = tiny.model_config(hidden_size=128, intermediate_size=256, num_heads=4, num_kv_heads=4, head_dim=32)
        config = dataclasses.replace(config, quant=Rules.uniform(w4a8.Config(128)), numerics=resolve(profile))
        schemes = {config.scheme_of(f"stacks.0.{own}.kernel") for own in ("attn.q", "mlp.down")}
        assert schemes == {CONFIG if kind == "float" else w4a8.Config(128)}
        section = vllm.engine_config(models.split(models.abstract_model(config))[0])["quantization_config"]
        (group,) = section["config_groups"].values()
        assert group["input_activations"]["type"] == kind
        assert engine._int4_activations({"quantization_config": section}) == {"int": "int8", "float": "fp8"}[kind]


def test_any_other_device_than_a_hopper_gpu_is_refused():
    def torch(capability):
        cuda = types.SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: capability)
        return types.SimpleNamespace(cuda=cuda)

    engine._check_fp8_device(torch((9, 0)))
    with pytest.raises(BridgeError, match=r"need a Hopper GPU \(sm90\), this is sm89: use w4a16"):
        engine._check_fp8_device(torch((8, 9)))


@pytest.mark.parametrize("shape", [(64, 256), (256, 192)])
def test_a_shape_the_kernel_does_not_take_is_one_sentence_that_says_what_to_do(shape):
    with pytest.raises(UserError, match=r"layers\.0\.k_proj .*multiples of 128, got N = .*quant\.rules"):
        quant.quantize(jnp.zeros(shape), CONFIG, "layers.0.k_proj")


def test_the_config_section_asks_for_float_activations_and_refuses_experts_and_other_groups():
    section = formats.quantization_config({"model.layers.0.mlp.down_proj": "w4a8_fp8:g128"})
    (group,) = section["config_groups"].values()
    assert group["format"] == "pack-quantized"
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False
    }  # fmt: skip
    assert group["input_activations"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True
    }  # fmt: skip
    with pytest.raises(BridgeError, match=r"experts\.0\.down_proj .* give experts w4a16 or fp8 with a rule"):
        formats.quantization_config({"model.layers.0.mlp.experts.0.down_proj": "w4a8_fp8:g128"})
    with pytest.raises(BridgeError, match="groups of 128 only"):
        formats.parse("w4a8_fp8:g64")


@pytest.mark.vllm
def test_vllm_on_a_hopper_gpu_takes_the_section_for_its_int4_fp8_scheme(monkeypatch):
    compressed = pytest.importorskip(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    ).CompressedTensorsConfig
    torch = pytest.importorskip("torch")
    section = formats.quantization_config({"model.layers.0.mlp.down_proj": "w4a8_fp8"})
    config = compressed.from_config(section)
    monkeypatch.setattr(compressed, "_check_scheme_supported", lambda *args, **named: True)
    found = config.get_scheme(torch.nn.Linear(1, 1), "model.layers.0.mlp.down_proj")
    assert type(found).__name__ == "CompressedTensorsW4A8Fp8"
