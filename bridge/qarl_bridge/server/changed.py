# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A version that was made of another by changes: its fingerprints from those of the other, without reading it all.

A fingerprint is of the sums of a tensor's rows (protocol/fingerprint.py). A byte that changes moves its row's sums by a
known amount, so that the sums of the new version follow from the old ones' and from what was applied: 0.1 % of the
bytes instead of all of them. What was not touched was checked when it came, and is compared again when the engine's
loader takes it (`HostCopy.checked_parts`).
"""

from __future__ import annotations

import functools
import threading

import numpy as np

from qarl_bridge.protocol import fingerprint, messages

_ROW_BITS = fingerprint.ROW_BYTES.bit_length() - 1


class Sums:
    """Row sums of all tensors of a version.

    Attributes:
      rows: [rows of all tensors, 2] uint32. first: [tensors + 1], where each tensor's begin.
      starts, ends: [tensors], its bytes in the version.
    """

    def __init__(self, manifest: messages.Manifest):
        self.starts = np.array([entry.offset for entry in manifest.tensors], np.int64)
        self.ends = self.starts + np.array([entry.nbytes for entry in manifest.tensors], np.int64)
        counts = [fingerprint.rows_of(entry.nbytes) for entry in manifest.tensors]
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.rows = np.zeros((int(self.first[-1]), 2), np.uint32)

    def of(self, tensor: int) -> np.ndarray:
        """[rows, 2]: those of a tensor, by its number in the manifest."""
        return self.rows[self.first[tensor] : self.first[tensor + 1]]


class Changes:
    """The changes since the base, gathered while they are applied (`delta.apply` calls this object from its threads).

    Args:
      base: the version that is changed, with its sums.
      manifest: the new version, with the same layout.
    """

    def __init__(self, base: messages.Manifest, sums: Sums, manifest: messages.Manifest):
        self._base = base
        self.sums = Sums(manifest)
        self.sums.rows[:] = sums.rows
        self._calls: list[np.ndarray] = []  # the bytes that each call changed
        self._lock = threading.Lock()

    @staticmethod
    def fit(base: messages.Manifest, manifest: messages.Manifest) -> bool:
        """Tells whether both lay their tensors out alike."""

        def layout(of: messages.Manifest) -> list[tuple[object, ...]]:
            return [(entry.name, entry.dtype, tuple(entry.shape), entry.offset) for entry in of.tensors]

        return layout(base) == layout(manifest)

    def __call__(self, places: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Bytes at `places` (int64, ascending) were `before`, and are `after`; all [n], the last two uint8."""
        sums = self.sums
        tensor = np.searchsorted(sums.starts, places, "right") - 1
        own = places < sums.ends[tensor]  # not in the gap behind a tensor
        places, tensor, before, after = places[own], tensor[own], before[own], after[own]
        if not len(places):
            return
        inside = places - sums.starts[tensor]
        row = sums.first[tensor] + (inside >> _ROW_BITS)
        moved = (after.astype(np.int64) - before) << (8 * (inside & 1))
        weighed = moved * (((inside & (fingerprint.ROW_BYTES - 1)) >> 1) + 1)
        cuts = np.concatenate([[0], np.flatnonzero(np.diff(row)) + 1])
        a, b = (np.add.reduceat(one, cuts).astype(np.uint32) for one in (moved, weighed))
        with self._lock:  # a row may lie in two calls
            sums.rows[row[cuts], 0] += a
            sums.rows[row[cuts], 1] += b
            self._calls.append(places)

    @functools.cached_property
    def _places(self) -> np.ndarray:
        """All bytes that have changed, ascending; asked for once all is applied."""
        return np.concatenate([np.zeros(0, np.int64), *sorted(self._calls, key=lambda places: int(places[0]))])

    def _within(self, tensor: int) -> np.ndarray:
        """Finds the changes of a tensor, by its number in the manifest."""
        start = self.sums.starts[tensor]
        return self._places[slice(*np.searchsorted(self._places, (start, self.sums.ends[tensor])))] - start

    def elements(self, tensor: int, itemsize: int) -> np.ndarray:
        """Lists the changed elements of a tensor; empty: the tensor is the base's."""
        return np.unique(self._within(tensor) // itemsize)

    def digest(self, tensor: int) -> bytes:
        """The fingerprint of a tensor as it is now."""
        if not len(self._within(tensor)):
            return self._base.tensors[tensor].digest
        return fingerprint.digest_of_sums(self.sums.of(tensor))
