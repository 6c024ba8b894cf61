# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Delta encoding of a version: encodes the bytes that differ from an earlier version with an equal layout.

    data = difference(old, new)          # bytes, or None: the whole version is cheaper
    apply(data, buffer)                  # `buffer` held old, and holds new

A version is cut into pieces of 1 MiB. Each changed piece is encoded in the shortest of three ways. With c of its n
bytes changed:

| kind   | what is written                                                            | bytes       |
|--------|----------------------------------------------------------------------------|-------------|
| sparse | position (uint32) and new byte of each change                              | 5 c         |
| dense  | number of changes in every 256 bytes (uint8), position of each change in   | 2 c + n/256 |
|        | its 256 (uint8), each new byte                                             |             |
| raw    | the piece                                                                  | n           |

A header of 17 bytes comes before each. The raw kind replaces the dense one where all bytes of a block of 256 change,
because their number does not fit a uint8.

Where a code of four bits flips with probability p, c is nearly 2 p n. New bytes and positions are as random as weights:
a compressor would gain little, and would cost more time than the network.

The caller checks the result by the fingerprints of a version's tensors.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from qarl_bridge.protocol.errors import BridgeError

PIECE = 1 << 20
_BLOCK = 256
_MOST_THREADS = 8
_TOGETHER = 1 << 16  # changes that one call applies: a version has thousands of pieces, most with a few
_HEADER = struct.Struct("<QIIB")  # offset, bytes of the piece, changes, kind
_SPARSE, _DENSE, _RAW = range(3)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Returns the thread pool for comparisons, during which numpy releases the GIL."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(_MOST_THREADS, count), thread_name_prefix="delta")


def difference(old: np.ndarray, new: np.ndarray, most: int | None = None) -> bytes | None:
    """Encodes the changes from `old` to `new`, both [n] uint8; None if they exceed `most` bytes (default 3/4 n)."""
    most = len(new) * 3 // 4 if most is None else most
    parts: list[bytes] = []
    total = 0
    for piece in _threads().map(lambda at: _piece(old, new, at), range(0, len(new), PIECE)):
        parts += piece
        total += sum(map(len, piece))
        if total > most:
            return None
    return b"".join(parts)


def _piece(old: np.ndarray, new: np.ndarray, at: int) -> list[bytes]:
    before, after = old[at : at + PIECE], new[at : at + PIECE]
    whole = len(after) // 8 * 8
    words = np.flatnonzero(before[:whole].view("<u8") != after[:whole].view("<u8"))
    if len(words) * 8 < whole // 8:  # few: look into these alone
        spots = (words[:, None] * 8 + np.arange(8)).reshape(-1)
        spots = np.concatenate([spots, np.arange(whole, len(after))])
        spots = spots[before[spots] != after[spots]]
    else:
        spots = np.flatnonzero(before != after)
    count = len(spots)
    if not count:
        return []
    sparse, dense = 5 * count, 2 * count + -(-len(after) // _BLOCK)
    if min(sparse, dense) >= len(after):
        return [_HEADER.pack(at, len(after), count, _RAW), after.tobytes()]
    values = after[spots].tobytes()
    if sparse <= dense:
        return [_HEADER.pack(at, len(after), count, _SPARSE), spots.astype("<u4").tobytes(), values]
    counts = np.bincount(spots // _BLOCK, minlength=-(-len(after) // _BLOCK))
    if counts.max() == _BLOCK:  # a count that has no byte
        return [_HEADER.pack(at, len(after), count, _RAW), after.tobytes()]
    low = (spots % _BLOCK).astype(np.uint8)
    return [
        _HEADER.pack(at, len(after), count, _DENSE), counts.astype(np.uint8).tobytes(), low.tobytes(), values,
    ]  # fmt: skip


def fill(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into `target`, arrays of equal length, with several threads."""
    starts = range(0, len(source), 64 * PIECE)
    list(_threads().map(lambda at: np.copyto(target[at : at + 64 * PIECE], source[at : at + 64 * PIECE]), starts))


Watch = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
_Piece = tuple[int, int, np.ndarray, int, int]  # offset, bytes, what is written of it, changes, kind


def apply(data: bytes | bytearray | memoryview, buffer: np.ndarray, watch: Watch | None = None) -> None:
    """Decodes the output of `difference` and writes the changed bytes into `buffer`, [n] uint8.

    watch: a callback (positions, old bytes, new bytes) for many changes at a time. Positions ascend; several threads
      call it.

    Raises:
      BridgeError("torn"): `data` is damaged or does not fit the buffer, which may be half-written.
    """
    raw = np.frombuffer(data, np.uint8)
    groups: list[list[_Piece]] = []
    at = end = together = 0
    while at < len(raw):
        if at + _HEADER.size > len(raw):
            raise _torn()
        offset, size, count, kind = _HEADER.unpack_from(raw.data, at)
        at += _HEADER.size
        length = {_SPARSE: 5 * count, _DENSE: 2 * count + -(-size // _BLOCK), _RAW: size}.get(kind)
        fits = end <= offset and offset + size <= len(buffer) and 0 < count <= size <= PIECE
        if length is None or at + length > len(raw) or not fits:
            raise _torn()
        if not groups or together + count > _TOGETHER:
            groups.append([])
            together = 0
        groups[-1].append((offset, size, raw[at : at + length], count, kind))
        together += count
        at += length
        end = offset + size
    list(_threads().map(functools.partial(_write, buffer, watch), groups))


def _write(buffer: np.ndarray, watch: Watch | None, pieces: list[_Piece]) -> None:
    found = [_changes(buffer, *piece) for piece in pieces]
    spots, values = (np.concatenate(each) for each in zip(*found, strict=True))
    if not (spots[1:] > spots[:-1]).all():  # a byte changes once
        raise _torn()
    if watch is not None and len(spots):
        watch(spots, buffer[spots], values)
    buffer[spots] = values


def _changes(buffer: np.ndarray, at: int, size: int, data: np.ndarray, count: int, kind: int) -> tuple[np.ndarray, ...]:
    """Decodes a piece: returns the positions that it changes, int64, and the new bytes."""
    if kind == _RAW:
        spots = np.flatnonzero(buffer[at : at + size] != data)
        return spots + at, data[spots]
    if kind == _SPARSE:
        spots = np.frombuffer(data[: 4 * count], "<u4").astype(np.int64)
    else:
        counts, low = data[: -2 * count], data[-2 * count : -count]
        if int(counts.sum(dtype=np.int64)) != count:
            raise _torn()
        spots = np.repeat(np.arange(len(counts)) * _BLOCK, counts) + low
    if spots[-1] >= size:
        raise _torn()
    return spots + at, data[-count:]


def _torn() -> BridgeError:
    return BridgeError("the changes to a version are torn", "torn")
