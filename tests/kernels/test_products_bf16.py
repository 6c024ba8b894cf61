# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: bfloat16 products split along K as the engine's, under the interpreter of Pallas (numpy adds up
a part there), and as programs lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qarl_bridge.protocol import split_k

from qarl_jax.kernels import product_hopper
from qarl_jax.kernels.product_hopper import FLOAT, FLOAT_SPLIT
from tests.reference.one_layer import interpreter


def operands(m, n, k):
    rng = np.random.default_rng(k)
    numbers = [rng.standard_normal(shape) for shape in ((m, k), (n, k), (n,))]
    return jnp.asarray(numbers[0], jnp.bfloat16), jnp.asarray(numbers[1], jnp.bfloat16), jnp.asarray(numbers[2])


def in_parts(x, w, b, splits):
    x, w = (np.asarray(a, np.float32) for a in (x, w))
    sums = [x[:, first:end] @ w[:, first:end].T for first, end in split_k.cuts(x.shape[1], splits)]
    return functools.reduce(np.add, sums) + np.asarray(b, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "splits", "tile"),
    [
        ((128, 256, 512), 1, FLOAT),
        ((128, 128, 1024), 2, FLOAT_SPLIT),
        ((70, 96, 1152), 2, None),  # nine steps: the second part is filled up to five, rows and outputs to a tile
        ((70, 24, 1536), 3, None),  # an adapter's
        ((130, 96, 2048), 4, None),  # of two tiles of outputs
    ],
    ids=str,
)
def test_parts_of_k_are_added_in_order_and_rounded_once_with_the_bias(shape, splits, tile):
    x, w, b = operands(*shape)
    b = b if splits <= 2 else None
    got = product_hopper.float_product(x, w, b, splits=splits, tile=tile, blocks=2, interpret=interpreter())
    want = in_parts(x, w, 0 if b is None else b, splits)
    assert got.shape == want.shape
    assert got.dtype == jnp.bfloat16
    # numpy's order within a part is the interpreter's but for blocks: an ulp of float32 moves few roundings.
    assert np.mean(np.asarray(got) == np.asarray(jnp.asarray(want).astype(jnp.bfloat16))) > 0.999
    assert np.abs(np.asarray(got, np.float32) - want).max() <= np.abs(want).max() * 2**-8


@pytest.mark.slow
@pytest.mark.parametrize("with_bias", [False, True])
def test_factors_meet_the_sum_which_is_rounded_before_the_bias(with_bias):
    rng = np.random.default_rng(0)
    # Exact sums, which no order changes.
    x, w = (jnp.asarray(rng.integers(-4, 5, shape), jnp.bfloat16) for shape in ((70, 1152), (96, 1152)))
    factor, b = (jnp.asarray(rng.standard_normal(96), jnp.float32) for _ in range(2))
    bias = b if with_bias else None
    got = product_hopper.float_product(x, w, bias, factor, splits=2, blocks=2, interpret=interpreter())
    want = jnp.asarray(in_parts(x, w, 0 * b, 2) * np.asarray(factor)).astype(jnp.bfloat16)
    want = (want.astype(jnp.float32) + b[None]).astype(jnp.bfloat16) if with_bias else want
    np.testing.assert_array_equal(got, want)


def test_many_parts_with_a_bias_are_refused():
    x, w, b = operands(64, 64, 512)
    with pytest.raises(ValueError, match="4 parts takes no bias"):
        product_hopper.float_product(x, w, b, splits=4)


@pytest.mark.slow
@pytest.mark.parametrize(("splits", "factors"), [(1, False), (1, True), (2, False), (2, True), (8, False)])
def test_the_kernel_lowers_for_a_gpu(splits, factors):
    x, w = (jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16) for _ in range(2))
    vectors = [jax.ShapeDtypeStruct((256,), jnp.float32)] * (2 if factors else 0)
    program = jax.jit(functools.partial(product_hopper.float_product, splits=splits)).trace(x, w, *vectors)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "hopper_bf16_256x1024" in text
