# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Holds an announced version until it is committed, and gathers its bytes if they arrive in Chunks."""

from __future__ import annotations

import dataclasses
import os
import threading
from concurrent.futures import Future

import numpy as np

from qarl_bridge.protocol import delta, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.changed import Changes
from qarl_bridge.server.staged import Copy, HostCopy
from qarl_bridge.transport import shm
from qarl_bridge.transport.zeromq import Peer


class Spare:
    """A background copy of the serving version, into which the next version's changes are written.

    Copying into fresh memory takes longer than applying changes, so it runs ahead, after a version has come as changes.
    The next version needs the memory anyway.
    """

    def __init__(self) -> None:
        self._of: HostCopy | None = None
        self._made: Future[tuple[int, np.ndarray]] | None = None

    def prepare(self, base: HostCopy) -> None:
        """Starts to copy `base` in a background thread."""
        made: Future[tuple[int, np.ndarray]] = Future()

        def copy() -> None:
            try:
                made.set_result(_copied(base))
            except Exception as error:
                made.set_exception(error)

        self.drop()
        self._of, self._made = base, made
        threading.Thread(target=copy, daemon=True, name="spare").start()

    def take(self, base: HostCopy) -> tuple[int, np.ndarray]:
        """Returns (descriptor, writable uint8 view) of a copy of `base`, prepared or made now. The caller closes it."""
        if self._of is not base or self._made is None:
            return _copied(base)
        made, self._of, self._made = self._made, None, None
        return made.result()

    def drop(self) -> None:
        """Frees a prepared copy that was not taken. Idempotent."""
        made, self._of, self._made = self._made, None, None
        if made is not None:
            made.add_done_callback(lambda done: None if done.exception() else os.close(done.result()[0]))


def _copied(base: HostCopy) -> tuple[int, np.ndarray]:
    fd = shm.create(0)
    try:
        buffer = shm.map_to_write(fd, base.manifest.total_bytes)
        delta.fill(buffer, base.buffer)
        return fd, buffer
    except BaseException:
        os.close(fd)
        raise


@dataclasses.dataclass
class Pending:
    """An announced version.

    Attributes:
      owner: the peer that announced it.
      received: descriptor of the memory file with the chunks so far; -1: none came, or `copy` has them.
      high_water: number of bytes received in chunks.
      copy: the validated version; None until it is staged.
    """

    manifest: messages.Manifest
    owner: Peer
    received: int = -1
    high_water: int = 0
    copy: Copy | None = None

    def append(self, chunk: messages.Chunk, data: bytes) -> None:
        """Appends a Chunk's bytes.

        Raises:
          BridgeError: the chunk is out of order or too long ("torn"), or the version is already staged ("bad_state").
        """
        if self.copy is not None:
            raise BridgeError("the version is already staged", "bad_state")
        if chunk.offset != self.high_water:
            raise BridgeError(f"chunk at {chunk.offset}, expected {self.high_water}: chunks come in order", "torn")
        if chunk.offset + len(data) > self.manifest.total_bytes:
            raise BridgeError("chunk lies beyond the announced bytes", "torn")
        if self.received < 0:
            self.received = shm.create(0)
        shm.write(self.received, memoryview(data), chunk.offset)  # grows with what arrives, not with what was announced
        self.high_water += len(data)

    def received_copy(self) -> HostCopy:
        """Makes a version of the received chunks and hands it their memory file.

        Raises:
          BridgeError("torn"): bytes are missing.
        """
        if self.high_water != self.manifest.total_bytes:
            raise BridgeError(
                f"{self.manifest.version} is torn: {self.high_water} of {self.manifest.total_bytes} bytes arrived",
                "torn",
            )
        fd, self.received = self.received, -1
        return self._held(fd if fd >= 0 else shm.create(0))

    def changed_copy(self, base: Copy | None, digest: bytes, spare: Spare) -> HostCopy:
        """Makes a version by applying the received chunks as changes (delta.py) to a copy of `base` from `spare`.

        Raises:
          BridgeError: `base` does not have this digest ("unshared"), or the changes do not fit it ("torn").
        """
        if not isinstance(base, HostCopy) or base.manifest.digest != digest:
            raise BridgeError("the changes are to a version that this bridge does not hold", "unshared")
        if base.manifest.total_bytes != self.manifest.total_bytes:
            raise BridgeError(f"{self.manifest.version} is torn: it is not laid out as its base", "torn")
        changes = os.pread(self.received, self.high_water, 0) if self.received >= 0 else b""
        watch = None
        if base.sums is not None and Changes.fit(base.manifest, self.manifest):
            watch = Changes(base.manifest, base.sums, self.manifest)
        fd, buffer = spare.take(base)
        try:
            delta.apply(changes, buffer, watch)
            del buffer
        except BaseException:
            os.close(fd)
            raise
        return self._held(fd, watch)

    def _held(self, fd: int, changes: Changes | None = None) -> HostCopy:
        try:
            shm.seal(fd)
            return HostCopy(self.manifest, shm.map_sealed(fd, self.manifest.total_bytes), fd, changes)
        except BaseException:
            os.close(fd)
            raise

    def __del__(self) -> None:
        if self.received >= 0:
            os.close(self.received)
