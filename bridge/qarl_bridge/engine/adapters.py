# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes LoRA adapters in a live vLLM model: h = bf(x A^T), d = bf(h B^T), y' = bf(y + d).

An engine serves one policy, so it does not use vLLM's LoRA, which has slots, names, folders, and products that add by
atomics. All A and B lie in one live tensor, allocated at the start as zeros. Every version is copied into this memory,
so captured CUDA graphs stay valid.

    prepare, while the engine decodes:  published tensors -> staged tensor -> fingerprints = manifest's
    switch, in the pause:               staged tensor -> live tensor, one copy
    compare, in the pause:              live tensor = staged tensor, one comparison

The staged tensor is laid out as the live one. A load without `prepare` (a complete version, another shard) stages in
the pause.

Layers that vLLM fuses have one adapter, whose B is block diagonal:

    h = x [A_q; A_k; A_v]^T        d = h diag(B_q, B_k, B_v)^T

The zeros of B add exact zeros, so two products compute three adapters. Products are the device's batch-invariant ones:
sums in float64 on a CPU (cpu/linear.py), `ops.product` on a GPU. On a GPU many multiprocessors share the inputs of A,
which has few outputs (`split_k.splits_of_adapter`).

A shard of a tensor-parallel engine holds all of A, and the rows of B for its layer's outputs. If a layer's inputs are
spread over shards, they are all-gathered first. So the results equal those of one shard.

The tensors are no parameters or buffers of a module, so vLLM's reload does not rebuild them. Not supported: experts,
embeddings, the head, and arithmetic=vllm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from qarl_bridge.protocol import adapters, messages, split_k
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.protocol.formats import stems
from qarl_bridge.server import staged_gpu
from qarl_bridge.server.staged import HostCopy

Product = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor | None], torch.Tensor]
Gather = Callable[[torch.Tensor], torch.Tensor]
_UNIT = 8  # ranks are filled up with zeros: a row of B has whole 16 bytes
_START = 256  # elements; a multiple of them precedes each matrix, as kernels want their operands
_COMPARED = {"cpu": 1 << 20, "cuda": 1 << 25}  # elements at once: they stay in cache, or are few kernels
_CHECKED_BYTES = 32 << 20  # of staged tensors whose fingerprints are computed at once


@dataclasses.dataclass(frozen=True)
class _Slice:
    """One published adapter in a fused layer's adapter: module name, its ranks and rows in the fused A and B, and the
    rows `of` the published B on this shard."""

    module: str
    ranks: slice
    rows: slice
    of: slice


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A live layer's adapter before it has memory: its published adapters, and N and K of the layer."""

    slices: Sequence[_Slice]
    outputs: int
    inputs: int
    gather: Gather | None

    def shapes(self) -> list[tuple[int, int]]:
        """Returns the shapes of A, [ranks, K], and B, [N, ranks]. Ranks are padded to a multiple of 8."""
        ranks = -(-self.slices[-1].ranks.stop // _UNIT) * _UNIT
        return [(ranks, self.inputs), (self.outputs, ranks)]


def _allocate(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocates one tensor of zeros for matrices of these shapes; returns it, and views of the matrices."""
    starts = [0]
    for rows, columns in shapes:
        starts.append(starts[-1] + -(-rows * columns // _START) * _START)
    with torch.inference_mode(False):
        whole = torch.zeros(starts[-1], dtype=dtype, device=device)
        return whole, [
            whole[start : start + rows * columns].view(rows, columns)
            for start, (rows, columns) in zip(starts, shapes, strict=False)
        ]


class Adapter:
    """The adapter of one live layer, which may fuse several published adapters.

    Args:
      product: a function (x [..., K], weight [N, K], splits, added) that returns d = bf(x W^T), whose sum has `splits`
        parts of K; with added [..., N] it returns bf(added + d).

    Attributes:
      a: [ranks, K]. b: [N, ranks].
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor, product: Product):
        self.a, self.b, self._product = a, b, product

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds the adapter's output for inputs x [..., K] to the layer's output y [..., N]."""
        h = self._product(x, self.a, split_k.splits_of_adapter(x.shape[-1]), None)
        return self._product(h, self.b, 1, y)


def _with(adapter: Adapter, forward: Callable[..., Any], gather: Gather | None) -> Callable[..., Any]:
    """Wraps a layer's `forward` to add the adapter's output. gather: all-gathers spread inputs, or None."""

    @functools.wraps(forward)
    def call(x: torch.Tensor, *args: Any, **named: Any) -> Any:
        out = forward(x, *args, **named)
        x = x if gather is None else gather(x)
        return (adapter(x, out[0]), *out[1:]) if isinstance(out, tuple) else adapter(x, out)

    return call


class Adapters:
    """All adapters of a live model. It wraps the `forward` of each layer that has an adapter.

    One thread at a time may call it, and with no GPU work of the last call left.

    Args:
      modules: the model's modules, by name.
      shapes: shapes of the published adapter tensors, by name.
      product: see `Adapter`. dtype: dtype in which `product` takes weights.
      rank: rank of this shard. gather: all-gathers inputs [..., K of a shard] to [..., K] where they are spread.

    Raises:
      BridgeError("setup"): the model has no layer for an adapter, or one of another shape.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        *,
        product: Product,
        dtype: torch.dtype,
        device: Any,
        rank: int = 0,
        gather: Gather | None = None,
    ):
        layers = _layers(modules, shapes, rank, gather)
        sizes = [shape for layer in layers.values() for shape in layer.shapes()]
        self._live, live = _allocate(sizes, dtype, device)
        self._staged, staged = _allocate(sizes, torch.bfloat16, device)
        self._of: dict[str, Adapter] = {}
        self._places: dict[str, tuple[torch.Tensor, slice]] = {}  # staged, and the rows of a published tensor there
        for number, (name, layer) in enumerate(layers.items()):
            adapter = self._of[name] = Adapter(live[2 * number], live[2 * number + 1], product)
            modules[name].forward = _with(adapter, modules[name].forward, layer.gather)
            a, b = staged[2 * number : 2 * number + 2]
            for one in layer.slices:
                self._places[one.module + adapters.A] = a[one.ranks], slice(None)
                self._places[one.module + adapters.B] = b[one.rows, one.ranks], one.of
        self._prepared = b""  # digest of the version that is staged; empty: unknown
        self._rest: Mapping[str, torch.Tensor] = {}  # its tensors that are no adapters
        self._raw = torch.empty(0, dtype=torch.uint8, device=device)  # staged tensors as published, some at a time
        self._stream: Any = None

    def __len__(self) -> int:
        return len(self._of)

    def prepare(self, manifest: messages.Manifest, parts: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Stages a partial version while the engine computes, and checks fingerprints of what lies on the device.

        Raises:
          BridgeError("torn"): names the first tensor whose staged bytes do not match the manifest.
        """
        self._prepared, self._rest = b"", {}
        with self._beside(), torch.no_grad():
            rest = {
                name: tensor.to(self._staged.device, copy=True)
                for part in parts
                for name, tensor in self.stage(part).items()
            }
            for part in _in_pieces(manifest):
                size = staged_gpu.whole_rows(part.total_bytes)
                if len(self._raw) < size:
                    self._raw = torch.empty(size, dtype=torch.uint8, device=self._raw.device)
                raw = self._raw[:size].zero_()
                piece = staged_gpu.DeviceCopy(part, raw)
                for name, tensor in next(piece.parts()).items():
                    tensor.copy_(self._places[name][0] if name in self._places else rest[name])
                (piece if raw.is_cuda else HostCopy(part, raw.numpy())).validate()
        self._prepared, self._rest = manifest.digest, rest

    def prepared(self, digest: bytes) -> Mapping[str, torch.Tensor] | None:
        """Returns the tensors that are no adapters of the prepared version, if it has this digest, else None."""
        return self._rest if digest and digest == self._prepared else None

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """A context whose GPU work runs beside the engine's, and is over at its end."""
        if not self._staged.is_cuda:
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(self._staged.device)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def stage(self, published: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies the adapters among published tensors to the staged tensor; returns the other tensors."""
        self._prepared = b""
        with torch.no_grad():
            for name, tensor in published.items():
                if name in self._places:
                    place, rows = self._places[name]
                    place.copy_(tensor[rows])
        return {name: tensor for name, tensor in published.items() if not adapters.is_adapter(name)}

    def switch(self) -> None:
        """Makes the staged version the live one."""
        with torch.no_grad():
            self._live.copy_(self._staged)

    def load(self, parts: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the tensors of parts that are no adapters, and at the end makes the adapters among them live."""
        for part in parts:
            yield self.stage(part)
        self.switch()

    def clear(self) -> None:
        """Sets all adapters to zero, so that the model computes the base."""
        with torch.no_grad():
            self._live.zero_()

    def compare(self) -> tuple[int, int]:
        """Compares every value of the live adapters with the staged version; returns counts (layers, rows).

        Raises:
          BridgeError("engine"): names the first layer that differs.
        """
        size = _COMPARED[self._live.device.type]
        pairs = zip(self._live.split(size), self._staged.split(size), strict=True)
        wrong = [(_bits(live) != _bits(staged.to(live.dtype))).any() for live, staged in pairs]
        if torch.stack(wrong).any():  # the host waits here, and nowhere else
            wanted = self._staged.to(self._live.dtype)
            for name, adapter in self._of.items():
                for matrix in (adapter.a, adapter.b):
                    staged = wanted.as_strided(matrix.shape, matrix.stride(), matrix.storage_offset())
                    if not torch.equal(matrix, staged):
                        raise BridgeError(f"read-back: the adapter of {name} is not the published one", "engine")
            raise BridgeError("read-back: the adapters are not the published ones", "engine")
        return len(self._of), sum(len(matrix) for one in self._of.values() for matrix in (one.a, one.b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int64)


def _layers(
    modules: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], rank: int, gather: Gather | None
) -> dict[str, _Layer]:
    """Finds the live layers that have adapters. Arguments and errors as of `Adapters`."""
    layers: dict[str, _Layer] = {}
    left = set(shapes)
    for name, module in modules.items():
        parts = stems(name)
        if not any(part + adapters.A in shapes for part in parts) or not hasattr(module, "quant_method"):
            continue
        sizes = getattr(module, "output_partition_sizes", None) or [module.output_size]
        shards = module.output_size // sum(sizes)  # over which its outputs are spread
        slices, ranks, row = [], 0, 0
        for part, size in zip(parts, sizes, strict=True):
            if part + adapters.A in shapes:
                own = shapes[part + adapters.A][0]
                wanted = [own, module.input_size], [shards * size, own]
                if (list(shapes[part + adapters.A]), list(shapes[part + adapters.B])) != wanted:
                    raise BridgeError(f"the adapter of {part} does not fit [{size}, {module.input_size}]", "setup")
                start = rank * size if shards > 1 else 0
                rows = slice(row, row + size)
                slices.append(_Slice(part, slice(ranks, ranks + own), rows, slice(start, start + size)))
                left -= {part + adapters.A, part + adapters.B}
                ranks += own
            row += size
        spread = getattr(module, "input_size_per_partition", module.input_size) < module.input_size
        layers[name] = _Layer(slices, row, module.input_size, gather if spread else None)
    if left:
        raise BridgeError(f"the engine has no layer for {min(left)}", "setup")
    return layers


def _in_pieces(manifest: messages.Manifest) -> Iterator[messages.Manifest]:
    """Cuts a manifest into manifests of at most 32 MiB or one tensor, with offsets from the piece's first byte."""
    entries: list[messages.TensorEntry] = []
    for entry in (*manifest.tensors, None):
        if entries and (entry is None or entry.offset + entry.nbytes - entries[0].offset > _CHECKED_BYTES):
            yield manifest.part(entries)
            entries = []
        if entry is not None:
            entries.append(entry)
