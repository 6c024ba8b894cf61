# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantization of activations to int8 with one dynamic scale per row (a token); fp8 uses `row_absmax` too."""

from __future__ import annotations

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from qarl_jax.numerics.float32 import divide
from qarl_jax.runtime.remat import ROW_ABSMAX


def row_absmax(x: Float[Array, "M K"]) -> Float[Array, "M 1"]:
    """Computes max_k |x[m, k]| and names it `ROW_ABSMAX` for `remat` policies."""
    return checkpoint_name(jnp.max(jnp.abs(x), axis=-1, keepdims=True), ROW_ABSMAX)


def quantize_rows(x: Float[Array, "M K"], *, amax_floor: float = 0.0) -> tuple[Int[Array, "M K"], Float[Array, "M 1"]]:
    """Quantizes rows to int8 symmetrically, with one scale per row from the row's absmax.

    scale = absmax / 127, codes = RNE(x * (127 / absmax)), all quotients IEEE float32. There is one division per row and
    one multiplication per element, as in the engines.

    Args:
      x: activations, any float dtype.
      amax_floor: lower bound of absmax; 0: none, and a row of zeros gets codes 0 and scale 0.

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
