# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Holds and checks a version in the engine's GPU memory, without a copy to the host.

The version lies in the trainer's buffer, which the engine maps (transport/cuda_ipc.py), or in the engine's own buffer,
if it came from another GPU (transport/nccl.py). The trainer can still write to its buffer, unlike to a sealed file. So
the bridge checks fingerprints twice, each time in one pass: at staging, and after the engine has loaded the version
(`confirm`). If the version changed in between, the state machine restores the last good one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from qarl_bridge.protocol import fingerprint, messages
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.server import staged
from qarl_bridge.transport import cuda_ipc, nccl

_ROWS_AT_ONCE = 16_384  # 64 MiB
_RUN_BYTES = 64 << 20  # tensors looked at at once: a mask of them takes as much
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def row_sums(buffer: Any) -> Any:
    """Computes the row sums (fingerprint.py) of a uint8 tensor whose size is a multiple of ROW_BYTES, on its device:
    [rows, 2] int32, the bits of the uint32 sums."""
    if buffer.is_cuda and _HAS_TRITON:
        from qarl_bridge.server import gpu_sums

        return gpu_sums.row_sums(buffer)
    words = buffer.view(torch.int32).view(-1, fingerprint.WORDS // 2)
    odd = torch.arange(1, fingerprint.WORDS + 1, 2, dtype=torch.int32, device=buffer.device)  # of the low halves
    out = torch.empty((len(words), 2), dtype=torch.int64, device=buffer.device)
    for start in range(0, len(words), _ROWS_AT_ONCE):
        part = words[start : start + _ROWS_AT_ONCE]
        low, high = part & 0xFFFF, (part >> 16) & 0xFFFF
        rows = out[start : start + _ROWS_AT_ONCE]
        rows[:, 0] = (low + high).sum(dim=1)  # int64 sums of int32 terms: 65535 * 2048 < 2^31
        rows[:, 1] = (low * odd + high).sum(dim=1) + (high * odd).sum(dim=1)  # high's multiplier is one more
    return out.to(torch.int32)  # modulo 2^32


def on_the_host(sums: Any) -> np.ndarray:
    """Copies the result of `row_sums` to the host as numpy uint32, [rows, 2]."""
    return sums.cpu().numpy().view(np.uint32)


class DeviceCopy:
    """A version in a GPU buffer; implements `staged.Copy`.

    Args:
      manifest: a manifest that `manifest.check_manifest` has checked.
      buffer: uint8 tensor, total_bytes rounded up to whole rows of 4 KiB.
      close: a callback that frees the memory; its argument is True if the fingerprints matched.
      borrowed: whether the memory belongs to the trainer.
    """

    def __init__(
        self,
        manifest: messages.Manifest,
        buffer: Any,
        close: Callable[[bool], None] = lambda sound: None,
        *,
        borrowed: bool = True,
    ):
        self.manifest = manifest
        self.borrowed = borrowed
        self._buffer = buffer
        self._views: dict[str, Any] = {}
        self._sound = True
        self._sums: Any = None  # of what was announced, once compared
        self._close: Callable[[bool], None] | None = close

    def _tensor(self, entry: messages.TensorEntry) -> Any:
        raw = self._buffer[entry.offset : entry.offset + entry.nbytes]
        return raw.view(getattr(torch, entry.dtype)).view(entry.shape)

    def _check_bytes(self) -> None:
        found = row_sums(self._buffer)
        sums = on_the_host(found)
        for entry in self.manifest.tensors:
            first = entry.offset // fingerprint.ROW_BYTES
            mine = sums[first : first + fingerprint.rows_of(entry.nbytes)]
            if fingerprint.digest_of_sums(mine) != entry.digest:
                self._sound, self._sums = False, None
                raise staged.torn(entry)
        self._sums = found

    def validate(self) -> None:
        self._check_bytes()
        checked, extremes = [], []
        for entries in _runs(self.manifest.tensors):
            values = self._run(entries)
            if entries[0].dtype == "float8_e4m3fn" and any(map(staged.is_scale, entries)):
                values = values.bfloat16()  # which holds them exactly, and can be compared
            if values.dtype == torch.float8_e4m3fn:
                nan = ((values.view(torch.uint8) & 0x7F) == 0x7F).any(dim=1).float()
                low = high = torch.where(nan > 0, torch.nan, nan)
            elif values.dtype.is_floating_point:
                low, high = torch.aminmax(values, dim=1)  # both NaN if anything is
            else:
                continue
            checked += entries
            extremes.append(torch.stack([low, high], dim=1).float())
        if not checked:
            return
        found = torch.cat(extremes).cpu().numpy()
        for entry, (lowest, highest), finite in zip(checked, found, np.isfinite(found).all(axis=1), strict=True):
            if not finite:
                raise staged.not_finite(entry)
            if staged.is_scale(entry):
                staged.check_scale_range(entry, float(lowest), float(highest))

    def _run(self, entries: list[messages.TensorEntry]) -> Any:
        """Views several tensors of `_runs` as one tensor [tensors, elements]."""
        first, last = entries[0], entries[-1]
        dtype = getattr(torch, first.dtype)
        flat = self._buffer[first.offset : last.offset + last.nbytes].view(dtype)
        step = (entries[1].offset - first.offset) // dtype.itemsize if len(entries) > 1 else 1
        return flat.as_strided((len(entries), first.nbytes // dtype.itemsize), (step, 1))

    def parts(self) -> Iterator[Mapping[str, Any]]:
        if not self._views:  # asked for twice in every publish
            self._views = {entry.name: self._tensor(entry) for entry in self.manifest.tensors}
        yield self._views

    def checked_parts(self) -> Iterator[Mapping[str, Any]]:
        return self.parts()

    def confirm(self) -> None:
        # The sums that were announced, without hashing them again: an engine pauses meanwhile.
        if self._sums is not None and torch.equal(row_sums(self._buffer), self._sums):
            return
        try:
            self._check_bytes()
        except BridgeError as error:
            whose = "the trainer wrote to it" if self.borrowed else "it changed on the engine's GPU"
            raise BridgeError(f"{error}: {whose} after it was staged", "torn") from None

    def close(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            self._buffer, self._views, self._sums = None, {}, None
            close(self._sound)


def _runs(entries: list[messages.TensorEntry]) -> list[list[messages.TensorEntry]]:
    """Groups tensors of one dtype and size at equal distances (a norm's weight in every layer), to check them at once.

    Empty tensors are left out.
    """
    runs: list[list[messages.TensorEntry]] = []
    last: dict[tuple[str, int], list[messages.TensorEntry]] = {}
    for entry in entries:
        if entry.nbytes == 0:
            continue
        run = last.get((entry.dtype, entry.nbytes))
        is_regular = run is None or len(run) < 2 or entry.offset - run[-1].offset == run[1].offset - run[0].offset
        if run is None or not is_regular or (len(run) + 1) * entry.nbytes > _RUN_BYTES:
            run = last[entry.dtype, entry.nbytes] = []
            runs.append(run)
        run.append(entry)
    return runs


class _Span:
    """A wrapper through which torch.as_tensor reads mapped GPU memory (the CUDA array interface, version 3)."""

    def __init__(self, pointer: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def view(pointer: int, size: int, ordinal: int) -> Any:
    """Views mapped memory of GPU `ordinal` as a uint8 tensor [size], without a copy."""
    return torch.as_tensor(_Span(pointer, size), device=torch.device("cuda", ordinal))


def whole_rows(nbytes: int) -> int:
    """Rounds a number of bytes up to whole rows of 4 KiB, the size of a staging buffer."""
    return fingerprint.rows_of(nbytes) * fingerprint.ROW_BYTES


_mappings: dict[cuda_ipc.Device, cuda_ipc.Mappings] = {}


def open_version(manifest: messages.Manifest, memory: messages.DeviceMemory) -> DeviceCopy:
    """Maps the trainer's GPU buffer; it stays mapped for later versions until `forget_trainer`.

    Raises:
      BridgeError: this process does not see the GPU or cannot map the buffer ("unshared"), or it is too small ("torn").
    """
    if manifest.total_bytes == 0:
        return DeviceCopy(manifest, torch.empty(0, dtype=torch.uint8))
    gpu = cuda_ipc.find(memory.device)
    handle, mappings = memory.handle, _mappings.setdefault(gpu, cuda_ipc.Mappings(gpu))
    pointer = mappings.open(handle, whole_rows(manifest.total_bytes))
    # A handle may have come to name other memory: it is mapped anew after a version that was not what was announced.
    return _copy_at(manifest, gpu, pointer, lambda sound: mappings.close(handle, keep=sound), borrowed=True)


def forget_trainer() -> None:
    """Unmaps all buffers of trainers that no version uses any more."""
    for mappings in list(_mappings.values()):
        mappings.clear()


def receive_version(
    receiver: nccl.Receiver, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]
) -> DeviceCopy:
    """Receives a version from the trainer's GPU over NCCL; arguments and errors as of `nccl.Receiver.receive`."""
    if manifest.total_bytes == 0:
        return DeviceCopy(manifest, torch.empty(0, dtype=torch.uint8), borrowed=False)
    buffer = receiver.receive(memory, whole_rows(manifest.total_bytes), check)
    return _copy_at(manifest, buffer.device, buffer.pointer, lambda sound: buffer.release(), borrowed=False)


def _copy_at(
    manifest: messages.Manifest, gpu: cuda_ipc.Device, pointer: int, let_go: Callable[[bool], None], *, borrowed: bool
) -> DeviceCopy:
    where = torch.device("cuda", gpu.ordinal)
    try:
        buffer = view(pointer, whole_rows(manifest.total_bytes), gpu.ordinal)
    except BaseException:
        let_go(False)
        raise

    def close(sound: bool) -> None:
        torch.cuda.synchronize(where)  # nothing may still be reading it
        let_go(sound)

    return DeviceCopy(manifest, buffer, close, borrowed=borrowed)


def receiver() -> nccl.Receiver:
    """Makes an `nccl.Receiver` on torch's current GPU."""
    return nccl.Receiver(cuda_ipc.Device(torch.cuda.current_device()))


def uuid_of_current() -> bytes:
    """Returns the 16-byte UUID of torch's current GPU, or b"" if libcuda fails: no GPU transport is used then."""
    try:
        return cuda_ipc.Device(torch.cuda.current_device()).uuid
    except BridgeError:
        return b""
