# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels of w8a8's forward, equal to the scheme's own operations to the last bit: under Pallas' interpreter, on a
mesh, and on a Hopper GPU. Which kernels run is a field of `Numerics`; here every combination does. fp8 has its own
file, test_products_fp8.py."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.kernels import product_hopper, product_triton, products
from qarl_jax.kernels.product_triton import TILES, Tile, tile_for
from qarl_jax.numerics import rows
from qarl_jax.numerics.engine import KERNELS, Kernels
from qarl_jax.numerics.float32 import round_to
from qarl_jax.quant import resolve
from qarl_jax.quant.dot import Dense
from qarl_jax.quant.schemes import w8a8
from qarl_jax.runtime import mesh as sharding
from tests.reference import one_layer
from tests.reference.one_layer import CUDA, assert_equal_bits

TRITON = Kernels(w8a8="triton")
BOTH = Kernels(w8a8="triton", w8a8_rows="triton")
MOSAIC = Kernels(w8a8="hopper")
on_hopper = pytest.mark.skipif(not sharding.is_hopper(), reason="needs JAX on a Hopper GPU (JAX_PLATFORMS=cuda,cpu)")
SMALL = Tile(m=32, n=32, k=32, group=2)


def operands(m, n, k, bias=False, dtype=jnp.bfloat16):
    """x [M, K] with rows of very different sizes, one of them zero, a quantized weight and a bias or None."""
    rng = np.random.default_rng(m + n + k)
    x = rng.standard_normal((m, k)) * np.exp(2 * rng.standard_normal((m, 1)))
    x[m // 2] = 0
    w = quant.quantize(jnp.asarray(rng.standard_normal((n, k)) * 0.05, jnp.float32), w8a8.Config())
    return jnp.asarray(x, dtype), w, jnp.asarray(rng.standard_normal((1, n)), jnp.float32) if bias else None


@functools.partial(jax.jit, static_argnames="numerics")
def scheme(x, qt, bias, numerics=CUDA):
    """What w8a8 computes without a kernel."""
    y, used = w8a8._forward(x, qt.qvalue, qt.scale, bias, numerics=numerics, product=Dense())
    return round_to(y, jnp.bfloat16), used


# M, N and K that the tile divides, that it does not, and that are smaller than it
@pytest.mark.parametrize("shape", [(64, 96, 64), (70, 45, 100), (7, 5, 20)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_equals_the_scheme_to_the_last_bit(shape, bias):
    x, qt, b = operands(*shape, bias=bias)
    want, (x_q, s_x) = scheme(x, qt, b)
    got = product_triton.product(
        x_q, s_x, qt.qvalue, qt.scale[:, 0], None if b is None else b[0], tile=SMALL, interpret=True
    )
    assert_equal_bits(got, want)


@pytest.mark.slow
def test_every_tile_and_order_of_tiles_gives_the_same_bits():
    x, qt, _ = operands(150, 100, 96)
    want, (x_q, s_x) = scheme(x, qt, None)
    tiles = [SMALL, Tile(m=64, n=16, k=32, group=1), Tile(m=16, n=64, k=64, group=3)]
    for tile in tiles:
        got = product_triton.product(x_q, s_x, qt.qvalue, qt.scale[:, 0], tile=tile, interpret=True)
        assert_equal_bits(got, want)


def test_the_largest_sums_do_not_overflow():
    k = 4096
    x_q, w_q = jnp.full((16, k), -128, jnp.int8), jnp.full((16, k), -128, jnp.int8)
    ones = jnp.ones((16, 1), jnp.float32)
    y = product_triton.product(x_q, ones, w_q, ones[:, 0], tile=Tile(m=16, n=16, k=128), interpret=True)
    assert np.all(np.asarray(y, np.float32) == 2.0**14 * k)


# a power of two; a sum of two, of three; one that is padded; a single element
@pytest.mark.slow
@pytest.mark.parametrize("k", [512, 768, 1792, 300, 1])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_activation_codes_and_scales_are_those_of_the_scheme(k, dtype):
    x, _, _ = operands(9, 4, k, dtype=dtype)
    assert_equal_bits(product_triton.quantize_rows(x, interpret=True), jax.jit(rows.quantize_rows)(x))


@pytest.mark.parametrize("kernels", [TRITON, BOTH], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_equals_the_scheme_and_keeps_its_codes_for_the_backward(kernels, bias):
    x, qt, b = operands(40, 24, 48, bias=bias)
    got = products.layer(x, qt.qvalue, qt.scale, b, numerics=taking(kernels), interpret=True)
    assert_equal_bits(got, scheme(x, qt, b))


def taking(kernels, numerics=CUDA):
    """That arithmetic, computed by these kernels."""
    return dataclasses.replace(numerics, kernels=kernels)


def served(x, outputs, numerics=None):
    """Whether the kernels chosen take a layer of so many outputs."""
    return products.serves("w8a8", x, (outputs, 64), numerics or taking(BOTH))


def test_outputs_and_gradients_of_a_layer_are_the_same_with_and_without(monkeypatch):
    x, qt, b = operands(40, 24, 48, bias=True)
    master = jnp.zeros((24, 48), jnp.float32)
    run = one_layer.with_gradient(qt, taking(BOTH))
    want = jax.jit(run)(x, master, b[0])
    one_layer.interpreted(monkeypatch, True)
    got = jax.jit(lambda *args: run(*args))(x, master, b[0])
    assert_equal_bits(got, want)
    assert float(jnp.abs(got[1][1]).max()) > 0


def lowered(platform, experts=False, kernels=MOSAIC):
    """A layer of 512 rows with its gradient, as StableHLO."""
    trace = one_layer.traced(512, 256, 512, w8a8.Config(), (200, 312) if experts else (), taking(kernels))
    return trace.lower(lowering_platforms=(platform,)).as_text()


# Two blocks, each with more than one tile.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((384, 512, 512), product_hopper.CHOSEN),
        ((128, 512, 256), product_hopper.Tile(split="n", out_n=32, steps=2)),
        ((256, 256, 384), product_hopper.Tile(n=128, width=1, slots=1, steps=3, delay=1)),
    ],
    ids=str,
)
def test_hoppers_product_equals_the_scheme_to_the_last_bit(shape, tile):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # has no public name

    x, qt, _ = operands(*shape)
    want, (x_q, s_x) = scheme(x, qt, None)
    got = product_hopper.product(
        x_q, s_x, qt.qvalue, qt.scale[:, 0], tile=tile, blocks=2, interpret=InterpretGPUParams()
    )
    assert_equal_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(70, 96, 200), (3, 130, 128)], ids=str)
def test_hoppers_product_takes_a_bias_and_fills_up_what_no_tile_divides(shape):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    x, qt, b = operands(*shape, bias=True)
    want, (x_q, s_x) = scheme(x, qt, b)
    got = product_hopper.product(x_q, s_x, qt.qvalue, qt.scale[:, 0], b[0], blocks=2, interpret=InterpretGPUParams())
    assert_equal_bits(got, want)


@pytest.mark.slow
def test_hoppers_product_takes_whole_tiles_without_a_bias_and_tritons_the_rest(monkeypatch):
    taken = []

    def record(x_q, s_x, w_q, s_w, **options):
        taken.append((*x_q.shape, w_q.shape[0]))
        return product_triton.product(x_q, s_x, w_q, s_w, interpret=True, **options)

    monkeypatch.setattr(product_hopper, "product", record)
    for shape, bias in (((128, 256, 512), False), ((128, 256, 512), True), ((128, 255, 512), False)):
        x, qt, b = operands(*shape, bias=bias)
        got = products.layer(x, qt.qvalue, qt.scale, b, numerics=taking(MOSAIC), interpret=True)
        assert_equal_bits(got, scheme(x, qt, b))
    assert taken == [(128, 512, 256)]


def test_only_a_dense_layer_for_cuda_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(products, "serves", lambda *_: True)
    text = lowered("cuda", kernels=BOTH)
    assert "int8_product" in text
    assert "int8_rows" in text
    assert "tensor<512x256xi32>" not in text  # the accumulator is nowhere in memory
    text = lowered("cuda")
    assert "mosaic_gpu" in text
    assert "tensor<512x256xi32>" not in text
    for text in (lowered("cpu"), lowered("tpu"), lowered("cuda", experts=True)):
        assert "int8_product" not in text
        assert "mosaic_gpu" not in text
        assert "xi32>" in text
        assert "dot" in text


def test_they_serve_bfloat16_rows_on_one_hopper_gpu_and_no_profile_of_a_cpu(monkeypatch):
    x = jax.ShapeDtypeStruct((products.LEAST_ROWS, 64), jnp.bfloat16)
    assert not served(x, 64)  # a CPU

    class Gpu:
        compute_capability = "9.0"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert served(x, 64)
    assert served(x, 64, resolve("plain"))
    assert not served(jax.ShapeDtypeStruct(x.shape, jnp.float32), 64)
    assert not served(jax.ShapeDtypeStruct((x.shape[0] - 1, 64), x.dtype), 64)
    assert not served(x, 64, resolve("cpu"))
    monkeypatch.setattr(Gpu, "compute_capability", "8.0")
    assert not served(x, 64)
    monkeypatch.setattr(Gpu, "compute_capability", "9.0")
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not served(x, 64)  # two GPUs and nothing that says how arrays lie on them
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert not served(x, 64, taking(KERNELS["xla"]))


needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@needs_eight
def test_a_mesh_is_served_where_it_divides_the_layer(monkeypatch):
    monkeypatch.setattr(products, "LEAST_ROWS", 16)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Gpu", (), {"compute_capability": "9.0"})])
    with jax.set_mesh(sharding.make_mesh(data=2, fsdp=2, tensor=2)):
        x = jax.ShapeDtypeStruct((64, 48), jnp.bfloat16)
        assert served(x, 32)
        assert not served(x, 33)
        assert not served(jax.ShapeDtypeStruct((66, 48), jnp.bfloat16), 32)
        assert not served(jax.ShapeDtypeStruct((60, 48), jnp.bfloat16), 32)  # 15 rows a device


@needs_eight
@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_on_a_mesh_equals_one_device_and_moves_nothing(bias):
    x, qt, b = operands(48, 32, 64, bias=bias)
    want = scheme(x, qt, b)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    spec = jax.sharding.PartitionSpec

    def put(array, *axes):
        return None if array is None else jax.device_put(array, jax.sharding.NamedSharding(mesh, spec(*axes)))

    args = put(x, ("data", "fsdp"), None), put(qt.qvalue, "tensor", None), put(qt.scale, "tensor", None)
    layer = functools.partial(products.layer, numerics=taking(BOTH), interpret=True)
    with jax.set_mesh(mesh):
        compiled = jax.jit(layer).lower(*args, put(b, None, "tensor")).compile()
        got = compiled(*args, put(b, None, "tensor"))
    assert_equal_bits(got, want)
    assert got[0].sharding.spec == spec(("data", "fsdp"), "tensor")
    text = compiled.as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))


def test_the_table_has_a_tile_for_every_shape():
    for m, n in ((1, 1), (127, 4096), (128, 128), (16384, 24576)):
        assert tile_for(m, n) in [tile for *_, tile in TILES]
    tile = product_hopper.CHOSEN
    part_m, _ = tile.part
    needed = tile.steps * tile.k * (tile.m + tile.n) + 2 * tile.slots * part_m * tile.out_n * 2
    assert needed <= 227 * 1024
    for *_, tile in TILES:
        sizes = (tile.m, tile.n, tile.k)
        assert all(size & (size - 1) == 0 for size in sizes)
        assert tile.stages * tile.k * (tile.m + tile.n) <= 227 * 1024  # a Hopper multiprocessor's shared memory


def target():
    """A sharding on an H200 that need not be here, or a skip."""
    if not os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        pytest.skip("needs jax's CUDA plugin, and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 where there is no GPU")
    from benchmarks.memory import absent_gpus

    return jax.sharding.NamedSharding(absent_gpus(), jax.sharding.PartitionSpec())


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(16384, 24576, 4096), (1000, 6184, 4176)], ids=str)
@pytest.mark.parametrize("kernels", [BOTH, MOSAIC], ids=str)
def test_the_kernels_compile_for_an_h200(shape, bias, kernels):
    where = target()
    m, n, k = shape

    def placed(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=where)

    args = placed(jnp.bfloat16, m, k), placed(jnp.int8, n, k), placed(jnp.float32, n, 1)
    b = placed(jnp.float32, 1, n) if bias else None
    layer = functools.partial(products.layer, numerics=taking(kernels))
    compiled = jax.jit(layer).trace(*args, b).lower(lowering_platforms=("cuda",)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < m * n  # no int32 [M, N]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(16384, 6144, 4096), (1000, 6184, 4176), (512, 4096, 12288)], ids=str)
@pytest.mark.parametrize("kernels", [TRITON, BOTH, MOSAIC], ids=str)
def test_on_a_hopper_gpu(shape, bias, kernels):
    x, qt, b = operands(*shape, bias=bias)
    layer = jax.jit(functools.partial(products.layer, numerics=taking(kernels)))
    assert_equal_bits(layer(x, qt.qvalue, qt.scale, b), scheme(x, qt, b))
    for tile in (Tile(m=128, n=256, warps=8), dataclasses.replace(Tile(), group=1)):
        x_q, s_x = jax.jit(rows.quantize_rows)(x)
        product = jax.jit(functools.partial(product_triton.product, tile=tile))
        got = product(x_q, s_x, qt.qvalue, qt.scale[:, 0], None if b is None else b[0])
        assert_equal_bits(got, scheme(x, qt, b)[0])
