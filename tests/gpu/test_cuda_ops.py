# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic, on a Hopper GPU: the engine's products are the same for every number of rows, and the learner's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from qarl_bridge.protocol import split_k

from qarl_jax import quant
from qarl_jax.models.layers import lookup
from qarl_jax.quant.schemes import nvfp4_words
from tests.reference import quant_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "shape", [(2560, 4096), (6144, 2560), (896, 4864), (1152, 896), (5120, 2048), (16384, 512)], ids=str
)
def test_a_rows_product_depends_on_no_other_row_and_is_the_learners(shape):
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine.cuda import asym_ops, ops

    from qarl_jax.kernels import product_hopper

    n, k = shape
    keys = jax.random.split(jax.random.key(n + k), 3)
    x = jax.random.normal(keys[0], (2048, k), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (n, k)) * 0.03).astype(jnp.bfloat16)
    x_t, w_t = (torch.from_dlpack(a) for a in (x, w))
    whole = ops.product(x_t, w_t)
    for rows in (1, 17, 64, 128, 200, 513):
        assert torch.equal(ops.product(x_t[:rows], w_t), whole[:rows])
    words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), device="cuda").to(torch.int32)
    codes = ((words[..., None] >> (4 * torch.arange(8, device="cuda"))) & 15).reshape(n, k) - 8
    words = ops.interleaved(words)
    for group in (32, 128):
        scale = torch.rand(k // group, n, device="cuda").bfloat16()
        served = (codes.float() * scale.t().float().repeat_interleave(group, 1)).bfloat16()
        assert torch.equal(ops.dequantized(words, scale), served)
        dense = ops.product(x_t, served)
        for rows in (1, 17, 64, 128, 200, 2048):
            assert torch.equal(ops.product(x_t[:rows], words, scale), dense[:rows])
        if asym_ops.in_whole(256, k, split_k.splits_of(n, k)):
            for tile in ((16, 64, 256, 4, 3), (64, 128, 256, 8, 2)):
                assert torch.equal(ops.product(x_t[:200], words, scale, tile=tile), dense[:200])
    splits = split_k.splits_of(n, k)
    mine = jax.jit(functools.partial(product_hopper.float_product, splits=splits))(x, w)
    assert torch.equal(torch.from_dlpack(mine), whole)


def layer(shape, least):
    """x [2048, K], w [N, K] whose rows' sizes fall from 0.1 to `least`, bias [N]; bfloat16."""
    n, k = shape
    keys = jax.random.split(jax.random.key(n + k), 3)
    x = jax.random.normal(keys[0], (2048, k), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (n, k)) * jnp.geomspace(0.1, least, n)[:, None]).astype(jnp.bfloat16)
    return x, w, jax.random.normal(keys[2], (n,), jnp.bfloat16)


def learners(x, w, qt, bias):
    """The layer's output in the learner, which mirrors vLLM on CUDA."""
    numerics = quant.resolve("cuda").of_layer(*w.shape)
    return jax.jit(lambda x: quant.dot(x, w, qt, bias, numerics=numerics))(x)


@pytest.mark.parametrize("shape", [(2560, 4096), (6144, 2560), (1152, 896), (5120, 2048), (16384, 512)], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_nvfp4_layers_depend_on_no_other_row_and_are_the_learners(shape, biased):
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine.cuda import asym_ops, nvfp4, ops

    n, k = shape
    x, w, bias = layer(shape, least=1e-7)
    bias = bias if biased else None
    qt = quant.quantize(w, quant.parse_scheme("nvfp4"))
    scales = torch.from_dlpack(jax.lax.bitcast_convert_type(qt.scales, jnp.uint8)).view(torch.float8_e4m3fn)
    words, turned = nvfp4.served(torch.from_dlpack(qt.codes), scales)
    factor = (1 / torch.from_dlpack(qt.arrays["divisor"])).reshape(1).expand(n).contiguous()
    decoded = ops.dequantized(words, turned)
    assert not decoded[-1].any()  # flushed
    assert torch.equal(decoded.float(), torch.from_dlpack(quant.schemes.nvfp4.decoded(qt)))
    assert torch.equal(words, torch.from_dlpack(nvfp4_words.words(qt.codes)))
    assert torch.equal(turned, torch.from_dlpack(nvfp4_words.turned(qt.scales)))
    x_t, bias_t = torch.from_dlpack(x), None if bias is None else torch.from_dlpack(bias)
    whole = ops.product(x_t, decoded, bias=bias_t, factor=factor)
    for rows in (1, 17, 64, 128, 200, 2048):
        assert torch.equal(ops.product(x_t[:rows], words, turned, bias_t, factor=factor), whole[:rows])
    if asym_ops.in_whole(256, k, split_k.splits_of(n, k)):
        for tile in ((16, 64, 256, 4, 3), (64, 128, 256, 8, 2)):
            found = ops.product(x_t[:200], words, turned, bias_t, factor=factor, tile=tile)
            assert torch.equal(found, whole[:200])
    assert torch.equal(torch.from_dlpack(learners(x, w, qt, bias)), whole)


def words_of(qt, shape):
    """Converts a QTensor with zero points, of a weight [N, K] of `shape`, to the kernel's layout."""
    import torch
    from qarl_bridge.engine.cuda import asym_ops

    (n, k), scheme = shape, qt.scheme
    planes = [(torch.from_dlpack(qt.arrays[a.name]), 8 // a.inputs) for a in scheme.wire.arrays if "codes" in a.name]
    codes = [asym_ops.interleaved(*plane) for plane in planes] + [None]
    scales = torch.from_dlpack(jax.lax.bitcast_convert_type(qt.scales, jnp.uint8)).view(torch.float8_e4m3fn)
    levels = asym_ops.levels_of(scales, torch.from_dlpack(qt.arrays["zero_points"]), k)
    steps = torch.from_dlpack(qt.arrays["tensor_scale"]).reshape(1).expand(n).bfloat16()
    return asym_ops.Words(codes[0], codes[1], levels, steps, scheme.bits, scheme.group_size, scheme.middle)


@pytest.mark.parametrize("shape", [(2560, 4096), (6144, 2560), (1152, 896)], ids=str)
@pytest.mark.parametrize(
    "name",
    ["w2a16_asym:g32", "w2a16_midpoint:g64", "w3a16_asym:g128", "w4a16_asym:g16", "w8a16_asym", "w2a2:g32", "w4a4:g64"],
)
def test_layers_with_zero_points_depend_on_no_other_row_and_are_the_learners(shape, name):
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine.cuda import asym_ops, ops

    x, w, bias = layer(shape, least=1e-4)
    scheme = quant.parse_scheme(name)
    qt = quant.quantize(w, scheme)
    words = words_of(qt, shape)
    decoded = words.decoded()
    assert torch.equal(decoded, torch.from_dlpack(quant.dequantize(qt)))
    x_t, bias_t = torch.from_dlpack(x), torch.from_dlpack(bias)
    if scheme.activation_bits:
        x_t = asym_ops.rounded_rows(x_t, scheme.activation_bits, scheme.group_size)
    whole = ops.product(x_t, decoded, bias=bias_t)
    for rows in (1, 8, 17, 64, 128, 200, 512):
        assert torch.equal(ops.product(x_t[:rows], words, bias=bias_t), whole[:rows])
    assert torch.equal(torch.from_dlpack(learners(x, w, qt, bias)), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["w2a2:g16", "w2a2:g32", "w4a4:g64", "w4a4:g128"])
def test_activations_on_a_grid_depend_on_no_other_row_and_are_the_learners(name, dtype):
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine.cuda import asym_ops

    scheme = quant.parse_scheme(name)
    for k in (512, 4096, 12288, 18944):
        x = jnp.asarray(quant_reference.adversarial_rows(k), dtype)
        mine = jax.jit(lambda x: scheme.activations(x, numerics=quant.resolve("cuda")))(x)
        x_t, mine = torch.from_dlpack(x), torch.from_dlpack(mine)
        found = asym_ops.rounded_rows(x_t, scheme.activation_bits, scheme.group_size)
        assert torch.equal(found[:-2].float().view(torch.int32), mine[:-2].float().view(torch.int32)), k
        assert found[-2:, 7].isnan().all()
        for row in (0, 5, 17):
            one = asym_ops.rounded_rows(x_t[row : row + 1], scheme.activation_bits, scheme.group_size)
            assert torch.equal(one, found[row : row + 1])


@pytest.mark.parametrize("shape", [(32064, 4096), (4160, 896)], ids=str)  # of a vocabulary in vLLM's units of 64
@pytest.mark.parametrize("name", ["w4a16:g32", "w4a16:g128", "w4a16:g-1", "w4a16_asym:g32", "w4a16_asym:g128"])
def test_a_table_of_codes_has_the_learners_rows_and_the_logits_of_what_it_stands_for(shape, name):
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine.cuda import ops

    x, w, _ = layer(shape, least=1e-3)
    scheme = quant.parse_scheme(name)
    qt = quant.quantize(w, scheme)
    tokens = torch.randint(0, shape[0], (777,), device="cuda")
    if name.startswith("w4a16:"):
        held = ops.interleaved(torch.from_dlpack(qt.codes)), torch.from_dlpack(qt.scales).t().contiguous()
    else:
        held = words_of(qt, shape), None
    learners = lookup(w, qt, jnp.from_dlpack(tokens.int()), jnp.dtype(jnp.bfloat16))
    assert torch.equal(ops.rows_of(*held, tokens), torch.from_dlpack(learners))
    x_t, served = torch.from_dlpack(x), torch.from_dlpack(quant.decoded(qt, jnp.bfloat16))
    whole = ops.product(x_t, served, out_dtype=torch.float32, splits=1)
    for rows in (1, 8, 17, 64, 128, 200, 513, 2048):
        assert torch.equal(ops.product(x_t[:rows], *held, out_dtype=torch.float32, splits=1), whole[:rows])


@pytest.mark.parametrize(("rank", "inputs"), [(8, 4096), (32, 4096), (64, 4096), (32, 12288), (16, 1408)])
def test_an_adapters_products_are_the_learners_and_a_fused_layers_are_its_parts(rank, inputs):
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine.cuda import ops

    outputs, k = (4096, 1024, 1024), inputs
    many, one_part = quant.resolve("cuda").of_adapter(k), dataclasses.replace(quant.resolve("cuda"), splits=1)
    dot = jax.jit(lambda x, w: quant.dot(x, w, w, numerics=many if x.shape[1] == k else one_part))
    keys = iter(jax.random.split(jax.random.key(rank), 7))
    x = jax.random.normal(next(keys), (513, k), jnp.bfloat16)
    a = [(jax.random.normal(next(keys), (rank, k)) / 64).astype(jnp.bfloat16) for _ in outputs]
    b = [(jax.random.normal(next(keys), (n, rank)) / 8).astype(jnp.bfloat16) for n in outputs]
    mine = jnp.concatenate([dot(dot(x, one), other) for one, other in zip(a, b, strict=True)], axis=1)
    x_t, stacked = torch.from_dlpack(x), torch.cat([torch.from_dlpack(one) for one in a])
    diagonal = torch.block_diag(*(torch.from_dlpack(one).float() for one in b)).bfloat16()
    for rows in (1, 17, 128, 513):
        h = ops.product(x_t[:rows], stacked, splits=many.splits)
        d = ops.product(h, diagonal, splits=1)
        assert torch.equal(d, torch.from_dlpack(mine)[:rows])
        y = torch.where(torch.arange(len(d.T), device="cuda") < 64, -0.0, torch.randn_like(d))
        h[-1] = 0  # where d is 0, y is y: -0 too
        both = ops.product(h, diagonal, splits=1, added=y)
        assert torch.equal(both.view(torch.int16), (y - (0.0 - ops.product(h, diagonal, splits=1))).view(torch.int16))
