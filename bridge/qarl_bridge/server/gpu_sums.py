# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel that computes the row sums of fingerprint.py in one pass over GPU memory.

With torch's operations they take a dozen passes over temporaries of twice the size, and a publish needs them twice.
Triton comes with every CUDA build of torch. Import this module only where a GPU is used.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from qarl_bridge.protocol import fingerprint

_PAIRS = fingerprint.WORDS // 2  # 32-bit words of a row
_ROWS = 4  # of a program


@triton.jit
def _row_sums(words, out, count, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = tl.arange(0, PAIRS)
    inside = rows < count
    pair = tl.load(words + rows[:, None] * PAIRS + places[None, :], mask=inside[:, None], other=0)
    low, high = pair & 0xFFFF, (pair >> 16) & 0xFFFF
    odd = (2 * places + 1)[None, :]  # multiplier of the low half; the high half's is one more
    # int32 wraps as the definition does: modulo 2^32.
    tl.store(out + 2 * rows, tl.sum(low + high, axis=1), mask=inside)
    tl.store(out + 2 * rows + 1, tl.sum(low * odd + high * (odd + 1), axis=1), mask=inside)


def row_sums(buffer: Any) -> Any:
    """Computes the row sums of a uint8 GPU tensor of whole rows of 4 KiB; see fingerprint.py.

    Returns [rows, 2] int32, the bits of the uint32 sums, on the GPU.
    """
    words = buffer.view(torch.int32)
    count = words.numel() // _PAIRS
    out = torch.empty((count, 2), dtype=torch.int32, device=buffer.device)
    if count:
        _row_sums[(triton.cdiv(count, _ROWS),)](words, out, count, PAIRS=_PAIRS, ROWS=_ROWS)
    return out
