# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Moments as an optimizer stores them: float32, bfloat16, or a byte each (`eight_bit`); and how they are rounded."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.optim import eight_bit

MomentDtype = Literal["float32", "bfloat16", "int8"]


def round_stochastically(x: Float[Array, "*S"], seed: Array) -> Float[Array, "*S"]:
    """float32 -> bfloat16, up or down with probabilities that make its expectation x (Gupta et al., arXiv 1502.02551).

    16 random bits are added below the last bit kept, and what is then below it is dropped. The bits are a hash of seed
    and position (`eight_bit.random_bits`).

    Args:
      x: float32; what is not finite is kept.
      seed: uint32 scalar, another one for every rounding.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (eight_bit.random_bits(x.shape, seed) >> jnp.uint32(16))
    rounded = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def rounding_seed(count: Any, number: int, first: Any = None) -> Array:
    """The seed of a rounding, a uint32 scalar, from the update's number and the leaf's: a resumed run rounds alike.

    Args:
      first: uint32, the position in its leaf at which what is rounded begins; None: 0.
    """
    # Multiplied by odd constants, so that neither neighbouring updates nor neighbouring leaves share their bits.
    seed = jnp.asarray(count).astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + jnp.uint32(number * 0x7FEB352D % 2**32)
    return seed if first is None else seed + first
