# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w8a8: int8 weights per output channel, int8 activations per token, int32 accumulation.

**Grid.** Symmetric, zero point 0. Per output channel n, from the bfloat16-rounded master: s_n = max_k |w_nk| / 127.5 in
float32 (compressed-tensors' rule: half of the range 255), q = RNE(w / s_n) clamped to [-128, 127]; both quotients are
IEEE. The largest weight of a row sits at 127.5 up to the rounding of s: 127 if positive, -127 or -128 if negative. A
zero row gets the scale 2**-23. Scales stay float32 (vLLM keeps them so whatever the file says).

**Activations.** Dynamic, per token, absmax / 127, see `numerics/rows.py`.

**Product.** acc = sum_k x_q q in int32: exact, in any order, on any mesh. So the only freedom an engine has is the
order of the two float32 multiplications and where the bias enters:

    CUDA (CUTLASS), plain    y = bf(s_x * (s_w * acc))             with bias bf(fma(s_x, s_w * acc, b))
    CPU (the bridge's own)   y = bf(f32(s_x * (s_w * acc)) + b)    rescaled in float64

The order moves float32 results by one ulp, so one bfloat16 output in a hundred thousand. The activation code matters
far more: x * (1 / s_x) in place of x * (127 / am) flips codes and changes 4 % of bfloat16 outputs (K = 512, Gaussian).
On a CPU the product itself is made in float64, where it is as exact as in int32 and many times as fast in XLA. On a
Hopper GPU one kernel makes product, rescale, bias and rounding, with the same bits (`kernels/products.py`).

**Backward.** Straight through: dX = dY (q * s_n), dMaster = dY^T (x_q * s_x). It keeps the
activation codes: K + 4 bytes per token instead of 2K or 4K.

**What vLLM does with the bytes.** `weight` int8 [N, K] and `weight_scale` float32 [N, 1] (compressed-tensors
`int-quantized`); the weight is never dequantized.

**Left out.** Static activation scales, asymmetric activations (zero points), SmoothQuant (arXiv 2211.10438).

Sources: QaRL, arXiv 2604.07853; vLLM csrc/quantization/w8a8.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from qarl_bridge.protocol import formats

from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import divide, fused_multiply_add, round_bf16
from qarl_jax.numerics.rows import quantize_rows
from qarl_jax.quant.contractions import Product
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.scheme import Scheme

# What a row of zeros gets for a scale: float32's machine epsilon, as in compressed-tensors.
_ZERO_SCALE = 2.0**-23
_WIRE = formats.Layout(
    scheme="w8a8",
    format="int-quantized",
    weights=formats.arguments(8, "int", "channel"),
    activations=formats.arguments(8, "int", "token", dynamic=True),
    arrays=(
        formats.Array("codes", "weight", np.dtype(np.int8)),
        formats.Array("scales", "weight_scale", np.dtype(np.float32), inputs=0, is_scale=True),
    ),
)


@dataclasses.dataclass(frozen=True)
class Config(Scheme):
    """int8 weights per output channel, dynamic int8 activations per token."""

    name: ClassVar[str] = "w8a8"
    low_bit_activations: ClassVar[bool] = True
    kernel: ClassVar[str] = "int8"
    sums_are_exact: ClassVar[bool] = True
    baseline_k3: ClassVar[float | None] = 6e-2

    @property
    def wire(self) -> formats.Layout:
        """The layout: codes int8 [N, K] and scales float32 [N, 1]."""
        return _WIRE

    def quantize(self, w: Float[Array, "*L N K"]) -> QTensor:
        """Quantizes the bfloat16-rounded master to codes int8 [..., N, K] and scales float32 [..., N, 1]."""
        w = round_bf16(w.astype(jnp.float32))
        amax = jnp.max(jnp.abs(w), axis=-1, keepdims=True)
        scale = divide(amax, jnp.full_like(amax, 127.5))
        scale = jnp.where(scale == 0, _ZERO_SCALE, scale)
        codes = jnp.clip(jnp.round(divide(w, scale)), -128, 127).astype(jnp.int8)
        return QTensor({"codes": codes, "scales": scale}, self)

    def dequantize(self, qt: QTensor) -> Float[Array, "*L N K"]:
        """Computes the weight code * scale in float32."""
        return qt.codes.astype(jnp.float32) * qt.scales

    def activations(self, x, *, numerics: Numerics):
        """Quantizes rows to int8 codes [M, K] and float32 scales [M, 1]."""
        return quantize_rows(x, amax_floor=numerics.amax_floor)

    def multiply(self, used, qt: QTensor, bias, *, numerics: Numerics, product: Product):
        """Computes the engine's layer (see "Product" above): float32 [M, N], not yet rounded."""
        x_q, s_x = used
        if numerics.float64:
            y = product.rescaled(x_q, s_x, qt.codes, qt.scales)
            return y if bias is None else y + bias
        acc = product.integer(x_q, qt.codes).astype(jnp.float32)
        return rescale(acc, s_x, product.per_output(qt.scales[..., 0]), bias)


def rescale(acc, s_x, s_w, bias):
    """Multiplies the float32 sums `acc` [M, N] by scales [M, 1] and [1 or M, N] and adds a bias, in CUTLASS's order."""
    first = s_w * acc
    return s_x * first if bias is None else fused_multiply_add(first, s_x, bias, s_x)
