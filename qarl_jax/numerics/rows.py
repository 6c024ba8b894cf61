# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Activations coded in eight bits, one dynamic scale per row (a token): int8, and what fp8 shares with it."""

from __future__ import annotations

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from qarl_jax.numerics.float32 import divide
from qarl_jax.runtime.remat import ROW_ABSMAX


def row_absmax(x: Float[Array, "M K"]) -> Float[Array, "M 1"]:
    """max_k |x[m, k]|, under the name `ROW_ABSMAX`."""
    return checkpoint_name(jnp.max(jnp.abs(x), axis=-1, keepdims=True), ROW_ABSMAX)


def quantize_rows(x: Float[Array, "M K"], *, amax_floor: float = 0.0) -> tuple[Int[Array, "M K"], Float[Array, "M 1"]]:
    """One symmetric int8 scale per row, from the row's absmax.

    scale = absmax / 127, codes = RNE(x * (127 / absmax)), all quotients IEEE float32. The quotients exist once per row;
    the per-element operation is a multiplication, as in the engines.

    Args:
      x: activations, any float dtype.
      amax_floor: lower bound put under absmax. 0: none, a zero row then gets codes 0 and scale 0.

    Returns:
      int8 codes in [-127, 127] and float32 scales.
    """
    x = x.astype(jnp.float32)
    amax = row_absmax(x)
    if amax_floor:
        amax = jnp.maximum(amax, amax_floor)
    scale = divide(amax, jnp.full_like(amax, 127.0))
    inverse = divide(jnp.full_like(amax, 127.0), jnp.where(amax == 0, 1.0, amax))
    codes = jnp.clip(jnp.round(x * inverse), -128, 127)
    return codes.astype(jnp.int8), scale
