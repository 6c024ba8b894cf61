# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant matrix products and sums of shards for a CUDA engine, as Triton kernels.

The order of sums in vLLM's products (cuBLAS, Machete, Marlin) and norms depends on the number of rows, and vLLM rounds
logits to bfloat16. `install.py` replaces them by these kernels; the learner computes equal numbers by equal rules:

    product      y = bf16(acc + b), acc in the parts of `split_k.splits_of`; weights bfloat16, or int4 as bf16(q * s)
                 nvfp4: bf16(bf16(acc * f) + b), weights q * s of e2m1 codes and e4m3 scales, exact in bfloat16
                 zero points: weights bf16((q - z) s t) of 2, 3, 4 or 8 bits (`asym_ops`)
    logits       the bfloat16 product, in one part, left in float32
    shards       y = bf16(((x_0 + x_1) + x_2) + ...) in float32, of a tensor-parallel engine (`engine/all_reduce.py`)

Norms: `norm_ops.py`. wgmma products have equal bits with every tile, so tiles and schedules decide speed alone.

Not supported: experts (`expert_ops.py`), GPUs without wgmma.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl_bridge.engine.cuda import asym_ops
from qarl_bridge.protocol import split_k

_STEP = tl.constexpr(split_k.STEP)
_MOST_TILES = 264  # two for each multiprocessor of an H100; of a product whose parts are computed side by side


# ---- products --------------------------------------------------------------------------------------------------------


@triton.jit
def _decoded(words, s0, s1, s2, s3):
    """Decodes a word to eight bf16(q s), in input order: nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7.

    It decodes pairs. The lowest eight bits of a bfloat16 whose other bits are 0 are an integer, in units of 2^-133: one
    multiplication and addition makes q 2^-6 of a masked nibble, exactly. Its product with s 2^6 is rounded once.
    s0 to s3: the scales of the four pairs, below 2^121."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 w, p0, p1, p2, p3, s0, s1, s2, s3, low, high, less, more;
        mov.b32 low, 0x7f007f00;
        mov.b32 high, 0x7d007d00;
        mov.b32 less, 0xbe00be00;
        mov.b32 more, 0x42804280;
        shr.u32 w, $8, 8;
        and.b32 p0, $8, 0x000f000f;
        and.b32 p1, $8, 0x00f000f0;
        and.b32 p2, w, 0x000f000f;
        and.b32 p3, w, 0x00f000f0;
        fma.rn.bf16x2 p0, p0, low, less;
        fma.rn.bf16x2 p1, p1, high, less;
        fma.rn.bf16x2 p2, p2, low, less;
        fma.rn.bf16x2 p3, p3, high, less;
        mov.b32 s0, {$9, $9};
        mov.b32 s1, {$10, $10};
        mov.b32 s2, {$11, $11};
        mov.b32 s3, {$12, $12};
        mul.rn.bf16x2 s0, s0, more;
        mul.rn.bf16x2 s1, s1, more;
        mul.rn.bf16x2 s2, s2, more;
        mul.rn.bf16x2 s3, s3, more;
        mul.rn.bf16x2 p0, p0, s0;
        mul.rn.bf16x2 p1, p1, s1;
        mul.rn.bf16x2 p2, p2, s2;
        mul.rn.bf16x2 p3, p3, s3;
        mov.b32 {$0, $1}, p0;
        mov.b32 {$2, $3}, p1;
        mov.b32 {$4, $5}, p2;
        mov.b32 {$6, $7}, p3;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h,h,h,h",
        [words, s0, s1, s2, s3],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _decoded_float4(words, s0, s1, s2, s3):
    """Decodes a word of e2m1 codes, as `one_base` lays it out, to eight exact q s.

    A code's sign and three bits become a bfloat16's sign, the last exponent bits and the first mantissa bit. The result
    is q 2^-126 (for the code 1 a subnormal, which bfloat16 products keep)."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 p0, p1, p2, p3, s0, s1, s2, s3, most;
        mov.b32 most, 0x7e807e80;
        shf.r.wrap.b32 p1, $8, $8, 6;
        shf.r.wrap.b32 p2, $8, $8, 3;
        and.b32 p3, $8, 0x001b001b;
        mul.lo.u32 p3, p3, 0x4108;
        and.b32 p0, $8, 0x81c081c0;
        and.b32 p1, p1, 0x81c081c0;
        and.b32 p2, p2, 0x81c081c0;
        and.b32 p3, p3, 0x81c081c0;
        mul.rn.bf16x2 p0, p0, most;
        mul.rn.bf16x2 p1, p1, most;
        mul.rn.bf16x2 p2, p2, most;
        mul.rn.bf16x2 p3, p3, most;
        mov.b32 s0, {$9, $9};
        mov.b32 s1, {$10, $10};
        mov.b32 s2, {$11, $11};
        mov.b32 s3, {$12, $12};
        mul.rn.bf16x2 p0, p0, s0;
        mul.rn.bf16x2 p1, p1, s1;
        mul.rn.bf16x2 p2, p2, s2;
        mul.rn.bf16x2 p3, p3, s3;
        mov.b32 {$0, $1}, p0;
        mov.b32 {$2, $3}, p1;
        mov.b32 {$4, $5}, p2;
        mov.b32 {$6, $7}, p3;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r,h,h,h,h",
        [words, s0, s1, s2, s3],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _four_scales(scales):
    """Converts a word of four e4m3 scales, none negative, to four bfloat16, the lowest byte first."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 even, odd, most;
        mov.b32 most, 0x7b807b80;
        shl.b32 even, $4, 4;
        shr.u32 odd, $4, 4;
        and.b32 even, even, 0x0ff00ff0;
        and.b32 odd, odd, 0x0ff00ff0;
        mul.rn.bf16x2 even, even, most;
        mul.rn.bf16x2 odd, odd, most;
        mov.b32 {$0, $2}, even;
        mov.b32 {$1, $3}, odd;
        }""",
        "=h,=h,=h,=h,r",
        [scales],
        dtype=(tl.bfloat16,) * 4,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _of_halves(s, ROWS: tl.constexpr):
    """Expands [ROWS, 2], the scales of inputs below and from 64, to the 16 `interleaved` words: [ROWS, 16]."""
    return s[:, None, :].broadcast_to(ROWS, 8, 2).reshape(ROWS, 16)


@triton.jit
def weights(words, s, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Decodes `interleaved` words [ROWS, 16] to bf16(q s) [ROWS, 128]; a row is 128 inputs of one output.

    s: bfloat16 scales of int4 codes [ROWS, max(1, 128 / GROUP)], or of e2m1 codes words of four e4m3 scales
    [ROWS, 2]."""
    if s.dtype == tl.int32:
        first, second, third, fourth = _four_scales(s)
        s0, s1 = _of_halves(first, ROWS), _of_halves(second, ROWS)
        s2, s3 = _of_halves(third, ROWS), _of_halves(fourth, ROWS)
        a0, a1, b0, b1, c0, c1, d0, d1 = _decoded_float4(words, s0, s1, s2, s3)
    else:
        if GROUP >= _STEP:
            s0 = s.broadcast_to(ROWS, 16)
            s1, s2, s3 = s0, s0, s0
        elif GROUP == 64:
            s0 = _of_halves(s, ROWS)
            s1, s2, s3 = s0, s0, s0
        elif GROUP == 32:
            first, second = s.reshape(ROWS, 2, 2).split()
            s0, s2 = _of_halves(first, ROWS), _of_halves(second, ROWS)
            s1, s3 = s0, s2
        else:
            even, odd = s.reshape(ROWS, 2, 2, 2).split()
            first, second = even.split()
            s0, s2 = _of_halves(first, ROWS), _of_halves(second, ROWS)
            first, second = odd.split()
            s1, s3 = _of_halves(first, ROWS), _of_halves(second, ROWS)
        a0, a1, b0, b1, c0, c1, d0, d1 = _decoded(words, s0, s1, s2, s3)
    ac, bd = tl.join(tl.join(a0, a1), tl.join(c0, c1)), tl.join(tl.join(b0, b1), tl.join(d0, d1))
    y = tl.join(ac, bd).reshape(ROWS, 4, 2, 2, 2, 2, 2)  # of an input's bits [ROWS, 1-2, 3, 6, 0, 5, 4]
    return y.permute(0, 3, 5, 6, 2, 1, 4).reshape(ROWS, _STEP)


@triton.jit
def _loaded(w, s, block, output, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Loads and decodes a tile of weights [BN, BK], from input 128 `block` on."""
    U: tl.constexpr = BK // _STEP
    S: tl.constexpr = max(1, BK // GROUP)
    words = w.load([block, output, 0]).permute(1, 0, 2).reshape(BN * U, 16)
    R: tl.constexpr = max(S, U) // U
    scales = s.load([block * _STEP // GROUP, output])
    if S < U:
        scales = scales.reshape(S, 1, BN).broadcast_to(S, U // S, BN)
    scales = scales.reshape(U, R, BN).permute(2, 0, 1).reshape(BN * U, R)
    return weights(words, scales, GROUP, BN * U).reshape(BN, BK)


@triton.jit
def _finished(acc):
    """Returns acc unchanged. It makes the compiler wait for the product within its step; otherwise the compiler waits
    after every sixteen inputs of the next step."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _part(x, w, low, s, t, row, output, first, end, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
          MIDDLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Computes the float32 accumulator [BN, BM] over steps [first, end) of inputs; loads beyond K give zeros."""
    acc = tl.zeros((BN, BM), tl.float32)
    for k in range(first * _STEP, end * _STEP, BK):
        if BITS == 16:
            tile = w.load([output, k])
        elif ZEROS:
            tile = asym_ops.loaded(w, low, s, t, k // _STEP, output, BITS, GROUP, MIDDLE, BN, BK)
        else:
            tile = _loaded(w, s, k // _STEP, output, GROUP, BN, BK)
        acc = tl.dot(tile, x.load([row, k]).T, acc)
        if BITS != 16:
            acc = _finished(acc)
    return acc


@triton.jit
def _product(x, w, low, s, t_ptr, f_ptr, b_ptr, a_ptr, y_ptr, partial_ptr, done_ptr, M, N, K, PARTS: tl.constexpr,
             BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr, SPLIT: tl.constexpr,
             FACTOR: tl.constexpr, BIAS: tl.constexpr, ADDED: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Computes one tile [BM rows, BN outputs]. With SPLIT a program computes one part; the last adds all, in order.

    x, w and s are descriptors: of tiles [BM, BK], and [BN, BK] or `interleaved` words [BK/128, BN, 16] with scales
    [max(1, BK / GROUP), BN]; with ZEROS w, low and s are those of `asym_ops.Words`, and t_ptr its steps."""
    tiles_m = tl.cdiv(M, BM)
    tile = tl.program_id(0)
    row = (tile % tiles_m) * BM
    output = (tile // tiles_m) * BN
    outputs = output + tl.arange(0, BN)
    t = tl.load(t_ptr + outputs, mask=outputs < N, other=0.0) if ZEROS else None
    steps = tl.cdiv(K, _STEP)
    longer, shorter = steps % PARTS, steps // PARTS
    last = True
    if SPLIT:
        part = tl.program_id(1)
        first = part * shorter + tl.minimum(part, longer)
        end = first + shorter + (part < longer).to(tl.int32)
        acc = _part(x, w, low, s, t, row, output, first, end, BITS, GROUP, ZEROS, MIDDLE, BM, BN, BK)
        cells = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        own = partial_ptr + tile * PARTS * BM * BN
        tl.store(own + part * BM * BN + cells, acc)
        tl.debug_barrier()
        last = tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") == PARTS - 1
        if last:
            tl.store(done_ptr + tile, 0)
            acc = tl.load(own + cells, cache_modifier=".cg")
            for p in tl.static_range(1, PARTS):
                acc += tl.load(own + p * BM * BN + cells, cache_modifier=".cg")
    else:
        end = shorter + (longer > 0)
        acc = _part(x, w, low, s, t, row, output, 0, end, BITS, GROUP, ZEROS, MIDDLE, BM, BN, BK)
        if PARTS == 2:
            acc += _part(x, w, low, s, t, row, output, end, steps, BITS, GROUP, ZEROS, MIDDLE, BM, BN, BK)
        elif PARTS > 2:  # a loop of the program: its text would be long
            for p in range(1, PARTS):
                first = p * shorter + tl.minimum(p, longer)
                end = first + shorter + (p < longer).to(tl.int32)
                acc += _part(x, w, low, s, t, row, output, first, end, BITS, GROUP, ZEROS, MIDDLE, BM, BN, BK)
    if last:
        if FACTOR:
            acc *= tl.load(f_ptr + outputs, mask=outputs < N, other=0.0)[:, None]
            acc = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
        if BIAS:
            acc += tl.load(b_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
        y = tl.trans(acc).to(y_ptr.dtype.element_ty)
        rows = (row + tl.arange(0, BM)).to(tl.int64)
        at, there = rows[:, None] * N + outputs[None, :], (rows < M)[:, None] & (outputs < N)[None, :]
        if ADDED:  # the addend itself, and not +0 for -0, where y is 0
            y = (tl.load(a_ptr + at, mask=there, other=0.0).to(tl.float32) - (0.0 - y.to(tl.float32))).to(y.dtype)
        tl.store(y_ptr + at, y, mask=there)


_workspaces: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def _workspace(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns buffers for partial sums and for each tile's number of finished parts, which is 0 between kernels.
    Kernels of one stream share them."""
    if device not in _workspaces:
        partial = torch.empty(_MOST_TILES * 128 * 128, dtype=torch.float32, device=device)
        _workspaces[device] = partial, torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
    return _workspaces[device]


def side_by_side(splits: int, tiles: int, size: int) -> bool:
    """Tells whether K's parts are computed in parallel: the workspace holds them for so many tiles of a size."""
    return splits > 1 and tiles <= _MOST_TILES and splits * tiles * size <= _MOST_TILES * 128 * 128


def product(
    x: torch.Tensor,
    weight: torch.Tensor | asym_ops.Words,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    factor: torch.Tensor | None = None,
    added: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    splits: int | None = None,
    tile: tuple[int, int, int, int, int] | None = None,
    split: bool | None = None,
) -> torch.Tensor:
    """Computes x W^T + b for x [M, K] bfloat16; returns [M, N]. The order of sums depends on the weight's shape alone.

    Args:
      weight: bfloat16 [N, K], or `interleaved` words int32 [K/128, N, 16], or a weight with zero points.
      scale: for int4 codes bfloat16 [K/G, N]; G 16, 32, 64, or a multiple of 128; N a multiple of 8. For e2m1 codes
        words of four e4m3 scales int32 [K/64, N]; N a multiple of 4.
      bias: [N] or None.
      factor: float32 [N] or None; multiplies the sum, which is then rounded to out_dtype before the bias is added.
      added: [M, N] of out_dtype or None; the rounded product is added to it, and the sum rounded.
      out_dtype: bfloat16 or float32.
      splits: number of parts of K (split-K); None: `split_k.splits_of`.
      tile: (rows, outputs, inputs, warps, stages); None: chosen by the number of rows. split: compute parts in
        parallel; None: if there are few tiles. Neither changes the result.
    """
    m, k = x.shape
    zeros = isinstance(weight, asym_ops.Words)
    if isinstance(weight, asym_ops.Words):
        n, bits, group, middle, steps = weight.outputs, weight.bits, weight.group, weight.middle, weight.steps
    elif scale is None:
        n, bits, group, middle, steps = weight.shape[0], 16, 0, 0, None
    else:
        n, bits, group, middle, steps = weight.shape[1], 4, k // scale.shape[0], 0, None
    splits = split_k.splits_of(n, k) if splits is None else splits
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if m == 0:
        return y
    if tile is None:
        tile = asym_ops.tile_of(m, k, bits, splits) if zeros else _tile(m, n, k, bits, splits, group)
    bm, bn, bk, warps, stages = tile
    tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn)
    partial, done = _workspace(x.device)
    split = side_by_side(splits, tiles, bm * bn) if split is None else split
    x = x.contiguous()
    added = None if added is None else added.contiguous()
    low = None
    if isinstance(weight, asym_ops.Words):
        w, low, s = weight.descriptors(bn, bk)
    elif scale is None:
        w, s = TensorDescriptor.from_tensor(weight, [bn, bk]), None
    else:
        w = TensorDescriptor.from_tensor(weight, [bk // split_k.STEP, bn, 16])
        # Flat first: a single group's row may have any stride, but a descriptor's may not.
        s = TensorDescriptor.from_tensor(scale.view(-1).view(-1, n), [max(1, bk // group), bn])
    _product[(tiles, splits if split else 1)](
        TensorDescriptor.from_tensor(x, [bm, bk]), w, low, s, steps, factor, bias, added, y, partial, done, m, n, k,
        PARTS=splits, BITS=bits, GROUP=group, ZEROS=zeros, MIDDLE=middle, SPLIT=split,
        FACTOR=factor is not None, BIAS=bias is not None, ADDED=added is not None,
        BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


# Of 4-bit words, by the most rows: (rows, outputs, inputs, warps, stages) for layers that give a multiprocessor one
# thread block at most, for larger ones, and for layers of many outputs. Inputs are the most, see `_tile`.
_INT4_TILES = {
    16: ((16, 64, 256, 4, 4), (16, 64, 256, 4, 4), (16, 64, 256, 4, 3)),
    32: ((32, 64, 256, 4, 4), (32, 64, 256, 4, 3), (32, 64, 256, 4, 3)),
    64: ((64, 64, 256, 4, 3), (64, 64, 128, 4, 4), (64, 64, 128, 4, 3)),
    128: ((128, 64, 256, 4, 3), (128, 64, 128, 4, 3), (64, 128, 128, 4, 3)),
    256: ((128, 64, 128, 4, 3), (128, 64, 128, 4, 3), (128, 64, 128, 4, 3)),
    512: ((128, 128, 128, 8, 3), (128, 128, 128, 8, 3), (128, 128, 128, 8, 3)),
}
_ALONE = 132 * 64  # outputs, in all parts of K: a tile of 64 for each multiprocessor
_MANY = 16384  # outputs


def _tile(m: int, n: int, k: int, bits: int, splits: int, group: int) -> tuple[int, int, int, int, int]:
    """Chooses (rows, outputs, inputs, warps, stages). Words take the table's inputs at a time if all parts of K are
    multiples of them, and no tile has a part of a group beside another's; otherwise 128."""
    if bits == 4:
        rows = max(min(_INT4_TILES), min(max(_INT4_TILES), triton.next_power_of_2(m)))
        column = (n * splits > _ALONE) + (n >= _MANY)
        rows, outputs, inputs, warps, stages = _INT4_TILES[rows][column]
        fits = asym_ops.in_whole(inputs, k, splits) and (inputs % group == 0 or group % inputs == 0)
        return rows, outputs, inputs if fits else split_k.STEP, warps, stages
    if m <= 128:
        return max(16, triton.next_power_of_2(m)), 64, 128, 4, 4
    if m <= 512:
        return 128, 128, 64, 4, 5
    return (256, 128, 64, 8, 3) if splits == 1 else (128, 128, 64, 8, 4)


@triton.jit
def _dequantize(words_ptr, s_ptr, y_ptr, N, K, GROUP: tl.constexpr, GROUPS: tl.constexpr, BN: tl.constexpr):
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    block = tl.program_id(1)
    there = outputs < N
    at = (block * N + outputs).to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    words = tl.load(words_ptr + at, mask=there[:, None], other=0)
    groups = block * 128 // GROUP + tl.arange(0, GROUPS)
    s = tl.load(s_ptr + groups[None, :] * N + outputs[:, None], mask=there[:, None], other=0)
    at = outputs.to(tl.int64)[:, None] * K + block * 128 + tl.arange(0, 128)[None, :]
    tl.store(y_ptr + at, weights(words, s, GROUP, BN), mask=there[:, None])


def dequantized(words: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantizes `interleaved` words [K/128, N, 16] to bf16(q s) [N, K], in `out` if given. scale: as in `product`."""
    n, k = words.shape[1], words.shape[0] * 128
    y = torch.empty((n, k), dtype=torch.bfloat16, device=words.device) if out is None else out
    group = k // scale.shape[0]
    _dequantize[(triton.cdiv(n, 64), k // 128)](
        words, scale, y, n, k, GROUP=group, GROUPS=max(1, split_k.STEP // group), BN=64, num_warps=4
    )
    return y


def rows_of(weight: torch.Tensor | asym_ops.Words, scale: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor:
    """Decodes some outputs, int64 [R], of int4 words or of a weight with zero points (as in `product`), to bfloat16
    [R, K]."""
    if isinstance(weight, asym_ops.Words):
        return weight.rows(index)
    assert scale is not None
    return dequantized(weight.index_select(1, index), scale.index_select(1, index))


@triton.jit
def _interleave(words_ptr, y_ptr, N, blocks, words, FLOAT4: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < words
    j, row, block, batch = at % 16, at // 16 % N, at // 16 // N % blocks, at // 16 // N // blocks
    first = ((batch * N + row) * blocks + block) * 16 + j % 2 * 8 + j // 2 % 2
    shift = (j // 4 * 8).to(tl.int32)
    y = tl.zeros((BLOCK,), tl.uint32)
    for i in tl.static_range(4):
        pair = (tl.load(words_ptr + first + 2 * i, mask=there) >> shift).to(tl.uint32, bitcast=True)
        pair = (pair & 15) | ((pair & 0xF0) << 12)
        if FLOAT4:
            pair = ((pair & 0x70007) << 6) | ((pair & 0x80008) << 12)
            if i == 1:
                pair = (pair << 6) | (pair >> 26)
            elif i == 2:
                pair = (pair << 3) | (pair >> 29)
            elif i == 3:
                pair = ((pair >> 3) & 0x180018) | ((pair >> 8) & 0x10001) | ((pair >> 14) & 0x20002)
            y |= pair
        else:
            y |= pair << (4 * i)
    tl.store(y_ptr + at, y.to(tl.int32, bitcast=True), mask=there)


def interleaved(packed: torch.Tensor, *, floats: bool = False) -> torch.Tensor:
    """Interleaves a checkpoint's 4-bit words int32 [..., N, K/8] for the tensor cores: returns [..., K/128, N, 16].

    In a checkpoint nibble i of word j is element 8 j + i. Here pair i of word 4 t + 2 f + h has elements
    64 h + 16 i + 8 f + 2 t and the next, of 128 inputs. So a thread of the tensor cores finds its inputs in four
    adjacent words. A pair of int4 codes is nibbles i and i + 4: one mask extracts both of a register (`_decoded`).
    floats: the codes are e2m1, whose pairs lie as `qarl_bridge.protocol.one_base` has them.
    """
    packed = packed.contiguous()
    *batch, n, words = packed.shape
    out = packed.new_empty((*batch, words // 16, n, 16))
    size = packed.numel()
    _interleave[(triton.cdiv(size, 1024),)](packed, out, n, words // 16, size, FLOAT4=floats, BLOCK=1024, num_warps=4)
    return out


# ---- shards ----------------------------------------------------------------------------------------------------------


@triton.jit
def _sum_shards(x_ptr, y_ptr, size, SHARDS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, SHARDS):
        x_ptr += size  # one shard on: a product of their number and their size may exceed 2^31
        total += tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=at < size)


def sum_of_shards(every: torch.Tensor) -> torch.Tensor:
    """Sums contiguous bfloat16 or float32 [shards, ...] over shards, in float32 by rank, and rounds once."""
    y = torch.empty_like(every[0])
    size = y.numel()
    if size:
        _sum_shards[(triton.cdiv(size, 1024),)](every, y, size, SHARDS=len(every), BLOCK=1024, num_warps=4)
    return y
