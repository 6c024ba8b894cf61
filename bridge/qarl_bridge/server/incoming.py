# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A version on its way in: what was announced, and the bytes that have arrived where no memory is shared."""

from __future__ import annotations

import dataclasses

import numpy as np

from qarl_bridge.protocol import delta, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.staged import Copy, HostCopy
from qarl_bridge.transport.zeromq import Peer


@dataclasses.dataclass
class Pending:
    """An announced version.

    Attributes:
      owner: who announced it.
      received: the chunks so far; None: none came, or they became a copy.
      high_water: bytes of all chunks that came.
      copy: the validated version; None until it is staged.
    """

    manifest: messages.Manifest
    owner: Peer
    received: bytearray | None = None
    high_water: int = 0
    copy: Copy | None = None

    def append(self, chunk: messages.Chunk, data: bytes) -> None:
        """Takes the next bytes.

        Raises:
          BridgeError: they are not the next ones ("torn"), or the version is staged already ("bad_state").
        """
        if self.copy is not None:
            raise BridgeError("the version is already staged", "bad_state")
        if chunk.offset != self.high_water:
            raise BridgeError(f"chunk at {chunk.offset}, expected {self.high_water}: chunks come in order", "torn")
        if chunk.offset + len(data) > self.manifest.total_bytes:
            raise BridgeError("chunk lies beyond the announced bytes", "torn")
        if self.received is None:
            self.received = bytearray()
        self.received += data  # grows with what really arrives, never with what was merely announced
        self.high_water += len(data)

    def received_copy(self) -> HostCopy:
        """The chunks as a version, which has them from here on.

        Raises:
          BridgeError: some are missing ("torn").
        """
        received, self.received = self.received or bytearray(), None
        if len(received) != self.manifest.total_bytes:
            raise BridgeError(
                f"{self.manifest.version} is torn: {len(received)} of {self.manifest.total_bytes} bytes arrived", "torn"
            )
        return self._held(np.frombuffer(received, np.uint8))

    def changed_copy(self, base: Copy | None, digest: bytes) -> HostCopy:
        """The chunks as changes to `base`, which stays as it is, and the version that makes.

        Raises:
          BridgeError: the base is another ("unshared"), or the changes are not to bytes laid out so ("torn").
        """
        received, self.received = self.received or bytearray(), None
        if not isinstance(base, HostCopy) or base.manifest.digest != digest:
            raise BridgeError("the changes are to a version that this bridge does not hold", "unshared")
        if base.manifest.total_bytes != self.manifest.total_bytes:
            raise BridgeError(f"{self.manifest.version} is torn: it is not laid out as its base", "torn")
        buffer = delta.copy(base.buffer)
        delta.apply(received, buffer)
        return self._held(buffer)

    def _held(self, buffer: np.ndarray) -> HostCopy:
        buffer.flags.writeable = False
        return HostCopy(self.manifest, buffer)
