# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant routers and MoE experts for a CUDA engine, as Triton kernels.

vLLM's experts add with atomics (int4), choose tiles by the number of rows, and round a weighted output before they sum;
its routers use cuBLAS. These kernels replace them, and the learner computes equal numbers (`qarl_jax/models/moe.py`):

    router    z = float32(sum_k x_k w_k) in float64, rows of x and w rounded to 24 and 16 bits of their maximum; the
              k largest, of equal ones the first; their weights float32(exp(z - log(sum(exp(z))))) in float64, the sum
              over the chosen or over all, of multiples of 2^-43. So both sums are exact in every order
    experts   h = bf16(acc), one accumulator of the tensor cores through all inputs, ascending; 8-bit codes: with
              scales, bf16(s_x (s_w acc)); int8 ones summed in int32, e4m3 ones multiplied in 16 bits;
              nvfp4: bf16(acc f)
              a = silu(gate) up, as in dense layers; o = bf16(acc) of `down`, likewise
              y = bf16(float32(sum over a token's experts of weight * o)) in float64

The products are grouped: each token has one copy for each of its k experts. Copies are sorted by expert (vLLM's
`moe_align_block_size`), and a Triton program multiplies a tile of copies of one expert. A decoding step uses enough
experts to fill the GPU, so there is no split-K.

Not supported: expert parallelism, biases, activations other than SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl_bridge.engine.cuda.norm_ops import nearest, units_per_one
from qarl_bridge.engine.cuda.ops import _finished, weights
from qarl_bridge.protocol import split_k

_STEP = tl.constexpr(split_k.STEP)
# (sorted copies, padded with their number, expert of each tile, number of sorted copies) of [M, k] ids in tiles.
Align = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
# A matrix of every expert: weight, scale, factor.
Held = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@triton.jit
def _grouped(x_ptr, w, s, s_x_ptr, f_ptr, copies_ptr, experts_ptr, end_ptr, y_ptr, COPIES, N, K,
             TOP: tl.constexpr, INT4: tl.constexpr, SCALED: tl.constexpr, FACTOR: tl.constexpr, GROUP: tl.constexpr,
             AS: tl.constexpr, SUM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Computes one tile [BM copies, BN outputs]; copy c reads row c // TOP of x [*, K] and writes row c of y.

    w is a descriptor of all experts' weights, of tiles [BN, BK], or of 4-bit words; then s is one, too, as in
    `ops._product`."""
    columns = tl.cdiv(N, BN)
    tile = tl.program_id(0) // columns
    if tile * BM >= tl.load(end_ptr):
        return
    output = (tl.program_id(0) % columns) * BN
    outputs = output + tl.arange(0, BN)
    copies = tl.load(copies_ptr + tile * BM + tl.arange(0, BM)).to(tl.int64)
    there = copies < COPIES
    rows = copies // TOP
    expert = tl.load(experts_ptr + tile)
    known = outputs < N
    acc = tl.zeros((BN, BM), SUM)
    for k in range(0, K, BK):
        ks = k + tl.arange(0, BK)
        x = tl.load(x_ptr + rows[:, None] * K + ks[None, :], mask=there[:, None] & (ks < K)[None, :], other=0.0)
        if INT4:
            words = w.load([(expert * (K // _STEP) + k // _STEP) * N + output, 0])
            held = weights(words, s.load([expert * (K // GROUP) + k // GROUP, output]).T, GROUP, BN)
        else:  # behind the last output there are the next expert's, which are not stored
            held = w.load([expert * N + output, k])
        acc = tl.dot(held.to(AS), x.to(AS).T, acc, out_dtype=SUM)
        if INT4:
            acc = _finished(acc)
    y = acc.to(tl.float32)
    if SCALED:
        s_w = tl.load(s + expert.to(tl.int64) * N + outputs, mask=known, other=0.0)
        s_x = tl.load(s_x_ptr + rows, mask=there, other=0.0)
        y = s_x[None, :] * (s_w[:, None] * y)
    if FACTOR:
        y *= tl.load(f_ptr + expert.to(tl.int64) * N + outputs, mask=known, other=0.0)[:, None]
    y = tl.trans(y).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + copies[:, None] * N + outputs[None, :], y, mask=there[:, None] & known[None, :])


class _Tile(NamedTuple):
    n: int
    k: int
    warps: int
    stages: int


def _tile(weight: torch.dtype, height: int) -> _Tile:
    """Chooses a tile, tuned on an H100 for Qwen3-30B-A3B's experts at heights of 16 and 128; it changes no bit.

    Figures: benchmarks/results/experts_tiles_h100.json.
    """
    if weight == torch.int32:
        return _Tile(n=128, k=128, warps=8 if height >= 64 else 4, stages=3)
    if height < 64:
        return _Tile(n=64, k=256 if weight.itemsize == 1 else 128, warps=4, stages=3)
    if weight.itemsize == 1:
        return _Tile(n=128, k=128, warps=4, stages=3) if weight == torch.int8 else _Tile(n=128, k=64, warps=4, stages=4)
    return _Tile(n=256, k=64, warps=8, stages=4) if height == 128 else _Tile(n=128, k=128, warps=4, stages=3)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    copies: torch.Tensor,
    experts: torch.Tensor,
    end: torch.Tensor,
    *,
    factor: torch.Tensor | None = None,
    top: int,
    number: int,
    height: int,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Multiplies each copy of a token by its expert's weight; returns [number, N].

    Args:
      x: [number / top, K]: bfloat16, or int8 or e4m3 codes with `x_scale` float32 [number / top, 1].
      weight: bfloat16, int8 or e4m3 [E, N, K]; or `ops.interleaved` words int32 [E, K/128, N, 16].
      scale: for int4 words bfloat16 [E, K/G, N], for e2m1 words int32 [E, K/64, N] as in `ops.product`, for 8-bit codes
        float32 [E, N, 1]; else None.
      factor: float32 [E, N] or None; multiplies the sum.
      copies, experts, end: the result of an `Align` for tiles of `height` copies.
      top: number of adjacent copies that share a row of x. number: number of all copies.
      out_dtype: dtype of the result.
    """
    int4, scaled = weight.dtype == torch.int32, x_scale is not None
    n, k = weight.shape[2 if int4 else 1], x.shape[1]
    y = torch.empty((number, n), dtype=out_dtype, device=x.device)
    tile = _tile(weight.dtype, height)
    group, s = 1, scale
    if int4 and scale is not None:
        group = k // scale.shape[1]
        w = TensorDescriptor.from_tensor(weight.view(-1, 16), [tile.n, 16])
        s = TensorDescriptor.from_tensor(scale.view(-1).view(-1, n), [max(1, split_k.STEP // group), tile.n])
    else:
        w = TensorDescriptor.from_tensor(weight.view(-1, k), [tile.n, tile.k])
    # 8-bit floats are exact in float16 as in bfloat16, and half the work to make.
    floats = tl.float16 if weight.itemsize == 1 or out_dtype == torch.float16 else tl.bfloat16
    compute = tl.int8 if weight.dtype == torch.int8 else floats
    _grouped[(len(experts) * triton.cdiv(n, tile.n),)](
        x, w, s, x_scale, factor, copies, experts, end, y, number, n, k,
        TOP=top, INT4=int4, SCALED=scaled, FACTOR=factor is not None, GROUP=group, AS=compute,
        SUM=tl.int32 if compute == tl.int8 else tl.float32, BM=height, BN=tile.n, BK=tile.k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


@triton.jit
def _weigh(o_ptr, weights_ptr, y_ptr, D, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for i in tl.static_range(TOP):
        o = tl.load(o_ptr + (row * TOP + i) * D + at, mask=at < D, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + row * TOP + i).to(tl.float64) * o.to(tl.float64)
    tl.store(y_ptr + row * D + at, total.to(tl.float32).to(y_ptr.dtype.element_ty), mask=at < D)


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums each token's k expert outputs [M * k, D] with weights float32 [M, k], in float64; returns [M, D]."""
    (m, top), d = weights.shape, outputs.shape[1]
    y = torch.empty((m, d), dtype=outputs.dtype, device=outputs.device)
    if m:
        _weigh[(m, triton.cdiv(d, 1024))](outputs, weights, y, d, TOP=top, BLOCK=1024, num_warps=4)
    return y


@triton.jit
def _choose(z_ptr, ids_ptr, weights_ptr, E, TOP: tl.constexpr, AMONG_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
            SLOTS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    z = tl.load(z_ptr + row * E + at, mask=at < E, other=float("-inf"))
    left = z
    chosen = tl.full((SLOTS,), float("-inf"), tl.float32)
    ids = tl.zeros((SLOTS,), tl.int32)
    for i in tl.static_range(TOP):
        best = tl.max(left, axis=0)
        first = tl.min(tl.where(left == best, at, E - 1), axis=0)  # of equal ones; NaN is equal to none
        chosen = tl.where(slot == i, best, chosen)
        ids = tl.where(slot == i, first, ids)
        left = tl.where(at == first, float("-inf"), left)
    highest = tl.max(z, axis=0).to(tl.float64)
    among = chosen if AMONG_CHOSEN else z
    total = tl.sum(nearest(tl.exp(among.to(tl.float64) - highest) * 2.0**43), axis=0) * 2.0**-43
    weights = tl.exp(chosen.to(tl.float64) - (highest + tl.log(total))).to(tl.float32)
    tl.store(ids_ptr + row * TOP + slot, ids, mask=slot < TOP)
    tl.store(weights_ptr + row * TOP + slot, weights, mask=slot < TOP)


def choose(logits: torch.Tensor, top: int, among_chosen: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts by float32 logits [M, E]: returns weights float32 [M, top] and experts int32 [M, top].
    among_chosen: the softmax is over the chosen experts, not over all."""
    m, e = logits.shape
    weights = torch.empty((m, top), dtype=torch.float32, device=logits.device)
    ids = torch.empty((m, top), dtype=torch.int32, device=logits.device)
    if m:
        _choose[(m,)](
            logits.contiguous(), ids, weights, e, TOP=top, AMONG_CHOSEN=among_chosen,
            BLOCK=triton.next_power_of_2(e), SLOTS=triton.next_power_of_2(top), num_warps=1,
        )  # fmt: skip
    return weights, ids


@triton.jit
def _round_row(x_ptr, y_ptr, D, BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + at, mask=at < D, other=0.0).to(tl.float64)
    scale = units_per_one(tl.max(tl.abs(x)), BITS)
    tl.store(y_ptr + row * D + at, nearest(x * scale) / scale, mask=at < D)


def _rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds rows of x [M, D] to so many bits of their maximum; returns float64."""
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    if len(x):
        _round_row[(len(x),)](x.contiguous(), y, x.shape[1], BITS=bits, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes router logits float32 [M, E] of x [M, D] and weight [E, D], by exact sums of up to 8,192 products."""
    return (_rounded(x, 24) @ _rounded(weight, 16).t()).float()


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    first: Held,
    second: Held,
    *,
    align: Align,
    activation: Callable[[torch.Tensor], torch.Tensor],
    rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Computes an MoE layer: x [M, D] through experts ids [M, k] with float32 weights [M, k]; returns [M, D].

    Args:
      first, second: gate above up [E, 2 F, D], and down [E, D, F]: weight, scale and factor as in `product`.
      align: sorts the copies by expert.
      activation: a function from [*, 2 F] to [*, F].
      rows: quantizes activations to codes and scales; None: bf16 activations.
    """
    (m, top), e = ids.shape, len(first[0])
    if m == 0:
        return torch.empty_like(x)
    number = m * top
    height = max(16, min(128, triton.next_power_of_2(number // e)))
    found: dict[str, Any] = dict(zip(("copies", "experts", "end"), align(ids, height, e), strict=True))
    found |= {"number": number, "height": height, "out_dtype": x.dtype}

    def of(x: torch.Tensor, held: Held, top: int) -> torch.Tensor:
        codes, x_scale = (x, None) if rows is None else rows(x)
        weight, scale, factor = held
        return product(codes, weight, scale, factor=factor, top=top, x_scale=x_scale, **found)

    return weighted_sum(of(activation(of(x, first, top)), second, 1), weights)
