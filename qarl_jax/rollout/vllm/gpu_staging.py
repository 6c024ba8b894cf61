# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Staging a version on the learner's GPU: from QTensors to the engine's tensors without leaving the device.

    stager = DeviceStager(gpu_buffers(0), transport="auto")
    staged = stager.stage(weights, version=..., model=..., scheme=...)    # a sender.DeviceVersion

The learner keeps its weights stacked over layers and in wire layout already, so a layer's tensor is a contiguous piece
of a stack: publishing it is one device-to-device copy from the stack into a staging buffer, which an engine on this GPU
maps (transport/cuda_ipc.py) and one on another is sent (transport/nccl.py). Masters without a QTensor (embedding,
norms, head, all of a bf16 policy) are cast to bfloat16 first, one stack at a time. The fingerprints are computed by a
jitted program from the stacks themselves, not from the copy: what the bridge checks is what the learner computes with.

Two buffers are held, one of which the serving version lies in. The learner is on one GPU; one that is spread over
several publishes over host memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from qarl_bridge.client import sender
from qarl_bridge.protocol import expert_stacks, fingerprint, formats, messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models
from qarl_jax.quant import QTensor
from qarl_jax.rollout import PolicyWeights

Key = tuple[str, str]  # (path of a parameter, "qvalue" | "scale" | "master")


@functools.partial(jax.jit, static_argnames="lead")
def row_sums(x: jax.Array, lead: int) -> jax.Array:
    """Fingerprints' row sums (`qarl_bridge.protocol.fingerprint`) of every tensor in a stack.

    Args:
      x: [*stack, ...] of any wire dtype. lead: number of stack dims.

    Returns:
      [*stack, rows, 2] uint32.
    """
    stack = x.shape[:lead]
    x = x.reshape(*stack, -1)
    if x.dtype.itemsize == 1:
        x = jnp.pad(x, [(0, 0)] * lead + [(0, x.shape[-1] % 2)]).reshape(*stack, -1, 2)
    words = lax.bitcast_convert_type(x, jnp.uint16).reshape(*stack, -1)
    words = jnp.pad(words, [(0, 0)] * lead + [(0, -words.shape[-1] % fingerprint.WORDS)])
    rows = words.reshape(*stack, -1, fingerprint.WORDS).astype(jnp.uint32)
    multiplier = jnp.arange(1, fingerprint.WORDS + 1, dtype=jnp.uint32).reshape((1,) * (lead + 1) + (-1,))
    return jnp.stack([rows.sum(-1, dtype=jnp.uint32), (rows * multiplier).sum(-1, dtype=jnp.uint32)], axis=-1)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Place:
    """One tensor of the wire: where it comes from and where it goes.

    `source` None: `constant` holds its bytes. `index`: which tensor of the stack, counted row by row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    source: Key | None
    index: int = 0
    constant: bytes = b""


def layout(weights: PolicyWeights) -> list[_Place]:
    """Every tensor the engine is given, in the order of `engine_tensors`: embedding, layers in order, norm, head; the
    experts of a layer in one.

    From shapes alone: arrays may be abstract.
    """
    config = models.config_of(weights.graphdef)
    names = models.hf_names(config)
    tensors: dict[str, Any] = models.by_path(weights.params) | models.by_path(weights.qweights)
    places: list[_Place] = []
    end = 0

    def add(name: str, dtype: Any, shape: tuple[int, ...], source: Key | None, index: int = 0, constant: bytes = b""):
        nonlocal end
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        offset = sender.align(end)
        places.append(_Place(name, messages.dtype_name(dtype), shape, offset, nbytes, source, index, constant))
        end = offset + nbytes

    for place in itertools.chain.from_iterable(models.checkpoint_order(config)):
        path, index = place.path, place.index or 0
        own = expert_stacks.name_of(place.names[0])
        tensor = tensors[path]
        lead = _lead(names[path])
        if not isinstance(tensor, QTensor):
            add(own, jnp.bfloat16, tuple(tensor.shape[lead:]), (path, "master"), index)
            continue
        parts = formats.tensor_names(own, str(tensor.scheme))
        add(parts[0], tensor.qvalue.dtype, tuple(tensor.qvalue.shape[lead:]), (path, "qvalue"), index)
        add(parts[1], tensor.scale.dtype, tuple(tensor.scale.shape[lead:]), (path, "scale"), index)
        if len(parts) > 2:
            experts = tuple(tensor.shape[lead:-2])
            shape = np.array(tensor.shape[-2:], "<i8")
            add(parts[2], np.int64, (*experts, 2), None, constant=shape.tobytes() * math.prod(experts))
    return places


def _lead(names: np.ndarray) -> int:
    """Stack dims that tensors are cut out of: layers, if any. Experts stay together."""
    return min(1, names.ndim)


def gpu_of(weights: PolicyWeights, platform: str = "gpu") -> int:
    """The number of the one GPU all the weights are on.

    Raises:
      BridgeError("unshared"): they are elsewhere, or on several devices.
    """
    devices = {device for leaf in jax.tree.leaves((weights.params, weights.qweights)) for device in leaf.devices()}
    if len(devices) != 1:
        raise BridgeError(f"the learner is spread over {len(devices)} devices", "unshared")
    (device,) = devices
    if device.platform != platform:
        raise BridgeError(f"the learner runs on {device.platform}, not on a GPU", "unshared")
    return int(device.local_hardware_id)


class DeviceStager:
    """Writes versions into staging buffers on the GPU.

    Args:
      buffers: of the GPU the weights are on.
      transport: how versions travel, see `sender.DeviceVersion`.
    """

    def __init__(self, buffers: Any, transport: str = "auto"):
        self._buffers = buffers
        self._transport = transport
        self._layouts: dict[Any, list[_Place]] = {}

    def stage(
        self, weights: PolicyWeights, *, version: messages.Version, model: bytes, scheme: bytes
    ) -> sender.DeviceVersion:
        """A version in a buffer of its own, complete when this returns. Arguments as in `sender.stage`.

        Raises:
          BridgeError: "limits", the GPU has no room for the buffer.
        """
        start = time.perf_counter()
        if weights.graphdef not in self._layouts:
            self._layouts[weights.graphdef] = layout(weights)
        places = self._layouts[weights.graphdef]
        total = places[-1].offset + places[-1].nbytes
        buffer = self._buffers.take(sender.align(total))
        try:
            digests = self._fill(buffer, places, weights)
        except BaseException:
            buffer.release()
            raise
        entries = [
            messages.TensorEntry(
                name=p.name, dtype=p.dtype, shape=list(p.shape), offset=p.offset, nbytes=p.nbytes, digest=digest
            )
            for p, digest in zip(places, digests, strict=True)
        ]
        manifest = sender.manifest_of(entries, version=version, model=model, scheme=scheme)
        return sender.DeviceVersion(manifest, buffer, time.perf_counter() - start, self._transport)

    def _fill(self, buffer: Any, places: list[_Place], weights: PolicyWeights) -> list[bytes]:
        tensors: dict[str, Any] = models.by_path(weights.params) | models.by_path(weights.qweights)
        names = models.hf_names(models.config_of(weights.graphdef))
        by_source: dict[Key, list[int]] = {}
        for number, place in enumerate(places):
            if place.source is not None:
                by_source.setdefault(place.source, []).append(number)
            elif buffer.fresh:  # the same in every version: written once
                buffer.device.write(buffer.pointer + place.offset, place.constant)
        sums: dict[Key, jax.Array] = {}
        for source, numbers in by_source.items():
            path, part = source
            tensor = tensors[path]
            stack = tensor if part == "master" else getattr(tensor, part)
            if part == "master" and stack.dtype != jnp.bfloat16:
                stack = _cast(stack, jnp.bfloat16)
            sums[source] = row_sums(stack, _lead(names[path]))
            stack = jax.block_until_ready(stack)
            pointer = stack.unsafe_buffer_pointer()
            buffer.device.copy_all(
                [
                    (buffer.pointer + p.offset, pointer + p.index * p.nbytes, p.nbytes)
                    for p in (places[number] for number in numbers)
                    if p.nbytes
                ]
            )
            if part == "master":
                buffer.device.synchronize()  # the cast copy is freed with this turn of the loop
        buffer.device.synchronize()
        buffer.fresh = False
        digests = [fingerprint.digest(p.constant) for p in places]
        for source, numbers in by_source.items():
            rows = np.asarray(sums[source])
            rows = rows.reshape(-1, *rows.shape[-2:])
            for number in numbers:
                digests[number] = fingerprint.digest_of_sums(rows[places[number].index])
        return digests

    def close(self) -> None:
        """Free the buffers; no version in them may be in use. Idempotent."""
        self._buffers.close()


__all__ = ["DeviceStager", "gpu_of", "layout", "row_sums"]
