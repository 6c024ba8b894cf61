# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Shares GPU staging buffers between processes of a host by CUDA IPC handles, through libcuda and ctypes.

    trainer   Buffers(Device(0)).take(size) -> Buffer; copy_all(...); synchronize(); Buffer.handle travels to the bridge
    bridge    Mappings(device).open(handle, size) -> pointer into the buffer, read in place; close(handle)

The learner's arrays cannot be exported: JAX's memory comes from pools and the virtual-memory API, for which
cuIpcGetMemHandle fails or names a whole pool. Memory of cuMemAlloc in JAX's (primary) context can always be exported.
A copy from an array to it stays on the GPU, at memory speed.

It uses ctypes because the learner's environment has neither cuda-python nor torch. Every call makes the device's
primary context current on the calling thread while it runs.

The bridge keeps a trainer's two buffers mapped between versions (`Mappings`): mapping takes 5 ms per GB. After the
trainer ends its memory must not be read: the bridge unmaps it when the lease ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

from qarl_bridge.protocol.errors import BridgeError

HANDLE_BYTES = 64
UUID_BYTES = 16
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * UUID_BYTES),)


_POINTER, _SIZE, _INT, _ANY = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
# Name -> argument types, as cuda.h declares them (CUdeviceptr is 64 bits, contexts and streams are pointers).
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (ctypes.POINTER(_INT),),
    "cuDeviceGet": (ctypes.POINTER(_INT), _INT),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_Uuid), _INT),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_ANY), _INT),
    "cuCtxPushCurrent_v2": (_ANY,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_ANY),),
    "cuStreamCreate": (ctypes.POINTER(_ANY), ctypes.c_uint),
    "cuStreamSynchronize": (_ANY,),
    "cuStreamQuery": (_ANY,),
    "cuStreamDestroy_v2": (_ANY,),
    "cuMemAlloc_v2": (ctypes.POINTER(_POINTER), _SIZE),
    "cuMemFree_v2": (_POINTER,),
    "cuMemsetD8Async": (_POINTER, ctypes.c_ubyte, _SIZE, _ANY),
    "cuMemcpyDtoDAsync_v2": (_POINTER, _POINTER, _SIZE, _ANY),
    "cuMemcpyHtoDAsync_v2": (_POINTER, _ANY, _SIZE, _ANY),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_POINTER), ctypes.POINTER(_SIZE), _POINTER),
    "cuMemGetInfo_v2": (ctypes.POINTER(_SIZE), ctypes.POINTER(_SIZE)),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _POINTER),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_POINTER), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
}
_NON_BLOCKING = 1
_NOT_READY = 600


@functools.cache
def load(path: str = "libcuda.so.1") -> Any:
    """Loads and initialises libcuda and declares the signatures of its functions.

    Raises:
      BridgeError("unshared"): the machine has no CUDA driver, the driver lacks a function, or it finds no GPU.
    """
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise BridgeError(f"no CUDA driver on this machine ({error}): publish over host memory", "unshared") from None
    for name, arguments in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise BridgeError(
                f"the CUDA driver lacks {name}: update it, or publish over host memory", "unshared"
            ) from None
        function.argtypes, function.restype = arguments, _INT
    code = library.cuInit(0)
    if code:
        raise BridgeError(f"the CUDA driver cannot start: {_name(library, code)}", "unshared")
    return library


def _name(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    if library.cuGetErrorName(code, ctypes.byref(text)) or text.value is None:
        return f"CUDA error {code}"
    return text.value.decode()


class Device:
    """One GPU: allocates, exports, maps and copies its memory. A CUDA error is a BridgeError("unshared").

    Attributes:
      ordinal: the GPU's number among those that this process sees.
      uuid: 16 bytes that name the GPU in every process.
    """

    def __init__(self, ordinal: int, library: Any = None):
        self._cuda = load() if library is None else library
        self.ordinal = ordinal
        number, uuid = _INT(), _Uuid()
        self._check("cuDeviceGet", ctypes.byref(number), ordinal)
        self._check("cuDeviceGetUuid_v2", ctypes.byref(uuid), number)
        self.uuid = bytes(ctypes.string_at(ctypes.byref(uuid), UUID_BYTES))
        self._context = _ANY()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self._stream = self.new_stream()

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise BridgeError(f"{name} failed on GPU {self.ordinal}: {_name(self._cuda, code)}", "unshared")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device's primary CUDA context current on this thread inside the `with` block."""
        self._check("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(_ANY()))

    def new_stream(self) -> Any:
        """Creates a non-blocking CUDA stream, which does not synchronize with the default stream."""
        stream = _ANY()
        with self.current():
            self._check("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def drop_stream(self, stream: Any) -> None:
        """Destroys a stream that `new_stream` created."""
        with self.current():
            self._check("cuStreamDestroy_v2", stream)

    def is_idle(self, stream: Any) -> bool:
        """Tells whether all work on `stream` is done; BridgeError("unshared") if it failed."""
        with self.current():
            code = self._cuda.cuStreamQuery(stream)
        if code not in (0, _NOT_READY):
            raise BridgeError(f"a stream of GPU {self.ordinal} failed: {_name(self._cuda, code)}", "unshared")
        return code == 0

    def allocate(self, size: int) -> int:
        """Allocates `size` zeroed bytes; returns the address, or raises BridgeError("limits")."""
        pointer = _POINTER()
        with self.current():
            try:
                self._check("cuMemAlloc_v2", ctypes.byref(pointer), size)
            except BridgeError as error:
                raise BridgeError(
                    f"no room for a staging buffer of {size / 2**30:.2f} GiB on the GPU ({error}): lower "
                    "rollout.engine.gpu_memory_utilization or kv_cache_gb, or set rollout.engine.staging_buffers=0 or "
                    "transport=host",
                    "limits",
                ) from None
        self.clear(int(pointer.value), size)
        self.synchronize()
        return int(pointer.value)

    def clear(self, pointer: int, size: int) -> None:
        """Starts to zero `size` bytes at `pointer`, ordered before later copies; does not wait."""
        with self.current():
            self._check("cuMemsetD8Async", pointer, 0, size, self._stream)

    def free(self, pointer: int) -> None:
        """Frees memory of `allocate`."""
        with self.current():
            self._check("cuMemFree_v2", pointer)

    def export(self, pointer: int) -> bytes:
        """Returns the 64-byte CUDA IPC handle by which another process maps memory of `allocate`."""
        handle = _Handle()
        with self.current():
            self._check("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES))

    def open(self, handle: bytes, size: int) -> int:
        """Maps another process's GPU memory by its IPC handle; returns the address in this process.

        Raises:
          BridgeError: CUDA cannot open the handle ("unshared"), or the memory has less than `size` bytes ("torn").
        """
        pointer, base, actual = _POINTER(), _POINTER(), _SIZE()
        foreign = _Handle()
        ctypes.memmove(ctypes.byref(foreign), handle, HANDLE_BYTES)
        with self.current():
            self._check("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), foreign, _LAZY_ENABLE_PEER_ACCESS)
            self._check("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(actual), pointer)
        left = base.value + actual.value - pointer.value
        if left < size:
            self.close_mapping(int(pointer.value))
            raise BridgeError(f"the staging buffer holds {left} bytes, the manifest announces {size}", "torn")
        return int(pointer.value)

    def close_mapping(self, pointer: int) -> None:
        """Unmaps memory that `open` mapped."""
        with self.current():
            self._check("cuIpcCloseMemHandle", pointer)

    def copy_all(self, copies: list[tuple[int, int, int]]) -> None:
        """Starts copies within the GPU, each (target address, source address, bytes); `synchronize` waits for them."""
        function, stream = self._cuda.cuMemcpyDtoDAsync_v2, self._stream
        with self.current():
            for to, source, size in copies:
                if function(to, source, size, stream):
                    self._check("cuMemcpyDtoDAsync_v2", to, source, size, stream)  # again, for its error

    def write(self, to: int, data: bytes) -> None:
        """Copies host bytes to the GPU address `to`; synchronous."""
        with self.current():
            self._check("cuMemcpyHtoDAsync_v2", to, ctypes.cast(ctypes.c_char_p(data), _ANY), len(data), self._stream)
            self._check("cuStreamSynchronize", self._stream)

    def synchronize(self) -> None:
        """Waits until all copies that this object started are done."""
        with self.current():
            self._check("cuStreamSynchronize", self._stream)

    def memory(self) -> tuple[int, int]:
        """Returns (free, total) bytes of the GPU, counting all processes."""
        free, total = _SIZE(), _SIZE()
        with self.current():
            self._check("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


@dataclasses.dataclass
class _Mapping:
    pointer: int
    size: int  # bytes behind the pointer
    users: int = 0


class Mappings:
    """A cache of mapped memory of other processes; unused mappings go at `clear` or at a new handle. Thread-safe."""

    def __init__(self, device: Device):
        self._device = device
        self._lock = threading.Lock()
        self._held: dict[bytes, _Mapping] = {}

    def open(self, handle: bytes, size: int) -> int:
        """Maps a handle as `Device.open` does, or returns its cached address. Each call needs one `close`.

        Raises:
          BridgeError: as `Device.open`; "torn": the cached memory is smaller than `size` bytes.
        """
        with self._lock:
            held = self._held.get(handle)
            if held is None:
                self._close_unused()  # the trainer has other buffers now
                held = self._held[handle] = _Mapping(self._device.open(handle, size), size)
            elif held.size < size:
                raise BridgeError(f"the staging buffer holds {held.size} bytes, the manifest announces {size}", "torn")
            held.users += 1
            return held.pointer

    def close(self, handle: bytes, *, keep: bool = True) -> None:
        """Ends one use of a handle's memory. keep: leave unused memory mapped for the next `open`."""
        with self._lock:
            held = self._held[handle]
            held.users -= 1
            if not keep:
                self._close_unused()

    def clear(self) -> None:
        """Unmaps all memory that is not in use."""
        with self._lock:
            self._close_unused()

    def _close_unused(self) -> None:
        for handle in [handle for handle, held in self._held.items() if held.users == 0]:
            self._device.close_mapping(self._held.pop(handle).pointer)


def count(library: Any = None) -> int:
    """Counts the GPUs that this process sees.

    Raises:
      BridgeError("unshared"): the CUDA driver fails.
    """
    cuda = load() if library is None else library
    found = _INT()
    if code := cuda.cuDeviceGetCount(ctypes.byref(found)):
        raise BridgeError(f"the CUDA driver cannot count GPUs: {_name(cuda, code)}", "unshared")
    return found.value


def find(uuid: bytes, library: Any = None) -> Device:
    """Finds the GPU with a UUID among those that this process sees; BridgeError("unshared") if there is none."""
    cuda = load() if library is None else library
    for ordinal in range(count(cuda)):
        device = _device(cuda, ordinal)
        if device.uuid == uuid:
            return device
    raise BridgeError(
        "trainer and engine see different GPUs: publish over NCCL (transport=nccl) or host memory", "unshared"
    )


@functools.cache
def _device(library: Any, ordinal: int) -> Device:
    return Device(ordinal, library)


class Buffer:
    """A GPU buffer of a `Buffers` pool. `release` returns it to the pool."""

    def __init__(self, pool: Buffers, device: Device, size: int):
        self._pool = pool
        self.device = device
        self.size = size
        self.pointer = device.allocate(size)
        self.fresh = True  # nothing was written yet

    @functools.cached_property
    def handle(self) -> bytes:
        """The CUDA IPC handle of the buffer; BridgeError("unshared") where CUDA cannot export it."""
        return self.device.export(self.pointer)

    def release(self) -> None:
        """Returns the buffer to its pool, where the next version may overwrite it. Idempotent."""
        self._pool.give_back(self)


class Buffers:
    """A pool of staging buffers of one GPU. It grows to as many as are taken at once, usually two. Thread-safe."""

    def __init__(self, device: Device):
        self.device = device
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._taken: set[Buffer] = set()

    def take(self, size: int) -> Buffer:
        """Takes a free buffer of exactly `size` bytes, or allocates one and frees free buffers of other sizes."""
        with self._lock:
            for buffer in self._free:
                if buffer.size == size:
                    self._free.remove(buffer)
                    break
            else:
                self._drop_free()
                buffer = Buffer(self, self.device, size)
            self._taken.add(buffer)
            return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Makes a buffer free for the next `take`; nothing may read it any more."""
        with self._lock:
            if buffer in self._taken:
                self._taken.remove(buffer)
                self._free.append(buffer)

    def _drop_free(self) -> None:
        while self._free:
            self.device.free(self._free.pop().pointer)

    def close(self) -> None:
        """Frees all buffers, taken ones included. Idempotent."""
        with self._lock:
            self._free += self._taken
            self._taken.clear()
            self._drop_free()
