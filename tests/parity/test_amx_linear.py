# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rung "one linear layer" on CPUs with AMX: quant.dot under jit against vLLM's own kernels, scheme by scheme.

On the K and N of real Qwen models, for one token, a few and a batch, with and without a bias. The bf16 kernels are
compared too: the head and the router go through them under every scheme.
"""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from qarl_bridge.protocol import formats

from qarl_jax import quant
from qarl_jax.numerics import engine
from qarl_jax.numerics.float32 import pack_int4
from qarl_jax.quant.schemes import w4a8, w4a16, w8a8
from tests.reference import quant_reference as ref

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not engine.cpu_has_amx(), reason="this CPU has no AMX tiles to run these kernels with"),
]

# (K, N): the quickstart's gate and up; Qwen3-0.6B k and v, q, down; Qwen2.5-1.5B kv, o, down; Qwen3-8B kv.
SHAPES = [(256, 768), (1024, 1024), (1024, 2048), (3072, 1024), (1536, 256), (1536, 1536), (8960, 1536), (4096, 1024)]
ROWS = [1, 7, 64]
CASES = [(k, n, m, bias) for k, n in SHAPES for m in ROWS for bias in (False, True)]
AMX = quant.resolve("cpu_amx")
GROUP = 128


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.platforms

        if not vllm.platforms.current_platform.is_cpu():
            pytest.skip("compares CPU kernels")
        vllm.platforms.current_platform.import_kernels()
    torch.cpu._init_amx()
    return torch


def activations(k, n, m):
    """x [m, k] and a bias [n], bfloat16 values."""
    rng = np.random.default_rng([k, n, m])
    return ref.bf(rng.normal(size=(m, k)) * np.exp(rng.normal(size=(m, 1)))), ref.bf(rng.normal(size=n))


def learner(x, qtensor, shape, bias):
    y = quant.dot(jnp.asarray(x, jnp.bfloat16), jnp.zeros(shape), qtensor, bias, numerics=AMX)
    return np.asarray(y, np.float32)


def bf16(torch, x):
    return torch.from_numpy(np.asarray(x, np.float32)).to(torch.bfloat16)


def ordered(x):
    """bfloat16 values as integers in their order, so that neighbours differ by one."""
    bits = np.asarray(x, np.float32).view(np.int32) >> 16
    return np.where(bits < 0, -(bits & 0x7FFF), bits).astype(np.int64)


def compared(torch, layer_of):
    """{case: outputs that differ, out of how many, the largest difference in bf16 ulps}; layer_of(k, n) gives (live
    layer (x, bias) -> y, the learner's weight)."""
    found = {}
    for k, n in SHAPES:
        live, qtensor = layer_of(k, n)
        for m in ROWS:
            x, bias = activations(k, n, m)
            for b in (None, bias):
                got = live(bf16(torch, x), None if b is None else torch.from_numpy(b)).float().numpy()
                mine = learner(x, qtensor, (n, k), b)
                ulps = np.abs(ordered(got) - ordered(mine))
                found[k, n, m, b is not None] = (int((ulps > 0).sum()), ulps.size, int(ulps.max()))
    assert len(found) == len(CASES) == 48
    return found


def test_w8a8_layers_equal_the_engines_bit_for_bit(torch):
    def layer_of(k, n):
        rng = np.random.default_rng([k, n])
        codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
        scale = np.exp(rng.normal(size=(n, 1)) - 6).astype(np.float32)
        packed, s = torch.ops._C.convert_weight_packed(torch.from_numpy(codes)), torch.from_numpy(scale)

        def live(x, bias):
            return torch.ops._C.int8_scaled_mm_with_quant(x, packed, s, bias, torch.bfloat16, True)

        return live, quant.QTensor(jnp.asarray(codes), jnp.asarray(scale), w8a8.Config())

    unequal = {case: found for case, found in compared(torch, layer_of).items() if found[0]}
    assert not unequal


def int4_layers(torch, monkeypatch, scheme):
    """vLLM's int4 kernel, as its own class prepares it."""
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", str(int(scheme is w4a8)))

    def layer_of(k, n):
        rng = np.random.default_rng([k, n])
        codes = rng.integers(-8, 8, (n, k)).astype(np.int8)
        scale = ref.bf(rng.uniform(1e-3, 1e-2, (n, k // GROUP)))
        layer = torch.nn.Module()
        layer.bias = None
        for name, value in (
            ("weight_packed", torch.from_numpy(formats.pack_int4(codes))),
            ("weight_scale", bf16(torch, scale)),
        ):
            parameter = torch.nn.Parameter(value, requires_grad=False)
            parameter.input_dim = parameter.packed_dim = 1
            parameter.output_dim = 0
            layer.register_parameter(name, parameter)
        config = MPLinearLayerConfig((k, n), (k, n), scalar_types.uint4b8, torch.bfloat16, GROUP, False)
        kernel = CPUWNA16LinearKernel(config, "weight_packed", "weight_scale", "weight_zero_point")
        kernel.process_weights_after_loading(layer)
        assert layer.use_w4a8 == (scheme is w4a8)

        def live(x, bias):  # the w4a8 op reads a float32 bias, the other one in bf16: both as vLLM's layer hands it
            held = None if bias is None else bias if scheme is w4a8 else bias.to(torch.bfloat16)
            return kernel.apply_weights(layer, x, held)

        words = pack_int4(jnp.asarray(codes))
        return live, quant.QTensor(words, jnp.asarray(scale, jnp.bfloat16), scheme.Config(GROUP))

    return layer_of


def test_w4a8_layers_equal_the_engines_bit_for_bit(torch, monkeypatch):
    found = compared(torch, int4_layers(torch, monkeypatch, w4a8))
    assert not {case: found for case, found in found.items() if found[0]}


def test_w4a16_layers_equal_the_engines_bit_for_bit(torch, monkeypatch):
    found = compared(torch, int4_layers(torch, monkeypatch, w4a16))
    assert not {case: found for case, found in found.items() if found[0]}


@pytest.mark.parametrize("kernel", ["sgl", "onednn"])
def test_bf16_layers_equal_the_engines_on_nearly_every_output(torch, kernel):
    """To the last bit, but where oneDNN cuts a long K."""
    from qarl_bridge.engine.cpu_kernels import same_for_few_rows
    from vllm import _custom_ops as ops

    unequal = outputs = 0
    for k, n in SHAPES:
        w = ref.bf(np.random.default_rng([k, n]).normal(size=(n, k)))
        weight = bf16(torch, w)
        packed = torch.ops._C.convert_weight_packed(weight)
        handler = ops.create_onednn_mm(weight.t(), 32)
        live = {
            "sgl": same_for_few_rows(lambda x, w, b, p=packed, n=n: ops.weight_packed_linear_cpu(x, p, n, b)),
            "onednn": lambda x, w, b, h=handler: ops.onednn_mm(h, x, b),
        }[kernel]
        for m in ROWS:
            x, _ = activations(k, n, m)
            mine = learner(x, jnp.asarray(w, jnp.bfloat16), (n, k), None)
            different = np.abs(ordered(live(bf16(torch, x), None, None).float().numpy()) - ordered(mine))
            unequal, outputs = unequal + (different > 0).sum(), outputs + different.size
            assert different.max() <= 1 or kernel == "onednn"
    assert unequal == 0 if kernel == "sgl" else unequal < 1e-3 * outputs


def test_a_few_rows_are_added_otherwise_by_sgls_kernel_and_alike_by_the_bridge(torch):
    """The reason for `same_for_few_rows`: the last sequences of a batch would have log-probs of their own."""
    from qarl_bridge.engine.cpu_kernels import same_for_few_rows
    from vllm import _custom_ops as ops

    k, n = 1536, 256
    weight = bf16(torch, np.random.default_rng(0).normal(size=(n, k)))
    packed = torch.ops._C.convert_weight_packed(weight)

    def linear(x, weight, bias):
        return ops.weight_packed_linear_cpu(x, packed, n, bias)

    rows = bf16(torch, np.random.default_rng(1).normal(size=(64, 1, k)))
    whole = linear(rows, None, None)
    padded = same_for_few_rows(linear)
    assert same_for_few_rows(padded) is padded
    for few in (1, 2, 4):
        parts = [rows[i : i + few] for i in range(0, 64, few)]
        alone = torch.cat([linear(part, None, None) for part in parts])
        assert 0 < (alone != whole).sum() < 0.01 * whole.numel(), few
        assert torch.equal(torch.cat([padded(part, None, None) for part in parts]), whole)
