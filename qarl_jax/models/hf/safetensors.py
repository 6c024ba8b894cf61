# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors files through a memory map and writes them in one pass, with at most one tensor in memory.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes.
(https://huggingface.co/docs/safetensors; tests compare with the `safetensors` package.)
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from qarl_bridge.protocol import tensors as wire

from qarl_jax.runtime import progress
from qarl_jax.types import UserError

DTYPES: dict[str, np.dtype] = {
    **{code: wire.DTYPES[name] for code, name in wire.SAFETENSORS_DTYPES.items()},
    "F64": np.dtype(np.float64),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MAX_HEADER = 100 * 2**20
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9


Shapes = dict[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape by name, in order


class SafetensorsFile:
    """One safetensors file; the constructor checks the whole header. `entries`: {name: (dtype, shape, offset)}.

    Raises:
      UserError: the file is missing, truncated, not a safetensors file, or lists a tensor twice.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
                if not 0 < length <= min(size - 8, _MAX_HEADER):
                    raise UserError(f"{path}: not a safetensors file, or truncated ({size} bytes)")
                text = file.read(length)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            header = json.loads(text, object_pairs_hook=self._no_duplicates)
            header.pop("__metadata__", None)
            self._start = 8 + length
            self.entries = {name: self._entry(name, entry, size) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: the safetensors header is damaged ({error})") from error

    def _no_duplicates(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise UserError(f"{self.path}: tensor {key!r} is listed twice")
            out[key] = value
        return out

    def _entry(self, name: str, entry: dict[str, Any], size: int) -> tuple[np.dtype, tuple[int, ...], int]:
        shape, (begin, end) = tuple(int(dim) for dim in entry["shape"]), entry["data_offsets"]
        if entry["dtype"] not in DTYPES:
            raise UserError(f"{self.path}: tensor {name!r} has dtype {entry['dtype']}; known: {', '.join(DTYPES)}")
        dtype = DTYPES[entry["dtype"]]
        if end - begin != _nbytes(dtype, shape) or begin < 0:
            raise UserError(
                f"{self.path}: tensor {name!r} of shape {shape} and {entry['dtype']} spans {end - begin} bytes"
            )
        if self._start + end > size:
            missing = self._start + end - size
            raise UserError(
                f"{self.path}: truncated, {missing} bytes of tensor {name!r} are missing; download it again"
            )
        return dtype, shape, self._start + begin

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file; pages are read when touched."""
        dtype, shape, offset = self.entries[name]
        if 0 in shape:
            return np.zeros(shape, dtype)
        return np.memmap(self.path, dtype=dtype, mode="r", offset=offset, shape=shape)


def write(path: pathlib.Path, shapes: Shapes, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes one file, atomically (a temporary file, then a rename).

    Args:
      shapes: dtype and shape of every tensor, in the order in which `tensors` yields them.
      tensors: (name, array); each is written before the next is drawn from the iterable.

    Raises:
      ValueError: a tensor's name, dtype or shape is not the one of `shapes`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = _nbytes(dtype, shape)
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begins 8-byte aligned, as the reference writer has it
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, array), (expected, (dtype, shape)) in zip(tensors, shapes.items(), strict=True):
            if (name, array.dtype, array.shape) != (expected, dtype, shape):
                raise ValueError(f"{name} {array.dtype} {array.shape} written in place of {expected} {dtype} {shape}")
            file.write(np.ascontiguousarray(array).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_sharded(
    folder: pathlib.Path,
    shapes: Shapes,
    tensors: Iterable[tuple[str, np.ndarray]],
    max_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a checkpoint: one file, or several files and an index of their tensors.

    Args:
      folder: an existing folder.
      shapes, tensors: as in `write`.
      max_bytes: a new file begins when one would grow beyond this.
    """
    files: list[Shapes] = [{}]
    filled = total = 0
    for name, (dtype, shape) in shapes.items():
        nbytes = _nbytes(dtype, shape)
        if files[-1] and filled + nbytes > max_bytes:
            files.append({})
            filled = 0
        files[-1][name] = dtype, shape
        filled, total = filled + nbytes, total + nbytes
    weight_map: dict[str, str] = {}
    with progress.task("writing weights", len(shapes), "tensors") as task:
        counted = task.count(tensors)
        for number, own in enumerate(files, start=1):
            file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write(folder / file, own, itertools.islice(counted, len(own)))
            weight_map |= dict.fromkeys(own, file)
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def _nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
