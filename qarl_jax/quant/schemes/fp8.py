# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""fp8: e4m3 weights per output channel, e4m3 activations per token, float32 accumulation.

**Grid.** float8_e4m3fn: largest value 448, no infinity, 3 mantissa bits, subnormals down to 2**-9. Per output channel,
from the bfloat16-rounded master: s_n = absmax / 448 in float32, q = e4m3(clamp(w / s_n, +-448)), nearest, ties to even.
A zero row gets the scale 2**-23.

**Activations.** Dynamic, per token: s_x = max(absmax / 448, 1 / (448 * 512)), then

    CPU, plain, compiled CUDA    q = e4m3(clamp(x * (1 / s_x), +-448))
    CUDA, eager or in graphs     q = e4m3(clamp(x / s_x, +-448))

Which of the two the engine runs depends on its execution mode; the wrong one changes up to 19 % of outputs.

**Product.** acc = sum_k x_q q in float32, y = bf(s_x * (s_w * acc) + b). On sm90 vLLM's CUTLASS kernel accumulates in
the tensor cores' reduced precision and fuses the bias into the last multiplication; for 64 rows or fewer it swaps its
operands, and with them the rescale order, which the bridge prevents. XLA's product adds few rows up otherwise; asking
it for fast accumulation by name changed nothing (docs/concepts/engines.md). A kernel of ours for Hopper accumulates as
CUTLASS' does (`product_hopper.py`), equal to it on every output: layers under `cuda` and `plain` take it on such a GPU.
Experts' codes are multiplied in 16 bits on both sides. Under `cpu` y = bf(f32(s_x sum_k x_q q s_w) + b), the sum in
float64.

**Backward.** Straight through: dX = dY (q * s_n), dMaster = dY^T (x_q * s_x).

**What vLLM does with the bytes.** `weight` float8_e4m3fn [N, K], `weight_scale` float32 [N, 1] (compressed-tensors
`float-quantized`). vLLM's CPU build loads it but is unusably slow without AMX-FP8.

**Left out.** Block scales (DeepSeek's 128 x 128), e5m2 gradients, static activation scales.

Sources: FP8 formats, arXiv 2209.05433; QuRL; vLLM csrc/quantization/w8a8/fp8, and for the product
w8a8/cutlass/c3x/scaled_mm_sm90_fp8_dispatch.cuh.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from qarl_bridge.protocol import formats

from qarl_jax.numerics import rows
from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import divide, round_bf16
from qarl_jax.quant.contractions import Product
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.scheme import Scheme

_MAX = 448.0
_ZERO_SCALE = 2.0**-23
_MIN_ACTIVATION_SCALE = 1.0 / (448.0 * 512.0)
_WIRE = formats.Layout(
    scheme="fp8",
    format="float-quantized",
    weights=formats.arguments(8, "float", "channel"),
    activations=formats.arguments(8, "float", "token", dynamic=True),
    arrays=(
        formats.Array("codes", "weight", formats.FLOAT8),
        formats.Array("scales", "weight_scale", np.dtype(np.float32), inputs=0, is_scale=True),
    ),
)


def to_e4m3(x: Float[Array | np.ndarray, "*S"]) -> Float[Array, "*S"]:
    """Converts float32 to float8_e4m3fn: nearest, ties to even, saturating.

    It rounds in float32 first, so that no compiler pass can skip the rounding by cancelling two conversions.
    """
    x = jnp.clip(x, -_MAX, _MAX)
    # Normal numbers keep 3 mantissa bits (with float32's own exponent range, so no range effects); below 2**-6 the grid
    # is the multiples of 2**-9.
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    subnormal = jnp.round(x * 512.0) * (1.0 / 512.0)
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, normal).astype(jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Config(Scheme):
    """e4m3 weights per output channel, dynamic e4m3 activations per token."""

    name: ClassVar[str] = "fp8"
    low_bit_activations: ClassVar[bool] = True
    kernel: ClassVar[str] = "e4m3"
    baseline_k3: ClassVar[float | None] = 3e-1

    @property
    def wire(self) -> formats.Layout:
        """The layout: codes float8_e4m3fn [N, K] and scales float32 [N, 1]."""
        return _WIRE

    def quantize(self, w: Float[Array, "*L N K"]) -> QTensor:
        """Quantizes the bfloat16-rounded master to codes float8_e4m3fn [..., N, K] and scales float32 [..., N, 1]."""
        w = round_bf16(w.astype(jnp.float32))
        amax = jnp.max(jnp.abs(w), axis=-1, keepdims=True)
        scale = divide(amax, jnp.full_like(amax, _MAX))
        scale = jnp.where(scale == 0, _ZERO_SCALE, scale)
        return QTensor({"codes": to_e4m3(divide(w, scale)), "scales": scale}, self)

    def dequantize(self, qt: QTensor) -> Float[Array, "*L N K"]:
        """Computes the weight code * scale in float32."""
        return qt.codes.astype(jnp.float32) * qt.scales

    def activations(
        self, x: Float[Array, "M K"], *, numerics: Numerics
    ) -> tuple[Float[Array, "M K"], Float[Array, "M 1"]]:
        """Quantizes rows to codes float8_e4m3fn [M, K] and float32 scales [M, 1]; experts' rows likewise."""
        x = x.astype(jnp.float32)
        amax = rows.row_absmax(x)
        scale = jnp.maximum(divide(amax, jnp.full_like(amax, _MAX)), _MIN_ACTIVATION_SCALE)
        scaled = divide(x, scale) if numerics.fp8_divides else x * divide(jnp.ones_like(scale), scale)
        return to_e4m3(scaled), scale

    def multiply(self, used, qt: QTensor, bias, *, numerics: Numerics, product: Product):
        """Computes the engine's layer (see "Product" above): float32 [M, N], not yet rounded."""
        x_q, s_x = used
        if numerics.float64:
            y = product.rescaled(x_q, s_x, qt.codes, qt.scales)
        else:
            y = s_x * (product.per_output(qt.scales[..., 0]) * product.float8(x_q, qt.codes))
        return y if bias is None else y + bias
