# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w4a8_fp8: int4 weights in groups of 128 inputs, e4m3 activations per token, one fp8 product.

This is what `w4a8` means where the engine is vLLM on a Hopper GPU (`quant.engine=cuda`): `CompressedTensorsW4A8Fp8`.
Under every other engine the name `w4a8` keeps its int8 activations, and this scheme can still be asked for by its own
name, in the same arithmetic.

**The engine's grid.** vLLM does not multiply with the bfloat16 group scales s[n, g] it loads. It factors every output
channel into a float32 scale and e4m3 group scales, once, when the weights are loaded:

    c[n] = max(max_g s[n, g] / 448, 1 / (448 * 512))      v[n, g] = e4m3(e4m3(s[n, g] / c[n]) / 8)      C[n] = 8 c[n]

and multiplies code q with a table of e4m3 values: the weight is C[n] e4m3(q v[n, g]), q in [-8, 7]. v is at most 56, so
the table ends at 448. q v has up to 8 significant bits, of which 4 remain: the sixteen levels of a group are not
equally far apart (3 * 15 = 45 is 44, 7 * 9 = 63 is 64).

**Our grid.** The master, rounded to bfloat16, is quantized to those levels, so that nothing is rounded twice:

  1. s = bf16(absmax / 7.5) per group, as in `w4a16`, and t = max_g s;
  2. c = (t / 7 rounded to 4 significant bits) * 2^-6, C = 8 c;
  3. v = e4m3(s / C), at least 2^-9; 56 for the groups with s = t;
  4. q = the level nearest to w, ties to the smaller magnitude; scale = C v, stored as bfloat16.

C and v have 4 significant bits each, so C v, and the weight C e4m3(q v), are bfloat16 numbers exactly. The largest
scale of a row is 448 c, so dividing gives c again, and s / c is the e4m3 number 8 v: the engine's factoring gives back
(c, v), bit for bit. (Code that multiplies with the reciprocal of 448, as a compiler may make it, gets a c up to one
float32 ulp off, and the same v. Eagerly and in CUDA graphs vLLM's kernel runs, and divides.) Where 448 c would be below
2^-9 the engine uses its smallest c, 1 / (448 * 512), instead, and so do we; C v is then not a bfloat16 number, but
rounding it moves s / c by 2^-9 of itself at most, where half the way to the next e4m3 number is 2^-5 or more: it
factors alike. There the smallest step is 2^-9 * 8 c = 7e-8, and what is below half of it is zero.

What this costs on Gaussian weights (K = 4096): a relative L2 error of 11.18 %, with `w4a16` 11.10 %. With c free, that
is, any bfloat16 t, 11.17 %. Publishing `w4a16`'s codes and scales and letting the engine factor them: 11.58 %, and a
policy nobody trained. Rounding v down instead of to the nearest has less error (10.82 %), and so has a wider step in
`w4a16`, because it clips the largest weights; the range rule is left alone, as in all our schemes.

**Layer.** That of `fp8`, with the codes e4m3(q v) and the scales C (`as_fp8`). vLLM's own kernel (CUTLASS' mixed-input
product) sums in an order of its own, so the bridge multiplies the same two tensors by the product of fp8 layers instead
(`qarl_bridge.engine.pinned_w4a8`): there learner and engine are equal to the bit. It costs a byte per weight in place
of half a byte.

**Backward.** Straight through: dX = dY C e4m3(q v), dMaster = dY^T (x_q * s_x).

**What vLLM does with the bytes.** The tensors of `w4a16`, with `input_activations` of 8 bits, float, token, dynamic in
the config. K and N must be multiples of 128, outputs are bfloat16, the compute capability is 9.0 exactly.

**Left out.** Experts: vLLM has a grouped kernel of this kind, nobody has mirrored or run it here, so publishing a
mixture's experts under this scheme is refused (`qarl_bridge.protocol.formats`); the learner and the embedded sampler
compute it.
Groups other than 128, per-channel scales: the kernel has none.

Sources: vLLM 0.25.1 and 0.32, kernels/linear/mixed_precision/cutlass.py, convert_bf16_scales_to_fp8,
csrc/quantization/cutlass_w4a8; CUTLASS's mixed_dtype_utils.hpp (packed_scale_t); QQQ, arXiv 2406.09904.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from qarl_jax.numerics.float32 import divide, pack_int4, round_bf16, round_to, unpack_int4
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.schemes import fp8, int4_grid
from qarl_jax.types import UserError

NAME = "w4a8_fp8"
_GROUP = 128  # of the kernel, and what K and N must be multiples of
_MAX = 448.0
_TOP = 56.0  # _MAX / 8: e4m3(-8 v) must not saturate
_LEAST = 2.0**-9  # e4m3's smallest number
_SMALLEST_CHANNEL = 1.0 / (448.0 * 512.0)


@dataclasses.dataclass(frozen=True)
class Config(int4_grid.Config):
    """int4 weights in groups of 128, dynamic e4m3 activations per token. See `int4_grid.Config`."""

    name: ClassVar[str] = NAME

    def __post_init__(self) -> None:
        if self.group_size != _GROUP:
            raise UserError(
                f"w4a8 with fp8 activations (quant.engine=cuda) has groups of {_GROUP} only, not {self.group_size}: "
                f"set quant.group_size={_GROUP}, or use w4a16, or quant.engine=plain for int8 activations"
            )


def check(shape: tuple[int, ...], config: Config) -> str | None:
    """Why a weight [..., N, K] cannot be quantized, or None."""
    del config
    n, k = shape[-2:]
    if n % _GROUP or k % _GROUP:
        return (
            f"vLLM's int4 x fp8 kernel takes N and K that are multiples of {_GROUP}, got N = {n} and K = {k} "
            "(w4a8 under quant.engine=plain has no such limit)"
        )
    return None


def quantize(w: Float[Array, "*L N K"], config: Config) -> QTensor:
    """Packed codes int32 [..., N, K/8] and bfloat16 scales [..., N, K/128], on the engine's grid (see above)."""
    *lead, k = w.shape
    w = round_bf16(w.astype(jnp.float32)).reshape(*lead, k // _GROUP, _GROUP)
    amax = jnp.max(jnp.abs(w), axis=-1)
    s = round_bf16(divide(amax, jnp.full_like(amax, 7.5)))
    largest = jnp.max(s, axis=-1, keepdims=True)
    c = lax.reduce_precision(divide(largest, jnp.full_like(largest, 7.0)), exponent_bits=8, mantissa_bits=3) * 2.0**-6
    is_free = c * _MAX >= 2.0**-9  # otherwise the engine's lower bound decides
    channel = jnp.where(is_free, c, _SMALLEST_CHANNEL) * 8.0
    group = fp8.to_e4m3(divide(s, jnp.broadcast_to(channel, s.shape))).astype(jnp.float32)
    group = jnp.where(is_free & (s == largest), _TOP, jnp.clip(group, _LEAST, _TOP))

    # |w| against the middles between neighbouring levels: one rounded product each, so alike on every backend.
    levels = [_level(group * j) for j in range(9)]
    magnitude = jnp.zeros(w.shape, jnp.int8)
    for low, high in itertools.pairwise(levels):
        magnitude += (jnp.abs(w) > (channel * (0.5 * (low + high)))[..., None]).astype(jnp.int8)
    codes = jnp.where(w < 0, -magnitude, jnp.minimum(magnitude, jnp.int8(7)))
    return QTensor(pack_int4(codes.reshape(*lead, k)), round_to(channel * group, jnp.bfloat16), config)


def factors(scale: Float[Array, "*L N G"]) -> tuple[Float[Array, "*L N 1"], Float[Array, "*L N G"]]:
    """bfloat16 group scales -> (C, v), float32, as vLLM factors them when it loads them."""
    scale = scale.astype(jnp.float32)
    largest = jnp.max(scale, axis=-1, keepdims=True)
    c = jnp.maximum(divide(largest, jnp.full_like(largest, _MAX)), _SMALLEST_CHANNEL)
    eightfold = _level(divide(scale, jnp.broadcast_to(c, scale.shape)))
    return c * 8.0, _level(eightfold * 0.125)


def _level(x: jax.Array) -> jax.Array:
    """The nearest e4m3 number, as float32."""
    return fp8.to_e4m3(x).astype(jnp.float32)


def as_fp8(qt: QTensor) -> QTensor:
    """The fp8 weight that the layer multiplies with: codes e4m3(q v) [..., N, K], scales C float32 [..., N, 1]."""
    channel, group = factors(qt.scale)
    codes = unpack_int4(qt.qvalue)
    *lead, k = codes.shape
    codes = codes.reshape(*lead, k // _GROUP, _GROUP).astype(jnp.float32)
    return QTensor(fp8.to_e4m3(codes * group[..., None]).reshape(*lead, k), channel, fp8.Config())


def dequantize(qt: QTensor) -> Float[Array, "*L N K"]:
    """C e4m3(q v) as float32: the weight the kernel multiplies with."""
    return fp8.dequantize(as_fp8(qt))


activations, multiply = fp8.activations, fp8.multiply  # of `as_fp8`'s weight
