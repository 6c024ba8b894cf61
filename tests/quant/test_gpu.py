# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What must hold on a CUDA device, whose own float32 division is not IEEE: run with JAX_PLATFORMS=cuda,cpu."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.numerics.float32 import divide, round_to
from qarl_jax.numerics.rows import quantize_rows
from qarl_jax.numerics.stochastic import round_stochastically
from qarl_jax.optim import eight_bit
from qarl_jax.quant.schemes.fp8 import to_e4m3
from tests.reference import quant_reference as ref

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs JAX on a GPU (JAX_PLATFORMS=cuda,cpu)"),
]
CONFIGS = [*map(str, (config() for config in quant.SCHEMES.values())), "w4a16:g-1"]


def gaussian(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)))).astype(np.float32)


def test_divide_is_ieee_on_the_gpu():
    a, b = gaussian(4000, 1000), np.abs(gaussian(4000, 1000, seed=1))
    np.testing.assert_array_equal(np.asarray(jax.jit(divide)(a, b)), a / b)
    for constant in (127.0, 127.5, 7.5, 448.0):
        got = jax.jit(lambda a: divide(a, jnp.full_like(a, constant)))(a)  # noqa: B023
        np.testing.assert_array_equal(np.asarray(got), a / np.float32(constant))


def test_roundings_survive_a_cast_back_on_the_gpu():
    x = gaussian(1000, 1000)
    back = jax.jit(lambda x: round_to(x, jnp.bfloat16).astype(jnp.float32))(x)
    np.testing.assert_array_equal(np.asarray(back), ref.bf(x))
    back = jax.jit(lambda x: to_e4m3(x).astype(jnp.float32))(x)
    np.testing.assert_array_equal(np.asarray(back), x.clip(-448, 448).astype(ref.F8).astype(np.float32))


def test_stochastic_rounding_to_bfloat16_gives_the_bits_of_a_cpu():
    x, rounded = gaussian(1024, 1024), jax.jit(round_stochastically)
    here, there = (rounded(jax.device_put(x, d), jnp.uint32(5)) for d in (jax.devices()[0], jax.devices("cpu")[0]))
    assert np.asarray(here).tobytes() == np.asarray(there).tobytes()


@pytest.mark.parametrize("grid", ["LINEAR", "SIGNED", "UNSIGNED"])
def test_codes_of_moments_are_a_cpus_but_where_a_logarithm_rounds_otherwise(grid):
    x, made = np.abs(gaussian(1024, 1000)), getattr(eight_bit, grid)
    x = x * np.where(np.random.default_rng(1).random(x.shape) < 0.5, -1, 1) if made.signed else x
    encoded = jax.jit(lambda x: eight_bit.encode(x, made, jnp.uint32(5)))
    here, there = (encoded(jax.device_put(x, d)) for d in (jax.devices()[0], jax.devices("cpu")[0]))
    assert np.asarray(here.scale).tobytes() == np.asarray(there.scale).tobytes()
    apart = np.abs(np.asarray(here.codes, np.int32) - np.asarray(there.codes, np.int32))
    assert apart.max() <= 1
    assert apart.mean() < 1e-3


@pytest.mark.parametrize("profile", quant.PROFILES)
def test_activation_codes_equal_numpys_on_the_gpu(profile):
    x = ref.bf(gaussian(8192, 512))
    n = quant.resolve(profile)
    rows = jax.jit(lambda x: quantize_rows(x, amax_floor=n.amax_floor))(jnp.asarray(x, jnp.bfloat16))
    for got, want in zip(rows, ref.int8_rows(x, profile), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("scheme", CONFIGS)
def test_weights_have_the_same_bytes_on_the_gpu_and_on_the_cpu(scheme):
    w, config = gaussian(1024, 1024) * 0.05, quant.parse_scheme(scheme)
    cpu = jax.devices("cpu")[0]
    here = quant.quantize(jnp.asarray(w), config)
    there = quant.quantize(jax.device_put(w, cpu), config)
    for name, array in there.arrays.items():
        assert np.asarray(here.arrays[name]).tobytes() == np.asarray(array).tobytes(), name


def test_w8a8_layers_equal_the_formula_bit_for_bit_on_the_gpu():
    for m, k, n in ((1, 256, 512), (33, 4096, 1024), (512, 1536, 256)):
        x, w = ref.bf(gaussian(m, k)), gaussian(n, k, seed=2) * 0.05
        codes, scale = ref.int8_weight(w)
        y = quant.dot(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w), quant.quantize(w, quant.parse_scheme("w8a8")))
        want = ref.bf(ref.w8a8_layer(x, codes, scale, "plain"))
        np.testing.assert_array_equal(np.asarray(y, np.float32), want)


@pytest.mark.parametrize("scheme", CONFIGS)
def test_layers_and_gradients_on_the_gpu_agree_with_the_cpu(scheme):
    x, w = jnp.asarray(gaussian(64, 256), jnp.bfloat16), jnp.asarray(gaussian(4, 128, 256, seed=3) * 0.05)
    config = quant.parse_scheme(scheme)

    def loss(x, w):
        qt = quant.quantize(w, config)
        y = quant.dot(x, w[0], jax.tree.map(lambda a: a[0], qt))
        z = quant.expert_dot(x, w, qt, jnp.array([10, 0, 30, 24], jnp.int32))
        return jnp.sum((y.astype(jnp.float32) + z.astype(jnp.float32)) ** 2), (y, z)

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    cpu = jax.devices("cpu")[0]
    here, there = run(x, w), run(jax.device_put(x, cpu), jax.device_put(w, cpu))
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 4e-3 * np.linalg.norm(b)
