# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes LoRA adapters in a live vLLM model: h = bf(x A^T), d = bf(h B^T), y' = bf(y + d).

An engine serves one policy, so it does not use vLLM's LoRA, which has slots, names, folders, and products that add by
atomics. A and B are allocated at the start, as zeros. Every version is copied into this memory, so captured CUDA graphs
stay valid.

Layers that vLLM fuses have one adapter, whose B is block diagonal:

    h = x [A_q; A_k; A_v]^T        d = h diag(B_q, B_k, B_v)^T

The zeros of B add exact zeros, so two products compute three adapters. Products are the device's batch-invariant ones:
sums in float64 on a CPU (cpu/linear.py), `ops.product` on a GPU, without split-K.

A shard of a tensor-parallel engine holds all of A, and the rows of B for its layer's outputs. If a layer's inputs are
spread over shards, they are all-gathered first. So the results equal those of one shard.

The tensors are no parameters or buffers of a module, so vLLM's reload does not rebuild them. Not supported: experts,
embeddings, the head, and arithmetic=vllm.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from qarl_bridge.engine.readback.linear import SAMPLED_ROWS
from qarl_bridge.protocol import adapters
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.protocol.formats import FUSED

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Gather = Callable[[torch.Tensor], torch.Tensor]
OneHot = tuple[np.ndarray, torch.Tensor]  # inputs [R], and rows [R, K] that are 1 there
_UNIT = 8  # ranks are filled up with zeros: a row of B has whole 16 bytes
_CHUNK = 256  # one-hot rows pushed at once


@dataclasses.dataclass(frozen=True)
class _Slice:
    """One published adapter in a fused layer's adapter: module name, its ranks and rows in the fused A and B, and the
    rows `of` the published B on this shard."""

    module: str
    ranks: slice
    rows: slice
    of: slice

    def b(self, published: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the rows of the published B that this shard computes."""
        return published[self.module + adapters.B][self.of]


class Adapter:
    """The adapter of one live layer, which may fuse several published adapters.

    Args:
      slices: published adapters. outputs, inputs: N and K of the layer.
      product: a function (x [..., K], weight [N, K]) that returns bf(x W^T).
      dtype: dtype in which `product` takes weights.

    Attributes:
      a: [ranks, K]. b: [N, ranks]. Ranks are padded to a multiple of 8.
    """

    def __init__(
        self, slices: Sequence[_Slice], outputs: int, inputs: int, *, product: Product, dtype: torch.dtype, device: Any
    ):
        self.slices, self._product = slices, product
        ranks = -(-slices[-1].ranks.stop // _UNIT) * _UNIT
        with torch.inference_mode(False):
            self.a = torch.zeros((ranks, inputs), dtype=dtype, device=device)
            self.b = torch.zeros((outputs, ranks), dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Adds the adapter's output for inputs x [..., K] to the layer's output y [..., N]."""
        d = self._product(self._product(x, self.a), self.b)
        return y - (0.0 - d)  # y + d, but y itself, and not +0 for -0, where d is 0

    def load(self, published: Mapping[str, torch.Tensor]) -> None:
        """Copies this adapter's tensors among `published`, if any, into its memory."""
        with torch.no_grad():
            for one in self.slices:
                if one.module + adapters.A in published:
                    self.a[one.ranks].copy_(published[one.module + adapters.A])
                if one.module + adapters.B in published:
                    self.b[one.rows, one.ranks].copy_(one.b(published))

    def clear(self) -> None:
        """Sets A and B to zero, so that the layer computes the base model."""
        with torch.no_grad():
            self.a.zero_()
            self.b.zero_()

    def wanted(self, published: Mapping[str, torch.Tensor], end: str, inputs: np.ndarray) -> torch.Tensor:
        """Computes from published tensors the outputs [R, ranks or N] expected for one-hot rows at `inputs` [R].

        The outputs lie on the layer's device: of a version in host memory the host picks nothing.

        Args:
          end: `adapters.A` or `adapters.B`.
        """
        where = self.a.device
        out = torch.zeros(
            (len(inputs), len(self.a if end == adapters.A else self.b)), dtype=torch.bfloat16, device=where
        )
        for one in self.slices:
            at, columns, to, held = slice(None), inputs, one.ranks, published[one.module + end]
            if end == adapters.B:
                held = one.b(published)
                at = slice(*np.searchsorted(inputs, (one.ranks.start, one.ranks.stop)).tolist())
                columns, to = inputs[at] - one.ranks.start, one.rows
            out[at, to] = held.to(where).index_select(1, torch.from_numpy(columns).to(where)).t()
        return out

    def differing(
        self, published: Mapping[str, torch.Tensor], picked: Callable[[int], Sequence[OneHot]]
    ) -> tuple[Any, int]:
        """Multiplies one-hot rows by A and B, and compares the results with the published columns.

        Args:
          picked: a function from a matrix's number of inputs to its one-hot rows.

        Returns:
          (bool tensor: whether any value differs, number of rows).
        """
        wrong, pushed = torch.zeros((), dtype=torch.bool, device=self.a.device), 0
        for end, held in ((adapters.A, self.a), (adapters.B, self.b)):
            for inputs, one_hot in picked(held.shape[1]):
                wrong |= (self._product(one_hot, held) != self.wanted(published, end, inputs)).any()
                pushed += len(inputs)
        return wrong, pushed


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

    Args:
      modules: the model's modules, by name.
      shapes: shapes of the published adapter tensors, by name.
      product, dtype, device: see `Adapter`.
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
        self._of: dict[str, Adapter] = {}
        left = set(shapes)
        for name, module in modules.items():
            parent, dot, leaf = name.rpartition(".")
            parts = [f"{parent}{dot}{part}" for part in FUSED.get(leaf, (leaf,))]
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
            adapter = Adapter(slices, row, module.input_size, product=product, dtype=dtype, device=device)
            spread = getattr(module, "input_size_per_partition", module.input_size) < module.input_size
            module.forward = _with(adapter, module.forward, gather if spread else None)
            self._of[name] = adapter
        if left:
            raise BridgeError(f"the engine has no layer for {min(left)}", "setup")

    def __len__(self) -> int:
        return len(self._of)

    def load(self, published: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loads the adapters among published tensors; returns the other tensors."""
        for adapter in self._of.values():
            adapter.load(published)
        return {name: tensor for name, tensor in published.items() if not adapters.is_adapter(name)}

    def clear(self) -> None:
        """Sets all adapters to zero, so that the model computes the base."""
        for adapter in self._of.values():
            adapter.clear()

    def compare(self, published: Mapping[str, torch.Tensor], mode: str, rng: np.random.Generator) -> tuple[int, int]:
        """Compares live adapters with those among published tensors; returns counts (layers, one-hot rows).

        Args:
          mode: "full", or "sampled": some inputs drawn from `rng`, equal for all layers of a width.

        Raises:
          BridgeError("engine"): names the first layer that differs.
        """
        found: list[tuple[str, Any]] = []
        rows = 0

        @functools.cache
        def picked(width: int) -> list[OneHot]:
            most = width if mode == "full" else min(SAMPLED_ROWS, width)
            inputs = np.sort(rng.choice(width, most, replace=False))
            device = next(iter(self._of.values())).a.device
            every = torch.arange(width, device=device)
            chunks = (inputs[start : start + _CHUNK] for start in range(0, most, _CHUNK))
            return [(i, (every == torch.from_numpy(i).to(device)[:, None]).to(torch.bfloat16)) for i in chunks]

        with torch.inference_mode():
            for name, adapter in self._of.items():
                if adapter.slices[0].module + adapters.A in published:
                    wrong, pushed = adapter.differing(published, picked)
                    found.append((name, wrong))
                    rows += pushed
            if found:
                for index in torch.stack([wrong for _, wrong in found]).cpu().nonzero().flatten().tolist():
                    raise BridgeError(f"read-back: the adapter of {found[index][0]} is not the published one", "engine")
        return len(found), rows
