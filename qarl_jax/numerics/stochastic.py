# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding whose random bits are a hash of the update's number and an element's position, without state.

It rounds masters and moments (`optim`) and the operands of a low-bit backward (`quant.backward`). A resumed run, and
every mesh, draws equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32


def random_bits(shape: Sequence[int], seed: Any) -> UInt32[Array, "*shape"]:
    """Draws 32 random bits per element: a hash of seed + position (MurmurHash3's finalizer).

    It needs no buffer of random numbers, and gives equal bits on every mesh. Positions count in row-major order. A
    slice of a stack gets its bits of the whole stack if its first position is added to the seed.

    Args:
      seed: uint32 scalar.
    """
    h = jnp.full(shape, seed, jnp.uint32)
    for dim, size in enumerate(shape):
        stride = jnp.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        h = h + jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * stride if size > 1 else h
    return hashed(h)


def hashed(h: UInt32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Hashes sums of a seed and a position to random bits, as `random_bits` does."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> jnp.uint32(shift))) * jnp.uint32(factor)
    return h


def round_stochastically(x: Float[Array, "*S"], seed: Array) -> Float[Array, "*S"]:
    """Rounds float32 to bfloat16, up or down at random, so that the expectation is x (Gupta et al., arXiv 1502.02551).

    16 random bits (`random_bits`) are added below the last kept bit; then all bits below it are dropped.

    Args:
      x: float32; NaN and infinities are kept.
      seed: uint32 scalar, different for every call.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (random_bits(x.shape, seed) >> jnp.uint32(16))
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def rounding_seed(count: Any, number: int, first: Any = None) -> Array:
    """Makes the seed of a rounding, a uint32 scalar, from the numbers of the update and of the leaf.

    Args:
      count: int32 or uint32 scalar, the number of the update. number: the leaf's.
      first: uint32, the leaf's element at which the rounded slice begins; None: 0.
    """
    # Multiplied by odd constants, so that neither neighbouring updates nor neighbouring leaves share their bits.
    seed = jnp.asarray(count).astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(number * 0x7FEB352D % 2**32)
    return seed if first is None else seed + first


def halves(bits: UInt32[Array, "*S"]) -> tuple[Array, Array]:
    """Splits 32 random bits an element into two times 16, uint32."""
    return bits >> jnp.uint32(16), bits & jnp.uint32(0xFFFF)


_WHOLE = 1.5 * 2.0**23  # float32 of this size are whole numbers
_WHOLE_BITS = 0x4B400000


def _integers(x: Float[Array, "*S"], bits: Array) -> Array:
    """Rounds float32 of magnitude below 2^22 stochastically to int32.

    A number (b + 1/2) / 2^16 - 1/2 is added, and the sum is rounded to nearest. An integer stays what it is. No
    instruction converts between integers and floats, which GPUs do at an eighth of their speed: the number is made of
    its bits, and 1.5 2^23, whose neighbours are integers, leaves an integer in the lowest bits of the sum.
    """
    one_to_two = jax.lax.bitcast_convert_type(jnp.uint32(0x3F800040) | (bits << jnp.uint32(7)), jnp.float32)
    return jax.lax.bitcast_convert_type(x + (one_to_two - 1.5) + _WHOLE, jnp.int32) - _WHOLE_BITS


def to_int8(x: Float[Array, "*S"], bits: Array) -> Array:
    """Rounds float32 stochastically to int8, with expectation x to about 2^-17; clips to [-127, 127].

    The clip also puts an integer instruction before the store. CUDA's assembler up to 13.0 reads `st.b8` of a register
    that `add.f32` wrote as a conversion of the float to a byte, here 255. That of CUDA 13.5 stores the lowest byte.

    Args:
      bits: 16 random bits per element, uint32.
    """
    return jnp.minimum(jnp.maximum(_integers(x, bits), -127), 127).astype(jnp.int8)


def to_e4m3(x: Float[Array, "*S"], bits: Array) -> Array:
    """Rounds float32 stochastically to float8_e4m3fn, with expectation x to about 2^-17 of a step; clips to 448.

    It keeps 3 bits of mantissa; below 2^-6 the grid is the multiples of 2^-9. bits: as in `to_int8`.
    """
    x = jnp.minimum(jnp.maximum(x, -448), 448)
    word, size = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.abs(x)
    raised = jax.lax.bitcast_convert_type(size, jnp.uint32) + (bits << jnp.uint32(4) | jnp.uint32(8))
    normal = (raised >> jnp.uint32(20)) - jnp.uint32(120 << 3)  # exponents are biased by 127 and by 7
    subnormal = _integers(size * 512.0, bits).astype(jnp.uint32) & jnp.uint32(15)
    code = jnp.where(size < 2.0**-6, subnormal, normal) | (word >> jnp.uint32(24)) & jnp.uint32(0x80)
    return jax.lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn)
