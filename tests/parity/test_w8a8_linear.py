# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rung "one linear layer": quant.dot under w8a8 against vLLM's CPU int8 kernels, on the K and N of real Qwen models.

Two facts about oneDNN on CPUs without VNNI (AVX2 only), both measured here rather than assumed:

  * it adds pairs of u8 * s8 products in saturating int16, so its "int32" product is wrong for large codes;
  * vLLM's builds for CPUs without bf16 instructions truncate float32 to bfloat16 where the other rounds to nearest.

The bridge replaces that kernel (qarl_bridge.engine.cpu_kernels), so both layers are compared: oneDNN's on codes small
enough for its product to be exact, the bridge's on all. On CPUs with AMX vLLM takes another kernel for layers whose K
and N fit its tiles (`test_amx_linear.py`); oneDNN's is then compared under the profile it has elsewhere.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.numerics import rows as int8_rows
from qarl_jax.quant.schemes import w8a8
from tests.reference import quant_reference as ref

pytestmark = pytest.mark.vllm

# (K, N): quickstart-sized, Qwen2.5-1.5B (o, down, kv), Qwen3-8B kv.
SHAPES = [(64, 100), (256, 768), (1536, 256), (1536, 1536), (8960, 96), (4096, 128)]
ROWS = [1, 7, 64]
CASES = [(k, n, m, bias) for k, n in SHAPES for m in ROWS for bias in (False, True)]


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    import vllm.platforms

    if not vllm.platforms.current_platform.is_cpu():
        pytest.skip("compares CPU kernels")
    return torch


@pytest.fixture(scope="module")
def ops(torch):
    from vllm import _custom_ops

    return _custom_ops


def case(k, n, m, largest):
    rng = np.random.default_rng([k, n, m])
    x = ref.bf(rng.normal(size=(m, k)) * np.exp(rng.normal(size=(m, 1))))
    codes = rng.integers(-largest, largest + 1, (n, k)).clip(-128, 127).astype(np.int8)
    scale = np.exp(rng.normal(size=(n, 1)) - 6).astype(np.float32)
    return x, codes, scale, ref.bf(rng.normal(size=n))


def learner(x, codes, scale, bias, dtype, numerics):
    qt = quant.QTensor(jnp.asarray(codes), jnp.asarray(scale), w8a8.Config())
    master = jnp.zeros(codes.shape)
    y = quant.dot(jnp.asarray(x, dtype), master, qt, bias, numerics=numerics)
    return np.asarray(y, np.float32)


def truncated(y):
    return (y.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def has_flag(flag):
    with open("/proc/cpuinfo") as file:
        return flag in file.read()


@pytest.mark.parametrize("k", [8, 64, 1536, 8960])
def test_activation_scales_and_codes_equal_vllms_on_every_element(ops, torch, k):
    x, *_ = case(k, 1, 300, 127)
    codes, scale, _ = ops.onednn_scaled_int8_quant(torch.from_numpy(x).to(torch.bfloat16), None, None, True)
    want_codes, want_scale = int8_rows.quantize_rows(jnp.asarray(x), from_rounded_scale=True)
    np.testing.assert_array_equal(codes.numpy(), np.asarray(want_codes))
    np.testing.assert_array_equal(scale.numpy().reshape(-1, 1), np.asarray(want_scale))


@pytest.mark.slow
def test_onednn_layers_equal_the_learners_bit_for_bit(ops, torch):
    exact = has_flag("avx512_vnni") or has_flag("avx_vnni")
    numerics = quant.resolve("cpu_avx512_bf16" if has_flag("avx512_bf16") else "cpu_avx2")
    unequal = []
    for k, n, m, with_bias in CASES:
        # 255 * 64 * 2 is the largest pair that an int16 holds.
        x, codes, scale, bias = case(k, n, m, 128 if exact else 64)
        x_bf16, w, s = torch.from_numpy(x).to(torch.bfloat16), torch.from_numpy(codes), torch.from_numpy(scale)
        b = torch.from_numpy(bias).to(torch.bfloat16) if with_bias else None
        handler = ops.create_onednn_scaled_mm(w.t(), s, torch.bfloat16, True, False, 32)
        x_q, x_s, _ = ops.onednn_scaled_int8_quant(x_bf16, None, None, True)
        y = torch.empty((m, n), dtype=torch.bfloat16)
        ops.onednn_scaled_mm(handler, x_q, y, x_s, None, None, b)
        # In float32 the learner returns what the engine has before its conversion to bfloat16.
        mine = learner(x, codes, scale, bias if with_bias else None, jnp.float32, numerics)
        mine = ref.bf(mine) if has_flag("avx512_bf16") else truncated(mine)
        if (y.float().numpy() != mine).any():
            unequal.append((k, n, m, with_bias, (y.float().numpy() != mine).mean()))
    assert not unequal, f"{len(unequal)} of {len(CASES)} cases differ: {unequal[:5]}"


@pytest.mark.slow
def test_the_bridges_portable_int8_layers_equal_the_learners_bit_for_bit(torch):
    """What the engine really runs on CPUs whose oneDNN product saturates."""
    kernels = pytest.importorskip("qarl_bridge.engine.cpu_kernels")
    unequal = []
    for k, n, m, with_bias in CASES:
        x, codes, scale, bias = case(k, n, m, 128)
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.from_numpy(codes), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(torch.from_numpy(scale), requires_grad=False)
        kernel = kernels.PortableInt8LinearKernel.__new__(kernels.PortableInt8LinearKernel)
        kernel.layer_param_names = ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
        kernel.process_weights_after_loading(layer)
        b = torch.from_numpy(bias).to(torch.bfloat16) if with_bias else None
        y = kernel.apply_weights(layer, torch.from_numpy(x).to(torch.bfloat16), b).float().numpy()
        mine = learner(x, codes, scale, bias if with_bias else None, jnp.bfloat16, quant.resolve("cpu_avx2"))
        if (y != mine).any():
            unequal.append((k, n, m, with_bias, (y != mine).mean()))
    assert not unequal, f"{len(unequal)} of {len(CASES)} cases differ: {unequal[:5]}"


@pytest.mark.slow
def test_the_bridges_int8_experts_equal_the_learners_bit_for_bit(torch):
    """The product of its experts on CPUs with AMX, where vLLM's dense layers have another arithmetic than oneDNN's."""
    kernels = pytest.importorskip("qarl_bridge.engine.cpu_kernels")
    for k, n, m, _ in CASES[::2]:
        x, codes, scale, _ = case(k, n, m, 128)
        x_bf16, w, s = torch.from_numpy(x).to(torch.bfloat16), torch.from_numpy(codes).float(), torch.from_numpy(scale)
        y = kernels.int8_product(x_bf16, w, s, None, like_amx=True).float().numpy()
        mine = learner(x, codes, scale, None, jnp.bfloat16, quant.resolve("cpu_amx"))
        np.testing.assert_array_equal(y, mine)


def test_a_saturating_int16_product_is_what_onednn_computes_without_vnni(ops, torch):
    """The reason for the portable kernel. On CPUs with VNNI the same codes are multiplied exactly."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-127, 128, (rows, 256), dtype=np.int8) for rows in (7, 32))
    weight, ones_n, ones_m = torch.from_numpy(w), torch.ones(32, 1), torch.ones(7, 1)
    handler = ops.create_onednn_scaled_mm(weight.t(), ones_n, torch.float32, True, False, 32)
    y = torch.empty((7, 32), dtype=torch.float32)
    ops.onednn_scaled_mm(handler, torch.from_numpy(x), y, ones_m, None, None, None)
    exact = x.astype(np.int64) @ w.astype(np.int64).T
    unsigned, w = x.astype(np.int64) + 128, w.astype(np.int64)
    pairs = unsigned[:, None, 0::2] * w[None, :, 0::2] + unsigned[:, None, 1::2] * w[None, :, 1::2]
    saturated = np.clip(pairs, -(2**15), 2**15 - 1).sum(-1) - 128 * w.sum(1)[None, :]
    if has_flag("avx512_vnni") or has_flag("avx_vnni") or has_flag("amx_int8"):
        np.testing.assert_array_equal(y.numpy(), exact)
    else:
        np.testing.assert_array_equal(y.numpy(), saturated)
        assert (y.numpy() != exact).mean() > 0.5
