# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Stages a version on the learner's GPU: copies QTensors to the engine's tensors without leaving the device.

    stager = DeviceStager([gpu_buffers(0)], transport="auto")
    staged = stager.stage(weights, version=..., model=..., scheme=...)    # a sender.DeviceVersion

The learner keeps its weights stacked over layers and in wire layout (the byte layout that the engine loads). A layer's
tensor is a contiguous piece of a stack: publishing it is one device-to-device copy into a staging buffer. An engine on
this GPU maps the buffer (transport/cuda_ipc.py); an engine on another GPU is sent it (transport/nccl.py). Masters
without a QTensor (embedding, norms, head, all of a bf16 policy) are cast to bfloat16 first, some layers at a time. A
jitted program computes the fingerprints from the stacks, so that the bridge checks the copy.

Two buffers are held, for the served version and the next; or one, which the next version overwrites
(`staging_buffers`). A sharded learner all-gathers its shards, some layers at a time, onto each GPU with an engine.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from qarl_bridge.client import sender
from qarl_bridge.protocol import expert_stacks, fingerprint, formats, messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models
from qarl_jax.numerics.float32 import dtype_in
from qarl_jax.quant import QTensor
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.vllm import all_gather
from qarl_jax.types import UserError

Key = tuple[str, str]  # (path of a parameter, name of an array of its QTensor, or "master")


@functools.partial(jax.jit, static_argnames="lead")
def row_sums(x: jax.Array, lead: int) -> jax.Array:
    """Computes the row sums of the fingerprint (`qarl_bridge.protocol.fingerprint`) of every tensor in a stack.

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
    """Lists every tensor of a published version with source and offset, in the order embedding, layers, norm, head.

    A layer's experts are one tensor. Leaves of `weights.elsewhere` are left out. Only shapes are read: `weights` may be
    abstract.
    """
    config = models.config_of(weights.graphdef)
    names = models.hf_names(config)
    tensors: dict[str, Any] = models.by_path(weights.params) | models.by_path(weights.qweights)
    places: list[_Place] = []
    end = 0
    for place in itertools.chain.from_iterable(models.checkpoint_order(config)):
        if place.path in weights.elsewhere:
            continue
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
    """Lists a checkpoint's tensors by name: (dtype, shape), in the order of `engine_tensors`.

    Every expert has separate tensors here; in `layout` a layer's experts are one stack. `weights` may be abstract.
    """
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
    """Yields (name, dtype, shape, array) of each tensor of a weight, cut out of a stack with `lead` dims.

    The tensor with the weight's own shape comes last; it is no array, and `array` is empty.
    """
    if not isinstance(tensor, QTensor):
        yield name, dtype_in(tensor, jnp.bfloat16), tuple(tensor.shape[lead:]), "master"
        return
    layout = tensor.scheme.wire
    names = layout.names(name)
    for array in layout.arrays:
        held = tensor.arrays[array.name]
        yield names[array.name], held.dtype, array.sent(tuple(held.shape[lead:])), array.name
    if "" in names:
        yield names[""], np.int64, (*tensor.shape[lead:-2], 2), ""


def _lead(names: np.ndarray) -> int:
    """Stack dims that tensors are cut out of: layers, if any. Experts stay together."""
    return min(1, names.ndim)


_Tensors = Sequence[tuple[Key, all_gather.Piece, Mapping[int, jax.Array]]]  # and where the piece is, by the GPU


def _wanted(places: Sequence[_Place], weights: PolicyWeights) -> dict[Key, all_gather.Piece]:
    """Lists the sources of published tensors: for each source the first to the last tensor that is needed."""
    tensors: dict[str, Any] = models.by_path(weights.params) | models.by_path(weights.qweights)
    names = models.hf_names(models.config_of(weights.graphdef))
    indices: dict[Key, list[int]] = {}
    for place in places:
        if place.source is not None:
            indices.setdefault(place.source, []).append(place.index)
    wanted = {}
    for (path, part), found in indices.items():
        own = tensors[path] if part == "master" else tensors[path].arrays[part]
        dtype = np.dtype(dtype_in(own, jnp.bfloat16) if part == "master" else own.dtype)
        stack = all_gather.Stack(own, dtype, _lead(names[path]))
        wanted[path, part] = all_gather.Piece(stack, range(0 if stack.is_there else min(found), max(found) + 1))
    return wanted


def _gather(batch: Sequence[tuple[Key, all_gather.Piece]]) -> _Tensors:
    made = all_gather.gathered([piece for _, piece in batch])
    return [(key, piece, on) for (key, piece), on in zip(batch, made, strict=True)]


def _write(buffer: Any, places: Sequence[_Place], tensors: _Tensors, origin: int) -> None:
    """Start copies of tensors to their places in a buffer whose first byte is the version's `origin`th."""
    by_source: dict[Key, list[_Place]] = {}
    for place in places:
        if place.source is not None and place.nbytes:
            by_source.setdefault(place.source, []).append(place)
    for key, (_, wanted), on in tensors:
        source, to = on[buffer.device.ordinal].unsafe_buffer_pointer(), buffer.pointer - origin
        here = [place for place in by_source.get(key, []) if place.index in wanted]
        buffer.device.copy_all([(to + p.offset, source + (p.index - wanted.start) * p.nbytes, p.nbytes) for p in here])


def _write_constants(buffer: Any, places: Sequence[_Place], origin: int) -> None:
    for place in places:
        if place.source is None:
            buffer.device.write(buffer.pointer + place.offset - origin, place.constant)


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


def visible_gpus() -> list[str]:
    """Lists the names in this process's CUDA_VISIBLE_DEVICES; empty if the process sees all GPUs."""
    return [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]


def own_gpus(count: int, shards: int = 1) -> str:
    """Assigns this process's GPUs to `count` engines of `shards` shards, as `visible_gpus`; empty if it has none.

    Raises:
      UserError: an engine has more shards than the process has GPUs.
    """
    numbers = [int(device.local_hardware_id) for device in jax.local_devices() if device.platform == "gpu"]
    seen = visible_gpus()
    names = [seen[number] if seen else str(number) for number in numbers]
    if not names:
        return ""
    if len(names) < shards:
        raise UserError(
            f"rollout.engine.tensor_parallel_size={shards}, and each process has {len(names)} GPU(s): start one process"
            f" per host, give each {shards} GPUs (distributed.local_devices), or set tensor_parallel_size=1."
        )
    places = [names[number % len(names)] for number in range(count * shards)]
    return ";".join(",".join(places[first : first + shards]) for first in range(0, len(places), shards))


def gpus_of(weights: PolicyWeights, engines: Sequence[str], platform: str = "gpu") -> list[int]:
    """Lists this process's GPUs that versions are staged on: those with weights and an engine, else the first with
    weights.

    Args:
      engines: the CUDA_VISIBLE_DEVICES of each engine; empty: this process's.

    Raises:
      BridgeError("unshared"): some weights are not on a GPU.
    """
    devices = {device for leaf in jax.tree.leaves((weights.params, weights.qweights)) for device in leaf.devices()}
    others = {device.platform for device in devices} - {platform}
    if others:
        raise BridgeError(f"the learner runs on {', '.join(others)}, not on a GPU", "unshared")
    own = jax.process_index()
    numbers = sorted(int(device.local_hardware_id) for device in devices if device.process_index == own)
    seen = visible_gpus()

    def number(engine: str) -> int:
        first = engine.split(",")[0]
        return seen.index(first) if first in seen else int(first) if first.isdigit() and not seen else numbers[0]

    return sorted({number(engine) for engine in engines} & set(numbers)) or numbers[:1]


CHUNK_BYTES = 2 * 2**30
"""Size of the buffer of a chunked version. A larger layer is a part all the same."""


def parts_of(places: Sequence[_Place], limit: int | None = None) -> list[int]:
    """Cuts a version into chunks of whole layers: as many as fit `limit` bytes, at least one. Returns their ends in
    `places`.

    Args:
      limit: bytes; CHUNK_BYTES if None.
    """
    limit = CHUNK_BYTES if limit is None else limit
    layers = [
        list(group) for _, group in itertools.groupby(range(len(places)), lambda n: formats.layer_of(places[n].name))
    ]
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


def spans_of(places: Sequence[_Place], ends: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (first byte, number of bytes) of each chunk of `parts_of`."""
    spans = []
    for first, end in itertools.pairwise([0, *ends]):
        start, last = places[first].offset, places[end - 1]
        spans.append((start, last.offset + last.nbytes - start))
    return spans


class DeviceStager:
    """Writes versions into staging buffers on the learner's GPUs.

    Args:
      pools: the buffer pool of each GPU with an engine; every one of these GPUs holds the weights or a shard of them.
      transport: how versions reach engines, see `sender.DeviceVersion`.
      chunked: a buffer holds one chunk of a version (`sender.ChunkedVersion`), written when the bridge asks for it.
    """

    def __init__(self, pools: Sequence[Any], transport: str = "auto", *, chunked: bool = False):
        self._pools = pools
        self._transport = transport
        self._chunked = chunked
        self._layouts: dict[Any, list[_Place]] = {}
        self._turn = threading.Lock()
        # Engines ask for the same parts at almost the same time: the last gathered tensors are kept for the others.
        self._gathered: collections.deque[tuple[Any, _Tensors]] = collections.deque(maxlen=2 if len(pools) > 1 else 0)

    def stage(
        self, weights: PolicyWeights, *, version: messages.Version, model: bytes, scheme: bytes
    ) -> sender.DeviceVersion:
        """Writes a version into staging buffers, complete on return. A `chunked` stager writes later: keep `weights`
        alive until the version is published. Arguments as in `sender.stage`.

        Raises:
          BridgeError("limits"): the GPU has no room for the buffer.
        """
        start = time.perf_counter()
        if weights.graphdef not in self._layouts:
            self._layouts[weights.graphdef] = layout(weights)
        places = self._layouts[weights.graphdef]
        ends = parts_of(places) if self._chunked else [len(places)]
        spans = spans_of(places, ends)
        buffers: list[Any] = []
        try:
            buffers += (pool.take(sender.align(max(size for _, size in spans))) for pool in self._pools)
            digests = self._stage([] if self._chunked else buffers, places, weights)
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
        if not self._chunked:
            return sender.DeviceVersion(manifest, buffers, time.perf_counter() - start, self._transport)
        held = _Held(weights)

        def write(part: int, buffer: Any) -> None:
            first, end = [0, *ends][part : part + 2]
            mine, origin = places[first:end], spans[part][0]
            buffer.device.clear(buffer.pointer, buffer.size)  # between tensors are zeros, of which sums are taken
            _write_constants(buffer, mine, origin)
            tensors = self._part((version, part), mine, held)
            _write(buffer, mine, tensors, origin)
            buffer.device.synchronize()
            del tensors  # not before they are copied

        return sender.ChunkedVersion(manifest, buffers, time.perf_counter() - start, self._transport, ends, write)

    def _stage(self, buffers: Sequence[Any], places: Sequence[_Place], weights: PolicyWeights) -> list[bytes]:
        """Write a version into each of some buffers, if any, and return its tensors' fingerprints."""
        for buffer in buffers:
            if buffer.fresh:  # the same in every version: written once
                _write_constants(buffer, places, 0)
        sums: dict[Key, list[jax.Array]] = {}
        for batch in all_gather.batches(_wanted(places, weights)):
            tensors = _gather(batch)
            for key, piece, on in tensors:
                sums.setdefault(key, []).append(row_sums(next(iter(on.values())), piece.stack.lead))
            for buffer in buffers:
                _write(buffer, places, tensors, 0)
            for buffer in buffers:
                buffer.device.synchronize()  # frees the gathered tensors in this iteration
            del tensors
        for buffer in buffers:
            buffer.fresh = False
        rows = {
            key: np.concatenate([np.asarray(one).reshape(-1, *one.shape[-2:]) for one in several])
            for key, several in sums.items()
        }
        return [
            fingerprint.digest(p.constant) if p.source is None else fingerprint.digest_of_sums(rows[p.source][p.index])
            for p in places
        ]

    def _part(self, key: Any, places: Sequence[_Place], held: _Held) -> _Tensors:
        """The tensors of a part, on every GPU."""
        with self._turn:
            for known, tensors in self._gathered:
                if known == key:
                    return tensors
            tensors = _gather(list(_wanted(places, held.weights(key[0])).items()))
            self._gathered.append((key, tensors))
            return tensors

    def forget(self) -> None:
        """Frees the chunks that were gathered last, after every engine has them."""
        with self._turn:
            self._gathered.clear()

    def close(self) -> None:
        """Frees the buffers; no version in them may be in use. Idempotent."""
        for pool in self._pools:
            pool.close()
