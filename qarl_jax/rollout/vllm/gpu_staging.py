# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Staging a version on the learner's GPU: from QTensors to the engine's tensors without leaving the device.

    stager = DeviceStager([gpu_buffers(0)], transport="auto")
    staged = stager.stage(weights, version=..., model=..., scheme=...)    # a sender.DeviceVersion

The learner keeps its weights stacked over layers and in wire layout already, so a layer's tensor is a contiguous piece
of a stack: publishing it is one device-to-device copy from the stack into a staging buffer, which an engine on this GPU
maps (transport/cuda_ipc.py) and one on another is sent (transport/nccl.py). Masters without a QTensor (embedding,
norms, head, all of a bf16 policy) are cast to bfloat16 first, some layers at a time. The fingerprints are computed by a
jitted program from the stacks themselves, not from the copy: what the bridge checks is what the learner computes with.

Two buffers are held, one of which the serving version lies in; or one, which the next version overwrites
(`staging_buffers`). A learner that is spread over several GPUs joins its parts, some layers at a time, over the
wire between them, on each GPU where an engine is, for it holds whole matrices; no host has any.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
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


PIECE_BYTES = 2**30
"""What is cast or joined at once, in the type that travels: some layers of a stack, one at least. A GPU holds a few
such pieces while a version is staged: what arrives, what that is put together from, and what its sums are made of."""


@functools.partial(jax.jit, static_argnames=("size", "dtype", "place"))
def _cut(x: jax.Array, start: jax.Array, size: int, dtype: Any, place: Any) -> jax.Array:
    """`size` of x's first dimension from `start` on, in `dtype`."""
    x = lax.dynamic_slice_in_dim(x, start, size).astype(dtype)
    return x if place is None else lax.with_sharding_constraint(x, place)


# Two programs that send between the same GPUs must reach all of them in one order.
_JOINING = threading.Lock()


def _pieces(
    x: jax.Array, dtype: Any, lead: int, wanted: range | None = None
) -> Iterator[tuple[int, dict[int, jax.Array]]]:
    """An array in `dtype`, piece by piece: (first of its tensors, the piece by the number of the GPU, on each of those
    that the array is spread over). Itself, where it is on one and of that dtype.

    Args:
      lead: 1: its first dimension counts tensors; 0: it is one.
      wanted: which of its tensors; None: all.
    """
    if len(x.devices()) == 1 and x.dtype == dtype:
        (device,) = x.devices()
        yield 0, {int(device.local_hardware_id): x}
        return
    sharding = x.sharding
    assert len(x.devices()) == 1 or isinstance(sharding, NamedSharding)
    place = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    size = count = x.shape[0] if x.ndim else 1
    begin = 0
    if lead:
        most = max(1, PIECE_BYTES * count // max(1, x.size * jnp.dtype(dtype).itemsize))
        if wanted is not None:
            begin, count = wanted.start, len(wanted)
        size = max(n for n in range(1, min(most, count) + 1) if count % n == 0)
    for start in range(begin, begin + count, size):
        with _JOINING:
            piece = _cut(x, jnp.uint32(start), size, dtype, place)
            jax.block_until_ready(piece)
        yield start, {int(part.device.local_hardware_id): part.data for part in piece.addressable_shards}
        del piece


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
    for place in itertools.chain.from_iterable(models.checkpoint_order(config)):
        tensor = tensors[place.path]
        for name, dtype, shape, part in _parts(expert_stacks.name_of(place.names[0]), tensor, _lead(names[place.path])):
            offset, nbytes = sender.align(end), math.prod(shape) * np.dtype(dtype).itemsize
            end = offset + nbytes
            where: dict[str, Any] = {"source": (place.path, part), "index": place.index or 0}
            if not part:
                constant = np.array(tensor.shape[-2:], "<i8").tobytes() * math.prod(shape[:-1])
                where = {"source": None, "constant": constant}
            places.append(_Place(name, messages.dtype_name(dtype), shape, offset, nbytes, **where))
    return places


def shapes_apart(weights: PolicyWeights) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """dtype and shape of the tensors of a checkpoint, each expert's by itself, in the order of `engine_tensors`."""
    config = models.config_of(weights.graphdef)
    leads = {path: names.ndim for path, names in models.hf_names(config).items()}
    tensors: dict[str, Any] = models.by_path(weights.params) | models.by_path(weights.qweights)
    return {
        name: (np.dtype(dtype), shape)
        for place in itertools.chain.from_iterable(models.checkpoint_order(config))
        for own in place.names
        for name, dtype, shape, _ in _parts(own, tensors[place.path], leads[place.path])
    }


def _parts(name: str, tensor: Any, lead: int) -> Iterator[tuple[str, Any, tuple[int, ...], str]]:
    """(name, dtype, shape, field it is in) of each tensor of a weight, cut out of a stack with `lead` dims; the last
    says the weight's own shape, and is in no field."""
    if not isinstance(tensor, QTensor):
        yield name, jnp.bfloat16, tuple(tensor.shape[lead:]), "master"
        return
    qvalue, scale, *shape = formats.tensor_names(name, str(tensor.scheme))
    yield qvalue, tensor.qvalue.dtype, tuple(tensor.qvalue.shape[lead:]), "qvalue"
    yield scale, tensor.scale.dtype, tuple(tensor.scale.shape[lead:]), "scale"
    for last in shape:
        yield last, np.int64, (*tensor.shape[lead:-2], 2), ""


def _lead(names: np.ndarray) -> int:
    """Stack dims that tensors are cut out of: layers, if any. Experts stay together."""
    return min(1, names.ndim)


class _Held:
    """A policy that is not kept alive."""

    def __init__(self, weights: PolicyWeights):
        self._graphdef = weights.graphdef
        leaves, self._treedef = jax.tree.flatten((weights.params, weights.qweights))
        self._leaves = [weakref.ref(leaf) for leaf in leaves]

    def weights(self, version: messages.Version) -> PolicyWeights:
        """The policy; BridgeError("bad_state") once the learner has let go of it."""
        leaves = [leaf() for leaf in self._leaves]
        if any(leaf is None or leaf.is_deleted() for leaf in leaves):
            raise BridgeError(f"the learner holds the weights of {version} no longer: publish the next", "bad_state")
        params, qweights = jax.tree.unflatten(self._treedef, leaves)
        return PolicyWeights(graphdef=self._graphdef, params=params, qweights=qweights)


def gpus_of(weights: PolicyWeights, engines: Sequence[str], platform: str = "gpu") -> list[int]:
    """The numbers of the GPUs that versions are staged on: those of the engines that weights are on, too; else the
    weights' first.

    Args:
      engines: the CUDA_VISIBLE_DEVICES of each; empty: what this process sees.

    Raises:
      BridgeError("unshared"): the weights are elsewhere, or on GPUs of other processes.
    """
    devices = {device for leaf in jax.tree.leaves((weights.params, weights.qweights)) for device in leaf.devices()}
    others = {device.platform for device in devices} - {platform}
    if others:
        raise BridgeError(f"the learner runs on {', '.join(others)}, not on a GPU", "unshared")
    if {device.process_index for device in devices} != {jax.process_index()}:
        raise BridgeError("the learner is spread over several processes", "unshared")
    numbers = sorted(int(device.local_hardware_id) for device in devices)
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]

    def number(engine: str) -> int:
        first = engine.split(",")[0]
        return seen.index(first) if first in seen else int(first) if first.isdigit() and not seen else numbers[0]

    return sorted({number(engine) for engine in engines} & set(numbers)) or numbers[:1]


WINDOW_BYTES = 2 * 2**30
"""Of a buffer through which a version goes part by part. A layer that is larger is a part nevertheless."""


def parts_of(places: Sequence[_Place], limit: int | None = None) -> list[int]:
    """Where the parts of a version end: as many whole layers in each as `limit` bytes hold, one at least.

    Args:
      limit: WINDOW_BYTES, if not given.
    """
    limit = WINDOW_BYTES if limit is None else limit
    layers = [list(group) for _, group in itertools.groupby(range(len(places)), lambda n: _layer_of(places[n].name))]
    ends: list[int] = []
    start = 0
    for layer in layers:
        end = places[layer[-1]].offset + places[layer[-1]].nbytes
        if ends and end - start <= limit:
            ends[-1] = layer[-1] + 1
        else:
            ends.append(layer[-1] + 1)
            start = places[layer[0]].offset
    return ends


def _layer_of(name: str) -> str:
    """ "model.layers.3" of whatever is in that layer, else the module by itself."""
    found = re.match(r"(.*\.layers\.\d+)\.", name)
    return found[1] if found else name.rpartition(".")[0]


def spans_of(places: Sequence[_Place], ends: Sequence[int]) -> list[tuple[int, int]]:
    """(first byte, bytes) of each part."""
    spans = []
    for first, end in itertools.pairwise([0, *ends]):
        start, last = places[first].offset, places[end - 1]
        spans.append((start, last.offset + last.nbytes - start))
    return spans


class DeviceStager:
    """Writes versions into staging buffers on GPUs.

    Args:
      pools: the buffers of each GPU an engine is on; the weights are on all of these GPUs, whole or in parts.
      transport: how versions travel, see `sender.DeviceVersion`.
      in_parts: a buffer holds a part of a version (`sender.WindowVersion`), and is written when it is asked for.
    """

    def __init__(self, pools: Sequence[Any], transport: str = "auto", *, in_parts: bool = False):
        self._pools = pools
        self._transport = transport
        self._in_parts = in_parts
        self._layouts: dict[Any, list[_Place]] = {}

    def stage(
        self, weights: PolicyWeights, *, version: messages.Version, model: bytes, scheme: bytes
    ) -> sender.DeviceVersion:
        """A version in buffers of its own, complete when this returns, unless it goes `in_parts`: then `weights` must
        stay alive until it is published. Arguments as in `sender.stage`.

        Raises:
          BridgeError: "limits", the GPU has no room for the buffer.
        """
        start = time.perf_counter()
        if weights.graphdef not in self._layouts:
            self._layouts[weights.graphdef] = layout(weights)
        places = self._layouts[weights.graphdef]
        ends = parts_of(places) if self._in_parts else [len(places)]
        spans = spans_of(places, ends)
        buffers: list[Any] = []
        try:
            buffers += (pool.take(sender.align(max(size for _, size in spans))) for pool in self._pools)
            digests = self._fill([] if self._in_parts else buffers, places, weights, 0)
        except BaseException:
            for buffer in buffers:
                buffer.release()
            raise
        entries = [
            messages.TensorEntry(
                name=p.name, dtype=p.dtype, shape=list(p.shape), offset=p.offset, nbytes=p.nbytes, digest=digest
            )
            for p, digest in zip(places, digests, strict=True)
        ]
        manifest = sender.manifest_of(entries, version=version, model=model, scheme=scheme)
        if not self._in_parts:
            return sender.DeviceVersion(manifest, buffers, time.perf_counter() - start, self._transport)
        held = _Held(weights)

        def write(part: int, buffer: Any) -> None:
            first, end = [0, *ends][part : part + 2]
            # Between tensors are zeros, which belong to their fingerprints.
            buffer.device.clear(buffer.pointer, buffer.size)
            self._fill([buffer], places[first:end], held.weights(version), spans[part][0], sums=False)

        return sender.WindowVersion(manifest, buffers, time.perf_counter() - start, self._transport, ends, write)

    def _fill(
        self,
        buffers: list[Any],
        places: Sequence[_Place],
        weights: PolicyWeights,
        origin: int,
        *,
        sums: bool = True,
    ) -> list[bytes]:
        """Write tensors into buffers whose first byte is the version's `origin`th, and return their fingerprints.

        sums: whether these are wanted.
        """
        tensors: dict[str, Any] = models.by_path(weights.params) | models.by_path(weights.qweights)
        names = models.hf_names(models.config_of(weights.graphdef))
        by_source: dict[Key, list[int]] = {}
        for number, place in enumerate(places):
            if place.source is not None:
                by_source.setdefault(place.source, []).append(number)
                continue
            for buffer in buffers:
                if buffer.fresh or self._in_parts:  # the same in every version: written once into a buffer of its own
                    buffer.device.write(buffer.pointer + place.offset - origin, place.constant)
        found: dict[Key, list[jax.Array]] = {}
        for (path, part), numbers in by_source.items():
            own = tensors[path] if part == "master" else getattr(tensors[path], part)
            lead = _lead(names[path])
            indices = [places[n].index for n in numbers]
            wanted = range(min(indices), max(indices) + 1)
            found[path, part] = []
            for first, piece in _pieces(own, jnp.bfloat16 if part == "master" else own.dtype, lead, wanted):
                any_of_them = next(iter(piece.values()))
                if sums:
                    found[path, part].append(row_sums(any_of_them, lead))
                end = first + (any_of_them.shape[0] if lead else 1)
                here = [p for p in (places[n] for n in numbers) if p.nbytes and first <= p.index < end]
                for buffer in buffers:
                    stack = piece[buffer.device.ordinal]
                    pointer, to = jax.block_until_ready(stack).unsafe_buffer_pointer(), buffer.pointer - origin
                    buffer.device.copy_all(
                        [(to + p.offset, pointer + (p.index - first) * p.nbytes, p.nbytes) for p in here]
                    )
                    if own is not stack:
                        buffer.device.synchronize()  # the piece is freed with this turn of the loop
                    del stack
                del piece, any_of_them
        for buffer in buffers:
            buffer.device.synchronize()
            buffer.fresh = False
        if not sums:
            return []
        digests = [fingerprint.digest(p.constant) for p in places]
        for source, numbers in by_source.items():
            pieces = [np.asarray(piece) for piece in found[source]]
            rows = np.concatenate([piece.reshape(-1, *piece.shape[-2:]) for piece in pieces])
            for number in numbers:
                digests[number] = fingerprint.digest_of_sums(rows[places[number].index])
        return digests

    def close(self) -> None:
        """Free the buffers; no version in them may be in use. Idempotent."""
        for pool in self._pools:
            pool.close()
