# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The asymmetric grid of Bit-by-Bit: zero points, and an e4m3 scale per group of inputs under one float32 scale.

**Grid.** From the bfloat16-rounded master, per output channel and group of G inputs, with top = 2^bits - 1 and
R(x) = floor(x + 1/2), half up:

    high, low = max(w, 0), min(w, 0) of the group        every group holds 0, so that z is one of its codes
    t = 2^k, the least with (high - low) / (top t) <= 448 in every group of the weight; k >= -104
    s in e4m3, at least 2^-9: of the two neighbours of (high - low) / (top t) the smaller for which
        R(high / (s t)) - R(low / (s t)) <= top          no code is clipped
    z = -R(low / (s t));  q = R(w / (s t)) + z           codes 0 to top; w stands at (q - z) s t

An error is therefore half a step at most, in every group; with eight bits this holds before w is rounded to bfloat16. t
is a power of two, so that (q - z) s t has at most eight significant bits up to four bits a weight: bfloat16 holds it
exactly, and so does a bfloat16 scale s t.

**What is read out of the paper.** We know its formulas second-hand: s = (max - min) / (2^n - 1),
z = -round(min / s), q = clip(round(x / s) + z, 0, 2^n - 1), groups of 32, e4m3 group scales. We chose the rest:
ties go up (a split channel's codes then add up exactly, and z may be added before or after); one-sided groups are
widened to hold 0; a scale rounds down where no code is clipped by it. A group of one value c comes back as top s t,
which is c wherever c / top is on the grid of scales, and within a sixteenth of c elsewhere.

**Bytes.** Codes densely in bytes, the first lowest: `weight_u2` [N, K/4], `weight_u4` [N, K/2] or `weight_u8` [N, K];
three bits are `weight_u2`, the upper two, and `weight_u1` [N, K/8]. `weight_scale` e4m3 [N, K/G], `weight_zero_point`
uint8 [N, K/G], `weight_tensor_scale` float32 [1]. Zero points and tensor scale count in steps of eight bits, z 2^(8 -
bits) and t 2^(bits - 8), so that slices of an 8-bit grid have the same arrays. Two bits in groups of 32 cost 2.5 bits a
weight, in groups of 64 2.25.

**Product.** w = bf((q - z) s t), then an ordinary product with float32 accumulation, as in `w4a16`. With low-bit
activations each row's groups are rounded to this grid too, with one t per row: x is then (q - z) s t as well. Both are
exact in bfloat16, so every engine multiplies them as it does under bf16 activations, with the learner's bits
(docs/schemes.md says why codes are not summed as integers).

**Backward.** Straight through: dX = dY w, dMaster = dY^T x, with the rounded x where activations are.

**Export.** compressed-tensors' `pack-quantized` with zero points holds 2, 4 and 8 bits with bf16 activations: codes and
zero points as words of 32 bits, bfloat16 scales s t, the same weights. Slices of an 8-bit grid fill its eight bits. It
cannot hold other schemes: they are exported as they are published.

**In vLLM** the bridge's layers hold these arrays, and t once per output of a fused weight (asym_layers.py there).
One that rounds its activations calls its zero points `weight_zero_point_a4` or `_a2`.

**Left out.** Experts in vLLM; scales searched by error; groups as long as a row; groups with high - low above float32's
largest number. Their scale is NaN, which the bridge refuses. With the right scale the rounded weight may be infinite.

Sources: Bit-by-Bit, arXiv 2604.07888; e4m3, arXiv 2209.05433.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8
from qarl_bridge.protocol import formats

from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import divide, power_of_two, round_bf16, round_half_up
from qarl_jax.quant.contractions import Product
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.scheme import Scheme
from qarl_jax.types import UserError

_NAMES = ("codes", "codes_low")
_LEAST_SCALE = 2.0**-9  # e4m3's smallest number
_LEAST_EXPONENT = -104  # of t: (s t) 2^-6 is then no subnormal
_WORD = 32


def pack(codes: UInt8[Array, "*L K"], width: int) -> UInt8[Array, "*L B"]:
    """Packs codes of `width` bits (1, 2, 4 or 8) into bytes, the first code in the lowest bits."""
    lanes = codes.reshape(*codes.shape[:-1], -1, 8 // width)
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8).reshape((1,) * (lanes.ndim - 1) + (-1,))
    return jnp.sum(lanes << shifts, axis=-1, dtype=jnp.uint8)


def unpack(packed: UInt8[Array, "*L B"], width: int) -> UInt8[Array, "*L K"]:
    """The inverse of `pack`."""
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8).reshape((1,) * packed.ndim + (-1,))
    lanes = (packed[..., None] >> shifts) & (2**width - 1)
    return lanes.reshape(*packed.shape[:-1], -1)


def _exponent(x: jax.Array) -> jax.Array:
    """The k of a float32 in [2^k, 2^(k + 1)); -127 of 0."""
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Groups [..., G] of numbers, rounded to the asymmetric grid; q, z, s and t are those of the module's docstring.

    codes: q, float32 [..., G], 0 to top. zeros, scales: z and s, float32 [...]; s holds e4m3 numbers. exponent: int32,
    the k of t = 2^k, with the dimensions of `scales`, and of size 1 where groups share it.
    """

    codes: jax.Array
    zeros: jax.Array
    scales: jax.Array
    exponent: jax.Array

    def values(self) -> jax.Array:
        """Computes the rounded numbers (q - z) s t, float32 [..., G]."""
        step = self.scales * power_of_two(self.exponent)
        return (self.codes - self.zeros[..., None]) * step[..., None]


def rounded(groups: Float[Array, "*L G"], bits: int, shared: tuple[int, ...]) -> Rounded:
    """Rounds float32 groups to codes of `bits` bits; groups along the dimensions `shared` of [...] have one t."""
    top = 2**bits - 1
    high, low = jnp.maximum(jnp.max(groups, axis=-1), 0.0), jnp.minimum(jnp.min(groups, axis=-1), 0.0)
    exact = divide(high - low, jnp.full_like(high, top))
    most = jnp.max(exact, axis=shared, keepdims=True)
    carried = lax.bitcast_convert_type(most, jnp.int32) + 0x1FFFFF  # of a fraction above 1.75: 448 is 1.75 * 2^8
    exponent = jnp.maximum((carried >> 23) - 127 - 8, _LEAST_EXPONENT)
    t = power_of_two(exponent)
    ratio = exact * power_of_two(-exponent)
    last = jnp.clip(_exponent(ratio), -6, 8) - 3  # the place of the last bit of e4m3's neighbours
    units = ratio * power_of_two(-last)
    less, more = (jnp.maximum(towards(units) * power_of_two(last), _LEAST_SCALE) for towards in (jnp.floor, jnp.ceil))
    first, end = (round_half_up(divide(edge, less * t)) for edge in (low, high))
    scales = jnp.where(end - first <= top, less, more)
    step = scales * t
    zeros = -round_half_up(divide(low, step))
    quotients = divide(groups, jnp.broadcast_to(step[..., None], groups.shape))
    codes = jnp.clip(round_half_up(quotients) + zeros[..., None], 0, top)  # clips float32 activations alone
    return Rounded(codes, zeros, scales, exponent)


@dataclasses.dataclass(frozen=True)
class Config(Scheme):
    """The base class of the asymmetric schemes.

    Attributes:
      bits: width of a weight's code: 2, 3, 4 or 8.
      activation_bits: width of an activation's code; 0: activations stay in the compute dtype.
      slices: how codes are cut out of an 8-bit grid (`nested_grid.py`): "midpoint" or "shift"; "": they cannot be.
      group_size: inputs per scale and zero point: 16, 32, 64, 128, or another multiple of 16.
    """

    bits: ClassVar[int]
    decoded: ClassVar[bool] = True
    activation_bits: ClassVar[int] = 0
    slices: ClassVar[str] = ""
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.group_size <= 0 or self.group_size % 16:
            raise UserError(f"{self.name}: group size {self.group_size} is not a multiple of 16; use 16, 32, 64 or 128")

    @property
    def middle(self) -> int:
        """The 8-bit codes between the first of a slice's code and the one that it stands for: half of them, or 0."""
        return 2 ** (7 - self.bits) if self.slices == "midpoint" and self.bits < 8 else 0

    @property
    def wire(self) -> formats.Layout:
        """The layout: codes uint8 [N, K bits/8] in one or two arrays, e4m3 scales, uint8 zero points, float32 t [1]."""
        byte, group = np.dtype(np.uint8), self.group_size
        zeros = formats.zero_points(bool(self.middle), self.activation_bits)
        codes = (
            formats.Array(name, f"weight_u{width}", byte, inputs=8 // width)
            for name, width in zip(_NAMES, formats.LANES[self.bits], strict=False)
        )
        single = np.dtype(np.float32)
        given = functools.partial(formats.arguments, kind="int", strategy="group", group_size=group, symmetric=False)
        return formats.Layout(
            scheme=str(self),
            format=formats.ASYMMETRIC[bool(self.middle)],
            weights=given(self.bits),
            activations=given(self.activation_bits, dynamic=True) if self.activation_bits else None,
            arrays=(
                *codes,
                formats.Array("scales", "weight_scale", formats.FLOAT8, inputs=group, is_scale=True),
                formats.Array("zero_points", zeros, byte, inputs=group),
                formats.Array("tensor_scale", "weight_tensor_scale", single, inputs=0, outputs=0, is_scale=True),
            ),
        )

    def check(self, shape: tuple[int, ...]) -> str | None:
        """Returns the reason why groups do not fit a weight [..., N, K], as text for a message, or None."""
        k = shape[-1]
        if k % self.group_size:
            allowed = ", ".join(str(g) for g in (16, 32, 64, 128) if k % g == 0) or "none"
            return f"K = {k} is not a multiple of the group size {self.group_size} (allowed: {allowed})"
        return None

    def quantize(self, w: Float[Array, "*L N K"]) -> QTensor:
        """Quantizes the bfloat16-rounded master to the arrays that the module's docstring lists under "Bytes"."""
        found = self._rounded(w)
        finer = 8 - self.bits
        return self._held(w.shape, found.codes, found.zeros * 2**finer, found, finer)

    def _rounded(self, w: jax.Array) -> Rounded:
        """Groups [..., N, K/G, G] of a master, on the grid of `bits`."""
        return rounded(self._groups(round_bf16(w.astype(jnp.float32))), self.bits, (-2, -1))

    def _groups(self, x: jax.Array) -> jax.Array:
        """[..., K] -> [..., K/G, G]."""
        return x.reshape(*x.shape[:-1], x.shape[-1] // self.group_size, self.group_size)

    def _held(self, shape: Any, codes: jax.Array, zeros: jax.Array, found: Rounded, finer: int) -> QTensor:
        """Arrays of codes [..., N, K/G, G], and of zero points and t in steps of eight bits."""
        codes, planes, rest = codes.astype(jnp.uint8).reshape(shape), {}, self.bits
        for name, width in zip(_NAMES, formats.LANES[self.bits], strict=False):
            rest -= width
            planes[name] = pack((codes >> rest) & (2**width - 1), width)
        held = {
            "scales": found.scales.astype(jnp.float8_e4m3fn),
            "zero_points": zeros.astype(jnp.uint8),
            "tensor_scale": power_of_two(found.exponent - finer),
        }
        return QTensor(planes | held, self)

    def steps(self, qt: QTensor) -> Float[Array, "*L N groups"]:
        """Computes the distance of neighbouring codes, s t, for every group; float32 [..., N, K/G]."""
        return qt.scales.astype(jnp.float32) * qt.arrays["tensor_scale"] * 2.0 ** (8 - self.bits)

    def codes(self, qt: QTensor) -> UInt8[Array, "*L N K"]:
        """Unpacks the codes of a weight: uint8 [..., N, K], 0 to 2^bits - 1."""
        whole = jnp.zeros((), jnp.uint8)
        for name, width in zip(_NAMES, formats.LANES[self.bits], strict=False):
            whole = (whole << width) | unpack(qt.arrays[name], width)
        return whole

    def steps_of_eight(self, qt: QTensor) -> UInt8[Array, "*L N K"]:
        """Computes the codes in steps of eight bits, each at the number that it stands for: uint8 [..., N, K]."""
        return (self.codes(qt) << (8 - self.bits)) | self.middle

    def dequantize(self, qt: QTensor) -> Float[Array, "*L N K"]:
        """Computes the weight bf16((q - z) s t) as float32."""
        codes = self._groups(self.steps_of_eight(qt).astype(jnp.int32))
        steps = (codes - qt.arrays["zero_points"].astype(jnp.int32)[..., None]).astype(jnp.float32)
        scales = qt.scales.astype(jnp.float32) * qt.arrays["tensor_scale"]
        return round_bf16(steps * scales[..., None]).reshape(qt.shape)

    def activations(self, x: Float[Array, "M K"], *, numerics: Numerics) -> Float[Array, "M K"]:
        """Rounds rows to the grid of `activation_bits`, with one t per row; returns x's dtype, which is exact."""
        del numerics
        groups = self._groups(x.astype(jnp.float32))
        return rounded(groups, self.activation_bits, (-1,)).values().reshape(x.shape).astype(x.dtype)

    def multiply(self, used: Any, qt: QTensor, bias: Any, *, numerics: Numerics, product: Product) -> jax.Array:
        """Multiplies rounded activations [M, K] by the dequantized weight [N, K]: [M, N]; both are exact in bf16."""
        return product.floating(used, self.dequantize(qt).astype(jnp.bfloat16), bias, numerics)

    @property
    def exports(self) -> Scheme:
        """The scheme of an export: `Packed` where `pack-quantized` can hold the codes, else this scheme."""
        if self.activation_bits or _WORD % self.bits:
            return self
        return Packed(8 if self.slices else self.bits, self.group_size)

    def exported(self, qt: QTensor) -> QTensor:
        """Repacks a weight into the arrays of the scheme `exports`; its values do not change."""
        packed = self.exports
        if not isinstance(packed, Packed):
            return qt
        finer = 8 - packed.bits
        zeros = jnp.swapaxes(qt.arrays["zero_points"] >> finer, -1, -2)
        scales = qt.scales.astype(jnp.float32) * qt.arrays["tensor_scale"] * 2.0**finer
        arrays = {
            "codes": _words(self.steps_of_eight(qt) >> finer, packed.bits),
            "scales": scales.astype(jnp.bfloat16),
            "zero_points": jnp.swapaxes(_words(zeros, packed.bits), -1, -2),
        }
        return QTensor(arrays, packed)


def _words(codes: jax.Array, bits: int) -> jax.Array:
    """uint8 codes [..., K] -> int32 words, the first code in the lowest bits; the last word is filled with zeros."""
    per = _WORD // bits
    codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)])
    packed = pack(codes, bits).reshape(*codes.shape[:-1], -1, 4)
    return lax.bitcast_convert_type(packed, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Packed(Scheme):
    """The export format: compressed-tensors' `pack-quantized` with zero points. Weights are repacked into it."""

    name: ClassVar[str] = "pack-quantized"
    bits: int
    group_size: int

    @property
    def wire(self) -> formats.Layout:
        """The layout: codes int32 [N, K bits/32], scales bfloat16 [N, K/G], zero points int32, shape int64 [2]."""
        word, group, per = np.dtype(np.int32), self.group_size, _WORD // self.bits
        return formats.Layout(
            scheme=f"w{self.bits}a16_asym:g{group}",
            format=self.name,
            weights=formats.arguments(self.bits, "int", "group", group_size=group, symmetric=False),
            activations=None,
            arrays=(
                formats.Array("codes", "weight_packed", word, inputs=per),
                formats.Array("scales", "weight_scale", formats.BFLOAT16, inputs=group, is_scale=True),
                formats.Array("zero_points", "weight_zero_point", word, inputs=group, outputs=per),
            ),
            shape_leaf="weight_shape",
        )
