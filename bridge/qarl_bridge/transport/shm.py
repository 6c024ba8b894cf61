# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared memory of one host: the trainer writes and seals an anonymous memory file (memfd), and the bridge maps it.

The bridge receives process, descriptor and inode, and opens /proc/PID/fd/FD. The kernel permits it if both processes
belong to one user. For another user or another PID namespace the bytes go over the socket.

The kernel frees the memory once the trainer has closed its descriptor (StagedVersion) and the bridge its mapping, or
once both have died.

A memory file, unlike a named /dev/shm segment, leaves no name after a crash, and does not count against a container's
small /dev/shm. It can be sealed: then not even the trainer can change bytes whose fingerprints were checked.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import mmap
import os

import numpy as np

from qarl_bridge.protocol.messages import BridgeError, HostMemory

_NAME = "qarl-version"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@functools.cache
def host() -> bytes:
    """Returns 16 bytes that identify this boot and PID namespace, within which processes can share memory files."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        boot = file.read()
    return hashlib.sha256(boot + os.readlink("/proc/self/ns/pid").encode()).digest()[:16]


def create(size: int) -> int:
    """Creates a memory file of `size` bytes; returns its descriptor, which the caller closes.

    Raises:
      BridgeError("limits"): there is no memory for it.
    """
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise BridgeError(f"no memory to stage {size} bytes: {error.strerror}", "limits") from None
    return fd


def write(fd: int, data: memoryview, offset: int) -> None:
    """Writes `data` into a memory file at byte `offset`; the file grows as needed."""
    while data:
        written = os.pwrite(fd, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written


def seal(fd: int) -> None:
    """Seals a memory file: afterwards nobody can change or resize it."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def locate(fd: int, host: bytes = b"") -> HostMemory:
    """Describes a memory file, so that another process of this host can open it."""
    return HostMemory(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino, host=host)


def open_located(memory: HostMemory) -> int:
    """Opens another process's memory file; returns a descriptor that the caller closes.

    Raises:
      BridgeError("unshared"): the descriptor is not a staged version of this user, or cannot be opened.
    """
    path = f"/proc/{memory.pid}/fd/{memory.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise BridgeError(f"descriptor {memory.fd} of process {memory.pid} is not a staged version", "unshared")
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise BridgeError(f"cannot open the memory of process {memory.pid}: {error.strerror}", "unshared") from None
    found = os.fstat(fd)
    if (found.st_ino, found.st_uid) != (memory.inode, os.geteuid()):
        os.close(fd)
        raise BridgeError(f"process {memory.pid} here is not the trainer's, or not of this user", "unshared")
    return fd


def map_to_write(fd: int, size: int) -> np.ndarray:
    """Resizes a memory file and maps it as a writable uint8 array [size]; delete the array before `seal`."""
    os.ftruncate(fd, size)
    return np.frombuffer(mmap.mmap(fd, size), np.uint8) if size else np.zeros(0, np.uint8)


def map_to_read(fd: int, size: int) -> np.ndarray:
    """Maps an unsealed memory file as a read-only uint8 array [size]; the descriptor may be closed afterwards.

    Raises:
      BridgeError("torn"): the file is shorter than `size`.
    """
    actual = os.fstat(fd).st_size
    if actual < size:
        raise BridgeError(f"the memory file holds {actual} bytes, not {size}", "torn")
    return np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), np.uint8)


def map_sealed(fd: int, size: int) -> np.ndarray:
    """Maps a sealed memory file as a read-only uint8 array [size], which keeps the memory after the file is closed.

    Raises:
      BridgeError("torn"): the file is no memory file, is not sealed, or has another size.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise BridgeError("the staged file is not a memory file", "torn") from None
    if seals & _SEALS != _SEALS:
        raise BridgeError("the staged memory file is not sealed", "torn")
    actual = os.fstat(fd).st_size
    if actual != size:
        raise BridgeError(f"the staged memory file holds {actual} bytes, the manifest announces {size}", "torn")
    if size == 0:
        return np.zeros(0, np.uint8)
    # MAP_PRIVATE: before Linux 6.7 a write-sealed file could not be mapped shared, even read-only.
    return np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ), np.uint8)
