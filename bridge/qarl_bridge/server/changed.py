# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A version that was made of another by changes: its fingerprints from those of the other, without reading it all.

A fingerprint is of the sums of a tensor's rows (protocol/fingerprint.py). A byte that changes moves its row's sums by a
known amount, so that the sums of the new version follow from the old ones' and from what was applied: 0.1 % of the
bytes instead of all of them. What was not touched was checked when it came, and is compared again when the engine's
loader takes it (`HostCopy.at_the_door`).
"""

from __future__ import annotations

import threading
from collections import defaultdict

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
    """What has changed since the base, gathered while it is applied (`delta.apply` calls this object from its threads).

    Args:
      base: the version that is changed, with its sums.
      manifest: what it becomes; of the same layout.
    """

    def __init__(self, base: messages.Manifest, sums: Sums, manifest: messages.Manifest):
        self._base = base
        self.sums = Sums(manifest)
        self.sums.rows[:] = sums.rows
        self._touched: dict[int, list[np.ndarray]] = defaultdict(list)  # by tensor: its bytes that changed
        self._lock = threading.Lock()

    @staticmethod
    def fit(base: messages.Manifest, manifest: messages.Manifest) -> bool:
        """Whether both lay their tensors out alike."""

        def layout(of: messages.Manifest) -> list[tuple[object, ...]]:
            return [(entry.name, entry.dtype, tuple(entry.shape), entry.offset) for entry in of.tensors]

        return layout(base) == layout(manifest)

    def __call__(self, at: int, spots: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Bytes at `at` + `spots` (ascending) were `before`, and are `after`; all [n], the last two uint8."""
        places = at + spots.astype(np.int64)
        sums = self.sums
        low, high = np.searchsorted(sums.starts, places[[0, -1]], "right") - 1
        for tensor in range(max(0, int(low)), int(high) + 1):
            own = slice(*np.searchsorted(places, (sums.starts[tensor], sums.ends[tensor])))
            inside = places[own] - sums.starts[tensor]
            if not len(inside):
                continue
            moved = (after[own].astype(np.int64) - before[own]) << (8 * (inside & 1))
            row = inside >> _ROW_BITS
            cuts = np.concatenate([[0], np.flatnonzero(np.diff(row)) + 1])
            weighed = moved * (((inside & (fingerprint.ROW_BYTES - 1)) >> 1) + 1)
            which = sums.first[tensor] + row[cuts]
            a, b = (np.add.reduceat(one, cuts).astype(np.uint32) for one in (moved, weighed))
            with self._lock:  # a row may lie in two pieces
                sums.rows[which, 0] += a
                sums.rows[which, 1] += b
                self._touched[tensor].append(inside)

    def elements(self, tensor: int, itemsize: int) -> np.ndarray:
        """Which elements of a tensor have changed, by its number; empty: it is the base's."""
        found = self._touched.get(tensor)
        return np.unique(np.concatenate(found) // itemsize) if found else np.zeros(0, np.int64)

    def digest(self, tensor: int) -> bytes:
        """The fingerprint of a tensor as it is now."""
        same = tensor not in self._touched
        return self._base.tensors[tensor].digest if same else fingerprint.digest_of_sums(self.sums.of(tensor))
