# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""fp8: e4m3 weights per output channel, e4m3 activations per token, float32 accumulation.

**Grid.** float8_e4m3fn: largest value 448, no infinity, 3 mantissa bits, subnormals down to 2**-9. Per output channel,
from the bfloat16-rounded master: s_n = absmax / 448 in float32, q = e4m3(clamp(w / s_n, +-448)), nearest, ties to even.
A zero row gets the scale 2**-23.

**Activations.** Dynamic, per token: s_x = max(absmax / 448, 1 / (448 * 512)), then

    CPU, plain, compiled CUDA    q = e4m3(clamp(x * (1 / s_x), +-448))
    CUDA, eager kernel           q = e4m3(clamp(x / s_x, +-448))

Which of the two the engine runs depends on its execution mode; the wrong one changes up to 19 % of outputs.

**Product.** acc = sum_k x_q q in float32, y = bf(s_x * (s_w * acc) + b). On sm90 vLLM's CUTLASS kernel accumulates in
the tensor cores' reduced precision and fuses the bias into the last multiplication; for 64 rows or fewer it swaps its
operands, and with them the rescale order, which the bridge prevents. XLA's product adds few rows up otherwise; asking
it for fast accumulation by name changed nothing (docs/numerics.md). A kernel of our own for Hopper accumulates as
CUTLASS' does (`hopper_product.py`), equal to it on every output: layers under `cuda` and `plain` take it on such a GPU,
experts do not. On CPU the codes are multiplied as float32, exactly what torch's reference loop does up to summation
order.

**Backward.** Straight through: dX = dY (q * s_n), dMaster = dY^T (x_q * s_x).

**What vLLM does with the bytes.** `weight` float8_e4m3fn [N, K], `weight_scale` float32 [N, 1] (compressed-tensors
`float-quantized`). vLLM's CPU build loads it but is unusably slow without AMX-FP8.

**Left out.** Block scales (DeepSeek's 128 x 128), e5m2 gradients, static activation scales.

Sources: FP8 formats, arXiv 2209.05433; QuRL; vLLM csrc/quantization/w8a8/fp8, and for the product
w8a8/cutlass/c3x/scaled_mm_sm90_fp8_dispatch.cuh.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from qarl_jax.quant import fused, int8
from qarl_jax.quant.arithmetic import divide, round_bf16, round_to
from qarl_jax.quant.numerics import Numerics
from qarl_jax.quant.qtensor import QTensor

NAME = "fp8"
ACTIVATION_BITS = 8
MAX = 448.0  # the largest e4m3 number
_LEAST_EXPONENT = 127 - 6  # as float32 has it; below, e4m3 has multiples of 2^-9
_ZERO_SCALE = 2.0**-23
_MIN_ACTIVATION_SCALE = 1.0 / (448.0 * 512.0)


@dataclasses.dataclass(frozen=True)
class Config:
    """e4m3 weights per output channel, dynamic e4m3 activations per token."""

    def __str__(self) -> str:
        return NAME


def check(shape: tuple[int, ...], config: Config) -> str | None:
    """Why a weight [..., N, K] cannot be quantized, or None."""
    del shape, config
    return None


def on_grid(x: Float[Array | np.ndarray, "*S"]) -> Float[Array, "*S"]:
    """float32 -> the nearest e4m3 number, ties to even, saturating; still float32.

    A number is rounded by adding and subtracting another, whose last bit is worth what e4m3's last is at its exponent:
    2^-3 of a power of two, from 2^-6 on. A handful of operations, or a backward would be limited by them.
    """
    x = jnp.clip(x, -MAX, MAX)  # also keeps a multiplication before it from being fused with the addition
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent = jnp.maximum(bits & jnp.uint32(0x7F800000), jnp.uint32(_LEAST_EXPONENT << 23))
    large = lax.bitcast_convert_type(exponent + jnp.uint32((20 << 23) | (1 << 22)), jnp.float32)  # 1.5 * 2^20 times it
    rounded = lax.bitcast_convert_type((x + large) - large, jnp.uint32)
    return lax.bitcast_convert_type(rounded | (bits & jnp.uint32(0x80000000)), jnp.float32)  # -0, too


def to_e4m3(x: Float[Array | np.ndarray, "*S"]) -> Float[Array, "*S"]:
    """float32 -> float8_e4m3fn, nearest, ties to even, saturating.

    The rounding is done in float32 first, so that no pass can skip it by cancelling the two conversions.
    """
    return on_grid(x).astype(jnp.float8_e4m3fn)


def quantize(w: Float[Array, "*L N K"], config: Config) -> QTensor:
    """Codes float8_e4m3fn [..., N, K] and scales float32 [..., N, 1] from the bfloat16-rounded master."""
    w = round_bf16(w.astype(jnp.float32))
    amax = jnp.max(jnp.abs(w), axis=-1, keepdims=True)
    scale = divide(amax, jnp.full_like(amax, MAX))
    scale = jnp.where(scale == 0, _ZERO_SCALE, scale)
    return QTensor(to_e4m3(divide(w, scale)), scale, config)


def dequantize(qt: QTensor) -> Float[Array, "*L N K"]:
    """float32 code * scale."""
    return qt.qvalue.astype(jnp.float32) * qt.scale


def row_scale(amax: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The scales of rows with these absmax."""
    return jnp.maximum(divide(amax, jnp.full_like(amax, MAX)), _MIN_ACTIVATION_SCALE)


def rows_on_grid(
    x: Float[Array, "M K"], numerics: Numerics, amax: Float[Array, "M 1"] | None = None
) -> tuple[Float[Array, "M K"], Float[Array, "M 1"]]:
    """`quantize_rows`, the codes as float32 numbers. amax: as in `int8.quantize_rows`."""
    x = x.astype(jnp.float32)
    scale = row_scale(int8.row_absmax(x) if amax is None else amax)
    scaled = divide(x, scale) if numerics.fp8_divides else x * divide(jnp.ones_like(scale), scale)
    return on_grid(scaled), scale


def quantize_rows(x: Float[Array, "M K"], numerics: Numerics) -> tuple[Float[Array, "M K"], Float[Array, "M 1"]]:
    """Dynamic per-token codes float8_e4m3fn and scales float32."""
    values, scale = rows_on_grid(x, numerics)
    return values.astype(jnp.float8_e4m3fn), scale


def forward(x, qt: QTensor, bias, *, numerics: Numerics, product):
    """The engine's layer; arguments and results as in `w8a8.forward`."""

    def plain(x, codes, scale, bias):
        x_q, s_x = quantize_rows(x, numerics)
        y = s_x * (product.per_output(scale[..., 0]) * product.float8(x_q, codes))
        return y if bias is None else y + bias, (x_q, s_x)

    operands = x, qt.qvalue, qt.scale, bias
    if not (product.dense and fused.serves(NAME, x, qt.qvalue.shape, numerics)):
        return plain(*operands)

    def rounded(*operands):
        y, (x_q, s_x) = plain(*operands)
        return round_to(y, x.dtype), (x_q.astype(jnp.bfloat16), s_x)

    def quantized(x, amax=None):
        # In bfloat16, which holds every e4m3 number: a backward that recomputes them converts to nothing slower.
        values, s_x = rows_on_grid(x, numerics, amax)
        return values.astype(jnp.bfloat16), s_x

    def with_kernels(x, codes, scale, bias, interpret=None):
        x_q, used = fused.row_codes(NAME, x, codes.shape[0], quantized, numerics=numerics, interpret=bool(interpret))
        return fused.float8(x_q, used[1], codes, scale, bias, interpret=interpret), used

    return lax.platform_dependent(*operands, cuda=with_kernels, default=rounded)


saved_activation = int8.saved_activation
