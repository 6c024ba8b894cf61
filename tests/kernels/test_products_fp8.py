# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""fp8's product in a kernel of its own: its formula under Pallas' interpreter, where the sums are exact and no order of
theirs can matter; its instructions, compiled for an H200; on a Hopper GPU the tensor cores' own sums, which no CPU can
compute, against vLLM's kernel."""

import dataclasses
import functools
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qarl_jax import models, quant
from qarl_jax.kernels import product_hopper
from qarl_jax.kernels import products as fused
from qarl_jax.quant import resolve
from qarl_jax.quant.schemes import fp8
from qarl_jax.run import config
from qarl_jax.runtime.mesh import make_mesh
from tests.reference import one_layer, tiny
from tests.reference.one_layer import CUDA, assert_equal_bits, interpreter, on_hopper

LOW, NARROW, WIDE = product_hopper.LOW, product_hopper.NARROW, product_hopper.CHOSEN
nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def codes(m, n, k, bias=False):
    """(x_q, s_x, w_q, s_w [N], bias [N] or None): codes are integers, whose sums of products are exact."""
    rng = np.random.default_rng(m + n + k)
    x_q, w_q = (jnp.asarray(rng.integers(-8, 9, (size, k)), jnp.float8_e4m3fn) for size in (m, n))
    s_x, s_w = (jnp.asarray(rng.uniform(0.1, 3.0, shape), jnp.float32) for shape in ((m, 1), (n,)))
    return x_q, s_x, w_q, s_w, jnp.asarray(rng.standard_normal(n), jnp.float32) if bias else None


def formula(x_q, s_x, w_q, s_w, bias=None):
    """numpy's, of exact sums."""
    x_q, s_x, w_q, s_w = (np.asarray(a).astype(np.float32) for a in (x_q, s_x, w_q, s_w))
    scaled = s_w * (x_q @ w_q.T)
    y = s_x * scaled
    if bias is not None:
        y = (s_x.astype(np.float64) * scaled + np.asarray(bias, np.float64)).astype(np.float32)
    return y.astype(ml_dtypes.bfloat16)


# More than one tile to a block; more and fewer steps along K than are kept in flight; sizes that are filled up.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tile", "bias"),
    [
        ((1, 384, 384), LOW, True),
        nightly((64, 128, 128), LOW, False),
        nightly((70, 384, 1024), NARROW, True),
        ((65, 48, 400), NARROW, False),
        ((200, 512, 640), WIDE, True),
        nightly((128, 1024, 512), WIDE, False),
    ],
    ids=str,
)
def test_every_tile_equals_the_formula_where_the_sum_is_exact(shape, tile, bias):
    args = codes(*shape, bias=bias)
    assert product_hopper.tile_for(*shape[:2]) == tile
    got = product_hopper.product(*args, blocks=2, interpret=interpreter())
    assert_equal_bits(got, formula(*args))


def layer(k, n, bias):
    """(x, master, its weight quantized, bias or None) of 40 rows whose codes have exact sums."""
    rng = np.random.default_rng(k)

    def numbers(*shape):  # 448 times a power of two, an e4m3 integer in each: the scales are powers of two
        values = rng.integers(-8, 9, shape).astype(np.float32) * 32
        values[:, 0] = 448
        return values * 2.0 ** rng.integers(-3, 4, (shape[0], 1))

    w = jnp.asarray(numbers(n, k))
    b = jnp.asarray(rng.standard_normal(n), jnp.float32) if bias else None
    return jnp.asarray(numbers(40, k), jnp.bfloat16), w, quant.quantize(w, fp8.Config()), b


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_of_a_layer_are_the_same_with_and_without(monkeypatch, bias):
    x, master, qt, b = layer(48, 32, bias)
    run = one_layer.with_gradient(qt)
    want = jax.jit(run)(x, master, b)
    one_layer.interpreted(monkeypatch)
    ran = []
    product = product_hopper.product
    monkeypatch.setattr(product_hopper, "product", lambda *args, **options: ran.append(1) or product(*args, **options))
    got = jax.jit(lambda *args: run(*args))(x, master, b)
    assert ran
    assert_equal_bits(got, want)
    assert float(jnp.abs(got[1][1]).max()) > 0


def traced(experts=False, numerics=CUDA):
    """A layer of 96 rows with its gradient, for every platform."""
    return one_layer.traced(96, 256, 384, fp8.Config(), (60, 36) if experts else (), numerics)


def lowered(platform, numerics=CUDA):
    """The same as StableHLO."""
    return traced(numerics=numerics).lower(lowering_platforms=(platform,)).as_text()


def hopper(monkeypatch, devices=1):
    """As if there were such GPUs."""
    monkeypatch.setattr(fused, "is_hopper", lambda: True)
    monkeypatch.setattr(jax, "device_count", lambda: devices)


@pytest.mark.slow
def test_a_dense_layer_on_a_hopper_gpu_takes_the_kernel_where_it_is_chosen(monkeypatch):
    assert "mosaic_gpu" not in lowered("cuda")  # this process has none
    hopper(monkeypatch)
    text = lowered("cuda")
    assert text.count("custom_call @mosaic_gpu") == 1  # the forward; gradients are bfloat16
    assert "f8E4M3FN>) -> tensor<96x256xf32>" not in text
    text = lowered("cuda", dataclasses.replace(CUDA, own_kernels=False))
    assert "mosaic_gpu" not in text
    assert "f8E4M3FN>) -> tensor<96x256xf32>" in text
    assert "hopper_e4m3" in str(traced().jaxpr)
    assert "hopper_e4m3" not in str(traced(experts=True).jaxpr)
    for platform in ("cpu", "tpu"):
        assert "mosaic_gpu" not in lowered(platform)


def test_nothing_can_be_fused_to_a_kernels_result(monkeypatch):
    """XLA's dynamic-slice fusion takes a kernel along into the store of its result, and runs it again for others."""
    hopper(monkeypatch)
    qt = quant.quantize(jnp.ones((128, 256)), fp8.Config())
    traced = jax.jit(quant.dot.__wrapped__, static_argnames="numerics").trace(
        jnp.ones((128, 256), jnp.bfloat16), jnp.ones((128, 256)), qt, numerics=CUDA
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (result,) = re.findall(r"(%\S+) = stablehlo\.custom_call @mosaic_gpu", text)
    assert re.findall(rf"stablehlo\.(\w+) {result}\b", text) == ["optimization_barrier"]


def test_it_serves_few_rows_but_only_what_the_engines_kernel_multiplies_too(monkeypatch):
    def served(m=1, n=128, k=384, numerics=CUDA, dtype=jnp.bfloat16):
        return fused.serves("e4m3", jax.ShapeDtypeStruct((m, k), dtype), (n, k), numerics)

    assert not served()  # a CPU (other GPUs: test_products.py)
    hopper(monkeypatch)
    assert served()
    assert served(16384, 24576, 4096)
    assert served(n=640 + 16)
    assert not served(n=640 + 8)  # no product of CUTLASS
    assert not served(k=384 + 8)
    assert not served(dtype=jnp.float32)
    assert served(numerics=resolve("plain"))
    for profile in set(quant.PROFILES) - {"cuda", "plain"}:
        assert not served(numerics=resolve(profile))
    hopper(monkeypatch, devices=2)
    assert not served()  # two GPUs and nothing that says how arrays lie on them


@needs_eight
def test_a_mesh_is_served_where_it_divides_the_layer(monkeypatch):
    hopper(monkeypatch, devices=8)

    def served(m, n):
        return fused.serves("e4m3", jax.ShapeDtypeStruct((m, 48), jnp.bfloat16), (n, 48), CUDA)

    with jax.set_mesh(make_mesh(data=2, fsdp=2, tensor=2)):
        assert served(4, 32)
        assert not served(6, 32)
    with jax.set_mesh(make_mesh(tensor=3)):
        assert served(4, 48)
        assert not served(4, 32)


@needs_eight
@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_on_a_mesh_equals_one_device_and_moves_nothing(monkeypatch, bias):
    x_q, s_x, w_q, s_w, b = codes(48, 32, 64, bias=bias)
    shapes = []

    def product(x_q, s_x, w_q, s_w, bias=None, **_):  # the interpreter knows no mesh
        shapes.append((x_q.shape, w_q.shape))
        acc = jnp.einsum("mk,nk->mn", x_q.astype(jnp.float32), w_q.astype(jnp.float32))
        return (s_x * (s_w[None] * acc) + (0 if bias is None else bias[None])).astype(jnp.bfloat16)

    monkeypatch.setattr(product_hopper, "product", product)
    args = x_q, s_x, w_q, s_w[:, None], None if b is None else b[None]
    want = jax.jit(fused.eight_bit)(*args)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    spec = jax.sharding.PartitionSpec
    batch, weight, of_bias = spec(("data", "fsdp"), None), spec("tensor", None), spec(None, "tensor")
    placed = [
        None if array is None else jax.device_put(array, jax.sharding.NamedSharding(mesh, where))
        for array, where in zip(args, (batch, batch, weight, weight, of_bias), strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(fused.eight_bit).lower(*placed).compile()
        got = compiled(*placed)
    assert shapes == [((48, 64), (32, 64)), ((12, 64), (16, 64))]
    assert_equal_bits(got, want)
    assert got.sharding.spec == spec(("data", "fsdp"), "tensor")
    text = compiled.as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_a_run_can_do_without_kernels_and_another_in_the_same_process_with_them():
    path = ["model.path=assets/tiny-qwen3", "quant.kernels=xla"]
    mesh = make_mesh(fsdp=-1)
    without, _ = tiny.load_model(config.load("configs/quickstart.yaml", path), mesh)
    auto, _ = tiny.load_model(config.load("configs/quickstart.yaml", path[:1]), mesh)
    assert not models.config_of(without).numerics.own_kernels
    assert models.config_of(auto).numerics.own_kernels
    assert without != auto  # so that no program traced for one serves the other


def test_every_tile_fits_a_multiprocessor_and_its_instructions():
    for tile in (LOW, NARROW, WIDE):
        part_m, part_n = tile.part
        assert part_m % 64 == 0
        assert part_n % tile.out_n == 0
        inputs, written = tile.steps * tile.k * (tile.m + tile.n), 2 * tile.slots * part_m * tile.out_n * 2
        assert inputs + written <= 227 * 1024


def target():
    """A sharding on an H200 that need not be here, or a skip."""
    if not os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        pytest.skip("needs jax's CUDA plugin, and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 where there is no GPU")
    from benchmarks.memory import absent_gpus

    return jax.sharding.NamedSharding(absent_gpus(), jax.sharding.PartitionSpec())


# K, N of Qwen3-8B's layers and of the alignment experiment's policy: q, k (and v), o, gate (and up), down
BIG = [(4096, 4096), (4096, 1024), (4096, 12288), (12288, 4096)]
SMALL = [(384, 384), (384, 128), (384, 1024), (1024, 384)]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 100, 16384])  # each with kernels of its own, which a process compiles once
def test_the_kernel_compiles_for_an_h200_and_adds_nothing_outside_the_tensor_cores(monkeypatch, capfd, rows, bias):
    where = target()
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")

    def placed(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=where)

    for k, n in BIG + SMALL:
        args = placed(jnp.float8_e4m3fn, rows, k), placed(jnp.float32, rows, 1), placed(jnp.float8_e4m3fn, n, k)
        b = placed(jnp.float32, 1, n) if bias else None
        traced = jax.jit(fused.eight_bit).trace(*args, placed(jnp.float32, n, 1), b)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        tile = product_hopper.tile_for(rows, n)
        if rows % tile.m == 0:
            assert compiled.memory_analysis().temp_size_in_bytes == 0
        ptx = capfd.readouterr().out
        products = set(re.findall(r"wgmma\.mma_async\S*", ptx))
        assert products == {f"wgmma.mma_async.sync.aligned.m64n{tile.part[1]}k32.f32.e4m3.e4m3"}
        assert bias or not re.search(r"\b(add|fma|sub)\S*\.f32", ptx)


@pytest.mark.slow
def test_promoted_sums_are_added_up_outside_the_tensor_cores(monkeypatch, capfd):
    where = target()
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    shapes = (
        (jnp.float8_e4m3fn, 512, 1024),
        (jnp.float32, 512, 1),
        (jnp.float8_e4m3fn, 256, 1024),
        (jnp.float32, 256, 1),
    )
    args = [jax.ShapeDtypeStruct(dims, dtype, sharding=where) for dtype, *dims in shapes]
    run = functools.partial(fused.eight_bit, bias=None, promoted=True)
    jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).compile()
    ptx = capfd.readouterr().out
    assert len(re.findall(r"wgmma\.mma_async", ptx)) % (NARROW.k // 32) == 0
    assert len(re.findall(r"\badd\.f32", ptx)) >= NARROW.part[0] * NARROW.part[1] // 128  # one of each of a warpgroup


# ---- on a Hopper GPU -------------------------------------------------------------------------------------------------


def gaussian(m, n, k):
    """(x_q, s_x, w_q, s_w [N]) of a layer of Gaussian activations and weights."""
    rng = np.random.default_rng(m + n + k)
    x = jnp.asarray(rng.standard_normal((m, k)) * np.exp(rng.standard_normal((m, 1))), jnp.bfloat16)
    qt = quant.quantize(jnp.asarray(rng.standard_normal((n, k)) * 0.05, jnp.float32), fp8.Config())
    x_q, s_x = jax.jit(functools.partial(fp8.Config().activations, numerics=CUDA))(x)
    return x_q, s_x, qt.codes, qt.scales[:, 0]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 384, 384), (100, 640, 1024), (2048, 6144, 4096), (128, 512, 640)], ids=str)
def test_no_tile_and_no_zeros_at_the_end_change_a_bit_on_a_hopper_gpu(shape):
    args = gaussian(*shape)
    want = jax.jit(product_hopper.product)(*args)
    for tile in (LOW, NARROW, WIDE):
        got = jax.jit(functools.partial(product_hopper.product, tile=tile))(*args)
        assert_equal_bits(got, want)
    x_q, s_x, w_q, s_w = args
    longer = [product_hopper._filled(a, 1, shape[2] + 256) for a in (x_q, w_q)]
    assert_equal_bits(jax.jit(product_hopper.product)(longer[0], s_x, longer[1], s_w), want)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 384, 384), (100, 640, 1024), (2048, 6144, 4096), (65, 48, 400)], ids=str)
def test_the_formula_where_the_sum_is_exact_on_a_hopper_gpu(shape, bias):
    args = codes(*shape, bias=bias)
    assert_equal_bits(jax.jit(product_hopper.product)(*args), formula(*args))


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kn", [(384, 640), (384, 2048), (1024, 384), (4096, 6144), (12288, 4096), (400, 48)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 64, 65, 128, 300, 2048])
def test_every_output_equals_vllms_kernel_on_a_hopper_gpu(rows, kn, bias):
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("vllm._custom_ops")
    from benchmarks.gpu_linears import from_torch, to_torch

    k, n = kn
    # For up to 64 rows the kernel would swap its operands, and the scales with them: the bridge fills fewer up to 65.
    args = gaussian(max(rows, 65), n, k)
    b = np.random.default_rng(0).standard_normal(n).astype(ml_dtypes.bfloat16) if bias else None
    ours = [None if b is None else jnp.asarray(b, jnp.float32)]
    x_q, s_x, w_q, s_w = (to_torch(torch, np.asarray(a)) for a in args)
    theirs = None if b is None else to_torch(torch, b)
    want = ops.cutlass_scaled_mm(x_q, w_q.t(), scale_a=s_x, scale_b=s_w[:, None], out_dtype=torch.bfloat16, bias=theirs)
    got = jax.jit(product_hopper.product)(args[0][:rows], args[1][:rows], *args[2:], *ours)
    np.testing.assert_array_equal(np.asarray(got, np.float32), from_torch(torch, want)[:rows])


@on_hopper
@pytest.mark.gpu
@pytest.mark.skipif(jax.device_count() != 1, reason="without a mesh one GPU alone is served")
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_the_kernels_product_on_a_hopper_gpu(monkeypatch, bias):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 100, 384)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((640, 384)) * 0.05, jnp.float32)
    b = jnp.asarray(rng.standard_normal(640), jnp.bfloat16) if bias else None
    qt = quant.quantize(w, fp8.Config())
    got = quant.dot.__wrapped__(x, w, qt, b, numerics=CUDA)
    x_q, s_x = jax.jit(functools.partial(fp8.Config().activations, numerics=CUDA))(x.reshape(300, 384))
    operands = x_q, s_x, qt.codes, qt.scales[:, 0], None if b is None else b.astype(jnp.float32)
    assert_equal_bits(got.reshape(300, 640), jax.jit(product_hopper.product)(*operands))
