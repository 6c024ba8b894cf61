# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""nvfp4 weights in the engine's memory layout, for a learner that shares one copy of a frozen base with the engine.

The arrays are those of `qarl_bridge.protocol.one_base`, for a fused weight of the engine; one weight is a slice of its
outputs. The forward unpacks codes and scales, [N, K/2] and [N, K/16], and computes as nvfp4 does, to the same bits.
Scales below 2^-6 are stored as 0, because products treat them as 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int32, UInt8, UInt32
from qarl_bridge.protocol import formats, one_base

from qarl_jax.numerics.engine import Numerics
from qarl_jax.quant.contractions import Product
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.schemes import nvfp4

_BYTES = one_base.INPUTS // 2  # of a block's codes


@dataclasses.dataclass(frozen=True)
class Config(nvfp4.Config):
    """The scheme of outputs `first` to `end` of a fused weight with N' outputs, in the engine's layout.

    Arrays: codes int32 [..., K/128, N', 16], scales int32 [..., K/64, N'], and the slice's divisor float32 [..., 1, 1].
    Configs cannot name this scheme and it is never published: QTensors of nvfp4 are converted to it.
    """

    first: int = 0
    end: int = 0

    @property
    def wire(self) -> formats.Layout:
        """Raises NotImplementedError: the engine holds this weight, so it is not published."""
        raise NotImplementedError("this weight lies in memory that its engine reads; it is not published")

    def shape(self, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        """Computes the weight's logical shape (..., N, K)."""
        *leading, blocks, _, _ = arrays["codes"].shape
        return (*leading, self.end - self.first, blocks * one_base.INPUTS)

    def dequantize(self, qt: QTensor) -> Float[Array, "*L N K"]:
        """Unpacks the weight and dequantizes it as nvfp4 does, float32."""
        return super().dequantize(unpacked(qt))

    def multiply(self, used, qt: QTensor, bias, *, numerics: Numerics, product: Product):
        """Unpacks the weight and multiplies as nvfp4 does."""
        return super().multiply(used, unpacked(qt), bias, numerics=numerics, product=product)


def words(codes: UInt8[Array, "*L N _"]) -> Int32[Array, "*L B N 16"]:
    """Repacks codes of nvfp4 [..., N, K/2] into the engine's int32 words [..., K/128, N, 16]."""
    *lead, n, size = codes.shape
    pairs = codes.reshape(*lead, n, size // _BYTES, 2, 4, 2, 4).astype(jnp.uint32)  # h i f t
    spread = (pairs & 15) | ((pairs >> 4) << 16)
    spread = ((spread & 0x70007) << 6) | ((spread & 0x80008) << 12)
    first, second, third, last = (spread[..., i, :, :] for i in range(4))
    made = first | _rotated(second, 26) | _rotated(third, 29)
    made |= ((last >> 3) & 0x180018) | ((last >> 8) & 0x10001) | ((last >> 14) & 0x20002)  # n block h f t
    at = len(lead)
    ordered = jnp.transpose(made, (*range(at), at + 1, at, at + 4, at + 3, at + 2))
    return lax.bitcast_convert_type(ordered.reshape(*lead, size // _BYTES, n, 16), jnp.int32)


def _rotated(w: UInt32[Array, "*S"], places: int) -> UInt32[Array, "*S"]:
    """Rotates words to the right."""
    return (w >> places) | (w << 32 - places)


def _byte(pair: UInt32[Array, "*S"]) -> UInt8[Array, "*S"]:
    """Packs a pair of codes, as the engine decodes it, into a byte."""
    return ((pair >> 6 & 7) | (pair >> 12 & 8) | (pair >> 18 & 0x70) | (pair >> 24 & 0x80)).astype(jnp.uint8)


def turned(scales: Float[Array, "*L N G"]) -> Int32[Array, "*L H N"]:
    """Packs e4m3 scales of nvfp4 [..., N, K/16] into the engine's int32 [..., K/64, N]; below 2^-6 they become 0."""
    kept = jnp.where(scales.astype(jnp.float32) < nvfp4.FLUSHED, jnp.zeros_like(scales), scales)
    kept = lax.bitcast_convert_type(kept, jnp.uint8).reshape(*scales.shape[:-1], -1, 4)
    return jnp.swapaxes(lax.bitcast_convert_type(kept, jnp.int32), -1, -2)


def unpacked(qt: QTensor) -> QTensor:
    """Converts the weight back to a QTensor of nvfp4, to the same bits."""
    scheme: Config = qt.scheme
    rows = slice(scheme.first, scheme.end)
    held = lax.bitcast_convert_type(qt.codes[..., rows, :], jnp.uint32)
    *lead, blocks, n, _ = held.shape
    w = held.reshape(*lead, blocks, n, 4, 2, 2)  # t f h
    pairs = w, _rotated(w, 6), _rotated(w, 3), (w & 0x1B001B) * jnp.uint32(0x4108)
    stacked = jnp.stack([_byte(pair) for pair in pairs], axis=-1)  # block n t f h i
    at = len(lead)
    ordered = jnp.transpose(stacked, (*range(at), at + 1, at, at + 4, at + 5, at + 3, at + 2))
    # Left to choose a layout, XLA copies the scales of all layers into that of the turned ones before it loops.
    lying = with_layout_constraint(qt.scales[..., rows], Layout(tuple(range(qt.scales.ndim))))
    four = lax.bitcast_convert_type(jnp.swapaxes(lying, -1, -2), jnp.float8_e4m3fn)
    scales = four.reshape(*lead, n, blocks * one_base.INPUTS // 16)
    arrays = {"codes": ordered.reshape(*lead, n, blocks * _BYTES), "scales": scales}
    return QTensor(arrays | {"divisor": qt.arrays["divisor"]}, nvfp4.Config())
