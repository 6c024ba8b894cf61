# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tensors: 16-byte checksums that cost one pass over memory, in numpy here, in JAX and torch on GPUs.

The bytes are cut into rows of 4 KiB, the last one filled up with zeros, and read as little-endian 16-bit words w_0 ...
w_2047. Per row, modulo 2^32 (Fletcher's two sums, J. G. Fletcher, IEEE Trans. Comm. 30, 1982):

    a = sum_i w_i          b = sum_i (i + 1) w_i

A tensor's fingerprint is the first 16 bytes of SHA-256 over all its rows' (a, b), little-endian uint32, in order.

A fingerprint finds any change of one or two words of a row, hence every flipped byte and every swap of two words. With
differences |d| < 2^16 and positions up to 2^11 no product wraps, so d_1 + d_2 = 0 and i d_1 + j d_2 = 0 leave d = 0
only. It finds swapped rows, because SHA-256 sees rows in order. It misses another change about once in 2^55. It detects
damage, not an adversary: the bridge's key keeps strangers out.

Integer sums do not depend on their order, so every backend gets equal numbers. SHA-256 then runs over 1/512 of the
bytes, on the host.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

ROW_BYTES = 4096
WORDS = ROW_BYTES // 2
DIGEST_BYTES = 16
_MULTIPLIERS = np.arange(1, WORDS + 1, dtype=np.uint32)
_ROWS_AT_ONCE = 64  # 512 KiB of uint32: stays in cache
_ROWS_PER_THREAD = 1024  # 4 MiB: less is not worth handing over
_MOST_THREADS = 8
_kept = threading.local()


def rows_of(nbytes: int) -> int:
    """Counts the rows of 4 KiB that a tensor of `nbytes` bytes fills."""
    return -(-nbytes // ROW_BYTES)


def row_sums(data: bytes | memoryview | np.ndarray) -> np.ndarray:
    """Computes the sums (a, b) of every row of bytes or of a contiguous array; returns [rows, 2] uint32."""
    raw = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data.reshape(-1).view(np.uint8)
    whole = len(raw) // ROW_BYTES
    out = np.empty((rows_of(len(raw)), 2), np.uint32)
    _sum_rows(raw[: whole * ROW_BYTES].reshape(whole, ROW_BYTES), out[:whole])
    if len(out) > whole:
        last = np.zeros((1, ROW_BYTES), np.uint8)
        last[0, : len(raw) - whole * ROW_BYTES] = raw[whole * ROW_BYTES :]
        _sum_rows(last, out[whole:])
    return out


def _sum_rows(raw: np.ndarray, out: np.ndarray) -> None:
    if raw.ctypes.data % 2:
        raw = raw.copy()
    words = raw.view("<u2")
    if len(words) < 2 * _ROWS_PER_THREAD:
        _sum_words(words, out)
        return
    starts = range(0, len(words), _ROWS_PER_THREAD)
    cuts = [slice(start, start + _ROWS_PER_THREAD) for start in starts]
    list(threads().map(_sum_words, (words[cut] for cut in cuts), (out[cut] for cut in cuts)))


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Returns the shared thread pool for passes over large arrays, during which numpy releases the GIL."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(_MOST_THREADS, count), thread_name_prefix="fingerprint")


def _sum_words(words: np.ndarray, out: np.ndarray) -> None:
    """Sums in memory that a thread keeps: the kernel would page in new memory again and again."""
    if not hasattr(_kept, "wide"):
        _kept.wide = np.empty((_ROWS_AT_ONCE, WORDS), np.uint32)
    for start in range(0, len(words), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        wide = _kept.wide[: len(words[rows])]
        wide[...] = words[rows]
        out[rows, 0] = wide.sum(axis=1, dtype=np.uint32)
        wide *= _MULTIPLIERS
        out[rows, 1] = wide.sum(axis=1, dtype=np.uint32)


def digest_of_sums(sums: np.ndarray) -> bytes:
    """Computes a tensor's 16-byte fingerprint from its row sums, [rows, 2]."""
    return hashlib.sha256(np.ascontiguousarray(sums, "<u4").data).digest()[:DIGEST_BYTES]


def digest(data: bytes | memoryview | np.ndarray) -> bytes:
    """Computes the 16-byte fingerprint of bytes, or of a contiguous array, on the host."""
    return digest_of_sums(row_sums(data))
