# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Holds a staged version on the bridge's side, validates its bytes, and yields its tensors to the engine's loader.

The bytes lie in host memory (`HostCopy`: a memory file of the trainer, or received chunks) or on the engine's GPU
(`staged_gpu.DeviceCopy`: in the trainer's buffer, or in the engine's after an NCCL broadcast). Both implement `Copy`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.changed import Changes, Sums


class Copy(Protocol):
    """The interface of a staged version. Tensors are numpy arrays on the host and torch tensors on a GPU."""

    manifest: messages.Manifest
    borrowed: bool  # the memory is the trainer's, and ends with it

    def validate(self) -> None:
        """Checks every tensor's fingerprint, finite values and scales; BridgeError names the first bad tensor."""

    def parts(self) -> Iterator[Mapping[str, Any]]:
        """Yields all tensors by name, read only, in parts of whole layers in manifest order. A part's tensors are valid
        until the next part is requested."""

    def checked_parts(self) -> Iterator[Mapping[str, Any]]:
        """Yields tensors as `parts` does, for the engine's loader, and checks fingerprints again. On a GPU `confirm`
        checks them."""

    def confirm(self) -> None:
        """Checks after a load that the bytes did not change while they were read; BridgeError("torn") otherwise."""

    def close(self) -> None:
        """Closes or unmaps the memory. Idempotent."""


class HostCopy:
    """A version in sealed host memory; implements `Copy`.

    Args:
      manifest: a manifest that `manifest.check_manifest` has checked.
      buffer: [total_bytes] uint8, read only.
      fd: descriptor of the memory file, if other processes may open it; otherwise -1.
      changes: the changes to a valid base from which the version was made; None: it was sent whole.

    Attributes:
      of_changes: whether it was made from changes. sums: row sums of its tensors, once validated.
    """

    borrowed = False  # the kernel keeps it while it is mapped

    def __init__(self, manifest: messages.Manifest, buffer: np.ndarray, fd: int = -1, changes: Changes | None = None):
        self.manifest = manifest
        self.buffer = buffer
        self.fd = fd
        self.of_changes = changes is not None
        self._changes = changes
        self.sums: Sums | None = None

    def _array(self, entry: messages.TensorEntry) -> np.ndarray:
        raw = self.buffer[entry.offset : entry.offset + entry.nbytes]
        return raw.view(messages.DTYPES[entry.dtype]).reshape(entry.shape)

    def validate(self) -> None:
        arrays = [self._array(entry) for entry in self.manifest.tensors]
        if self._changes is not None:
            for number, (entry, array) in enumerate(zip(self.manifest.tensors, arrays, strict=True)):
                validate_changes(entry, array, number, self._changes)
            self.sums, self._changes = self._changes.sums, None
            return
        sums = Sums(self.manifest)
        for number, (entry, array) in enumerate(zip(self.manifest.tensors, arrays, strict=True)):
            sums.of(number)[:] = validate_tensor(entry, array)
        self.sums = sums

    def parts(self) -> Iterator[Mapping[str, np.ndarray]]:
        yield {entry.name: self._array(entry) for entry in self.manifest.tensors}

    def checked_parts(self) -> Iterator[Mapping[str, np.ndarray]]:
        named = {}
        for entry in self.manifest.tensors:
            named[entry.name] = array = self._array(entry)
            if fingerprint.digest(array) != entry.digest:
                raise BridgeError(f"tensor {entry.name} changed between validation and load", "torn")
        yield named

    def confirm(self) -> None:
        pass  # sealed, or private to this process

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)  # the mapping goes with the last view

    def __del__(self) -> None:
        self.close()


_AT_ONCE = 1 << 20  # elements: what is made of them stays in cache


def has_nonfinite(array: np.ndarray) -> bool:
    """Tells whether any value is NaN or infinite; it tests the bits of bfloat16 and float8 without conversion."""
    if array.size <= _AT_ONCE:
        return _has_nonfinite(array)
    flat = array.reshape(-1)
    cuts = (flat[start : start + _AT_ONCE] for start in range(0, flat.size, _AT_ONCE))
    return any(fingerprint.threads().map(_has_nonfinite, cuts))


def _has_nonfinite(array: np.ndarray) -> bool:
    name = array.dtype.name
    if name == "bfloat16":
        return bool(np.any((array.view(np.uint16) & 0x7F80) == 0x7F80))
    if name == "float8_e4m3fn":
        return bool(np.any((array.view(np.uint8) & 0x7F) == 0x7F))
    if array.dtype.kind == "f":
        return not bool(np.isfinite(array).all())
    return False


def _range(array: np.ndarray) -> tuple[float, float]:
    """(least, most) of finite values, exact: float32 holds every 8 and 16-bit float, which numpy compares slowly."""
    flat = array.reshape(-1)
    cuts = (flat[start : start + _AT_ONCE].astype(np.float32, copy=False) for start in range(0, flat.size, _AT_ONCE))
    ends = [(float(cut.min()), float(cut.max())) for cut in cuts]
    return min(low for low, _ in ends), max(high for _, high in ends)


def validate_tensor(entry: messages.TensorEntry, array: np.ndarray) -> np.ndarray:
    """Checks a tensor's fingerprint, finite values, and scales (not negative, not all zero); BridgeError otherwise.

    A loaded NaN could stay in the engine's KV cache even after the next good version.

    Returns:
      The tensor's row sums, uint32 [rows, 2].
    """
    sums = fingerprint.row_sums(array)
    if fingerprint.digest_of_sums(sums) != entry.digest:
        raise torn(entry)
    if has_nonfinite(array):
        raise not_finite(entry)
    if is_scale(entry) and array.size:
        check_scale_range(entry, *_range(array))
    return sums


def validate_changes(entry: messages.TensorEntry, array: np.ndarray, number: int, changes: Changes) -> None:
    """Checks the changed elements of tensor `number` of the manifest, as `validate_tensor` checks a whole tensor."""
    if changes.digest(number) != entry.digest:
        raise torn(entry)
    flat = array.reshape(-1)
    spots = changes.elements(number, array.itemsize) if array.dtype.kind not in "iu" else ()
    if not len(spots):
        return
    if has_nonfinite(flat[spots]):
        raise not_finite(entry)
    if is_scale(entry):
        least, most = _range(flat[spots])
        check_scale_range(entry, least, most if most > 0 else _range(flat)[1])


def is_scale(entry: messages.TensorEntry) -> bool:
    """Tells whether a tensor holds scales, by its name."""
    return entry.name.endswith("scale")


def torn(entry: messages.TensorEntry) -> BridgeError:
    """Makes the BridgeError("torn") for a tensor whose bytes do not match the manifest's fingerprint."""
    return BridgeError(f"tensor {entry.name} is torn: its bytes do not match the manifest's fingerprint", "torn")


def not_finite(entry: messages.TensorEntry) -> BridgeError:
    """Makes the BridgeError("tensor") for a tensor with NaN or infinite values."""
    return BridgeError(f"tensor {entry.name} holds NaN or infinite values", "tensor")


def check_scale_range(entry: messages.TensorEntry, low: float, high: float) -> None:
    """Raises BridgeError("tensor") if scales with minimum `low` and maximum `high` are negative or all zero."""
    if low < 0 or high <= 0:
        raise BridgeError(f"tensor {entry.name}: scales must be >= 0 and not all zero, range [{low}, {high}]", "tensor")
