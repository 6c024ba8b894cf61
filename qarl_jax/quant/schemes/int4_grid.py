# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The int4 weight grid that `w4a16` and `w4a8` share: symmetric, a bfloat16 scale per group, eight codes per word.

`w3a16` and `w2a16` use fewer of its sixteen codes: [-4, 3] and [-2, 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from qarl_bridge.protocol import formats

from qarl_jax.numerics.float32 import divide, pack_int4, round_bf16, unpack_int4
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.scheme import Scheme
from qarl_jax.types import UserError

# What a group of zeros gets for a scale: bfloat16's machine epsilon, as in compressed-tensors.
_ZERO_SCALE = 2.0**-7


@dataclasses.dataclass(frozen=True)
class Config(Scheme):
    """The base class of the int4 schemes.

    Attributes:
      bits: width of a code, 2 to 4; every code is stored in four bits.
      group_size: inputs per weight scale: 32, 64 or 128 (Machete and Marlin support these), or -1 for one scale per
        output channel.
    """

    bits: ClassVar[int] = 4
    rounded_activations: ClassVar[Mapping[str, Any] | None] = None
    group_size: int = 128

    def __post_init__(self) -> None:
        # A group is the whole row or fills whole int32 words.
        if self.group_size != -1 and (self.group_size <= 0 or self.group_size % 8):
            raise UserError(f"{self.name}: group size {self.group_size} is not a multiple of 8; use 32, 64, 128 or -1")

    @property
    def wire(self) -> formats.Layout:
        """The layout: codes int32 [N, K/8], scales bfloat16 [N, K/G] and the shape int64 [2]."""
        by_row = self.group_size == -1
        return formats.Layout(
            scheme=str(self),
            format="pack-quantized",
            weights=formats.arguments(4, "int", "channel")
            if by_row
            else formats.arguments(4, "int", "group", group_size=self.group_size),
            activations=self.rounded_activations,
            arrays=(
                formats.Array("codes", "weight_packed", np.dtype(np.int32), inputs=8),
                formats.Array(
                    "scales",
                    "weight_scale",
                    formats.BFLOAT16,
                    inputs=0 if by_row else self.group_size,
                    is_scale=True,
                ),
            ),
            shape_leaf="weight_shape",
        )

    def check(self, shape: tuple[int, ...]) -> str | None:
        """Returns the reason why groups do not fit a weight [..., N, K], as text for a message, or None."""
        k, group_size = shape[-1], self.group_size
        if k % 8:
            return f"K = {k} is not a multiple of 8, so its int4 codes do not fill int32 words"
        if group_size != -1 and k % group_size:
            allowed = ", ".join(map(str, [*(g for g in (32, 64, 128) if k % g == 0), -1]))
            return f"K = {k} is not a multiple of the group size {group_size} (allowed: {allowed})"
        return None

    def quantize(self, w: Float[Array, "*L N K"]) -> QTensor:
        """Quantizes a master to packed codes int32 [..., N, K/8] and bfloat16 scales [..., N, K/G].

        From the bfloat16-rounded master, with four bits: scale = bf16(absmax / 7.5) (compressed-tensors' rule: half of
        the range 15), codes = RNE(w / scale) clamped to [-8, 7]. With b bits the divisor is half of 2^b - 1, and codes
        are clamped to [-2^(b-1), 2^(b-1) - 1].
        """
        *lead, k = w.shape
        groups = 1 if self.group_size == -1 else k // self.group_size
        w = round_bf16(w.astype(jnp.float32)).reshape(*lead, groups, k // groups)
        amax = jnp.max(jnp.abs(w), axis=-1, keepdims=True)
        most = 2 ** (self.bits - 1)
        scale = round_bf16(divide(amax, jnp.full_like(amax, most - 0.5)))
        scale = jnp.where(scale == 0, _ZERO_SCALE, scale)
        codes = jnp.clip(jnp.round(divide(w, scale)), -most, most - 1).astype(jnp.int8)
        return QTensor(
            {"codes": pack_int4(codes.reshape(*lead, k)), "scales": scale[..., 0].astype(jnp.bfloat16)}, self
        )

    def dequantize(self, qt: QTensor) -> Float[Array, "*L N K"]:
        """Computes bf16(code * scale) as float32: exactly the weight with which every W4A16 kernel multiplies."""
        codes, scale = unpack_int4(qt.codes), qt.scales
        *lead, k = codes.shape
        groups = scale.shape[-1]
        codes = codes.reshape(*lead, groups, k // groups).astype(jnp.float32)
        return round_bf16(codes * scale.astype(jnp.float32)[..., None]).reshape(*lead, k)
