# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about eight-bit moments: how far a code is from what it stands for, and that rounding is unbiased."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from qarl_jax.optim import eight_bit
from qarl_jax.optim.eight_bit import BLOCK, LINEAR, SIGNED, UNSIGNED, Blocks

GRIDS = {"linear": LINEAR, "signed": SIGNED, "unsigned": UNSIGNED}
LOGARITHMIC = {"signed": SIGNED, "unsigned": UNSIGNED}


def spread_over_decades(seed, *shape, signed=True):
    """Log-normal magnitudes over some ten octaves."""
    rng = np.random.default_rng(seed)
    x = np.exp(1.5 * rng.standard_normal(shape)).astype(np.float32)
    return x * rng.choice([-1, 1], shape).astype(np.float32) if signed else x


def of(grid, seed, *shape):
    return spread_over_decades(seed, *shape, signed=grid.signed)


def largest(x):
    """Each element's block's largest magnitude, block by block."""
    out = np.empty_like(x)
    for start in range(0, x.shape[-1], BLOCK):
        part = slice(start, start + BLOCK)
        out[..., part] = np.abs(x[..., part]).max(-1, keepdims=True)
    return out


def smallest_level(grid):
    return 2.0**-grid.octaves


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_a_byte_per_element_and_a_float32_scale_per_block_the_last_one_short(grid, size):
    x = of(grid, 0, 3, size)
    blocks = eight_bit.encode(jnp.asarray(x), grid)
    assert blocks.codes.shape == (3, size)
    assert blocks.codes.dtype.name == grid.dtype
    assert blocks.scale.shape == (3, -(-size // BLOCK))
    np.testing.assert_array_equal(blocks.scale, largest(x)[:, ::BLOCK])
    empty = eight_bit.zeros(x.shape, grid)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), empty) == jax.tree.map(lambda a: (a.shape, a.dtype), blocks)
    np.testing.assert_array_equal(eight_bit.decode(empty, grid), np.zeros_like(x))


def test_a_linear_code_is_off_by_half_a_step_at_most():
    x = of(LINEAR, 1, 8, 600)
    found = eight_bit.decode(eight_bit.encode(jnp.asarray(x), LINEAR), LINEAR)
    assert (np.abs(found - x) <= largest(x) / 254 * (1 + 1e-5)).all()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("grid", LOGARITHMIC.values(), ids=LOGARITHMIC)
def test_a_logarithmic_code_is_off_by_a_share_of_its_element_at_most(grid, seed):
    x = of(grid, 2, 8, 600)
    found = np.asarray(eight_bit.decode(eight_bit.encode(jnp.asarray(x), grid, seed), grid))
    inside = np.abs(x) >= smallest_level(grid) * largest(x)
    assert inside.mean() > 0.9
    # Levels are 2^step apart: stochastic rounding goes to either neighbour, rounding to nearest half of the way.
    gap = 2**grid.step - 1
    allowed = gap if seed is not None else gap / 2
    assert (np.abs(found - x)[inside] <= allowed * np.abs(x)[inside] * (1 + 1e-4)).all()
    assert (np.sign(found) == np.sign(x))[inside].all()


@pytest.mark.slow
def test_the_first_moments_grid_has_a_zero_and_the_second_moments_has_none():
    x = np.full((1, BLOCK), 1e-12, np.float32)
    x[0, 0] = 1.0
    for seed in range(20):
        first, second = (
            np.asarray(eight_bit.decode(eight_bit.encode(jnp.asarray(x), grid, seed), grid))[0, 1:]
            for grid in (SIGNED, UNSIGNED)
        )
        levels = np.array([0.0, 2.0**-16])
        assert (np.abs(first[:, None] - levels) <= 1e-5 * levels).any(1).all()
        np.testing.assert_allclose(second, np.full(BLOCK - 1, 2.0**-24), rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_every_level_is_its_own_code(grid):
    codes = np.arange(-127, 128) if grid.signed else np.arange(256)
    codes = codes.astype(grid.dtype)[None]
    blocks = Blocks(codes=jnp.asarray(codes), scale=jnp.full((1, 1), 3.0, jnp.float32))
    again = eight_bit.encode(eight_bit.decode(blocks, grid), grid)
    np.testing.assert_array_equal(again.codes, codes)
    np.testing.assert_array_equal(again.scale, blocks.scale)


@pytest.mark.slow
@pytest.mark.parametrize("grid", LOGARITHMIC.values(), ids=LOGARITHMIC)
def test_stochastic_rounding_to_levels_is_right_on_average(grid):
    x = of(grid, 3, 2, BLOCK)
    x[0, :8] = smallest_level(grid) * np.abs(x[0]).max() * (0.3 if grid.signed else 1.5)
    seeds = jnp.arange(2000, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    draw = jax.jit(jax.vmap(lambda s: eight_bit.decode(eight_bit.encode(jnp.asarray(x), grid, s), grid)))
    many = np.asarray(draw(seeds), np.float64)
    # A share p = (x - low) / (high - low) goes up: the mean deviates by sqrt((x - low) (high - x) / 2000). Where p is
    # so small that only a few draws do, five more or less are no surprise.
    codes = np.arange(grid.top + 1, dtype=np.float32)
    levels = np.asarray(grid.level(jnp.asarray(codes)), np.float64)
    y = np.abs(x) / largest(x)
    index = np.clip(np.searchsorted(levels, y) - 1, 0, grid.top - 1)
    low, high = levels[index], levels[index + 1]
    deviation = np.sqrt(np.maximum((y - low) * (high - y), 0) / 2000)
    inside = y >= (0 if grid.signed else smallest_level(grid))
    error = np.abs(np.abs(many.mean(0)) / largest(x) - y)
    assert (error <= 5 * deviation + 5 * (high - low) / 2000 + 1e-6 * y)[inside].all()
    assert many.std(0)[0, :8].min() > 0  # and they are not simply kept


@pytest.mark.slow
def test_a_slice_of_a_stack_is_rounded_as_in_the_stack():
    x = jnp.asarray(of(UNSIGNED, 4, 3, 5, 300))
    whole = eight_bit.encode(x, UNSIGNED, jnp.uint32(9))
    for number in range(3):
        part = eight_bit.encode(x[number], UNSIGNED, jnp.uint32(9 + number * 5 * 300))
        jax.tree.map(np.testing.assert_array_equal, part, jax.tree.map(lambda a, n=number: a[n], whole))


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("spec", [("fsdp", None), (None, "fsdp")])
def test_codes_and_scales_are_the_same_on_every_mesh(grid, spec):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    x = of(grid, 5, 8, 8 * 90)  # 90 columns to a device where the last axis is split: blocks lie across devices
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    encode = jax.jit(lambda a: eight_bit.encode(a, grid, jnp.uint32(7)))
    jax.tree.map(np.testing.assert_array_equal, encode(jnp.asarray(x)), encode(placed))
