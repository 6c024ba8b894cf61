# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels we register in vLLM compute the formulas their docstrings state, and survive a reload of weights."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from qarl_bridge.protocol import formats

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BF16 = np.dtype(ml_dtypes.bfloat16)


def bf(x):
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


@pytest.fixture(scope="module")
def kernels():
    """The module under test; importing vLLM warns about many things that are not ours."""
    pytest.importorskip("vllm")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qarl_bridge.engine import cpu_kernels
    return cpu_kernels


def torch_of(array):
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def layer_of(**tensors):
    import torch

    layer = torch.nn.Module()
    for name, array in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(torch_of(array), requires_grad=False))
    return layer


def int4_case(n, k, group, seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (n, k)).astype(np.int8)
    scale = rng.uniform(1e-3, 1e-2, (n, k // group)).astype(BF16)
    return codes, scale, formats.pack_int4(codes)


def int4_kernel(kernels, monkeypatch, n, k, group, w4a8):
    import torch
    from vllm.scalar_type import scalar_types

    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", str(int(w4a8)))
    # Whether this host would choose it or not, what it computes is tested here.
    monkeypatch.setattr(kernels.PortableWNA16LinearKernel, "can_implement", classmethod(lambda cls, c: (True, None)))
    config = kernels.MPLinearLayerConfig(
        full_weight_shape=(k, n),
        partition_weight_shape=(k, n),
        weight_type=scalar_types.uint4b8,
        act_type=torch.bfloat16,
        group_size=group,
        zero_points=False,
    )
    return kernels.PortableWNA16LinearKernel(config, "weight_packed", "weight_scale", "weight_zero_point")


def run(kernel, layer, x, bias=None):
    out = kernel.apply_weights(layer, torch_of(x), None if bias is None else torch_of(bias))
    return out.float().numpy()


CASES = [(m, n, k, g, b) for m in (1, 5, 64) for n, k, g in ((64, 128, 32), (96, 256, 128)) for b in (False, True)]


def activations(m, k, seed=7):
    return (np.random.default_rng(seed).normal(size=(m, k)) * 3).astype(BF16)


@pytest.mark.parametrize(("m", "n", "k", "group", "with_bias"), CASES)
def test_w4a16_is_one_rounding_of_a_float32_product_with_bf16_weights(kernels, monkeypatch, m, n, k, group, with_bias):
    codes, scale, packed = int4_case(n, k, group, seed=m)
    x, bias = activations(m, k), activations(1, n, seed=8)[0] if with_bias else None
    kernel, layer = (
        int4_kernel(kernels, monkeypatch, n, k, group, False),
        layer_of(weight_packed=packed, weight_scale=scale),
    )
    kernel.process_weights_after_loading(layer)
    w = bf(codes * np.repeat(scale.astype(np.float32), group, axis=1))
    exact = x.astype(np.float64) @ w.T.astype(np.float64) + (0 if bias is None else bias.astype(np.float64))
    got = run(kernel, layer, x, bias)
    # float32 sums differ from the exact ones by about 1e-6 relative; one bf16 ulp (2^-7) where that crosses a boundary.
    assert (got == bf(exact)).mean() > 0.998
    np.testing.assert_allclose(got, exact, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(("m", "n", "k", "group", "with_bias"), CASES)
def test_w4a8_is_the_amx_kernels_formula(kernels, monkeypatch, m, n, k, group, with_bias):
    codes, scale, packed = int4_case(n, k, group, seed=m)
    x, bias = activations(m, k), activations(1, n, seed=8)[0] if with_bias else None
    kernel, layer = (
        int4_kernel(kernels, monkeypatch, n, k, group, True),
        layer_of(weight_packed=packed, weight_scale=scale),
    )
    kernel.process_weights_after_loading(layer)
    xf = x.astype(np.float32)
    amax = np.maximum(np.abs(xf).max(1, keepdims=True), np.float32(1e-7))
    x_s, x_q = amax / np.float32(127), np.round(xf * (np.float32(127) / amax))
    acc = np.zeros((m, n), np.float32) if bias is None else np.tile(bias.astype(np.float32), (m, 1))
    for g in range(k // group):
        part = slice(g * group, (g + 1) * group)
        p = (x_q[:, part].astype(np.int64) @ codes[:, part].astype(np.int64).T).astype(np.float32)
        product = (p * x_s).astype(np.float64) * scale[:, g].astype(np.float64)
        acc = (product + acc).astype(np.float32)  # a float32 fma, computed in float64
    np.testing.assert_array_equal(run(kernel, layer, x, bias), bf(acc))


def int8_kernel(kernels):
    config = kernels.Int8ScaledMMLinearLayerConfig(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True
    )
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    return object.__new__(kernels.PortableInt8LinearKernel), config, names


@pytest.mark.parametrize(("m", "n", "k"), [(1, 32, 64), (5, 48, 256), (64, 64, 1024), (3, 32, 3072)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_is_the_generic_cpu_formula_to_the_bit(kernels, m, n, k, with_bias):
    rng = np.random.default_rng(n)
    weight = rng.integers(-128, 128, (n, k)).astype(np.int8)
    weight[0], weight[1] = 127, -128  # what saturates oneDNN's int16 pairs
    scale = rng.uniform(1e-3, 1e-2, (n, 1)).astype(np.float32)
    x, bias = activations(m, k), activations(1, n, seed=8)[0] if with_bias else None
    x[0] = np.abs(x[0]).max()
    kernel, config, names = int8_kernel(kernels)
    kernel.config, kernel.layer_param_names = config, names
    layer = layer_of(weight=weight, weight_scale=scale)
    kernel.process_weights_after_loading(layer)
    xf = x.astype(np.float32)
    x_s = np.abs(xf).max(1, keepdims=True) / np.float32(127)
    x_q = np.clip(np.round(xf * (np.float32(1) / x_s)), -128, 127).astype(np.int64)
    y = (x_q @ weight.T.astype(np.int64)).astype(np.float32) * scale.T * x_s
    np.testing.assert_array_equal(run(kernel, layer, x, bias), bf(y if bias is None else y + bias.astype(np.float32)))


def test_new_values_take_effect_when_weights_are_loaded_again(kernels, monkeypatch):
    n, k, group = 64, 128, 32
    x = activations(4, k)
    kernel = int4_kernel(kernels, monkeypatch, n, k, group, False)
    outputs = []
    for seed in (0, 1, 0):
        _, scale, packed = int4_case(n, k, group, seed)
        layer = layer_of(weight_packed=packed, weight_scale=scale)
        kernel.process_weights_after_loading(layer)
        outputs.append(run(kernel, layer, x))
    assert not np.array_equal(outputs[0], outputs[1])
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_the_int8_self_test_agrees_with_an_independent_trial(kernels):
    # In a process of its own: the default dtype and threads of this one must not matter.
    code = """
import warnings; warnings.simplefilter("ignore")
import torch
torch.set_default_dtype(torch.bfloat16)   # as while vLLM builds a model
from qarl_bridge.engine import cpu_kernels as p
from vllm import _custom_ops as ops
w = torch.randint(-128, 128, (64, 256), dtype=torch.int8)
s = torch.ones(64, 1, dtype=torch.float32)
h = ops.create_onednn_scaled_mm(w.t(), s, torch.float32, True, False, 32)
x = torch.randint(-127, 128, (8, 256), dtype=torch.int8)
out = torch.empty(8, 64, dtype=torch.float32)
ones = torch.ones(8, 1, dtype=torch.float32)
ops.onednn_scaled_mm(h, x, out, ones, None, torch.zeros(1, 64, dtype=torch.float32), None)
exact = x.double() @ w.double().t()
print("exact" if torch.equal(out.double(), exact) else "wrong", p.onednn_int8_is_exact())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.split()[-2:] in (["exact", "True"], ["wrong", "False"]), result.stdout + result.stderr
