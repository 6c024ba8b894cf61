# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant norms, and what follows them elementwise, for a CUDA engine, as Triton kernels.

    RMSNorm      r = float32(1 / sqrt(s + eps)) in float64, eps a float32; y = bf16((x * r) * w), products in float32
                 s = sum(rint((x t)^2)) / (D t^2), t = 2^(17 - E), 2^E the largest power of two up to max |x|
    int8 codes   rint(y fl(127 / top)) and a row's scale fl(top / 127), vLLM's `dynamic_scaled_int8_quant`
    rotation     bf16(a cos - b sin), bf16(b cos + a sin) of a head's halves, with bfloat16 cosines, as vLLM's

Squares are rounded to integers of a row's unit, so that their float64 sum is exact in every order.
A decode step waits for many small kernels. So a norm also writes the codes that an int8 layer multiplies, and the
heads' norm rotates them.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _store_codes(y, codes_ptr, scales_ptr, row, at, D):
    """Stores a row's codes rint(y fl(127 / top)) and its scale fl(top / 127), as vLLM's int8 quantizer does.

    y: float32, bfloat16 numbers, 0 beyond D."""
    top = tl.max(tl.abs(y))
    inverse = tl.where(top == 0.0, 0.0, tl.math.div_rn(127.0, top))
    tl.store(codes_ptr + row * D + at, libdevice.rint(y * inverse).to(tl.int8), mask=at < D)
    tl.store(scales_ptr + row, tl.math.div_rn(top, 127.0))


_UNITS = tl.constexpr(1.5 * 2.0**52)  # a float64 near it is an integer: adding it rounds to the nearest, ties to even


@triton.jit
def nearest(x):
    """Rounds float64 numbers below 2^51 to the nearest integer, ties to even."""
    return (x + _UNITS) - _UNITS


@triton.jit
def units_per_one(top, BITS: tl.constexpr):
    """Computes 2^(BITS - 1 - E), float64, of rows' maxima of |x|, 2^E the largest power of two up to `top`."""
    return ((2045 + BITS - tl.maximum(top.to(tl.int64, bitcast=True) >> 52, 723)) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _inverse_root(x, eps, D: tl.constexpr):
    """Computes float32 1 / sqrt(s + eps) [..., 1] of each row of x float32 [..., BLOCK], 0 beyond D."""
    axis: tl.constexpr = len(x.shape) - 1
    top = tl.max(tl.abs(x), axis=axis, keep_dims=True).to(tl.float64)
    scale = units_per_one(top, 18)
    scaled = x.to(tl.float64) * scale
    total = tl.sum(nearest(scaled * scaled), axis=axis, keep_dims=True)  # of integers below 2^36
    return (1.0 / tl.sqrt(total / (D * scale * scale) + eps)).to(tl.float32)


@triton.jit
def _norm(x_ptr, r_ptr, w_ptr, y_ptr, codes_ptr, scales_ptr, vectors, outer, inner, eps, D: tl.constexpr,
          BLOCK: tl.constexpr, ADD: tl.constexpr, CODES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row // vectors * outer + row % vectors * inner + at, mask=at < D, other=0.0).to(tl.float32)
    if ADD:
        total = (x + tl.load(r_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float32)).to(r_ptr.dtype.element_ty)
        tl.store(r_ptr + row * D + at, total, mask=at < D)
        x = total.to(tl.float32)
    w = tl.load(w_ptr + at, mask=at < D, other=0.0).to(tl.float32)
    y = ((x * _inverse_root(x, eps, D)) * w).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * D + at, y, mask=at < D)
    if CODES:
        _store_codes(y.to(tl.float32), codes_ptr, scales_ptr, row, at, D)


Codes = tuple[torch.Tensor, torch.Tensor]


def room_for_codes(x: torch.Tensor) -> Codes:
    """Returns uninitialized int8 codes [..., D] and float32 scales [..., 1] for the rows of x [..., D]."""
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return codes, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    codes: Codes | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes RMSNorm of x bfloat16 [..., D] with gains `weight` [D]; with a residual, returns the norm of the sum,
    and the sum.

    The residual is overwritten by the sum. A strided x [T, H, D] (heads of a fused projection) is not copied.
    codes: of `room_for_codes`, or None; receives the norm's int8 codes and scales.
    """
    shape, d = x.shape, x.shape[-1]
    assert residual is None or residual.is_contiguous()
    if x.dim() != 3 or x.stride(-1) != 1:
        x = x.reshape(-1, 1, d)
    rows, vectors = x.shape[:2]
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(d)
    warps = max(1, min(8, block // 256))
    if rows:
        _norm[(rows * vectors,)](
            x, residual, weight, y, *(codes or (None, None)), vectors, x.stride(0), x.stride(1), float(np.float32(eps)),
            D=d, BLOCK=block, ADD=residual is not None, CODES=codes is not None, num_warps=warps,
        )  # fmt: skip
    return y if residual is None else (y, residual)


@triton.jit
def _rotated_norms(x_ptr, q_ptr, k_ptr, positions_ptr, table_ptr, y_ptr, heads, queries, stride, eps, H: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """Computes RMSNorm and rotary embedding of BLOCK heads: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    at = tl.arange(0, H)[None, :]
    other = (at + H // 2) % H
    there, of_keys = (head < heads) & (at < H), head >= queries
    x_ptr += row * stride
    x = tl.load(x_ptr + head * H + at, mask=there, other=0.0).to(tl.float32)
    partner = tl.load(x_ptr + head * H + other, mask=there, other=0.0).to(tl.float32)
    r = _inverse_root(x, eps, H)
    w = tl.where(of_keys, tl.load(k_ptr + at), tl.load(q_ptr + at)).to(tl.float32)
    y = ((x * r) * w).to(y_ptr.dtype.element_ty).to(tl.float32)
    w = tl.where(of_keys, tl.load(k_ptr + other), tl.load(q_ptr + other)).to(tl.float32)
    partner = ((partner * r) * w).to(y_ptr.dtype.element_ty).to(tl.float32)
    table_ptr += tl.load(positions_ptr + row).to(tl.int64) * H
    cos = tl.load(table_ptr + at % (H // 2)).to(tl.float32)
    sin = tl.load(table_ptr + H // 2 + at % (H // 2)).to(tl.float32)
    turned = y * cos + tl.where(at < H // 2, -partner, partner) * sin
    tl.store(y_ptr + row * heads * H + head * H + at, turned.to(y_ptr.dtype.element_ty), mask=there)


_HEADS = 4  # of a program


def rotated_norms(
    x: torch.Tensor,
    queries: int,
    gains: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    positions: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Computes RMSNorm over each head of queries and keys, then rotary embeddings by halves: [T, heads * H].

    Args:
      x: bfloat16 [T, heads * H], columns adjacent: the heads of queries, then those of keys; H is a power of two.
      queries: number of the queries' heads. gains: of queries and of keys, [H] each.
      positions: integer [T]. table: bfloat16 [positions, H], cosines and then sines, as vLLM holds it.
    """
    tokens, width = x.shape
    size = len(gains[0])
    heads = width // size
    y = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens:
        _rotated_norms[(tokens, triton.cdiv(heads, _HEADS))](
            x, *gains, positions, table, y, heads, queries, x.stride(0), float(np.float32(eps)), H=size, BLOCK=_HEADS,
            num_warps=4,
        )  # fmt: skip
    return y
