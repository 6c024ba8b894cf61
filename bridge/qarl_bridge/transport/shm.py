# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared memory for one host: an anonymous memory file, written once, sealed, and opened by the bridge.

The bridge receives process, descriptor and inode, and opens /proc/PID/fd/FD: the kernel lets it if both processes are
of one user. Elsewhere (another user, another PID namespace) the bytes travel over the socket.

Lifetime: the memory lives as long as the trainer holds its descriptor (StagedVersion) or the bridge its mapping (the
pending version and the last good one), and the kernel frees it with the last of the two, however they die.

Why a memory file and not a named /dev/shm segment: it has no name to leak, guess or clean up after a crash, it does not
count against a container's small /dev/shm, and it can be sealed, so that the bytes which were hashed are the bytes
which are loaded: after sealing not even the trainer can change them.
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
    """The same 16 bytes in all processes that can open each other's memory files, but for their users."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        boot = file.read()
    return hashlib.sha256(boot + os.readlink("/proc/self/ns/pid").encode()).digest()[:16]


def create(size: int) -> int:
    """A new memory file of `size` bytes, open for writing; the caller closes it."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        os.close(fd)
        raise BridgeError(f"no memory to stage {size} bytes: {error.strerror}", "limits") from None
    return fd


def write(fd: int, data: memoryview, offset: int) -> None:
    """Copy bytes in at `offset` (the one copy a publish makes on the trainer's side)."""
    while data:
        written = os.pwrite(fd, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written


def seal(fd: int) -> None:
    """Seals the file: nobody can change or truncate it."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def locate(fd: int, host: bytes = b"") -> HostMemory:
    """Locates the memory file for another process of this host."""
    return HostMemory(pid=os.getpid(), fd=fd, inode=os.fstat(fd).st_ino, host=host)


def open_located(memory: HostMemory) -> int:
    """A descriptor of our own for another process's memory file; the caller closes it.

    Raises:
      BridgeError("unshared"): there is no such file to be had; nothing else is ever opened.
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
    """[size] uint8: a memory file of ours, made that long, before it is sealed; let go of the array first."""
    os.ftruncate(fd, size)
    return np.frombuffer(mmap.mmap(fd, size), np.uint8) if size else np.zeros(0, np.uint8)


def map_to_read(fd: int, size: int) -> np.ndarray:
    """[size] uint8, read-only view of a memory file that its owner writes; the descriptor may be closed.

    Raises:
      BridgeError("torn"): the file is shorter.
    """
    actual = os.fstat(fd).st_size
    if actual < size:
        raise BridgeError(f"the memory file holds {actual} bytes, not {size}", "torn")
    return np.frombuffer(mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ), np.uint8)


def map_sealed(fd: int, size: int) -> np.ndarray:
    """[size] uint8, read-only view of a sealed memory file; it keeps the memory alive, the descriptor may be closed.

    Raises:
      BridgeError: not a sealed memory file (it could change or vanish under the engine), or shorter than announced.
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
