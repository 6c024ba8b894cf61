# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The layers we register in vLLM's CPU engine compute the formulas their docstrings state, whatever the rows."""

import types

import jax
import numpy as np
import pytest

from tests.reference import quant_reference as ref
from tests.reference.quant_reference import BF16, bf

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def kernels():
    """The module under test; importing vLLM warns about many things that are not ours."""
    pytest.importorskip("vllm")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qarl_bridge.engine.cpu import linear
    return linear


@pytest.fixture(scope="module")
def layers(kernels):
    from qarl_bridge.engine.cpu import layers

    return layers


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
    return codes, scale, ref.pack(codes)


def int4_kernel(kernels, monkeypatch, n, k, group, w4a8):
    import torch
    from vllm.scalar_type import scalar_types

    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", str(int(w4a8)))
    config = kernels.MPLinearLayerConfig(
        full_weight_shape=(k, n),
        partition_weight_shape=(k, n),
        weight_type=scalar_types.uint4b8,
        act_type=torch.bfloat16,
        group_size=group,
        zero_points=False,
    )
    assert kernels.Float64WNA16LinearKernel.can_implement(config) == (True, None)
    return kernels.Float64WNA16LinearKernel(config, "weight_packed", "weight_scale", "weight_zero_point")


def int8_kernel(kernels):
    config = kernels.Int8ScaledMMLinearLayerConfig(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True
    )
    names = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
    return kernels.Float64Int8LinearKernel(config, names)


def run(kernel, layer, x, bias=None):
    out = kernel.apply_weights(layer, torch_of(x), None if bias is None else torch_of(bias))
    return out.float().numpy()


CASES = [(m, n, k, g, b) for m in (1, 64) for n, k, g in ((64, 128, 32), (96, 256, 128)) for b in (False, True)]


def activations(m, k, seed=7):
    return (np.random.default_rng(seed).normal(size=(m, k)) * 3).astype(BF16)


def once(y, bias):
    """float64 sums -> float32, plus a bias, -> bfloat16."""
    y = y.astype(np.float32)
    return bf(y if bias is None else y + bias.astype(np.float32))


def int8_rows(x):
    x = x.astype(np.float32)
    amax = np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-7))
    return np.round(x * (np.float32(127) / amax)).astype(np.float64), (amax / np.float32(127)).astype(np.float64)


@pytest.mark.parametrize(("m", "n", "k", "group", "with_bias"), CASES)
def test_int4_layers_are_one_float64_sum(kernels, monkeypatch, m, n, k, group, with_bias):
    codes, scale, packed = int4_case(n, k, group, seed=m)
    x, bias = activations(m, k), activations(1, n, seed=8)[0] if with_bias else None
    layer = layer_of(weight_packed=packed, weight_scale=scale)
    weight = codes * np.repeat(scale.astype(np.float64), group, axis=1)
    kernel = int4_kernel(kernels, monkeypatch, n, k, group, False)
    kernel.process_weights_after_loading(layer)
    exact = x.astype(np.float64) @ bf(weight).T.astype(np.float64)
    np.testing.assert_array_equal(run(kernel, layer, x, bias), once(exact, bias))
    kernel = int4_kernel(kernels, monkeypatch, n, k, group, True)
    kernel.process_weights_after_loading(layer)
    x_q, s_x = int8_rows(x)
    np.testing.assert_array_equal(run(kernel, layer, x, bias), once(s_x * (x_q @ weight.T), bias))


@pytest.mark.parametrize("with_bias", [False, True])
def test_nvfp4_layers_are_one_float64_sum_and_a_factor(kernels, with_bias):
    import torch

    rng = np.random.default_rng(0)
    masters = [rng.normal(size=(48, 256)) * np.geomspace(1, 1e-6, 48)[:, None], rng.normal(size=(16, 256)) * 0.3]
    parts = [ref.nvfp4_weight(w) for w in masters]  # two that are fused, with a number each
    codes, scales = (np.concatenate(arrays) for arrays in tuple(zip(*parts, strict=True))[:2])
    x, bias = activations(5, 256), activations(1, 64, seed=8)[0] if with_bias else None
    divisors = np.array([divisor.item() for *_, divisor in parts], np.float32)
    layer = layer_of(weight_packed=codes[:, ::2] | codes[:, 1::2] << 4, weight_global_scale=divisors)
    layer.weight_scale = torch.from_numpy(scales.view(np.uint8)).view(torch.float8_e4m3fn)
    layer.logical_widths = [48, 16]
    factors = [ref.nvfp4_factors(*part) for part in parts]
    value, factor = (np.concatenate(a) for a in ([v for v, _ in factors], [np.full(len(v), f) for v, f in factors]))
    assert not value[47].any()  # flushed
    kernel = kernels.Float64NvFp4LinearKernel(None)
    kernel.process_weights_after_loading(layer)
    sums = (x.astype(np.float64) @ value.T.astype(np.float64)).astype(np.float32)
    want = bf(sums * factor)
    np.testing.assert_array_equal(
        run(kernel, layer, x, bias), want if bias is None else bf(want + bias.astype(np.float32))
    )


@pytest.mark.parametrize(("m", "n", "k"), [(5, 48, 256), (3, 32, 3072)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_layers_are_one_float64_sum(kernels, m, n, k, with_bias):
    rng = np.random.default_rng(n)
    weight = rng.integers(-128, 128, (n, k)).astype(np.int8)
    weight[0], weight[1] = 127, -128  # what saturates the int16 pairs of CPUs without VNNI
    scale = rng.uniform(1e-3, 1e-2, (n, 1)).astype(np.float32)
    x, bias = activations(m, k), activations(1, n, seed=8)[0] if with_bias else None
    x[0] = np.abs(x[0]).max()
    x[1] = 0
    kernel, layer = int8_kernel(kernels), layer_of(weight=weight, weight_scale=scale)
    kernel.process_weights_after_loading(layer)
    x_q, s_x = int8_rows(x)
    want = once(s_x * (x_q @ (weight * scale.astype(np.float64)).T), bias)
    np.testing.assert_array_equal(run(kernel, layer, x, bias), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("name", ["w2a2", "w4a4"])
def test_activations_are_rounded_to_the_learners_bits(kernels, name, group, dtype):
    import jax
    import jax.numpy as jnp
    import torch

    from qarl_jax import quant

    scheme = quant.parse_scheme(f"{name}:g{group}")
    x = jnp.asarray(ref.adversarial_rows(512), dtype)
    learners = jax.jit(lambda x: scheme.activations(x, numerics=quant.resolve("cpu")))(x)
    given = torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, dtype))
    rounded = kernels.Float64AsymmetricLinear.rounded(given, scheme.activation_bits, group)
    assert rounded.dtype == given.dtype
    want, found = np.array(learners, np.float32), rounded.float().numpy()
    np.testing.assert_array_equal(found[:-2].view(np.int32), want[:-2].view(np.int32))
    assert np.isnan([want[-2:, 7], found[-2:, 7]]).all()  # every output of such a row is NaN
    torch.testing.assert_close(
        kernels.Float64AsymmetricLinear.rounded(given[9], scheme.activation_bits, group), rounded[9], rtol=0, atol=0
    )


ASYMMETRIC = [n for n in ref.GRIDS if isinstance(ref.GRIDS[n], ref.Asym)]


@pytest.mark.parametrize(("name", "twice"), [*((name, 0) for name in ASYMMETRIC), ("w3a16_asym", 64), ("w2a2", 64)])
def test_layers_with_zero_points_are_one_float64_sum_of_fused_parts(kernels, monkeypatch, name, twice):
    import torch

    grid, widths, k, group = ref.GRIDS[name], [48, 16], 256, 32
    rng, scheme = np.random.default_rng(0), types.SimpleNamespace(group_size=group)
    masters = [rng.normal(size=(n, k)) * rng.uniform(0.5, 2, (n, 1)) * scale for n, scale in ((48, 1), (16, 9))]
    parts = [grid.arrays(w, scheme) for w in masters]
    assert parts[0]["tensor_scale"].item() != parts[1]["tensor_scale"].item()
    weight = np.concatenate([grid.value(part) for part in parts]).astype(np.float64)
    own = k - twice  # inputs; some of them are there once more
    low = 0 if "a16" in name else grid.bits  # bits of activations
    kernel = kernels.Float64AsymmetricLinear(grid.bits, group, name.endswith("midpoint"), twice / own, low)
    layer = torch.nn.Module()
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1)
    kernel.create_weights(layer, widths, own, weight_loader=None)
    index = np.where(np.arange(twice) < 40, rng.permutation(own)[:twice], own)  # those of index `own` are zeros
    if twice:
        layer.input_index.data.copy_(torch.from_numpy(index).expand(2, -1))
    names = dict(zip(("codes", "codes_low"), kernel.codes, strict=False))
    names |= {"scales": "weight_scale", "zero_points": kernel.zeros, "tensor_scale": "weight_tensor_scale"}
    for array, leaf in names.items():
        parameter, value = getattr(layer, leaf), np.concatenate([part[array] for part in parts])
        raw = torch.from_numpy(value.view(np.uint8)).view(torch.float8_e4m3fn) if array == "scales" else None
        parameter.data.copy_(torch.from_numpy(value).view(parameter.shape) if raw is None else raw)
    kernel.process_weights_after_loading(layer)
    assert sum(p.numel() * p.element_size() for p in layer.parameters()) == 64 * (
        k * grid.bits // 8 + 2 * k // group + 4
    ) + 4 * k * bool(twice)
    x, bias = activations(5, own), activations(1, 64, seed=8)[0]
    wide = np.concatenate([x, np.pad(x, ((0, 0), (0, 1)))[:, index]], axis=1).astype(np.float64)
    wide = ref.asym_rows(wide, low, group) if low else wide
    for decoded, b in ((2**18, None), (2**18, bias), (7 * k, bias)):  # outputs at once change nothing
        monkeypatch.setattr(kernels, "_DECODED", decoded)
        np.testing.assert_array_equal(run(kernel, layer, x, b), once(wide @ weight.T, b))
    np.testing.assert_array_equal(run(kernel, layer, x[3:4], bias), run(kernel, layer, x, bias)[3:4])


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


def test_neither_the_rows_nor_the_order_of_inputs_can_be_seen_in_a_layer(kernels):
    rng = np.random.default_rng(0)
    x, w = torch_of(activations(40, 4864)), torch_of((rng.normal(size=(64, 4864)) * 0.02).astype(BF16))
    order = rng.permutation(4864)
    whole = kernels.product(x, w.double(), None, wide=True)
    assert whole.equal(kernels.product(x[:, order], w[:, order].double(), None, wide=True))
    for rows in (1, 2, 5, 17):
        assert whole[:rows].equal(kernels.product(x[:rows], w.double(), None, wide=True))


def attention_world(layers, lengths, block=32, heads=4, kv_heads=2, width=32):
    """An attention layer, and queries, keys and values of sequences, with a cache whose blocks are scattered."""
    import torch

    impl = object.__new__(layers.Float64AttentionImpl)
    impl.scale = width**-0.5
    rng = torch.Generator().manual_seed(0)

    def normal(count, n):
        return torch.randn(count, n, width, generator=rng).bfloat16()

    sequences = [(normal(length, heads), normal(length, kv_heads), normal(length, kv_heads)) for length in lengths]
    most = max(-(-length // block) for length in lengths)
    numbers = torch.randperm(len(lengths) * most, generator=rng).view(len(lengths), most).int()
    cache = torch.full((len(lengths) * most, kv_heads, block, 2 * width), torch.nan).bfloat16()  # what is not written
    return impl, sequences, numbers, cache, block


def engine_step(impl, sequences, numbers, cache, block, spans):
    """One forward over positions [start, stop) of each sequence; the outputs, sequence by sequence."""
    import torch

    parts = [[part[start:stop] for part in s] for s, (start, stop) in zip(sequences, spans, strict=True)]
    q, k, v = (torch.cat(column) for column in zip(*parts, strict=True))
    slots = torch.cat(
        [
            numbers[i][torch.arange(start, stop) // block].long() * block + torch.arange(start, stop) % block
            for i, (start, stop) in enumerate(spans)
        ]
    )
    impl.do_kv_cache_update(None, k, v, cache, slots)
    counts = torch.tensor([stop - start for start, stop in spans])
    metadata = types.SimpleNamespace(
        query_start_loc=torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
        seq_lens=torch.tensor([stop for _, stop in spans]),
        block_table=numbers,
    )
    out = impl.forward(None, q, k, v, cache, metadata, torch.empty_like(q))
    return out.split(counts.tolist())


def test_a_token_attends_alike_in_a_prefill_a_chunk_a_mixed_batch_and_a_decoding_step(layers):
    import torch

    lengths = [70, 33, 300]
    world = attention_world(layers, lengths)
    prefilled = engine_step(*world, [(0, n) for n in lengths])
    assert all(out.isfinite().all() for out in prefilled)
    again = attention_world(layers, lengths)
    engine_step(*again, [(0, 40), (0, 32), (0, 299)])
    mixed = engine_step(*again, [(40, 69), (32, 33), (299, 300)])  # a chunk of a prompt beside two decoding steps
    last = engine_step(*again, [(69, 70), (32, 33), (299, 300)])
    for i, (start, stop) in enumerate([(40, 69), (32, 33), (299, 300)]):
        assert torch.equal(mixed[i], prefilled[i][start:stop])
        assert torch.equal(last[i], prefilled[i][-1:])
    q, k, v = (part.double() for part in world[1][0])
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = torch.einsum("tnh,snh->nts", q, k) * 32**-0.5
    p = torch.softmax(scores.masked_fill(~torch.ones(70, 70, dtype=torch.bool).tril(), -torch.inf), dim=-1)
    assert torch.equal(prefilled[0], torch.einsum("nts,snh->tnh", p, v).float().bfloat16())


def test_the_stretched_frequencies_of_llama_are_the_learners(layers):
    from qarl_jax.models.hf.config import RopeScaling
    from qarl_jax.models.layers import rope_frequencies

    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    live = types.SimpleNamespace(rotary_dim=128, orig_max_position=8192, scaling_factor=8.0, **scaling)
    want = RopeScaling(factor=8.0, original_max_position_embeddings=8192, **scaling)
    config = types.SimpleNamespace(head_dim=128, rope_theta=5e5, rope_scaling=want)
    np.testing.assert_array_equal(layers.llama3_frequencies(live, 5e5).numpy(), rope_frequencies(config))


@pytest.mark.parametrize("renormalize", [False, True])
def test_of_equal_router_logits_the_lower_expert_comes_first_as_in_the_learner(layers, renormalize):
    import torch

    logits = np.random.default_rng(0).integers(0, 3, (64, 16)).astype(np.float32)
    weights, experts = layers._softmax_topk(torch.from_numpy(logits), 4, renormalize)
    chosen, wanted = jax.lax.top_k(logits, 4)
    np.testing.assert_array_equal(experts.numpy(), wanted)
    among = np.exp(np.asarray(chosen if renormalize else logits, np.float64))
    np.testing.assert_allclose(
        weights, np.exp(np.asarray(chosen, np.float64)) / among.sum(-1, keepdims=True), rtol=1e-6
    )
