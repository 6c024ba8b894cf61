# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A split layer is the layer: its floats to an ulp, and its codes exactly, on random and on adversarial weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.numerics.float32 import divide, round_half_up
from qarl_jax.quant import splitting
from qarl_jax.types import UserError
from tests.reference import quant_reference as ref

GROUP, INPUTS = 32, 128
RNG = np.random.default_rng(0)
TAILED = RNG.standard_t(2, size=(64, INPUTS)) * 0.05
WEIGHTS = {
    "normal": RNG.normal(size=(64, INPUTS)),
    "heavy_tailed": TAILED,
    "one_sided": np.abs(TAILED),
    "huge_beside_tiny": TAILED * 10.0 ** RNG.integers(-12, 6, TAILED.shape),
    # Every half, quarter and eighth of a step of 3 (two bits, range 9), and the floats beside them.
    "ties": np.clip(np.resize(np.arange(-3, 6.01, 3 / 16), (64, INPUTS)), -3, 6),
    "beside_ties": np.resize(np.arange(-3, 6.01, 3 / 4), (64, INPUTS)) * (1 + 2.0**-8 * RNG.integers(-1, 2, (64, 1))),
    "constant": np.full((64, INPUTS), 0.7),
    "zero": np.zeros((64, INPUTS)),
    "powers_of_two": 2.0 ** RNG.integers(-30, 30, (64, INPUTS)),
}
each_weight = pytest.mark.parametrize("kind", WEIGHTS)


def case(kind, bits):
    """(weight, scheme's QTensor, its steps per group, an index of some inputs)."""
    w = jnp.asarray(ref.bf(WEIGHTS[kind]))
    qt = quant.quantize(w, quant.parse_scheme(f"w{bits}a16_asym:g{GROUP}"))
    index = jnp.asarray(np.sort(RNG.permutation(INPUTS)[:GROUP]), jnp.int32)
    return w, qt, qt.scheme.steps(qt), index


def codes_at(w, steps):
    return np.asarray(round_half_up(divide(w, jnp.broadcast_to(steps, w.shape))), np.int64)


@each_weight
def test_the_halves_of_a_weight_add_up_to_it_within_an_ulp_of_itself_or_its_step(kind):
    w, _, steps, index = case(kind, 2)
    halves = np.asarray(splitting.split(w, steps, index), np.float64)
    own = np.asarray(w)[:, index]
    total = halves[:, index] + halves[:, INPUTS:]
    size = np.maximum(np.abs(own), np.asarray(steps)[:, np.asarray(index) // GROUP]).astype(np.float32)
    assert (np.abs(total - own) <= np.spacing(size)).all()
    rest = np.setdiff1d(np.arange(INPUTS), index)
    np.testing.assert_array_equal(halves[:, rest], np.asarray(w)[:, rest])
    np.testing.assert_allclose(
        splitting.merged(jnp.asarray(halves, jnp.float32), index), w, atol=float(size.max()) * 2**-23
    )


@each_weight
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_of_the_halves_add_up_to_the_layers_own_and_lie_on_its_grid(kind, bits):
    w, qt, steps, index = case(kind, bits)
    halves = splitting.split(w, steps, index)
    step = jnp.take(steps, index // GROUP, axis=1)
    zeros = np.repeat(np.asarray(qt.arrays["zero_points"], np.int64) >> (8 - bits), GROUP, 1)[:, index]
    whole = np.asarray(qt.scheme.codes(qt), np.int64)[:, index] - zeros
    first, second = codes_at(halves[:, index], step), codes_at(halves[:, INPUTS:], step)
    np.testing.assert_array_equal(first + second, whole)
    for part in (first, second):
        assert ((part + zeros >= 0) & (part + zeros < 2**bits)).all(), "a half would be clipped"


def test_ties_to_even_would_break_the_identity():
    w, _, steps, index = case("ties", 2)
    halves, step = splitting.split(w, steps, index), np.asarray(steps)[:, np.asarray(index) // GROUP]
    even = [np.rint(np.asarray(part) / step) for part in (halves[:, index], halves[:, INPUTS:], w[:, index])]
    assert (even[0] + even[1] != even[2]).any()


def test_halving_alone_errs_four_times_as_much_in_squares():
    u = RNG.uniform(-100, 100, 100_000)
    half_up = np.floor(u / 2 - 0.25 + 0.5) + np.floor(u / 2 + 0.25 + 0.5)
    naive = 2 * np.floor(u / 2 + 0.5)
    assert ((naive - u) ** 2).mean() / ((half_up - u) ** 2).mean() == pytest.approx(4, rel=0.02)


@pytest.mark.slow
def test_a_split_layer_computes_what_the_layer_did_and_errs_less_than_with_halving_alone():
    w, x = RNG.normal(size=(48, INPUTS)).astype(np.float32) * 0.05, RNG.normal(size=(64, INPUTS)).astype(np.float32)
    x[:, [5, 40, 77, 100]] *= 20
    w[:, [5, 40, 77, 100]] *= 10
    scheme = quant.parse_scheme(f"w2a16_asym:g{GROUP}")
    qt = quant.quantize(w, scheme)
    count = splitting.number(INPUTS, 0.05, 3, 4, GROUP)
    index = splitting.chosen(splitting.scores(jnp.linalg.norm(jnp.asarray(x), axis=0), jnp.asarray(w)), count)
    assert count == GROUP
    assert {5, 40, 77, 100} <= set(np.asarray(index).tolist())
    wider, apart = splitting.duplicated(jnp.asarray(x), index), splitting.split(jnp.asarray(w), scheme.steps(qt), index)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    np.testing.assert_allclose(
        np.asarray(wider, np.float64) @ np.asarray(apart, np.float64).T, exact, rtol=1e-5, atol=1e-5
    )

    def error(w):
        return np.square(np.asarray(quant.dot(wider, w, quant.quantize(w, scheme))) - exact).mean()

    assert error(apart) < error(splitting.split(jnp.asarray(w), 0 * scheme.steps(qt), index))


def test_the_share_grows_linearly_with_depth_in_whole_groups():
    assert [splitting.number(1024, 0.25, layer, 5, 32) for layer in range(5)] == [0, 64, 128, 192, 256]
    assert [splitting.number(1024, 0.01, layer, 3, 32) for layer in range(3)] == [0, 32, 32]
    assert [splitting.Splitting(0.05, 32).places(inputs) for inputs in (576, 4096, 12288)] == [32, 256, 640]
    with pytest.raises(UserError, match="between 0 and 1"):
        splitting.number(1024, 1.5, 0, 3, 32)
    with pytest.raises(UserError, match="no multiple of the group"):
        splitting.number(1000, 0.1, 0, 3, 32)
