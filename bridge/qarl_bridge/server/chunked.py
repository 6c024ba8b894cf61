# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked weight transfer: a version comes part by part through a GPU buffer that is smaller than the version.

A part has whole layers. The bridge asks for one part after the other; the trainer writes it into the buffer and
answers. The bridge reads a version three times: to check every byte and value before any weight is replaced
(`validate`), to load, and to read back. A part that is read again must equal the checked part (`staged.Copy.confirm`).

The bridge keeps nothing of a chunked version, so it cannot restore one after a failed load.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.server.staged import Copy


class Fetches:
    """Passes requests for parts from the thread that reads a version to the thread that talks to the trainer."""

    _error: BridgeError | None

    def __init__(self) -> None:
        self.begin()
        self._error = BridgeError("a chunked version cannot be read again", "dead")

    def fetch(self, part: int) -> None:
        """Requests a part and waits until the buffer holds it. Called by the reading thread.

        Raises:
          BridgeError: the trainer gave up, or is gone.
        """
        if self._error is not None:
            raise self._error
        self._wanted.put(part)
        error = self._brought.get()
        if error is not None:
            raise error

    def begin(self) -> None:
        """Opens the queue, so that `fetch` may be called."""
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._brought: queue.SimpleQueue[BridgeError | None] = queue.SimpleQueue()
        self._error = None

    def wanted(self, timeout_s: float) -> int | None:
        """Waits for the index of the next requested part; None after `stop`, queue.Empty after `timeout_s` seconds."""
        return self._wanted.get(timeout=timeout_s)

    def stop(self) -> None:
        """Makes `wanted` return None."""
        self._wanted.put(None)

    def bring(self, error: BridgeError | None = None) -> None:
        """Answers the waiting `fetch`: the buffer holds the part, or `error` prevents it."""
        self._brought.put(error)

    def end(self, error: BridgeError) -> None:
        """Closes the queue: a waiting `fetch` and later ones raise `error`."""
        self._error = error
        self._brought.put(error)


class ChunkedCopy:
    """A version of which the GPU buffer holds one part at a time; implements `staged.Copy`.

    Args:
      manifest: a manifest that `manifest.check_manifest` has checked.
      ends: for each part the index of the tensor after its last one, see messages.DeviceMemory.
      open_part: a function from a part's manifest to a copy of the part in the buffer.
    """

    borrowed = True

    def __init__(
        self, manifest: messages.Manifest, ends: Sequence[int], open_part: Callable[[messages.Manifest], Copy]
    ):
        self.manifest = manifest
        self.fetches = Fetches()
        parts = _parts(manifest, ends)
        opened: dict[int, Copy] = {}
        try:  # the largest first: the buffer is mapped once, at that size
            for number in sorted(range(len(parts)), key=lambda i: -parts[i].total_bytes):
                opened[number] = open_part(parts[number])
        except BaseException:
            for copy in opened.values():
                copy.close()
            raise
        self._copies = [opened[number] for number in range(len(parts))]

    def validate(self) -> None:
        for number, copy in enumerate(self._copies):
            self.fetches.fetch(number)
            copy.validate()

    def _sweep(self, take: Callable[[Copy], Iterator[Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
        for number, copy in enumerate(self._copies):
            self.fetches.fetch(number)
            yield from take(copy)
            copy.confirm()  # what was read is what was checked; and on a GPU, it has been read by now

    def parts(self) -> Iterator[Mapping[str, Any]]:
        return self._sweep(lambda copy: copy.parts())

    def checked_parts(self) -> Iterator[Mapping[str, Any]]:
        return self._sweep(lambda copy: copy.checked_parts())

    def confirm(self) -> None:
        pass  # every part was

    def close(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.close()


def _parts(manifest: messages.Manifest, ends: Sequence[int]) -> list[messages.Manifest]:
    """Makes a manifest for each part, with offsets from the buffer's first byte."""
    tensors = manifest.tensors
    if any(b <= a for a, b in itertools.pairwise([0, *ends])) or [*ends][-1:] != [len(tensors)]:
        raise BridgeError(f"the parts of {manifest.version} do not make the version", "torn")
    return [manifest.part(tensors[first:end]) for first, end in itertools.pairwise([0, *ends])]
