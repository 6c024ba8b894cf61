# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels of w8a8's forward, equal to the scheme's own operations to the last bit: under Pallas' interpreter, on a
mesh, and on a Hopper GPU. fp8 has its own file, test_products_fp8.py."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.kernels import product_hopper, products
from qarl_jax.kernels.product_hopper import CHOSEN, Tile
from qarl_jax.numerics.float32 import round_to
from qarl_jax.quant import resolve
from qarl_jax.quant.contractions import Dense
from qarl_jax.quant.schemes import w8a8
from qarl_jax.runtime import mesh as sharding
from tests.reference import one_layer
from tests.reference.one_layer import CUDA, assert_equal_bits, interpreter, on_hopper

XLA = dataclasses.replace(CUDA, own_kernels=False)


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
    used = qt.scheme.activations(x, numerics=numerics)
    y = qt.scheme.multiply(used, qt, bias, numerics=numerics, product=Dense())
    return round_to(y, jnp.bfloat16), used


def served(x, outputs, numerics=None):
    """Whether the kernels chosen take a layer of so many outputs."""
    return products.serves("int8", x, (outputs, 64), numerics or CUDA)


@pytest.mark.slow
def test_outputs_and_gradients_of_a_layer_are_the_same_with_and_without(monkeypatch):
    x, qt, b = operands(40, 24, 48, bias=True)
    master = jnp.zeros((24, 48), jnp.float32)
    run = one_layer.with_gradient(qt)
    want = jax.jit(run)(x, master, b[0])
    one_layer.interpreted(monkeypatch)
    got = jax.jit(lambda *args: run(*args))(x, master, b[0])
    assert_equal_bits(got, want)
    assert float(jnp.abs(got[1][1]).max()) > 0


def lowered(platform, experts=False, numerics=CUDA):
    """A layer of 512 rows with its gradient, as StableHLO."""
    trace = one_layer.traced(512, 256, 512, w8a8.Config(), (200, 312) if experts else (), numerics)
    return trace.lower(lowering_platforms=(platform,)).as_text()


# Two blocks, each with more than one tile.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((384, 512, 512), CHOSEN),
        pytest.param((128, 512, 256), Tile(split="n", out_n=32, steps=2), marks=pytest.mark.nightly),
        pytest.param((256, 256, 384), Tile(n=128, width=1, slots=1, steps=3), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_hoppers_product_equals_the_scheme_to_the_last_bit(shape, tile):
    x, qt, _ = operands(*shape)
    want, (x_q, s_x) = scheme(x, qt, None)
    got = product_hopper.product(x_q, s_x, qt.codes, qt.scales[:, 0], tile=tile, blocks=2, interpret=interpreter())
    assert_equal_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(70, 96, 200), (3, 130, 128)], ids=str)
def test_hoppers_product_takes_a_bias_and_fills_up_what_no_tile_divides(shape):
    x, qt, b = operands(*shape, bias=True)
    want, (x_q, s_x) = scheme(x, qt, b)
    got = product_hopper.product(x_q, s_x, qt.codes, qt.scales[:, 0], b[0], blocks=2, interpret=interpreter())
    assert_equal_bits(got, want)


@pytest.mark.slow
def test_the_largest_sums_do_not_overflow():
    k = 4096
    x_q, w_q = (jnp.full((size, k), -128, jnp.int8) for size in (64, 128))
    ones = jnp.ones((128, 1), jnp.float32)
    y = product_hopper.product(x_q, ones[:64], w_q, ones[:, 0], blocks=1, interpret=interpreter())
    assert np.all(np.asarray(y, np.float32) == 2.0**14 * k)


@pytest.mark.slow
def test_only_a_dense_layer_for_cuda_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(products, "serves", lambda *_: True)
    text = lowered("cuda")
    assert "mosaic_gpu" in text
    assert "tensor<512x256xi32>" not in text  # the accumulator is nowhere in memory
    for text in (lowered("cpu"), lowered("tpu"), lowered("cuda", experts=True)):
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
    assert not served(x, 64, XLA)


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


def test_a_tile_fits_a_multiprocessor():
    part_m, _ = CHOSEN.part
    needed = CHOSEN.steps * CHOSEN.k * (CHOSEN.m + CHOSEN.n) + 2 * CHOSEN.slots * part_m * CHOSEN.out_n * 2
    assert needed <= 227 * 1024


def target():
    """A sharding on an H200 that need not be here, or a skip."""
    if not os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        pytest.skip("needs jax's CUDA plugin, and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 where there is no GPU")
    from benchmarks.memory import absent_gpus

    return jax.sharding.NamedSharding(absent_gpus(), jax.sharding.PartitionSpec())


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(16384, 24576, 4096), (1000, 6184, 4176)], ids=str)
def test_the_kernel_compiles_for_an_h200(shape, bias):
    where = target()
    m, n, k = shape

    def placed(dtype, *dims):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=where)

    args = placed(jnp.int8, m, k), placed(jnp.float32, m, 1), placed(jnp.int8, n, k), placed(jnp.float32, n, 1)
    b = placed(jnp.float32, 1, n) if bias else None
    compiled = jax.jit(products.eight_bit).trace(*args, b).lower(lowering_platforms=("cuda",)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < m * n  # no int32 [M, N]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(16384, 6144, 4096), (1000, 6184, 4176), (512, 4096, 12288)], ids=str)
def test_on_a_hopper_gpu(shape, bias):
    x, qt, b = operands(*shape, bias=bias)
    want, used = scheme(x, qt, b)
    assert_equal_bits(jax.jit(products.eight_bit)(*used, qt.codes, qt.scales, b), want)
