# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Maps a frozen base in the trainer's memory into the engine's layers (`protocol/one_base.py`)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from qarl_bridge.engine.nvfp4_layers import Given, NvFp4Layer, packed
from qarl_bridge.protocol import messages, one_base
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.protocol.formats import stems
from qarl_bridge.server import staged_gpu
from qarl_bridge.transport import cuda_ipc, shm


def read(folder: str) -> list[one_base.Place]:
    """Reads the list of shared buffers from a model folder's base.json; empty if the folder has none.

    Raises:
      BridgeError("setup"): the file cannot be read.
    """
    path = os.path.join(folder, one_base.FILE)
    if not os.path.exists(path):
        return []
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=list[one_base.Place])
    except (OSError, msgspec.MsgspecError) as error:
        raise BridgeError(f"{path} cannot be read: {error}", "setup") from None


def _mapped(memory: messages.HostMemory | messages.DeviceMemory, size: int, *, on_gpu: bool) -> Any:
    """Maps a shared buffer as a uint8 torch tensor [size], without a copy."""
    is_host = isinstance(memory, messages.HostMemory)
    if is_host == on_gpu:
        here, there = ("a GPU", "host memory") if on_gpu else ("a CPU", "a GPU")
        raise BridgeError(f"this engine runs on {here}, and the base lies in {there}", "unshared")
    if isinstance(memory, messages.HostMemory):
        fd = shm.open_located(memory)
        try:
            return torch.from_numpy(shm.map_to_read(fd, size))
        finally:
            os.close(fd)
    gpu = cuda_ipc.find(memory.device)
    return staged_gpu.view(gpu.open(memory.handle, size), size, gpu.ordinal)


def _given(place: one_base.Place, *, on_gpu: bool) -> Iterator[tuple[str, Given]]:
    listed = one_base.arrays_of(place)
    buffer = _mapped(place.memory, one_base.size(listed), on_gpu=on_gpu)
    views = {
        name: buffer[a.offset : a.offset + a.nbytes].view(getattr(torch, messages.dtype_name(a.dtype))).view(a.shape)
        for name, a in listed.items()
    }
    for layer, module in enumerate(place.modules):
        own = {name: view[layer] for name, view in views.items()}
        yield module, Given(widths=list(place.outputs), bias=own.pop("bias", None), **own)


@dataclasses.dataclass(frozen=True)
class Base:
    """The layers whose weights lie in the trainer's memory, by live name."""

    layers: Mapping[str, Given]

    @staticmethod
    def open(places: Sequence[one_base.Place], *, on_gpu: bool) -> Base:
        """Maps all shared buffers, without a copy, and returns their layers.

        Args:
          places: the list that `read` returns.
          on_gpu: whether this engine runs on a GPU; the buffers must lie in the memory of the engine's device.

        Raises:
          BridgeError("setup"): a buffer cannot be mapped.
        """
        try:
            return Base({name: one for place in places for name, one in _given(place, on_gpu=on_gpu)})
        except BridgeError as error:
            raise BridgeError(
                f"the engine cannot read the base in the trainer's memory ({error}): set rollout.engine.transport=host,"
                " so that each holds a copy",
                "setup",
            ) from None

    def check(self, modules: Mapping[str, Any]) -> None:
        """Checks that an `NvFp4Layer` of the bridge computes every layer of the base.

        Raises:
          BridgeError("setup"): another class of vLLM computes a layer.
        """
        for name in self.layers:
            module = modules.get(name)
            if not isinstance(_kernel(module), NvFp4Layer) or getattr(module, "prefix", "") != name:
                raise BridgeError(
                    f"{name} of this vLLM cannot read the base in the trainer's memory: set"
                    " rollout.engine.transport=host, so that each holds a copy",
                    "setup",
                )

    def load(self, modules: Mapping[str, Any]) -> None:
        """Recomputes factors and biases that layers derive from shared weights, after the trainer wrote a version."""
        with torch.no_grad():
            for name, given in self.layers.items():
                _kernel(modules[name]).refresh(modules[name], given)

    def parts(self) -> Iterator[Mapping[str, Any]]:
        """Yields each module's tensors in published names and layout, for the read-back."""
        for name, given in self.layers.items():
            codes, scales = packed(given.words, given.scales)
            tensors = {"weight_packed": codes, "weight_scale": scales}
            tensors |= {} if given.bias is None else {"bias": given.bias}
            found: dict[str, Any] = {}
            first = 0
            for stem, width, divisor in zip(stems(name), given.widths, given.divisors, strict=True):
                rows = slice(first, first + width)
                found |= {f"{stem}.{leaf}": tensor[rows] for leaf, tensor in tensors.items()}
                found[f"{stem}.weight_global_scale"] = divisor.reshape(1)
                first += width
            yield found


def _kernel(module: Any) -> Any:
    return getattr(getattr(module, "scheme", None), "kernel", None)
