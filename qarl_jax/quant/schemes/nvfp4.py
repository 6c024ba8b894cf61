# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""nvfp4: e2m1 weights, an e4m3 scale per 16 inputs under one float32 scale, activations in the compute dtype (W4A16).

**Grid.** Codes +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}, stored as sign and place in that list. With d a rounding to bfloat16,
w the master rounded to bfloat16, amax the largest |w| of all that the engine fuses (q, k and v; gate and up), and m the
largest of a block of 16 inputs:

    g = d(d(1 / amax) * 2688)       a divisor; 1 where that is infinite; amax at least 2^-126
    s = e4m3(min(448, d(m / 6) g))  0.125 where that is 0
    q = e2m1(w / (s / g))           float32 quotients; nearest, ties to the even code; a negative that becomes 0 is -0

These are compressed-tensors' roundings for a bfloat16 weight (torch divides a number by a tensor through the rounded
reciprocal), and their bytes where amax is at least 2^-104; below, float32 quotients are subnormal.

**Product.** q s has six significant bits, so that bfloat16 holds it, and 1 / g multiplies the float32 sum:
y = bf(bf(f32(sum x (q s)) f32(1 / g)) + b), Marlin's order. Marlin multiplies all block scales by a power of two, and
counts those below 2^-6 as 0. The power is 1 here: the block with amax has s = 448, or else every code is 0. The product
mirrors this flush and the codes do not, so codes and scales stay compressed-tensors'. A flushed weight is at most
6 * 2^-6 / g, or amax / 28,672.

**Backward.** Straight through: dX = dY bf(q s / g), dMaster = dY^T x.

**What an engine does with the bytes.** `weight_packed` uint8 [N, K/2] (low nibble first), `weight_scale` e4m3
[N, K/16], `weight_global_scale` float32 [1], which is g (compressed-tensors `nvfp4-pack-quantized`). Readers that
dequantize form q f32(s / g), which may have another last bit than q s f32(1 / g).

In vLLM the bridge's layers replace vLLM's: on CUDA Marlin cuts its sums as the rows and the GPU decide, and takes one
g, the largest, for all parts that it fuses. The bridge's layers keep each part's g, so the parts of a released folder
may differ in g.

**Left out.** Activations in e2m1.

Sources: QeRL, arXiv 2510.11696; compressed-tensors 0.17.0; vLLM 0.25.1, marlin_utils_fp4.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from qarl_bridge.protocol import formats

from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import divide, float_of, round_bf16
from qarl_jax.quant.contractions import Product
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.scheme import Scheme
from qarl_jax.quant.schemes.fp8 import to_e4m3

_GROUP = 16
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MAX = 448.0 * 6.0
_ZERO_SCALE = 0.125
FLUSHED = 2.0**-6  # block scales below this count as 0 in a product
_TINY = 0x00800000  # the bits of 2^-126
_MAGNITUDE = 0x7FFFFFFF
_WIRE = formats.Layout(
    scheme="nvfp4",
    format="nvfp4-pack-quantized",
    weights=formats.arguments(4, "float", "tensor_group", group_size=_GROUP) | {"scale_dtype": "torch.float8_e4m3fn"},
    activations=None,
    arrays=(
        formats.Array("codes", "weight_packed", np.dtype(np.uint8), inputs=2),
        formats.Array("scales", "weight_scale", formats.FLOAT8, inputs=_GROUP, is_scale=True),
        formats.Array("divisor", "weight_global_scale", np.dtype(np.float32), inputs=0, outputs=0, is_scale=True),
    ),
)


def _magnitudes(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bits of |bf(w)| as a float32, which keep subnormals, and whether bf(w) < 0."""
    bits = lax.bitcast_convert_type(round_bf16(w.astype(jnp.float32)), jnp.int32)
    magnitude = bits & _MAGNITUDE
    return magnitude, (bits < 0) & (magnitude > 0)


def _divisor(amax: jax.Array) -> jax.Array:
    """Computes g of the largest magnitudes. XLA flushes 1 / amax above 2^126 to zero, so it is scaled there."""
    g = round_bf16(round_bf16(divide(jnp.ones_like(amax), amax)) * _MAX)
    scaled = divide(jnp.full_like(amax, 2.0**10), amax)
    scaled = jnp.round(scaled * 2.0**123) * 2.0**-123  # bfloat16's subnormals are multiples of 2^-133
    g = jnp.where(amax > 2.0**126, round_bf16(scaled * (_MAX * 2.0**-10)), g)
    return jnp.where(jnp.isfinite(g), g, 1.0)


def to_e2m1(x: Float[Array, "*S"]) -> jax.Array:
    """Rounds float32 magnitudes to uint8 codes 0 to 7: the nearest value, ties to the even code, saturating."""
    code = jnp.zeros(x.shape, jnp.uint8)
    for i, (low, high) in enumerate(itertools.pairwise(_VALUES)):
        middle = (low + high) / 2
        code += (x >= middle if i % 2 else x > middle).astype(jnp.uint8)
    return code


@dataclasses.dataclass(frozen=True)
class Config(Scheme):
    """e2m1 weights in blocks of 16, activations in the compute dtype."""

    name: ClassVar[str] = "nvfp4"
    one_range: ClassVar[bool] = True
    decoded: ClassVar[bool] = True

    @property
    def own_layer(self) -> bool:
        """True: `multiply` applies the tensor's scale 1 / g to the sum and not to the weight."""
        return True

    @property
    def wire(self) -> formats.Layout:
        """The layout: codes uint8 [N, K/2], block scales e4m3 [N, K/16] and the divisor g, float32 [1]."""
        return _WIRE

    def check(self, shape: tuple[int, ...]) -> str | None:
        """Returns the reason why a weight [..., N, K] cannot be quantized, as text for a message, or None."""
        return f"K = {shape[-1]} is not a multiple of {_GROUP}, the inputs of a block" if shape[-1] % _GROUP else None

    def quantize(self, w: Float[Array, "*L N K"]) -> QTensor:
        """Quantizes bf16(w): codes uint8 [..., N, K/2], scales e4m3 [..., N, K/16], divisor g float32 [..., 1, 1]."""
        return self.quantize_beside(w, ())

    def quantize_beside(self, w: Float[Array, "*L N K"], beside: Sequence[jax.Array]) -> QTensor:
        """Quantizes a master as `quantize` does, with g from the largest magnitude in it and the weights `beside`."""
        *lead, k = w.shape
        magnitude, negative = _magnitudes(w)
        blocks = magnitude.reshape(*lead, k // _GROUP, _GROUP)
        most = jnp.max(blocks, axis=-1)
        top = [jnp.max(m, axis=(-2, -1), keepdims=True) for m in (most, *(_magnitudes(other)[0] for other in beside))]
        amax = float_of(functools.reduce(jnp.maximum, top, jnp.int32(_TINY)))
        g = _divisor(amax)
        ratio = round_bf16(divide(float_of(most), jnp.full(most.shape, 6.0)))
        scales = to_e4m3(jnp.minimum(ratio * g, 448.0))
        scales = jnp.where(scales == 0, jnp.asarray(_ZERO_SCALE, scales.dtype), scales)
        step = divide(scales.astype(jnp.float32), jnp.broadcast_to(g, scales.shape))
        codes = to_e2m1(divide(float_of(blocks), jnp.broadcast_to(step[..., None], blocks.shape))).reshape(w.shape)
        pairs = (codes | (negative.astype(jnp.uint8) << 3)).reshape(*lead, k // 2, 2)
        packed = pairs[..., 0] | (pairs[..., 1] << 4)
        return QTensor({"codes": packed, "scales": scales, "divisor": g}, self)

    def dequantize(self, qt: QTensor) -> Float[Array, "*L N K"]:
        """Computes the weight (q s) f32(1 / g) in float32; block scales below 2^-6 count as zero."""
        return decoded(qt) * factor(qt)

    def activations(self, x: Float[Array, "M K"], *, numerics: Numerics) -> Float[Array, "M K"]:
        """Returns the activations unchanged."""
        del numerics
        return x

    def multiply(self, used, qt: QTensor, bias, *, numerics: Numerics, product: Product):
        """Computes the engine's layer (see "Product" above): [M, N]."""
        return product.floating(used, decoded(qt), bias, numerics, factor(qt)[..., 0, 0])


def decoded(qt: QTensor) -> Float[Array, "*L N K"]:
    """Computes q s, the operand of the product: float32, exact in bfloat16; block scales below 2^-6 count as zero."""
    *lead, k = qt.shape
    codes = jnp.stack([qt.codes & 15, qt.codes >> 4], axis=-1).reshape(*lead, k // _GROUP, _GROUP)
    values = jnp.asarray(np.array([*_VALUES, *(-v for v in _VALUES)], np.float32))[codes]
    scales = qt.scales.astype(jnp.float32)
    scales = jnp.where(scales < FLUSHED, 0.0, scales)
    return (values * scales[..., None]).reshape(*lead, k)


def factor(qt: QTensor) -> Float[Array, "*L 1 1"]:
    """Computes f32(1 / g), by which `multiply` multiplies a product's sum."""
    g: Any = qt.arrays["divisor"]
    return divide(jnp.ones_like(g), g)
