# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A version that crosses from the trainer's GPU to the engine's, which is another one: NCCL, through ctypes.

    trainer   Communicator(device, 0, 2, new_id(library), library=library, ...).broadcast(pointer, size, ...)
    bridge    Receiver(device).receive(what the Stage message says, size, check) -> Buffer

The trainer's GPU is rank 0 and the root of a broadcast of bytes; the engine's is rank 1. Both ends know the size from
the manifest, and the fingerprints say whether what came is what was sent. The communicator's unique id travels in the
Stage message, so that either end that lost its half, or whose connection is new, simply names another.

Nobody waits for ever. Communicators are non-blocking (NCCL 2.14 and later): every call returns at once, and a loop here
asks NCCL and the stream for the state, the caller's `check` whether the other end is still there, and the clock. When
one of them says so, ncclCommAbort ends what is still running on the device. Ends that agree to part abort as well:
nothing is under way then, and unlike ncclCommDestroy it waits for nobody.

The streams are this module's own and non-blocking, so what the process does with its GPU otherwise (JAX's own NCCL
among it) neither waits for a broadcast nor holds one up, except by needing the same wires.

NCCL's own traffic is neither encrypted nor authenticated. NCCL_* variables are the user's and left as they are.
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
    """ncclConfig_t of NCCL 2.14, the first to have one; later ones read as much as `size` and `version` say."""

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
    """Lists the places of NCCL: the folder of NVIDIA's wheel (nvidia-nccl-cu12, -cu13), as JAX and torch take it, then
    wherever the dynamic linker looks."""
    found = []
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia.nccl")
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            found.append(os.path.join(folder, "lib", SONAME))
    return [*filter(os.path.exists, found), SONAME]


@functools.cache
def load(path: str = "") -> Any:
    """libnccl with its signatures declared; from `path`, or the first of `candidates` that loads.

    Raises:
      BridgeError("unshared"): it is not here, or too old.
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
    """The version as NCCL writes it: 22703 is 2.27.3."""
    number = _INT()
    _check(library, "ncclGetVersion", library.ncclGetVersion(ctypes.byref(number)))
    return number.value


def readable(number: int) -> str:
    """22703 -> "2.27.3"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def new_id(library: Any) -> bytes:
    """The name of a communicator to be: whoever gives it joins that one. It says where rank 0 listens."""
    unique_id = _UniqueId()
    _check(library, "ncclGetUniqueId", library.ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(ctypes.string_at(ctypes.byref(unique_id), messages.NCCL_ID_BYTES))


def _check(library: Any, call: str, code: int, communicator: Any = None) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        what = (library.ncclGetErrorString(code) or b"").decode(errors="replace")
        detail = (library.ncclGetLastError(communicator) or b"").decode(errors="replace").strip()
        raise BridgeError(f"{call} failed: {what}{f' ({detail})' if detail else ''}", "unshared")


class Communicator:
    """An NCCL communicator of `world` GPUs; this process's GPU is number `rank`. One thread may use it at a time.

    Args:
      unique_id: made by `new_id`, the same at every rank.
      timeout_s: longest time until all have come.
      check: called again and again while there is something to wait for; what it raises ends the waiting.

    Raises:
      BridgeError("unshared"): NCCL cannot join these GPUs, or the others did not come in time.
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
        """False once aborted."""
        return self._handle is not None

    def broadcast(self, pointer: int, size: int, *, timeout_s: float, check: Callable[[], None]) -> None:
        """`size` bytes at `pointer` of rank 0 to `pointer` of every other; there when it returns.

        The communicator is of no use after an error.

        Args:
          timeout_s: longest time for PIECE_BYTES. check: as in the constructor.

        Raises:
          BridgeError("unshared"): an end is gone or stuck.
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
        """Tells whether NCCL has done what it was last asked for (on the host; the stream may go on)."""
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
        """End everything under way and leave. Idempotent.

        Returns:
          Whether the device is done with the memory it was given.
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
    """The engine's end: a communicator for the trainer that publishes, and buffers on the engine's GPU.

    The version being served lies in one of two buffers, the next one comes into the other. They are the engine's own:
    nobody else can write to them, and they outlive the trainer.

    Args:
      device: the engine's GPU. library: of `load`; None: found when first needed.
    """

    def __init__(self, device: cuda_ipc.Device, library: Any = None):
        self._buffers = cuda_ipc.Buffers(device)
        self._device = device
        self._library = library
        self._communicator: Communicator | None = None
        self._lock = threading.Lock()  # a new trainer's thread may come while that of a dead one is still giving up

    def receive(self, memory: messages.NcclMemory, size: int, check: Callable[[], None]) -> cuda_ipc.Buffer:
        """The next version's bytes, in a buffer that is the caller's until it is released.

        Args:
          size: bytes the trainer sends. check: raises when there is nobody to wait for any more.

        Raises:
          BridgeError: "unshared", no NCCL here, another version of it, or no way to the trainer's GPU; "limits", no
            room for a buffer.
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
        """Leave the communicator and free the buffers; no version in them may be in use. Idempotent."""
        with self._lock:
            self._leave()
            self._buffers.close()
