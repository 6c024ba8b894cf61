# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Float operations that must survive the compiler, against numpy's IEEE arithmetic, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_jax.numerics.float32 import (
    divide,
    from_float64,
    in_float64,
    matmul_precision,
    pack_int4,
    round_bf16,
    round_to,
    unpack_int4,
)
from tests.reference import quant_reference as ref

COUNT = 500_000
TINY = np.finfo(np.float32).tiny


def assert_quotients(a, b, got):
    with np.errstate(all="ignore"):
        want = (a / b).astype(np.float32)
    # XLA counts subnormals as zero; numpy does not.
    normal = np.ones(want.shape, bool)
    for x in (a, b, want):
        normal &= (np.abs(x) >= TINY) | (x == 0) | ~np.isfinite(x)
    same = (want.view(np.int32) == np.asarray(got).view(np.int32)) | (np.isnan(want) & np.isnan(got))
    wrong = np.nonzero(normal & ~same)[0]
    assert wrong.size == 0, [(a[i], b[i], want[i], got[i]) for i in wrong[:3]]


def random_bits(rng):
    return rng.integers(0, 2**32, COUNT, dtype=np.uint32).view(np.float32)


def near_midpoints(rng):
    """Quotients as close to the middle of two floats as a 24-bit dividend allows."""
    b = rng.uniform(1, 2, COUNT).astype(np.float32)
    q = (rng.integers(2**23, 2**24, COUNT) * 2 + 1) / 2.0**24
    return (q * b.astype(np.float64)).astype(np.float32), b


def near_code_ties(rng):
    """Weights that sit on half codes of their float32 scale, where one ulp decides the code."""
    s = (np.abs(rng.normal(size=COUNT)) / 127.5).astype(np.float32)
    w = ((rng.integers(-128, 127, COUNT) + 0.5) * s.astype(np.float64)).astype(np.float32)
    return w, s


def powers_of_two(rng):
    a = np.ldexp(np.float32(1), rng.integers(-30, 30, COUNT)).astype(np.float32)
    return a, np.nextafter(np.float32(1), rng.choice(np.float32([0, 2]), COUNT)).astype(np.float32)


def test_divide_is_ieee_on_any_floats_and_at_near_ties():
    rng = np.random.default_rng(0)
    f = jax.jit(divide)
    a = random_bits(rng)
    pairs = [(a, random_bits(rng)), near_midpoints(rng), near_code_ties(rng), powers_of_two(rng)]
    for a, b in pairs:
        assert_quotients(a, b, f(a, b))


@pytest.mark.parametrize("constant", [127.0, 127.5, 7.5, 448.0])
def test_divide_by_a_constant_and_of_a_constant_is_ieee_under_jit(constant):
    a = np.random.default_rng(1).normal(size=COUNT).astype(np.float32)
    b = np.full_like(a, constant)
    assert_quotients(a, b, jax.jit(lambda a: divide(a, jnp.full_like(a, constant)))(a))
    assert_quotients(b, a, jax.jit(lambda a: divide(jnp.full_like(a, constant), a))(a))


def test_divide_by_a_broadcast_column_is_ieee_under_jit():
    rng = np.random.default_rng(2)
    a = rng.normal(size=(1000, 128)).astype(np.float32)
    b = np.abs(rng.normal(size=(1000, 1))).astype(np.float32)
    got = np.asarray(jax.jit(divide)(a, b))
    assert_quotients(a.ravel(), np.broadcast_to(b, a.shape).ravel(), got.ravel())


def test_a_plain_jitted_division_by_127_is_not_ieee():
    """Why `divide` exists. If this ever fails, XLA stopped rewriting divisions."""
    a = np.random.default_rng(3).normal(size=COUNT).astype(np.float32)
    assert (np.asarray(jax.jit(lambda a: a / 127.0)(a)) != a / np.float32(127)).mean() > 0.01


def test_divide_propagates_zero_infinity_and_nan():
    a = np.float32([0, -0.0, 1, -1, np.inf, 1, np.nan, 0, np.inf])
    b = np.float32([3, 3, 0, 0, 2, -np.inf, 1, 0, np.inf])
    assert_quotients(a, b, jax.jit(divide)(a, b))


def test_round_to_survives_a_cast_back_under_jit():
    x = np.random.default_rng(4).normal(size=COUNT).astype(np.float32)
    back = jax.jit(lambda x: round_to(x, jnp.bfloat16).astype(jnp.float32))(x)
    np.testing.assert_array_equal(back, ref.bf(x))
    np.testing.assert_array_equal(jax.jit(round_bf16)(x), ref.bf(x))
    np.testing.assert_array_equal(jax.jit(lambda x: round_to(x, jnp.float32))(x), x)


def test_round_bf16_takes_ties_to_even_and_keeps_infinities():
    x = np.float32([257, 259, -257, np.inf, 3.3895314e38, 1e-30])
    np.testing.assert_array_equal(jax.jit(round_bf16)(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.slow
@given(st.lists(st.integers(-8, 7), min_size=8, max_size=8), st.integers(1, 4), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_pack_int4_round_trips_in_wire_order(nibbles, words, rank):
    codes = np.array(nibbles * words, np.int8)
    codes = codes.reshape((1,) * rank + (8 * words,))
    packed = jax.jit(pack_int4)(jnp.asarray(codes))  # one program per shape, and not one per operation
    np.testing.assert_array_equal(packed, ref.pack(codes))
    np.testing.assert_array_equal(jax.jit(unpack_int4)(packed), codes)


def test_element_8j_plus_i_sits_in_bits_4i_of_word_j():
    codes = jnp.full((16,), -8, jnp.int8).at[8 + 3].set(7)
    assert [int(x) for x in pack_int4(codes)] == [0, 0xF << 12]


def test_what_is_computed_in_float64_is_rounded_to_float32_once_and_has_float32s_gradient():
    rng = np.random.default_rng(3)
    x, y = (rng.normal(size=1000).astype(np.float32) for _ in range(2))

    def formula(x, y):
        return jnp.exp(x) * y + jnp.sum(x * y)

    got, gradient = jax.jit(jax.value_and_grad(lambda x, y: in_float64(formula)(x, y).sum(), (0, 1)))(x, y)
    wide = np.exp(x.astype(np.float64)) * y.astype(np.float64) + np.sum(x.astype(np.float64) * y.astype(np.float64))
    np.testing.assert_array_equal(jax.jit(in_float64(formula))(x, y), wide.astype(np.float32))
    usual = jax.jit(jax.value_and_grad(lambda x, y: formula(x, y).sum(), (0, 1)))(x, y)[1]
    for mine, theirs in zip(gradient, usual, strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert not jax.config.jax_enable_x64
    assert jnp.ones(2).dtype == got.dtype == jnp.float32


def test_the_rounding_to_float32_is_not_dropped_before_another_float64_step():
    x = np.random.default_rng(4).normal(size=4096).astype(np.float32)

    @jax.jit
    def twice(x):
        return from_float64(lambda y: y * 3, from_float64(lambda x: x / 3, x))

    want = ((x.astype(np.float64) / 3).astype(np.float32).astype(np.float64) * 3).astype(np.float32)
    np.testing.assert_array_equal(twice(x), want)
    assert (want != x).any()


def test_float32_products_are_exact_unless_jax_is_told_otherwise():
    def precision(gradient: bool = False) -> str:
        x = jnp.ones((4, 4), jnp.float32)
        product = lambda x: jnp.matmul(x, x, precision=matmul_precision(x.dtype, gradient=gradient))  # noqa: E731
        return jax.jit(product).lower(x).as_text()

    assert matmul_precision(jnp.bfloat16) is None
    assert "precision = [HIGHEST, HIGHEST]" in precision()
    assert "precision = [HIGH, HIGH]" in precision(gradient=True)
    with jax.default_matmul_precision("tensorfloat32"):
        assert "precision = [HIGH, HIGH]" in precision()
