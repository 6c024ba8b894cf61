# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes the fingerprints of a version that arrived as changes to a base, without reading all its bytes.

A fingerprint is the hash of a tensor's row sums (protocol/fingerprint.py). A changed byte moves its row's sums by a
known amount. So the new sums follow from the base's sums and the changes, about 0.1 % of the bytes. Unchanged bytes
were checked when the base arrived, and are checked again when the engine loads them (`HostCopy.checked_parts`).
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
      rows: uint32 [rows of all tensors, 2]. first: int64 [tensors + 1], index of each tensor's first row.
      starts, ends: int64 [tensors], byte range of each tensor in the version.
    """

    def __init__(self, manifest: messages.Manifest):
        self.starts = np.array([entry.offset for entry in manifest.tensors], np.int64)
        self.ends = self.starts + np.array([entry.nbytes for entry in manifest.tensors], np.int64)
        counts = [fingerprint.rows_of(entry.nbytes) for entry in manifest.tensors]
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.rows = np.zeros((int(self.first[-1]), 2), np.uint32)

    def of(self, tensor: int) -> np.ndarray:
        """Returns the row sums of one tensor, [rows, 2], by its index in the manifest."""
        return self.rows[self.first[tensor] : self.first[tensor + 1]]


class Changes:
    """A record of changed bytes and updated row sums; `delta.apply` calls it from its threads.

    Args:
      base: manifest of the version that is changed. sums: its row sums.
      manifest: manifest of the new version, with an equal layout.
    """

    def __init__(self, base: messages.Manifest, sums: Sums, manifest: messages.Manifest):
        self._base = base
        self.sums = Sums(manifest)
        self.sums.rows[:] = sums.rows
        self._calls: list[np.ndarray] = []  # the bytes that each call changed
        self._lock = threading.Lock()

    @staticmethod
    def fit(base: messages.Manifest, manifest: messages.Manifest) -> bool:
        """Tells whether both manifests list equal tensor names, dtypes, shapes and offsets."""

        def layout(of: messages.Manifest) -> list[tuple[object, ...]]:
            return [(entry.name, entry.dtype, tuple(entry.shape), entry.offset) for entry in of.tensors]

        return layout(base) == layout(manifest)

    def __call__(self, places: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
        """Records that bytes at `places` (int64 [n], ascending) changed from `before` to `after` (uint8 [n])."""
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
        """The positions of all changed bytes, ascending; read it once all changes are applied."""
        return np.concatenate([np.zeros(0, np.int64), *sorted(self._calls, key=lambda places: int(places[0]))])

    def _within(self, tensor: int) -> np.ndarray:
        """Finds the positions of changed bytes within a tensor, by its index in the manifest."""
        start = self.sums.starts[tensor]
        return self._places[slice(*np.searchsorted(self._places, (start, self.sums.ends[tensor])))] - start

    def elements(self, tensor: int, itemsize: int) -> np.ndarray:
        """Lists the indices, [n], of changed elements in a flattened tensor; empty if the tensor did not change."""
        return np.unique(self._within(tensor) // itemsize)

    def digest(self, tensor: int) -> bytes:
        """Returns the fingerprint of a tensor of the new version, by its index in the manifest."""
        if not len(self._within(tensor)):
            return self._base.tensors[tensor].digest
        return fingerprint.digest_of_sums(self.sums.of(tensor))
