# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""CUDA layout of weights with zero points, Triton code that decodes it to bf16((q - z) s t), and rounded activations.

Tensor cores multiply 16 inputs at a time. Of these a thread has inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, where t is
its place among four threads. So input 16 i + 8 f + 2 t + e of 128 lies in the adjacent words of thread t; e = 1 is the
upper half of a word. A word holds four codes of eight bits, or 16 of two bits:

    width   words of a thread [f, h]   a code's i      its bit in a half
    8       2 x 4                      2 h + i'        8 i'
    4       2 x 2                      4 h + i'        4 i'
    2       2 x 1                      i'              2 i'
    1       1                          i'              2 i' + f

A three-bit code is split into words of its upper two bits and of its lowest bit. Weights are decoded in pairs, at three
instructions a pair and a few for each word. The lowest eight bits of a bfloat16 whose other bits are 0 are an integer,
in units of 2^-133. So one multiplication and addition makes (q - z) 2^-n of a masked code, wherever it lies in these
bits. A code is scaled to eight bits, code 2^(8 - bits); q - z is an integer of eight bits, exact in bfloat16. Its
product with s t 2^n is rounded once; s t is below 2^100.

Scales and zero points of the P groups in 128 inputs lie side by side, s first: 16, 32, 64 or 128 bits for each output.

Activations of two or four bits (`rounded_rows`) are rounded in one pass, to bfloat16 numbers that the product takes.
Quotients are IEEE divisions (`div_rn`); Triton's own is not correctly rounded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from qarl_bridge.protocol import split_k

_STEP = tl.constexpr(split_k.STEP)
_ROWS = 8  # gathered outputs come by so many, for the tensor memory accelerator's rows of 16 bytes


def _bf16x2(power: int, sign: int = 0) -> str:
    """Formats the bfloat16 2^power, negative if sign is 1, in both halves of a register, as a PTX constant."""
    half = sign << 15 | (127 + power) << 7
    return f"0x{half:04x}{half:04x}"


def _shift(bits: int) -> int:
    """Returns n: a decoded integer of eight bits is made as (q - z) 2^-n, and its scale as s t 2^n."""
    return 14 - bits


def _fields(bits: int) -> tuple[list[str], list[tuple[str, int]]]:
    """Returns PTX that shifts a word, and for each of its pairs the register and the place of the codes in it.

    A place is in the lowest eight bits of each half."""
    if bits != 3:
        pairs = min(8, 16 // bits)
        return ["shr.u32 c, w, 8;"], [("wc"[i * bits // 8], i * bits % 8) for i in range(pairs)]
    # Of even pairs in c and of odd ones in d: the upper bits at 2 and 1 of every four, and the lowest at 0.
    lines = ["shl.b32 c, w, 1;", "lop3.b32 c, c, v, 0x66666666, 0xe4;"]
    lines += ["shr.u32 d, w, 1;", "shr.u32 v, v, 2;", "lop3.b32 d, d, v, 0x66666666, 0xe4;"]
    lines += ["shr.u32 e, c, 8;", "shr.u32 f, d, 8;"]
    return lines, [("cdef"[i // 4 * 2 + i % 2], i // 2 % 2 * 4) for i in range(8)]


def _program(lines: list[str], outputs: int, words: int, halves: int) -> tuple[tl.constexpr, tl.constexpr]:
    """Returns a PTX program, and its operand constraints: 16-bit outputs, 32-bit words, 16-bit halves."""
    text = "{\n.reg .b32 w, v, c, d, e, f, k, p, s, z;\n" + "\n".join(lines) + "\n}"
    return tl.constexpr(text), tl.constexpr(",".join(["=h"] * outputs + ["r"] * words + ["h"] * halves))


def _decoder(bits: int) -> tuple[tl.constexpr, tl.constexpr]:
    """Makes the PTX program that decodes a word (with the word of lowest bits) to its weights.

    Scales and zero points are those of `_levels`."""
    lines, fields = _fields(bits)
    first = 2 * len(fields)
    lines = [f"mov.b32 w, ${first};", f"mov.b32 v, ${first + 1};", *lines]
    for i, (register, place) in enumerate(fields):
        s, z, mask = first + 2 + i, first + 2 + len(fields) + i, (2**bits - 1) << place
        lines += [f"mov.b32 s, {{${s}, ${s}}};", f"mov.b32 z, {{${z}, ${z}}};"]
        lines += [f"and.b32 p, {register}, 0x{mask:04x}{mask:04x};", f"mov.b32 k, {_bf16x2(127 - place)};"]
        lines += ["fma.rn.bf16x2 p, p, k, z;", "mul.rn.bf16x2 p, p, s;", f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, p;"]
    return _program(lines, first, 2, first)


def _levels(bits: int) -> tuple[tl.constexpr, tl.constexpr]:
    """Makes the PTX program that turns four e4m3 scales s, four zero points z, t and middle into levels.

    These are s t 2^n and (middle - z) 2^-n, n = `_shift`; middle comes as middle 2^-n. A scale's bits become the last
    exponent bits and the first mantissa bits of a bfloat16, which is s 2^-120."""
    n = _shift(bits)
    lines = ["mov.b32 s, {$10, $10};", f"mov.b32 k, {_bf16x2(n)};", "mul.rn.bf16x2 s, s, k;", "mov.b32 z, {$11, $11};"]
    for odd in (0, 1):
        lines += [f"{('shl.b32', 'shr.u32')[odd]} p, $8, 4;", "and.b32 p, p, 0x0ff00ff0;"]
        lines += [f"mov.b32 k, {_bf16x2(120)};", "mul.rn.bf16x2 p, p, k;", "mul.rn.bf16x2 p, p, s;"]
        lines += [f"mov.b32 {{${odd}, ${2 + odd}}}, p;"]
        lines += [f"shr.u32 p, $9, {8 * odd};", "and.b32 p, p, 0x00ff00ff;"]
        lines += [f"mov.b32 k, {_bf16x2(133 - n, 1)};", "fma.rn.bf16x2 p, p, k, z;"]
        lines += [f"mov.b32 {{${4 + odd}, ${6 + odd}}}, p;"]
    return _program(lines, 8, 2, 2)


_TWO, _TWO_KINDS = _decoder(2)
_THREE, _THREE_KINDS = _decoder(3)
_FOUR, _FOUR_KINDS = _decoder(4)
_EIGHT, _EIGHT_KINDS = _decoder(8)
_LEVELS_TWO, _LEVELS_KINDS = _levels(2)
_LEVELS_THREE, _ = _levels(3)
_LEVELS_FOUR, _ = _levels(4)
_LEVELS_EIGHT, _ = _levels(8)


@triton.jit
def _levels_of(scales, zeros, t, MIDDLE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Computes scales and zero points of four groups each, as `_levels` has them."""
    middle = tl.full((ROWS,), MIDDLE * 2.0 ** (BITS - 14), tl.bfloat16)
    return tl.inline_asm_elementwise(
        (_LEVELS_TWO if BITS == 2 else _LEVELS_THREE) if BITS < 4 else (_LEVELS_FOUR if BITS == 4 else _LEVELS_EIGHT),
        _LEVELS_KINDS, [scales, zeros, t, middle], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _decoded_eight(words, s0, s1, z0, z1):
    return tl.inline_asm_elementwise(
        _EIGHT, _EIGHT_KINDS, [words, words, s0, s1, z0, z1], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
    )


@triton.jit
def _decoded_four(words, s0, s1, s2, s3, z0, z1, z2, z3):
    return tl.inline_asm_elementwise(
        _FOUR, _FOUR_KINDS, [words, words, s0, s1, s2, s3, z0, z1, z2, z3],
        dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _decoded_few(words, low, s0, s1, s2, s3, s4, s5, s6, s7, z0, z1, z2, z3, z4, z5, z6, z7, BITS: tl.constexpr):
    return tl.inline_asm_elementwise(
        _TWO if BITS == 2 else _THREE, _TWO_KINDS if BITS == 2 else _THREE_KINDS,
        [words, low, s0, s1, s2, s3, s4, s5, s6, s7, z0, z1, z2, z3, z4, z5, z6, z7],
        dtype=(tl.bfloat16,) * 16, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _levels_by_input(levels, t, MIDDLE: tl.constexpr, BITS: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """Computes scales and zero points (`_levels`) for each 16 of 128 inputs: eight tensors [ROWS] of each."""
    if P == 1:
        both = levels.reshape(ROWS).to(tl.int32)
        a, b, c, d, e, f, g, h = _levels_of(both, both >> 8, t, MIDDLE, BITS, ROWS)
        return a, a, a, a, a, a, a, a, e, e, e, e, e, e, e, e
    elif P == 2:
        both = levels.reshape(ROWS)
        a, b, c, d, e, f, g, h = _levels_of(both, both >> 16, t, MIDDLE, BITS, ROWS)
        return a, a, a, a, b, b, b, b, e, e, e, e, f, f, f, f
    elif P == 4:
        scales, zeros = levels.split()
        a, b, c, d, e, f, g, h = _levels_of(scales, zeros, t, MIDDLE, BITS, ROWS)
        return a, a, b, b, c, c, d, d, e, e, f, f, g, g, h, h
    else:
        first, other = levels.reshape(ROWS, 2, 2).split()
        scales, zeros = first.split()
        a, b, c, d, e, f, g, h = _levels_of(scales, zeros, t, MIDDLE, BITS, ROWS)
        scales, zeros = other.split()
        i, j, k, q, m, n, o, p = _levels_of(scales, zeros, t, MIDDLE, BITS, ROWS)
        return a, b, c, d, i, j, k, q, e, f, g, h, m, n, o, p


@triton.jit
def _of_words(s, ROWS: tl.constexpr, H: tl.constexpr):
    """Expands [ROWS, H], a value for each h, or [ROWS], to the words of a row: [ROWS, 8 H]."""
    return s.reshape(ROWS, 1, H).broadcast_to(ROWS, 8, H).reshape(ROWS, 8 * H)


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    """Joins eight tensors, by i, along new dimensions [.., 2, 2, 2] of i's bits, the upper bit first."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd)


@triton.jit
def weights(words, low, levels, t, BITS: tl.constexpr, P: tl.constexpr, MIDDLE: tl.constexpr, ROWS: tl.constexpr):
    """Decodes words to bf16((q - z) s t), [ROWS, 128]; a row is 128 inputs of one output.

    words: int32 [ROWS, 4 width]. low: int32 [ROWS, 4], for three bits only. levels: int32 [ROWS, P / 2], or int16
    [ROWS, 1]. t: bfloat16 [ROWS]."""
    s0, s1, s2, s3, s4, s5, s6, s7, z0, z1, z2, z3, z4, z5, z6, z7 = _levels_by_input(levels, t, MIDDLE, BITS, P, ROWS)
    if BITS == 8:
        s_even, s_odd = tl.join(tl.join(s0, s4), tl.join(s2, s6)), tl.join(tl.join(s1, s5), tl.join(s3, s7))
        z_even, z_odd = tl.join(tl.join(z0, z4), tl.join(z2, z6)), tl.join(tl.join(z1, z5), tl.join(z3, z7))
        a0, a1, b0, b1 = _decoded_eight(
            words, _of_words(s_even, ROWS, 4), _of_words(s_odd, ROWS, 4),
            _of_words(z_even, ROWS, 4), _of_words(z_odd, ROWS, 4),
        )  # fmt: skip
        y = tl.join(tl.join(a0, b0), tl.join(a1, b1)).reshape(ROWS, 4, 2, 4, 2, 2)  # t, f, h, i', e
        y = y.permute(0, 3, 4, 2, 1, 5)
    elif BITS == 4:
        a0, a1, b0, b1, c0, c1, d0, d1 = _decoded_four(
            words, _of_words(tl.join(s0, s4), ROWS, 2), _of_words(tl.join(s1, s5), ROWS, 2),
            _of_words(tl.join(s2, s6), ROWS, 2), _of_words(tl.join(s3, s7), ROWS, 2),
            _of_words(tl.join(z0, z4), ROWS, 2), _of_words(tl.join(z1, z5), ROWS, 2),
            _of_words(tl.join(z2, z6), ROWS, 2), _of_words(tl.join(z3, z7), ROWS, 2),
        )  # fmt: skip
        first = tl.join(tl.join(a0, c0), tl.join(b0, d0))
        other = tl.join(tl.join(a1, c1), tl.join(b1, d1))
        y = tl.join(first, other).reshape(ROWS, 4, 2, 2, 2, 2, 2)  # t, f, h, i' (upper bit first), e
        y = y.permute(0, 3, 4, 5, 2, 1, 6)
    else:
        if BITS == 3:
            lowest = tl.join(low, low >> 1).reshape(ROWS, 8)
        else:
            lowest = words
        a0, a1, b0, b1, c0, c1, d0, d1, e0, e1, f0, f1, g0, g1, h0, h1 = _decoded_few(
            words, lowest, _of_words(s0, ROWS, 1), _of_words(s1, ROWS, 1), _of_words(s2, ROWS, 1),
            _of_words(s3, ROWS, 1), _of_words(s4, ROWS, 1), _of_words(s5, ROWS, 1), _of_words(s6, ROWS, 1),
            _of_words(s7, ROWS, 1), _of_words(z0, ROWS, 1), _of_words(z1, ROWS, 1), _of_words(z2, ROWS, 1),
            _of_words(z3, ROWS, 1), _of_words(z4, ROWS, 1), _of_words(z5, ROWS, 1), _of_words(z6, ROWS, 1),
            _of_words(z7, ROWS, 1), BITS,
        )  # fmt: skip
        first = _joined(a0, b0, c0, d0, e0, f0, g0, h0)
        other = _joined(a1, b1, c1, d1, e1, f1, g1, h1)
        y = tl.join(first, other).reshape(ROWS, 4, 2, 2, 2, 2, 2)  # t, f, i (upper bit first), e
        y = y.permute(0, 3, 4, 5, 2, 1, 6)
    return y.reshape(ROWS, _STEP)


@triton.jit
def loaded(w, low, s, t, block, output, BITS: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr,
           BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Loads and decodes a tile of weights [BN, BK] by `Words.descriptors` and t [BN], from input 128 `block` on."""
    U: tl.constexpr = BK // _STEP
    P: tl.constexpr = max(1, _STEP // GROUP)
    C: tl.constexpr = max(1, P // 2)
    L: tl.constexpr = 2 if BITS == 3 else BITS
    words = w.load([block, output, 0]).permute(1, 0, 2).reshape(BN * U, 4 * L)
    lowest = low.load([block, output, 0]).permute(1, 0, 2).reshape(BN * U, 4) if BITS == 3 else None
    levels = s.load([block * C, output]).reshape(U, C, BN).permute(2, 0, 1).reshape(BN * U, C)
    steps = t[:, None].broadcast_to(BN, U).reshape(BN * U)
    return weights(words, lowest, levels, steps, BITS, P, MIDDLE, BN * U).reshape(BN, BK)


@triton.jit
def _decode(w, low, s, t_ptr, y_ptr, N, K, BITS: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr,
            BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    output, block = tl.program_id(0) * BN, tl.program_id(1)
    outputs = output + tl.arange(0, BN)
    there = outputs < N
    t = tl.load(t_ptr + outputs, mask=there, other=0.0)
    y = loaded(w, low, s, t, block, output, BITS, GROUP, MIDDLE, BN, BK)
    at = outputs.to(tl.int64)[:, None] * K + block * _STEP + tl.arange(0, BK)[None, :]
    tl.store(y_ptr + at, y, mask=there[:, None])


@dataclasses.dataclass(frozen=True)
class Words:
    """A weight [N, K] with zero points, in the layout that the CUDA kernel multiplies.

    Attributes:
      codes: int32 [K/128, N, 4 width]; for three bits, the upper two bits of the codes.
      low: int32 [K/128, N, 4], the lowest bit of three-bit codes; None: other widths.
      levels: scales s and zero points z (`levels_of`).
      steps: scale t of each output, bfloat16 [N].
      bits: bits of a code.
      group: inputs per scale: 16, 32, 64, or a multiple of 128.
      middle: number added to a code that is scaled to eight bits; 0, or half of its interval.
    """

    codes: torch.Tensor
    low: torch.Tensor | None
    levels: torch.Tensor
    steps: torch.Tensor
    bits: int
    group: int
    middle: int

    @property
    def outputs(self) -> int:
        """The number of outputs, N."""
        return self.codes.shape[1]

    @property
    def inputs(self) -> int:
        """The number of inputs, K."""
        return self.codes.shape[0] * split_k.STEP

    def descriptors(self, bn: int, bk: int) -> tuple[Any, Any, Any]:
        """Makes the tensor descriptors of codes, low and levels for tiles of bn outputs and bk inputs."""
        blocks, c = bk // split_k.STEP, self.levels.shape[1]
        words, low = (
            None if part is None else TensorDescriptor.from_tensor(part, [blocks, bn, part.shape[2]])
            for part in (self.codes, self.low)
        )
        return words, low, TensorDescriptor.from_tensor(self.levels.view(-1, self.outputs), [blocks * c, bn])

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Decodes some outputs, int64 [R], to bfloat16 [R, K]."""
        count = len(index)
        index = torch.nn.functional.pad(index, (0, -count % _ROWS))
        low = None if self.low is None else self.low.index_select(1, index)
        codes, levels = self.codes.index_select(1, index), self.levels.index_select(2, index)
        steps = self.steps.index_select(0, index)
        return dataclasses.replace(self, codes=codes, low=low, levels=levels, steps=steps).decoded()[:count]

    def decoded(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Decodes the whole weight to bf16((q - z) s t), [N, K], into `out` if given."""
        n, k, bn = self.outputs, self.inputs, 64
        y = torch.empty((n, k), dtype=torch.bfloat16, device=self.codes.device) if out is None else out
        _decode[(triton.cdiv(n, bn), k // split_k.STEP)](
            *self.descriptors(bn, split_k.STEP), self.steps, y, n, k,
            BITS=self.bits, GROUP=self.group, MIDDLE=self.middle, BN=bn, BK=split_k.STEP, num_warps=4,
        )  # fmt: skip
        return y


# By the most rows: (rows, outputs, inputs, warps, stages). Those of 16 and 256 rows are the best for `w2a16_asym:g32`
# at Qwen3-8B's shapes on an H200; the others were not measured.
_TILES = {
    16: (16, 64, 256, 4, 5),
    32: (32, 64, 256, 4, 4),
    64: (64, 64, 128, 4, 4),
    128: (128, 64, 128, 4, 3),
    256: (128, 64, 128, 4, 3),
    512: (128, 128, 128, 8, 3),
}


def in_whole(inputs: int, k: int, splits: int) -> bool:
    """Tells whether all parts of K are multiples of so many inputs."""
    return all((end - first) % inputs == 0 for first, end in split_k.cuts(k, splits))


def tile_of(m: int, k: int, bits: int, splits: int) -> tuple[int, int, int, int, int]:
    """Chooses (rows, outputs, inputs, warps, stages) for m rows. Codes of less than eight bits take the table's inputs
    if all parts of K are multiples of them; otherwise 128 inputs at a time."""
    rows, outputs, inputs, warps, stages = _TILES[max(min(_TILES), min(max(_TILES), triton.next_power_of_2(m)))]
    fits = bits != 8 and in_whole(inputs, k, splits)
    return rows, outputs, inputs if fits else split_k.STEP, warps, stages


def interleaved(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Interleaves published codes uint8 [N, K width/8], first code lowest, to int32 [K/128, N, 4 width]."""
    n = packed.shape[0]
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    codes = (packed.unsqueeze(-1) >> shifts) & (2**width - 1)
    shape = {8: (4, 2), 4: (2, 4), 2: (1, 8), 1: (1, 8)}[width]  # h, i'
    codes = codes.reshape(n, -1, *shape, 2, 4, 2)  # row, block, h, i', f, t, e
    h, i, f, t, e = range(2, 7)
    inner = (f, h, e, i) if width > 1 else (h, e, i, f)
    codes = codes.permute(1, 0, t, *inner).reshape(codes.shape[1], n, 4 * width, 32 // width)
    out = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=packed.device)
    for place in range(32 // width):
        out |= codes[..., place].to(torch.int32) << width * place
    return out


def levels_of(scales: torch.Tensor, zeros: torch.Tensor, inputs: int) -> torch.Tensor:
    """Packs e4m3 scales and uint8 zero points, both [N, K/G], to the kernel's layout. It returns int32
    [K/128, P / 2, N], or int16 [K/128, 1, N] where 128 inputs share a scale."""
    n, groups = scales.shape
    blocks, group = inputs // split_k.STEP, inputs // groups
    both = torch.stack([scales.view(torch.uint8), zeros], dim=1)  # row, kind, group
    if group > split_k.STEP:
        both = both.repeat_interleave(group // split_k.STEP, dim=2)
    both = both.reshape(n, 2, blocks, -1).permute(2, 0, 1, 3).reshape(blocks, n, -1).contiguous()
    words = both.view(torch.int16 if both.shape[-1] == 2 else torch.int32)
    return words.transpose(1, 2).contiguous()


@triton.jit
def _half_up(x):
    whole = tl.floor(x)
    return whole + (x - whole >= 0.5).to(tl.float32)


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _round(
    x_ptr, y_ptr, K: tl.constexpr, TOP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):
    """Rounds one row, by the operations of `asym_layers.rounded_rows`, one for one."""
    row = tl.program_id(0).to(tl.int64) * K
    place = tl.arange(0, WIDTH)[None, :]
    at = tl.arange(0, GROUPS)[:, None] * GROUP + place
    there = (at < K) & (place < GROUP)
    x = tl.load(x_ptr + row + at, mask=there, other=0.0).to(tl.float32)
    high, low = tl.maximum(tl.max(x, 1, keep_dims=True), 0.0), tl.minimum(tl.min(x, 1, keep_dims=True), 0.0)
    exact = tl.math.div_rn(high - low, TOP)
    carried = tl.max(exact).to(tl.int32, bitcast=True) + 0x1FFFFF
    exponent = tl.maximum((carried >> 23) - 135, -104)
    t, ratio = _power_of_two(exponent), exact * _power_of_two(-exponent)
    last = tl.minimum(tl.maximum((ratio.to(tl.int32, bitcast=True) >> 23) - 127, -6), 8) - 3
    units, unit = ratio * _power_of_two(-last), _power_of_two(last)
    less = tl.maximum(tl.floor(units) * unit, 0.001953125)
    more = tl.maximum(tl.ceil(units) * unit, 0.001953125)
    trial = less * t
    steps = _half_up(tl.math.div_rn(high, trial)) - _half_up(tl.math.div_rn(low, trial))
    step = tl.where(steps <= TOP, less, more) * t
    zero = -_half_up(tl.math.div_rn(low, step))
    code = _half_up(tl.math.div_rn(x, step.broadcast_to(GROUPS, WIDTH))) + zero
    code = tl.clamp(code, 0.0, TOP, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + row + at, ((code - zero) * step).to(y_ptr.dtype.element_ty), mask=there)


def rounded_rows(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Rounds rows of activations x [..., K] as `asym_layers.rounded_rows` does, with equal bits, in one kernel."""
    x = x.contiguous()
    k = x.shape[-1]
    y = torch.empty_like(x)
    groups, width = triton.next_power_of_2(k // group), triton.next_power_of_2(group)
    if x.numel():
        _round[(x.numel() // k,)](
            x, y, K=k, TOP=2.0**bits - 1, GROUP=group, GROUPS=groups, WIDTH=width,
            num_warps=min(32, max(4, groups * width // 256)),
        )  # fmt: skip
    return y
