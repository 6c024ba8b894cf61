# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Grids and engine arithmetic in numpy, from the formulas: numpy's float32 division is IEEE, float64 does the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
F8 = ml_dtypes.float8_e4m3fn


def bf(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, kept as float32."""
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


def int8_weight(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., N, K] -> int8 codes, float32 scales [..., N, 1]."""
    w = bf(w)
    scale = np.abs(w).max(-1, keepdims=True) / np.float32(127.5)
    scale = np.where(scale == 0, np.finfo(np.float32).eps, scale).astype(np.float32)
    return np.clip(np.rint(w / scale), -128, 127).astype(np.int8), scale


def fp8_weight(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., N, K] -> e4m3 codes, float32 scales [..., N, 1]."""
    w = bf(w)
    scale = np.abs(w).max(-1, keepdims=True) / np.float32(448)
    scale = np.where(scale == 0, np.finfo(np.float32).eps, scale).astype(np.float32)
    return np.clip(w / scale, -448, 448).astype(F8), scale


def int4_weight(w: np.ndarray, group: int, bits: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """The grid of 4, 3 or 2 bits: [..., N, K] -> unpacked int8 codes [..., N, K], bfloat16 scales [..., N, K/G]."""
    *lead, k = w.shape
    g = k if group == -1 else group
    w = bf(w).reshape(*lead, k // g, g)
    low, high = {4: (-8, 7), 3: (-4, 3), 2: (-2, 1)}[bits]
    scale = bf(np.abs(w).max(-1) / np.float32((high - low) / 2))
    scale = np.where(scale == 0, np.float32(2.0**-7), scale)
    codes = np.clip(np.rint(w / scale[..., None]), low, high).astype(np.int8)
    return codes.reshape(*lead, k), scale.astype(BF16)


def int4_value(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """bf(code * scale), as float32."""
    repeat = codes.shape[-1] // scale.shape[-1]
    return bf(codes.astype(np.float32) * np.repeat(scale.astype(np.float32), repeat, -1))


def nvfp4_weight(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[..., N, K] -> unpacked uint8 codes 0 to 15, e4m3 scales [..., N, K/16], float32 divisor [..., 1, 1]."""
    w = bf(w)
    blocks = w.reshape(*w.shape[:-1], -1, 16)
    most = np.abs(blocks).max(-1)
    with np.errstate(over="ignore"):
        g = bf(bf(1 / np.maximum(most.max((-2, -1), keepdims=True), np.float32(2.0**-126))) * np.float32(2688))
        g = np.where(np.isfinite(g), g, np.float32(1))
        scales = np.minimum(bf(most / np.float32(6)) * g, np.float32(448)).astype(F8)
    scales = np.where(scales.astype(np.float32) == 0, np.float32(0.125), scales.astype(np.float32)).astype(F8)
    x = np.abs(blocks) / (scales.astype(np.float32) / g)[..., None]
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    distance = np.abs(np.minimum(x, 6)[..., None].astype(np.float64) - grid)
    distance += np.where(np.arange(8) % 2, 1e-12, 0)  # ties: the even code
    codes = distance.argmin(-1) + 8 * (blocks < 0)
    return codes.reshape(w.shape).astype(np.uint8), scales, g


def nvfp4_factors(codes: np.ndarray, scales: np.ndarray, divisor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(code * scale, exact, scales below 2^-6 flushed; 1 / divisor), float32."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    scales = scales.astype(np.float32)
    scales = np.where(scales < 2.0**-6, np.float32(0), scales)
    values = np.where(codes & 8, -grid[codes & 7], grid[codes & 7])
    return values * np.repeat(scales, 16, -1), np.float32(1) / divisor


def pack(codes: np.ndarray) -> np.ndarray:
    """uint4b8, one element at a time."""
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint32)
    for i in range(8):
        out |= (codes[..., i::8].astype(np.int32) + 8).astype(np.uint32) << np.uint32(4 * i)
    return out.view(np.int32)


def unpack(words: np.ndarray) -> np.ndarray:
    """The inverse of `pack`: int8 codes."""
    nibbles = (words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 0xF
    return (nibbles.astype(np.int8) - 8).reshape(*words.shape[:-1], -1)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., K/2] -> codes [..., K], the low one first."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


Arrays = dict[str, np.ndarray]


def steps(arrays: Arrays) -> np.ndarray:
    """The scale of every weight, float32 [..., N, K]."""
    scale, codes = arrays["scales"].astype(np.float32), arrays["codes"]
    k = codes.shape[-1] * (8 if codes.dtype == np.int32 else 1)
    return np.repeat(scale, k // scale.shape[-1], -1)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A scheme's grid in numpy.

    Attributes:
      arrays: a master and its scheme -> the arrays as they are published, by name.
      rounded: whether the served weight, code times step, is rounded to bfloat16.
      half: half a step of codes that are floats, over the weight, and over the scale for the smallest; None: integers.
      step: arrays -> the distance between neighbouring codes, float32 [..., N, K].
      clamped: the largest distance, in steps, of a weight from the code it is clamped to.
      drift: the largest change, in steps, of a served weight that is quantized again.
    """

    arrays: Callable[[np.ndarray, Any], Arrays]
    rounded: bool = False
    half: tuple[float, float] | None = None
    step: Callable[[Arrays], np.ndarray] = steps
    clamped: float = 0.5 + 7.5 * 2.0**-8
    drift: float = 1.0

    def value(self, arrays: Arrays) -> np.ndarray:
        """The weight that an engine computes with, float32 [..., N, K]."""
        codes = arrays["codes"]
        codes = unpack(codes) if codes.dtype == np.int32 else codes
        value = codes.astype(np.float32) * self.step(arrays)
        return bf(value) if self.rounded else value


def named(codes: np.ndarray, scales: np.ndarray) -> Arrays:
    """The arrays of a grid with one level of scales."""
    return {"codes": codes, "scales": scales}


def int4_arrays(w: np.ndarray, scheme: Any) -> Arrays:
    """The arrays of `w4a16` and of its kin, packed."""
    codes, scale = int4_weight(w, scheme.group_size, scheme.bits)
    return named(pack(codes), scale)


INT4 = Grid(int4_arrays, rounded=True)


class Nvfp4(Grid):
    """The grid of `nvfp4`, whose value is (code * scale) * (1 / divisor)."""

    def value(self, arrays: Arrays) -> np.ndarray:
        """The weight that a layer's factors stand for, float32 [..., N, K]."""
        return np.multiply(*nvfp4_factors(nibbles(arrays["codes"]), arrays["scales"], arrays["divisor"]))


def nvfp4_arrays(w: np.ndarray, scheme: Any) -> Arrays:
    """The arrays of `nvfp4`, packed."""
    codes, scales, divisor = nvfp4_weight(w)
    return named(codes[..., ::2] | codes[..., 1::2] << 4, scales) | {"divisor": divisor}


def nvfp4_step(arrays: Arrays) -> np.ndarray:
    """The weight that code 2 stands for."""
    return np.repeat(arrays["scales"].astype(np.float32) / arrays["divisor"], 16, -1)


def half_up(x: np.ndarray) -> np.ndarray:
    """floor(x + 1/2), the sum in float64, which holds it."""
    return np.floor(x.astype(np.float64) + 0.5)


def asym_weight(groups: np.ndarray, bits: int, axes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """float32 [..., G] -> codes [..., G], zero points, e4m3 scales [...], and float64 t, one over `axes`."""
    top = 2**bits - 1
    high, low = np.maximum(groups.max(-1), 0), np.minimum(groups.min(-1), 0)
    exact = (high - low) / np.float32(top)
    most = exact.max(axes, keepdims=True).astype(np.float64)
    t = 2.0 ** np.maximum(np.ceil(np.log2(np.maximum(most / 448, 2.0**-200))), -104)
    grid = np.arange(1, 127, dtype=np.uint8).view(F8).astype(np.float64)
    more = np.searchsorted(grid, exact / t, side="left")
    less = np.where(grid[more] > exact / t, np.maximum(more - 1, 0), more)

    def codes_of(w: np.ndarray, place: np.ndarray) -> np.ndarray:
        return half_up(w / (grid[place] * t).astype(np.float32))

    place = np.where(codes_of(high, less) - codes_of(low, less) <= top, less, more)
    zeros = -codes_of(low, place)
    codes = half_up(groups / (grid[place] * t).astype(np.float32)[..., None]) + zeros[..., None]
    assert codes.min() >= 0
    assert codes.max() <= top, "a code would be clipped"
    return codes.astype(np.int64), zeros.astype(np.int64), grid[place].astype(np.float32).astype(F8), t


def asym_rows(x: np.ndarray, bits: int, group: int) -> np.ndarray:
    """[M, K] activations, each row on a grid of its own."""
    codes, zeros, scales, t = asym_weight(np.asarray(x, np.float32).reshape(len(x), -1, group), bits, (-1,))
    return ((codes - zeros[..., None]) * (scales.astype(np.float32) * t)[..., None]).reshape(x.shape)


def adversarial_rows(k: int) -> np.ndarray:
    """float32 [40, k] activations: rows of every size, of zeros, of -0, of one value, of one sign, with outliers, of
    subnormals, near the largest float, of ties. The last two have an infinity and a NaN, at input 7."""
    rng = np.random.default_rng(k)
    x = rng.normal(size=(40, k)) * rng.choice([1e-30, 1e-3, 1, 1e3, 1e30], (40, 1))
    x[0], x[1], x[2], x[3], x[4] = 0, -0.0, 1.5, -np.abs(x[3]), np.abs(x[4])
    x[5, 3], x[6, 40] = 1e38, 1e4 * x[6, 40]
    x[7], x[8] = 1e-40 * rng.normal(size=k), 1e-38 * rng.normal(size=k)
    x[9] = rng.normal(size=k) * 10.0 ** rng.uniform(-30, 30, k)
    x[10], x[11] = 1.6e38 * np.sign(x[10]), 2.0**-130 * rng.integers(-4, 5, k)
    x[12], x[13] = 0.5 * rng.integers(0, 8, k), rng.integers(-7, 8, k)
    x[14, :64], x[15, :64] = 0, 1e-45
    x[-2, 7], x[-1, 7] = np.inf, np.nan
    return x.astype(np.float32)


def as_bytes(codes: np.ndarray, width: int) -> np.ndarray:
    """Codes of `width` bits, the first in the lowest bits of a byte."""
    bits = (codes[..., None] >> np.arange(width)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def of_bytes(held: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `as_bytes`, uint8."""
    bits = np.unpackbits(held, axis=-1, bitorder="little").astype(np.int64)
    return (bits.reshape(*held.shape[:-1], -1, width) << np.arange(width)).sum(-1).astype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Asym(Grid):
    """The grid of zero points and two levels of scales."""

    arrays: Callable[[np.ndarray, Any], Arrays] = dataclasses.field(init=False, default=None)
    clamped: float = 0.5
    bits: int = 0

    def __post_init__(self):
        object.__setattr__(self, "arrays", self._arrays)
        object.__setattr__(self, "step", self._step)

    def _arrays(self, w: np.ndarray, scheme: Any) -> Arrays:
        group, finer = scheme.group_size, 8 - self.bits
        codes, zeros, scales, t = asym_weight(bf(w).reshape(*w.shape[:-1], -1, group), self.bits, (-2, -1))
        codes = codes.reshape(w.shape)
        planes = (
            {"codes": as_bytes(codes >> 1, 2), "codes_low": as_bytes(codes & 1, 1)}
            if self.bits == 3
            else {"codes": as_bytes(codes, self.bits)}
        )
        zeros = (zeros << finer).astype(np.uint8)
        return planes | {"scales": scales, "zero_points": zeros, "tensor_scale": (t * 2.0**-finer).astype(np.float32)}

    def codes(self, arrays: Arrays) -> np.ndarray:
        """uint8 [..., N, K]."""
        if self.bits == 3:
            return 2 * of_bytes(arrays["codes"], 2) + of_bytes(arrays["codes_low"], 1)
        return of_bytes(arrays["codes"], self.bits)

    def _step(self, arrays: Arrays) -> np.ndarray:
        scales = arrays["scales"].astype(np.float32) * arrays["tensor_scale"] * np.float32(2.0 ** (8 - self.bits))
        return np.repeat(scales, self.codes(arrays).shape[-1] // scales.shape[-1], -1)

    def value(self, arrays: Arrays) -> np.ndarray:
        """The weight that an engine computes with, float32 [..., N, K]."""
        codes, zeros = self.codes(arrays), arrays["zero_points"].astype(np.int64)
        zeros = np.repeat(zeros, codes.shape[-1] // zeros.shape[-1], -1)
        return bf((codes - zeros / 2.0 ** (8 - self.bits)) * self._step(arrays))


@dataclasses.dataclass(frozen=True)
class Slice(Asym):
    """The top bits of the 8-bit grid, read `middle` of a step above where they begin."""

    clamped: float = 1.0
    middle: float = 0.0

    def _arrays(self, w: np.ndarray, scheme: Any) -> Arrays:
        master = Asym(bits=8)._arrays(w, scheme)
        return master | {"codes": as_bytes(master["codes"] >> (8 - self.bits), self.bits)}

    def value(self, arrays: Arrays) -> np.ndarray:
        """The weight that an engine computes with, float32 [..., N, K]."""
        fine = 2 ** (8 - self.bits)
        zeros = arrays["zero_points"].astype(np.int64)
        codes = self.codes(arrays).astype(np.int64) * fine + int(self.middle * fine)
        steps = codes - np.repeat(zeros, codes.shape[-1] // zeros.shape[-1], -1)
        return bf(steps * (self._step(arrays) / fine).astype(np.float32))


# One row per scheme. `tests/quant/test_schemes.py` and `tests/bridge/test_formats.py` compare the scheme with it.
GRIDS = {
    "w8a8": Grid(lambda w, scheme: named(*int8_weight(w))),
    "fp8": Grid(lambda w, scheme: named(*fp8_weight(w)), half=(2.0**-4, 2.0**-10)),
    "w4a16": INT4,
    "w4a8": INT4,
    "w3a16": INT4,
    "w2a16": INT4,
    **{f"w{bits}a16_asym": Asym(bits=bits) for bits in (2, 3, 4, 8)},
    **{f"w{bits}a16_shift": Slice(bits=bits) for bits in (2, 4)},
    **{f"w{bits}a16_midpoint": Slice(bits=bits, clamped=0.5 + 2.0**-5, middle=0.5) for bits in (2, 4)},
    "w4a4": Asym(bits=4),
    "w2a2": Asym(bits=2),
    "nvfp4": Nvfp4(nvfp4_arrays, half=(2.0**-2, 2.0**-2), step=nvfp4_step),
}


def grid(name: str) -> Grid:
    """The row of a scheme."""
    assert name in GRIDS, f"scheme {name!r} has no formula: add its row to GRIDS in tests/reference/quant_reference.py"
    return GRIDS[name]


def int8_rows(x: np.ndarray, profile: str) -> tuple[np.ndarray, np.ndarray]:
    """[M, K] activations -> int8 codes, float32 scales [M, 1], as the engine of `profile` makes them."""
    x = np.asarray(x, np.float32)
    amax = np.abs(x).max(-1, keepdims=True)
    if profile == "cpu":
        amax = np.maximum(amax, np.float32(1e-7))
    scale = amax / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.float32(127) / amax
    inverse = np.where(amax == 0, np.float32(0), inverse).astype(np.float32)
    return np.clip(np.rint(x * inverse), -128, 127).astype(np.int8), scale


def fp8_rows(x: np.ndarray, profile: str) -> tuple[np.ndarray, np.ndarray]:
    x = np.asarray(x, np.float32)
    scale = np.maximum(np.abs(x).max(-1, keepdims=True) / np.float32(448), np.float32(1 / (448 * 512)))
    scaled = x / scale if profile == "cuda" else x * (np.float32(1) / scale)
    return np.clip(scaled, -448, 448).astype(F8), scale


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 fused multiply-add. The float64 product is exact; the float64 sum is rounded to odd, so that the final
    rounding to float32 is the only one that counts."""
    p = a.astype(np.float64) * b.astype(np.float64)
    c = np.broadcast_to(c, p.shape).astype(np.float64)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)
    bits = s.view(np.int64).copy()
    inexact_even = (error != 0) & ((bits & 1) == 0)
    away = (error > 0) == (s > 0)
    bits = np.where(inexact_even, np.where(away, bits + 1, bits - 1), bits)
    return bits.view(np.float64).astype(np.float32)


def rescaled(x_q, s_x, w, bias=None) -> np.ndarray:
    """float32 [M, N] of vLLM's CPU engine with the bridge's own layers: codes [M, K] times w [N, K], in float64."""
    y = (s_x.astype(np.float64) * (x_q.astype(np.float64) @ w.astype(np.float64).T)).astype(np.float32)
    return y if bias is None else y + bias[None, :]


def w8a8_layer(x, codes, scale, profile, bias=None) -> np.ndarray:
    """float32 [M, N], before the rounding to the compute dtype."""
    x_q, s_x = int8_rows(x, profile)
    if profile == "cpu":
        return rescaled(x_q, s_x, codes * scale.astype(np.float64), bias)
    acc = (x_q.astype(np.int64) @ codes.astype(np.int64).T).astype(np.float32)
    first = acc * scale[:, 0][None, :]
    return first * s_x if bias is None else fma(first, np.broadcast_to(s_x, first.shape), bias[None, :])


def w4a8_layer(x, codes, scale, bias=None) -> np.ndarray:
    """float32 [M, N]: one fused multiply-add per group, in order."""
    x_q, s_x = int8_rows(x, "cpu")
    n, k = codes.shape
    g = k // scale.shape[-1]
    acc = np.zeros((x.shape[0], n), np.float32) if bias is None else np.broadcast_to(bias, (x.shape[0], n))
    for i in range(k // g):
        part = slice(i * g, (i + 1) * g)
        p = (x_q[:, part].astype(np.int64) @ codes[:, part].astype(np.int64).T).astype(np.float32)
        acc = fma(p * s_x, np.broadcast_to(scale[:, i].astype(np.float32)[None, :], p.shape), acc)
    return acc
