# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The trainer's buffers of a base that its engine reads, too (`protocol/one_base.py`): in a memory file, or on a GPU.

A buffer lives as long as its process. An engine that starts again maps it again; nothing is transferred.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import msgspec

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.one_base import FILE, Place
from qarl_bridge.transport import cuda_ipc, shm


class HostMemory:
    """A memory file of `size` zeroed bytes.

    Attributes:
      pointer: its first byte in this process.
      place: the name by which another process of this host maps it.
      dlpack: device type and number, as DLPack has them.

    Raises:
      BridgeError("limits"): there is no memory for it.
    """

    dlpack = 1, 0

    def __init__(self, size: int):
        self._fd = shm.create(size)
        self._view = shm.map_to_write(self._fd, size)
        self.pointer = self._view.ctypes.data
        self.place = shm.locate(self._fd)

    def write(self, offset: int, source: int, nbytes: int) -> None:
        """Copies bytes in from a pointer on the buffer's device; done when it returns."""
        ctypes.memmove(self.pointer + offset, source, nbytes)


class GpuMemory:
    """`size` zeroed bytes of GPU `ordinal`, outside of JAX's pool; attributes as of `HostMemory`.

    Raises:
      BridgeError: there is no room for it ("limits"), or it cannot be exported ("unshared").
    """

    def __init__(self, size: int, ordinal: int, library: str = "libcuda.so.1"):
        self._device = cuda_ipc.Device(ordinal, cuda_ipc.load(library))
        self.pointer = self._device.allocate(size)
        self.place = messages.DeviceMemory(device=self._device.uuid, handle=self._device.export(self.pointer))
        self.dlpack = 2, ordinal

    def write(self, offset: int, source: int, nbytes: int) -> None:
        """Likewise."""
        self._device.copy_all([(self.pointer + offset, source, nbytes)])
        self._device.synchronize()


def write(folder: str, places: Sequence[Place]) -> None:
    """Puts places into an engine's model folder, in the place of any that it has."""
    temporary = os.path.join(folder, f".{FILE}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(msgspec.json.encode(list(places)))
    os.replace(temporary, os.path.join(folder, FILE))
