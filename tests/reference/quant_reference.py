# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Grids and engine arithmetic in numpy, from the formulas: numpy's float32 division is IEEE, float64 does the rest."""

from __future__ import annotations

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


def published_value(qvalue: np.ndarray, scale: np.ndarray, scheme: str) -> np.ndarray:
    """float32 [N, K]: the weight that the tensors of a layer stand for (qarl_bridge/protocol/formats.py)."""
    if qvalue.dtype != np.int32:
        return qvalue.astype(np.float32) * scale
    if scheme == "w4a8_fp8":
        channel, table = cutlass_int4_fp8(qvalue, scale)
        return channel * table
    return int4_value(unpack(qvalue), scale)


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


def _f8(x: np.ndarray) -> np.ndarray:
    """Round to e4m3, saturating, kept as float32."""
    return np.clip(x, -448, 448).astype(np.float32).astype(F8).astype(np.float32)


def w4a8_fp8_factors(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N, K] -> the factors C [N, 1] and v [N, K/128] our grid is made of."""
    n, k = w.shape
    s = bf(np.abs(bf(w).reshape(n, k // 128, 128)).max(-1) / np.float32(7.5))
    largest = s.max(-1, keepdims=True)
    mantissa, exponent = np.frexp(largest / np.float32(7))
    c = np.ldexp(np.rint(mantissa * 16) / 16, exponent - 6).astype(np.float32)
    free = c * np.float32(448) >= 2.0**-9
    channel = np.where(free, c, np.float32(1 / (448 * 512))) * np.float32(8)
    group = np.clip(_f8(s / channel), np.float32(2.0**-9), np.float32(56))
    return channel, np.where(free & (s == largest), np.float32(56), group)


def w4a8_fp8_weight(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N, K] -> int8 codes [N, K], bfloat16 scales [N, K/128]."""
    channel, group = w4a8_fp8_factors(w)
    levels = _f8(group[..., None] * np.arange(9, dtype=np.float32))
    middles = channel[..., None] * ((levels[..., 1:] + levels[..., :-1]) / 2)
    blocks = bf(w).reshape(*group.shape, 128)
    magnitude = (np.abs(blocks)[..., None] > middles[:, :, None, :]).sum(-1)
    codes = np.where(blocks < 0, -magnitude, np.minimum(magnitude, 7))
    return codes.reshape(w.shape).astype(np.int8), (channel * group).astype(BF16)


def factor_scales(scale: np.ndarray, way: str = "divide") -> tuple[np.ndarray, np.ndarray]:
    """vLLM's convert_bf16_scales_to_fp8: bfloat16 [N, groups] -> channel scales [N, 1], e4m3 group scales as float32.

    way: "divide" (its eager kernel), "reciprocal" (compiled), "one ulp up" or "down" (a channel scale that far off).
    """
    s = scale.astype(np.float32)
    largest = s.max(-1, keepdims=True)
    top = np.float32(448)
    c = largest * (np.float32(1) / top) if way == "reciprocal" else largest / top
    if "ulp" in way:
        c = np.nextafter(c, np.float32(np.inf if "up" in way else 0))
    c = np.maximum(c, np.float32(1 / (448 * 512)))
    eightfold = _f8(s * (np.float32(1) / c) if way == "reciprocal" else s / c)
    return c * np.float32(8), _f8(eightfold / np.float32(8))


def cutlass_int4_fp8(words: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What vLLM's int4 x fp8 kernel multiplies with, by its own steps: (channel scales [N, 1], e4m3 values [N, K]).

    Words of code + 8 become two's complement; positive codes then take the encoding of the table entry of their
    negative (1 -> 0b0111), and the table holds e4m3(-8 v), ..., e4m3(-2 v), -v. An entry is looked up by the low three
    bits; encodings 0b0000 to 0b0111 flip its sign, and 0b0000 is zero.
    """
    channel, group = factor_scales(scale)
    nibbles = unpack(words) & 0xF
    encoded = np.where((nibbles > 0) & (nibbles < 8), 8 - nibbles, nibbles)
    table = np.concatenate([_f8(group[..., None] * -np.arange(8, 1, -1, dtype=np.float32)), -group[..., None]], -1)
    rows = np.arange(len(words))[:, None]
    value = table[rows, np.arange(nibbles.shape[1])[None, :] // 128, encoded & 7]
    value = np.where(encoded < 8, -value, value)
    return channel, np.where(encoded == 0, np.float32(0), value)


def w4a8_fp8_layer(x, codes, scale, profile, bias=None, fused=False) -> np.ndarray:
    """The bfloat16 output [M, N] as float32; the sum in float64, so: of cases whose float32 sum is exact. fused: the
    last multiplication and the bias are one operation."""
    x_q, s_x = fp8_rows(x, profile)
    channel, table = cutlass_int4_fp8(pack(codes), scale)
    acc = (x_q.astype(np.float64) @ table.astype(np.float64).T).astype(np.float32)
    y = channel[:, 0][None, :] * acc
    return bf(fma(s_x, y, bias) if fused else s_x * y if bias is None else s_x * y + bias)
