# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Broadcasts a version from the trainer's GPU to another GPU, the engine's: NCCL, through ctypes.

    trainer   Communicator(device, 0, 2, new_id(library), library=library, ...).broadcast(pointer, size, ...)
    bridge    Receiver(device).receive(memory of the Stage message, size, check) -> Buffer

The trainer's GPU is rank 0 and the root of the broadcast; the engine's GPU is rank 1. Both ends know the size from the
manifest, and fingerprints show whether the bytes arrived intact. The Stage message has the communicator's unique id, so
a trainer with a new connection or a broken communicator sends another id.

No wait is endless. Communicators are non-blocking (NCCL 2.14 and later): every call returns at once. A loop polls NCCL,
the stream, the clock, and the caller's `check`, which raises if the other end is gone. On an error or a timeout
ncclCommAbort ends the work on the device. A communicator that is not needed any more is aborted, too: unlike
ncclCommDestroy, ncclCommAbort does not wait for the other rank.

The module uses non-blocking streams of its own. Other work on the GPU (JAX's NCCL included) and a broadcast do not wait
for each other, but share the links' bandwidth.

NCCL's traffic is neither encrypted nor authenticated. The module does not change NCCL_* variables.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html#fault-tolerance
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.transport import cuda_ipc

SONAME = "libnccl.so.2"
PIECE_BYTES = 1 << 30  # of one broadcast: the time limit is for each
ABORT_S = 10.0  # how long an aborted broadcast may take to leave the device
_SUCCESS, _IN_PROGRESS, _UINT8, _ROOT = 0, 7, 1, 0
_LONGEST_NAP_S = 1e-3


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * messages.NCCL_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14, the first release with one; later releases read it by `size` and `version`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_FIRST_WITH_CONFIG = 21400
_MAGIC = 0xCAFEBEEF
_SIZE, _INT, _ANY, _TEXT = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p
# Name -> (result, arguments), as nccl.h declares them (communicators and streams are pointers).
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ncclGetVersion": (_INT, (ctypes.POINTER(_INT),)),
    "ncclGetUniqueId": (_INT, (ctypes.POINTER(_UniqueId),)),
    "ncclCommInitRankConfig": (_INT, (ctypes.POINTER(_ANY), _INT, _UniqueId, _INT, ctypes.POINTER(_Config))),
    "ncclCommCuDevice": (_INT, (_ANY, ctypes.POINTER(_INT))),
    "ncclCommGetAsyncError": (_INT, (_ANY, ctypes.POINTER(_INT))),
    "ncclCommAbort": (_INT, (_ANY,)),
    "ncclBroadcast": (_INT, (_ANY, _ANY, _SIZE, _INT, _INT, _ANY, _ANY)),
    "ncclGetErrorString": (_TEXT, (_INT,)),
    "ncclGetLastError": (_TEXT, (_ANY,)),
}


def candidates() -> list[str]:
    """Lists where to look for libnccl: NVIDIA's wheel (nvidia-nccl-cu12, -cu13), then the dynamic linker's paths."""
    found = []
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found.append(os.path.join(folder, "lib", SONAME))
    return [*filter(os.path.exists, found), SONAME]


@functools.cache
def load(path: str = "") -> Any:
    """Loads libnccl from `path`, or the first of `candidates` that loads, and declares its signatures.

    Raises:
      BridgeError("unshared"): NCCL is not installed, or older than 2.14.
    """
    errors = []
    for candidate in [path] if path else candidates():
        try:
            library = ctypes.CDLL(candidate)
            break
        except OSError as error:
            errors.append(str(error))
    else:
        raise BridgeError(
            f"no NCCL in this environment ({'; '.join(errors)}): pip install nvidia-nccl-cu12 or -cu13, as fits the "
            "CUDA of this environment's JAX or torch, or publish over host memory (transport=host)",
            "unshared",
        )
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise BridgeError(f"this NCCL lacks {name}: 2.14 or later is needed", "unshared") from None
        function.argtypes, function.restype = arguments, result
    return library


def version(library: Any) -> int:
    """Returns NCCL's version number: 22703 is 2.27.3."""
    number = _INT()
    _check(library, "ncclGetVersion", library.ncclGetVersion(ctypes.byref(number)))
    return number.value


def readable(number: int) -> str:
    """Formats NCCL's version number: 22703 gives "2.27.3"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def new_id(library: Any) -> bytes:
    """Makes the 128-byte unique id of a new communicator, which all ranks pass to join; it has rank 0's address."""
    unique_id = _UniqueId()
    _check(library, "ncclGetUniqueId", library.ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(ctypes.string_at(ctypes.byref(unique_id), messages.NCCL_ID_BYTES))


def _check(library: Any, call: str, code: int, communicator: Any = None) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        what = (library.ncclGetErrorString(code) or b"").decode(errors="replace")
        detail = (library.ncclGetLastError(communicator) or b"").decode(errors="replace").strip()
        raise BridgeError(f"{call} failed: {what}{f' ({detail})' if detail else ''}", "unshared")


class Communicator:
    """An NCCL communicator of `world` GPUs; this process's GPU is number `rank`. Not thread-safe.

    Args:
      device: this process's GPU. library: NCCL.
      unique_id: the id from `new_id`, equal on every rank.
      timeout_s: seconds in which all ranks must join.
      check: a callback, polled during waits; an exception that it raises ends the wait.

    Raises:
      BridgeError("unshared"): NCCL cannot connect these GPUs, or a rank did not join in time.
    """

    def __init__(
        self,
        device: cuda_ipc.Device,
        rank: int,
        world: int,
        unique_id: bytes,
        *,
        library: Any,
        timeout_s: float,
        check: Callable[[], None],
    ):
        self.unique_id = unique_id
        self.device = device
        self._nccl = library
        self._handle: Any = _ANY()
        self._stream: Any = device.new_stream()
        name = _UniqueId.from_buffer_copy(unique_id)
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _FIRST_WITH_CONFIG, 0)
        try:
            with device.current():
                code = library.ncclCommInitRankConfig(
                    ctypes.byref(self._handle), world, name, rank, ctypes.byref(config)
                )
            _check(library, "ncclCommInitRankConfig", code)
            self._wait(self._is_ready, f"joining {world} GPUs", timeout_s, check)
            ordinal = _INT()
            _check(library, "ncclCommCuDevice", library.ncclCommCuDevice(self._handle, ctypes.byref(ordinal)))
            if ordinal.value != device.ordinal:
                raise BridgeError(f"NCCL took GPU {ordinal.value} for GPU {device.ordinal}", "unshared")
        except BaseException:
            self.abort()
            raise

    @property
    def alive(self) -> bool:
        """Tells whether the communicator can be used; False after `abort`."""
        return self._handle is not None

    def broadcast(self, pointer: int, size: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """Broadcasts `size` bytes at rank 0's `pointer` to the other ranks' `pointer`; waits until they have arrived.

        An error aborts the communicator.

        Args:
          timeout_s: longest time for each PIECE_BYTES (1 GiB). check: as in the constructor.

        Raises:
          BridgeError("unshared"): NCCL failed, or took too long.
        """
        try:
            for start in range(0, size, PIECE_BYTES):
                at, count = pointer + start, min(PIECE_BYTES, size - start)
                with self.device.current():
                    code = self._nccl.ncclBroadcast(at, at, count, _UINT8, _ROOT, self._handle, self._stream)
                _check(self._nccl, "ncclBroadcast", code, self._handle)
                self._wait(self._is_done, f"a broadcast of {count} bytes", timeout_s, check)
        except BaseException:
            self.abort()
            raise

    def _is_ready(self) -> bool:
        """Tells whether NCCL's last call is complete on the host (the stream may still run)."""
        state = _INT()
        code = self._nccl.ncclCommGetAsyncError(self._handle, ctypes.byref(state))
        _check(self._nccl, "ncclCommGetAsyncError", code, self._handle)
        _check(self._nccl, "NCCL", state.value, self._handle)
        return state.value == _SUCCESS

    def _is_done(self) -> bool:
        return self._is_ready() and self.device.is_idle(self._stream)

    def _wait(self, done: Callable[[], bool], what: str, timeout_s: float, check: Callable[[], None]) -> None:
        deadline, nap = time.monotonic() + timeout_s, 20e-6
        while not done():
            check()
            if time.monotonic() > deadline:
                raise BridgeError(f"NCCL: {what} took over {timeout_s:g} s; given up", "unshared")
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def abort(self) -> bool:
        """Aborts the communicator and its running broadcast. Idempotent.

        Returns:
          True if the device has stopped using the broadcast's memory; False if it has not within ABORT_S seconds.
        """
        handle, self._handle = self._handle, None
        if handle is None:
            return self._stream is None
        with self.device.current():
            if handle.value:
                self._nccl.ncclCommAbort(handle)  # its result is of no use: there is nothing else to be tried
        deadline = time.monotonic() + ABORT_S
        with contextlib.suppress(BridgeError):
            while not self.device.is_idle(self._stream):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_LONGEST_NAP_S)
            self.device.drop_stream(self._stream)
        self._stream = None
        return True


class Receiver:
    """The engine's receiving end: a communicator with the trainer, and buffers on the engine's GPU.

    One of two buffers holds the serving version, and the next version is received into the other. The engine owns the
    buffers: the trainer cannot write to them, and they stay valid after it ends.

    Args:
      device: the engine's GPU. library: the result of `load`; None: loaded when first needed.
    """

    def __init__(self, device: cuda_ipc.Device, library: Any = None):
        self._buffers = cuda_ipc.Buffers(device)
        self._device = device
        self._library = library
        self._communicator: Communicator | None = None
        self._lock = threading.Lock()  # a new trainer's thread may come while that of a dead one is still giving up

    def receive(self, memory: messages.NcclMemory, size: int, check: Callable[[], None]) -> cuda_ipc.Buffer:
        """Receives the next version's bytes into a buffer, which the caller must release.

        Args:
          size: bytes that the trainer sends. check: a callback, polled during waits; it raises to end the wait.

        Raises:
          BridgeError: NCCL is missing, has another version than the trainer's, or cannot reach the trainer's GPU
            ("unshared"); the GPU has no memory for a buffer ("limits").
        """
        library = load() if self._library is None else self._library
        if (mine := version(library)) != memory.version:
            raise BridgeError(
                f"the trainer has NCCL {readable(memory.version)}, the engine {readable(mine)}: install the same "
                "nvidia-nccl wheel in both environments, or publish over host memory (transport=host)",
                "unshared",
            )
        with self._lock:
            buffer = self._buffers.take(size)
            try:
                communicator = self._communicator
                if communicator is None or not communicator.alive or communicator.unique_id != memory.unique_id:
                    self._leave()
                    communicator = self._communicator = Communicator(
                        self._device,
                        memory.rank,
                        memory.world,
                        memory.unique_id,
                        library=library,
                        timeout_s=memory.timeout_s,
                        check=check,
                    )
                communicator.broadcast(buffer.pointer, size, timeout_s=memory.timeout_s, check=check)
            except BaseException:
                communicator = self._communicator
                if communicator is None or communicator.abort():  # else the device may still write to it
                    buffer.release()
                self._communicator = None
                raise
            return buffer

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        """Aborts the communicator and frees the buffers; no version in them may be in use. Idempotent."""
        with self._lock:
            self._leave()
            self._buffers.close()
