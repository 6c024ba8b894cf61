# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Other people's quantizers as oracles: compressed-tensors for the weight grids, AQT for the activation grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aqt.jax.v2 import aqt_quantizer, calibration
from aqt.jax.v2.numerics import int_numerics

from qarl_jax import quant
from qarl_jax.numerics.rows import quantize_rows
from qarl_jax.quant.schemes import fp8, w4a16, w8a8
from tests.reference import quant_reference as ref


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
