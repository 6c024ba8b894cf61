# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The grouped products of experts against float64 and int64, under Pallas' interpreter and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from qarl_jax import quant
from qarl_jax.kernels import experts_triton
from qarl_jax.kernels.experts_triton import Tile

SMALL = Tile(m=16, n=32, k=16)
on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs JAX on a GPU (JAX_PLATFORMS=cuda,cpu)")
# M, N, K and the groups' rows: sizes no tile divides, rows behind all groups, empty groups, everything in one
CASES = [
    (70, 45, 36, (10, 0, 33, 20)),
    (64, 64, 32, (64,)),
    (50, 32, 16, (0, 0, 50, 0)),
    (40, 33, 70, (1, 16, 0, 15, 7, 1)),
    (24, 32, 32, (0, 0)),
]
LARGE = [(4096, 768, 2048, (1000, 0, 1, 127, 129, 2000, 500)), (2048, 2048, 768, (0, 2048)), (300, 200, 328, (99, 101))]


def operands(m, n, k, groups, dtype):
    rng = np.random.default_rng(m + n + k)

    def draw(*shape):
        return jnp.asarray(rng.integers(-127, 128, shape) if dtype == jnp.int8 else rng.normal(size=shape), dtype)

    return draw(m, k), draw(groups, n, k), draw(m, n)


def wide(x):
    return np.asarray(x).astype(np.int64 if x.dtype == jnp.int8 else np.float64)


def group_of(m, sizes):
    return np.repeat(np.arange(len(sizes) + 1), [*sizes, m - sum(sizes)])


def reference(x, w, sizes):
    group = group_of(len(x), sizes)
    out = np.zeros((len(x), w.shape[1]), wide(x).dtype)
    for i in range(len(sizes)):
        out[group == i] = wide(x)[group == i] @ wide(w)[i].T
    return out


def check_product(m, n, k, sizes, dtype, **options):
    x, w, _ = operands(m, n, k, len(sizes), dtype)
    want = reference(x, w, sizes)
    counts = jnp.array(sizes, jnp.int32)
    out = jnp.int32 if dtype == jnp.int8 else jnp.float32
    got = jax.jit(lambda *a: experts_triton.product(*a, out, **options))(x, w, counts)
    assert got.dtype == out
    if dtype == jnp.int8:
        np.testing.assert_array_equal(np.asarray(got), want)
    else:
        np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=1e-6 * k)
    assert not np.asarray(got)[sum(sizes) :].any()


def check_gradient(m, n, k, sizes, **options):
    x, _, dy = operands(m, n, k, len(sizes), jnp.bfloat16)
    counts = jnp.array(sizes, jnp.int32)
    got = jax.jit(lambda *a: experts_triton.weight_gradient(*a, jnp.float32, **options))(dy, x, counts)
    group = group_of(m, sizes)
    want = np.stack([wide(dy)[group == i].T @ wide(x)[group == i] for i in range(len(sizes))])
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=2e-6 * m)
    assert not np.asarray(got)[[size == 0 for size in sizes]].any()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16])
def test_each_row_is_multiplied_with_its_groups_weight(case, dtype):
    check_product(*case, dtype, tile=SMALL, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_weights_gradient_sums_over_a_groups_rows_alone(case):
    check_gradient(*case, tile=SMALL, interpret=True)


def test_rows_outside_a_group_may_hold_anything():
    x, _, dy = operands(40, 32, 32, 2, jnp.bfloat16)
    counts = jnp.array([10, 14], jnp.int32)
    spoiled = [a.at[24:].set(jnp.nan) for a in (dy, x)]
    want, got = (
        experts_triton.weight_gradient(*a, counts, jnp.float32, tile=SMALL, interpret=True) for a in ((dy, x), spoiled)
    )
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_float32_and_meshes_that_cut_are_left_to_the_compiler():
    bf16, f32 = (jax.ShapeDtypeStruct((8, 8), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    one, eight = (jax.make_mesh((n,), ("x",), devices=jax.devices()[:n]) for n in (1, len(jax.devices())))
    with jax.set_mesh(one):
        assert experts_triton.serves(bf16, bf16)
        assert not experts_triton.serves(bf16, f32)
    if eight.size > 1:
        with jax.set_mesh(eight):
            assert not experts_triton.serves(bf16, bf16)
            inside = []
            cut = jax.shard_map(lambda x: inside.append(experts_triton.serves(x, x)), in_specs=P(), out_specs=None)
            jax.eval_shape(cut, bf16)
            assert inside == [True], "each device has arrays of its own there"


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_on_a_gpu(case):
    for dtype in (jnp.int8, jnp.bfloat16):
        check_product(*case, dtype)
    check_gradient(*case)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16", "fp8"])
def test_experts_on_a_gpu_are_the_compilers(scheme, monkeypatch):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((512, 256), (5, 384, 256)))
    config, sizes = quant.parse_scheme(scheme, 128), jnp.array([100, 0, 150, 12, 250], jnp.int32)
    qt = None if config is None else quant.quantize(w, config)

    def results():
        jax.clear_caches()
        y, pull = jax.vjp(lambda x, w: quant.expert_dot(x, w, qt, sizes), x, w)
        return [np.asarray(a, np.float64) for a in (y, *pull(y))]

    got = results()
    monkeypatch.setattr(experts_triton, "serves", lambda *operands: False)
    for a, b in zip(got, results(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7, atol=2**-7 * np.abs(b).max())
