# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Buffers for a frozen base that trainer and engine share (`protocol/one_base.py`): in a memory file, or on a GPU.

The trainer allocates a buffer, which lives as long as the trainer's process. An engine maps it at each start.
"""

from __future__ import annotations

import ctypes

from qarl_bridge.protocol import messages
from qarl_bridge.transport import cuda_ipc, shm


class HostMemory:
    """A memory file of `size` zeroed bytes, mapped into this process.

    Attributes:
      pointer: address of the first byte in this process.
      place: location by which another process of this host maps the file.
      dlpack: (device type, device number) in DLPack's numbering.

    Raises:
      BridgeError("limits"): the host has too little memory.
    """

    dlpack = 1, 0

    def __init__(self, size: int):
        self._fd = shm.create(size)
        self._view = shm.map_to_write(self._fd, size)
        self.pointer = self._view.ctypes.data
        self.place = shm.locate(self._fd)

    def write(self, offset: int, source: int, nbytes: int) -> None:
        """Copies `nbytes` bytes from the host address `source` into the buffer at byte `offset`; synchronous."""
        ctypes.memmove(self.pointer + offset, source, nbytes)


class GpuMemory:
    """A buffer of `size` zeroed bytes on GPU `ordinal`, outside JAX's memory pool; attributes as of `HostMemory`.

    Raises:
      BridgeError: the GPU has too little memory ("limits"), or CUDA cannot export the buffer ("unshared").
    """

    def __init__(self, size: int, ordinal: int, library: str = "libcuda.so.1"):
        self._device = cuda_ipc.Device(ordinal, cuda_ipc.load(library))
        self.pointer = self._device.allocate(size)
        self.place = messages.DeviceMemory(device=self._device.uuid, handle=self._device.export(self.pointer))
        self.dlpack = 2, ordinal

    def write(self, offset: int, source: int, nbytes: int) -> None:
        """Copies `nbytes` bytes from the GPU address `source` into the buffer at byte `offset`; synchronous."""
        self._device.copy_all([(self.pointer + offset, source, nbytes)])
        self._device.synchronize()
