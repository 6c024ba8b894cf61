# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Other people's quantizers as oracles: compressed-tensors for the weight grids, AQT for the activation grid."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import aqt_quantizer, calibration
from aqt.jax.v2.numerics import int_numerics
from qarl_bridge.protocol import formats
from safetensors.numpy import load_file

from qarl_jax import quant
from qarl_jax.numerics.rows import quantize_rows
from qarl_jax.quant.schemes import fp8, nvfp4, w2a16_asym, w4a16, w4a16_asym, w8a8, w8a16_asym
from tests.reference import quant_reference as ref

TRAINED = pathlib.Path(__file__).parents[2] / "assets" / "tiny-qwen3" / "model.safetensors"


def compressed_tensors(w, config):
    """Scales and codes as compressed-tensors computes them from float32 weights holding bfloat16 values."""
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward_helpers")
    args_type = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs
    group = getattr(config, "group_size", -1)
    args = args_type(
        num_bits=4 if isinstance(config, w4a16.Config) else 8,
        type="float" if isinstance(config, fp8.Config) else "int",
        symmetric=True,
        **({"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}),
    )
    g = w.shape[-1] if group == -1 else group
    blocks = torch.from_numpy(w).reshape(w.shape[0], -1, g)
    scale, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    if isinstance(config, w4a16.Config):
        # vLLM's scale parameter is bfloat16; a zero group's epsilon is then bfloat16's.
        scale = scale.to(torch.bfloat16)
        scale = torch.where(blocks.abs().amax(-1) == 0, torch.finfo(torch.bfloat16).eps, scale).to(torch.bfloat16)
    low, high = helpers.calculate_range(args, "cpu")
    codes = forward._quantize(blocks, scale.float()[..., None], None, low, high, args)
    return codes.reshape(w.shape).numpy(), scale.float().numpy()


@pytest.mark.parametrize(
    "config", [w8a8.Config(), fp8.Config(), w4a16.Config(32), w4a16.Config(128), w4a16.Config(-1)], ids=str
)
def test_weight_codes_and_scales_equal_compressed_tensors(config):
    rng = np.random.default_rng(0)
    w = ref.bf(rng.standard_t(3, size=(256, 512)) * 0.05)
    w[5] = 0
    w[6, :128] = 0
    codes, scale = compressed_tensors(w, config)
    qt = quant.quantize(w, config)
    mine = quant.unpack_int4(qt.codes) if qt.scheme.wire.codes.inputs == 8 else qt.codes
    np.testing.assert_array_equal(np.asarray(qt.scales, np.float32), scale.reshape(qt.scales.shape))
    np.testing.assert_array_equal(np.asarray(mine, np.float32), codes)


ADVERSARIAL = {
    "zero_rows": lambda w: np.concatenate([0 * w[:3], np.where(np.arange(256) < 16, 0, w[3:])]),
    "blocks_that_underflow": lambda w: w * np.geomspace(1, 1e-9, 64)[:, None],
    "one_huge_outlier": lambda w: np.where((w == w[7, 9]), 3e5, w),
    "subnormals": lambda w: np.where(np.arange(256) % 5 == 0, w * 1e-38, w),
    "subnormals_alone": lambda w: w * 1e-38,
    "ties": lambda w: np.resize([6, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5, -0.25, -0.75, 1.75, -0.0, -3.5], w.shape),
    "all_zero": lambda w: 0 * w,
    "as_small_as_is_promised": lambda w: w / np.abs(w).max() * 2.0**-104,
    "as_large": lambda w: w / np.abs(w).max() * 2.0**18,
    "reciprocals_that_are_subnormal": lambda w: np.where((w == w[7, 9]), 1e38, w),
    "the_largest_bfloat16": lambda w: w / np.abs(w).max() * 3.3895e38,
    "trained": lambda w: load_file(TRAINED)["model.layers.0.self_attn.k_proj.weight"][:64].astype(np.float32),
}


@pytest.mark.parametrize("which", [None, *ADVERSARIAL])
def test_nvfp4_has_compressed_tensors_bytes_of_weights_that_are_fused(which):
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    compressor = pytest.importorskip("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor
    w = np.random.default_rng(0).standard_t(3, size=(64, 256)) * 0.02
    w = (ADVERSARIAL[which](w) if which else w).astype(np.float32).astype(ref.BF16)
    scheme = schemes.preset_name_to_scheme("NVFP4A16", ["Linear"])
    divisor = helpers.generate_gparam(*torch.aminmax(torch.from_numpy(w.view(np.int16)).view(torch.bfloat16)))
    for part in (slice(0, 16), slice(16, 64)):  # as q and k are
        own = torch.from_numpy(w[part].view(np.int16)).view(torch.bfloat16)
        blocks = own.unflatten(-1, (-1, 16))
        scale, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
        held = {"weight": own, "weight_scale": scale, "weight_global_scale": divisor}
        with torch.compiler.set_stance("force_eager"):  # compiling takes long, and gives the same bytes
            want = {name: tensor.view(torch.uint8) for name, tensor in compressor.compress(held, scheme).items()}
        qt = quant.quantize(w[part], nvfp4.Config(), beside=[w[16:] if part.start == 0 else w[:16]])
        for array in qt.scheme.wire.arrays:
            mine = np.asarray(qt.arrays[array.name])
            assert mine.tobytes() == want[array.leaf].numpy().tobytes(), array.name


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        *(w2a16_asym.Config(32), w4a16_asym.Config(16), w8a16_asym.Config(128)),
        *map(quant.parse_scheme, ("w4a16_shift:g32", "w2a16_shift:g32", "w4a16_midpoint:g32", "w2a16_midpoint:g32")),
    ],
    ids=str,
)
def test_compressed_tensors_unpacks_an_export_with_zero_points_to_the_same_weight(config):
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packed = pytest.importorskip("compressed_tensors.compressors.pack_quantized").PackedQuantizationCompressor
    w = np.random.default_rng(0).standard_t(3, size=(48, 256)).astype(np.float32) * 0.05  # 48: rows of a word left over
    qt = quant.quantize(w, config)
    out = config.exported(qt)
    assert out.scheme.wire.format == "pack-quantized"
    held = formats.pack("p", {name: np.array(array) for name, array in out.arrays.items()}, out.scheme.wire)
    scales = torch.from_numpy(held["p.weight_scale"].view(np.int16)).view(torch.bfloat16)
    state = {"weight_scale": scales} | {
        leaf: torch.from_numpy(held[f"p.{leaf}"]) for leaf in ("weight_packed", "weight_zero_point", "weight_shape")
    }
    args = quantization.QuantizationArgs.model_validate(dict(out.scheme.wire.weights))
    given = packed.decompress(state, quantization.QuantizationScheme(targets=["Linear"], weights=args))["weight"]
    np.testing.assert_array_equal(given.float().numpy(), np.asarray(quant.dequantize(qt, jnp.float32)))


def aqt_rows(x):
    """AQT's absmax grid with the largest value in the centre of the last bucket: absmax / 127."""
    numerics = int_numerics.IntSymmetric(
        bits=8,
        preserve_zero=True,
        preserve_max_val=True,
        clip=True,
        clip_gradient=False,
        round=True,
        noise_fn=None,
        dtype=jnp.int8,
    )
    quantizer = aqt_quantizer.quantizer_make(8, initialize_calibration=False)
    quantizer.numerics = numerics
    quantizer.calibration = calibration.AbsMaxCalibration
    quantizer.init_calibration()
    qt, _ = quantizer.quant(x, calibration_axes=[-1])
    return qt.qvalue, qt.scale[0]


@pytest.mark.slow
def test_activation_grid_is_aqts_absmax_127_grid_up_to_its_division():
    """AQT multiplies by 1 / scale with XLA's division: the scales may be an ulp apart, and a code on a tie may flip."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(500, 256)), jnp.float32)
    codes, scale = quantize_rows(x)
    theirs, their_scale = jax.jit(aqt_rows)(x)
    np.testing.assert_allclose(scale, their_scale, rtol=1.2e-7)
    difference = np.abs(np.asarray(codes, np.int32) - np.asarray(theirs, np.int32))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-4
