# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Functional read-back: which weights do the live layers really use?

One-hot rows are pushed through every live linear layer; what comes out is the column of the weight matrix that the
kernel really uses, whatever layout it keeps. Expected values are computed from the staged tensors by the kernel's own
formula, where the staged tensors are (host or GPU):

    bf16, int4    y[n] = w[n, k] = bf16(q*s)                     exact
    int8, w4a8    s_x = 1/127, x_q = 127: y[n] = bf16((127*q*s_x)*s_w)
    fp8           s_x = 1/448, x_q = 448: y[n] = bf16((448*q*s_x)*s_w)
                  (these two in either order on a GPU; on a CPU in float64, rounded to float32 first)

Rows of embeddings, norms and biases are compared as stored. Experts are read back through the fused layer itself
(readback/experts.py). On a GPU every layer is pushed first and the verdicts are fetched together, so that nothing waits
per layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from qarl_bridge.engine.readback import experts as readback_experts
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.protocol.formats import FUSED

# One-hot rows per layer and publish in "sampled" mode, the same for all layers of a width; another 16 each time.
SAMPLED_ROWS = 16
_CHUNK = 256  # one-hot rows pushed at once in "full" mode


@dataclasses.dataclass(frozen=True)
class Shard:
    """One published linear weight (or a plain stored one) under its Hugging Face prefix; torch tensors."""

    kind: str  # "stored" | "dense" | "int8" | "fp8" | "int4"
    names: tuple[str, ...]
    weight: Any
    scale: Any
    bias: Any
    width: int  # K

    @staticmethod
    def find(prefix: str, tensors: Mapping[str, Any]) -> Shard | None:
        """The shard published under `prefix`, if any."""
        bias_name = f"{prefix}.bias"
        bias = tensors.get(bias_name)
        extra = (bias_name,) if bias is not None else ()
        scale = tensors.get(f"{prefix}.weight_scale")
        packed = tensors.get(f"{prefix}.weight_packed")
        if packed is not None:
            names = (f"{prefix}.weight_packed", f"{prefix}.weight_scale", f"{prefix}.weight_shape", *extra)
            return Shard("int4", names, packed, scale, bias, packed.shape[1] * 8)
        weight = tensors.get(f"{prefix}.weight")
        if weight is None:
            return None
        if scale is not None:
            kind = "int8" if weight.dtype == torch.int8 else "fp8"
            names = (f"{prefix}.weight", f"{prefix}.weight_scale", *extra)
            return Shard(kind, names, weight, scale, bias, weight.shape[1])
        kind = "dense" if weight.ndim == 2 else "stored"
        return Shard(kind, (f"{prefix}.weight", *extra), weight, None, bias, weight.shape[-1])


class Columns:
    """One-hot rows at some inputs, and what it takes to pick their columns from staged tensors.

    Made once for all layers of a width: on a GPU, a read-back takes as long as its kernels take to start.

    Attributes:
      picked: the inputs, int64 [R].
      width: K.
      one_hot: bfloat16 [R, K], where the model computes.
      index: `picked` where the staged tensors are.
    """

    def __init__(self, picked: np.ndarray, width: int, *, computing: Any, staged: Any):
        self.picked, self.width = picked, width
        self.index = torch.from_numpy(picked).to(staged)
        every = torch.arange(width, device=computing)
        self.one_hot = (every == self.index.to(computing)[:, None]).to(torch.bfloat16)
        self._word, self._shift = self.index // 8, (4 * (self.index % 8)).to(torch.int32)
        self._groups: dict[int, Any] = {}

    def of(self, tensors: Sequence[Any]) -> Any:
        """Columns of matrices side by side: [N_i, K] each -> [R, sum of N_i]."""
        return torch.cat([tensor.index_select(1, self.index) for tensor in tensors]).t()

    def codes(self, packed: Sequence[Any]) -> Any:
        """int4 codes of packed words [N_i, K / 8] -> float32 [R, sum of N_i]."""
        words = torch.cat([words.index_select(1, self._word) for words in packed])
        return (((words >> self._shift) & 0xF) - 8).t().float()

    def scales(self, tensors: Sequence[Any]) -> Any:
        """Group scales [N_i, groups] -> float32 [R, sum of N_i]."""
        count = tensors[0].shape[1]
        if count not in self._groups:
            self._groups[count] = self.index // (self.width // count)
        return torch.cat([scale.index_select(1, self._groups[count]) for scale in tensors]).t().float()


def expected(shards: Sequence[Shard], columns: Columns, activations: str) -> list[Any]:
    """What one-hot rows must return from a layer of these shards: one alternative [R, N] float32, or two either of
    which is right.

    Args:
      shards: of one kind, in row order.
      activations: of int4 layers, see `ReadBack`.
    """
    kind = shards[0].kind
    if kind == "dense":
        return [columns.of([shard.weight for shard in shards]).float()]
    if kind == "int4":
        codes = columns.codes([shard.weight for shard in shards])
        if activations == "bf16":
            return [_bf16(codes * columns.scales([shard.scale for shard in shards]))]
        scale = columns.scales([shard.scale for shard in shards])
    else:
        bytes_ = columns.of([shard.weight.view(torch.uint8) for shard in shards])  # float8 cannot be indexed everywhere
        codes = bytes_.contiguous().view(shards[0].weight.dtype).float()
        scale = torch.cat([shard.scale.float().reshape(1, -1) for shard in shards], dim=1)
    top = 448.0 if kind == "fp8" else 127.0
    # A float32 tensor: a Python float would be multiplied in float64 on some backends. Both are exact as the kernel
    # has them: |acc| < 2^24.
    x_scale = torch.tensor(1 / top, dtype=torch.float32, device=codes.device)
    acc = codes * top
    if columns.one_hot.device.type == "cpu":  # the bridge's own layers
        return [_bf16((acc.double() * scale.double() * x_scale.double()).float())]
    return [_bf16((acc * x_scale) * scale), _bf16((acc * scale) * x_scale)]


def _bf16(x: Any) -> Any:
    return x.to(torch.bfloat16).float()


class ReadBack:
    """Comparisons of a live model with staged tensors.

    Args:
      modules: every live module by name.
      tied: head -> embedding whose weight it shares.
      device: where the model computes.
      activations: what int4 layers take: "bf16" or "int8".
      context: what a layer's call needs around it (vLLM's config context).
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        tied: Mapping[str, str],
        *,
        device: Any,
        activations: str,
        context: Callable[[], contextlib.AbstractContextManager],
    ):
        self._modules = modules
        self._tied = tied
        self._device = device
        self._activations = activations
        self._context = context

    def compare(self, parts: Iterable[Mapping[str, Any]], mode: str, seed: int) -> tuple[int, int]:
        """(layers compared, one-hot rows pushed); BridgeError("engine") names the first layer that differs.

        Args:
          parts: torch tensors by Hugging Face name, on the host or on the model's device; whole layers together.
          mode: "sampled" (SAMPLED_ROWS inputs of every layer, drawn from `seed`) or "full".
        """
        rng = np.random.default_rng(seed)
        missing = {readback_experts.prefix_of(n): n for n, m in self._modules.items() if readback_experts.is_experts(m)}
        layers = rows = 0
        for tensors in parts:
            compared, pushed = self._compare(tensors, mode, rng)
            layers, rows = layers + compared, rows + pushed
            for prefix in {readback_experts.prefix_of(name) for name in tensors}:
                missing.pop(prefix, None)
        if missing:
            raise BridgeError(f"read-back: no experts were published for {next(iter(missing.values()))}", "engine")
        return layers, rows

    def _compare(self, tensors: Mapping[str, Any], mode: str, rng: np.random.Generator) -> tuple[int, int]:
        layers = rows = 0
        seen: set[str] = set()
        verdicts: list[tuple[Callable[[], None], Any]] = []  # how to explain it, whether it is wrong
        asked: Iterator[Columns]
        banks = readback_experts.Staged.by_layer(tensors)
        sampled: dict[int, Columns] = {}  # by width; all layers of a width are asked for the same inputs
        rows_of = functools.cache(functools.partial(readback_experts.Rows.draw, rng, self._device))  # for experts
        with torch.inference_mode(), self._context():
            for name, module in self._modules.items():
                if readback_experts.is_experts(module):
                    staged = banks.get(readback_experts.prefix_of(name))
                    if staged is None:
                        continue
                    found, pushed = readback_experts.read_back(
                        name, module, staged, mode=mode, rng=rng, w4a8=self._activations == "int8", rows_of=rows_of
                    )
                    verdicts += found
                    seen.update(staged.names)
                    rows += pushed
                    layers += 1
                    continue
                shards = self._shards(name, tensors)
                if shards is None:
                    continue
                seen.update(n for shard in shards for n in shard.names)
                if shards[0].kind == "stored":
                    verdicts += self._stored(name, module, shards[0])
                else:
                    width = shards[0].width
                    if mode == "full":
                        every = np.arange(width)
                        chunks = (every[start : start + _CHUNK] for start in range(0, width, _CHUNK))
                        asked = (self._columns(chunk, shards[0]) for chunk in chunks)
                        rows += width
                    else:
                        if width not in sampled:
                            picked = np.sort(rng.choice(width, min(SAMPLED_ROWS, width), replace=False))
                            sampled[width] = self._columns(picked, shards[0])
                        asked = iter([sampled[width]])
                        rows += len(sampled[width].picked)
                    verdicts += self._functional(name, module, shards, asked)
                layers += 1
        unseen = [n for n in tensors if n not in seen]
        if unseen:
            raise BridgeError(
                f"read-back found no live layer for {len(unseen)} tensor(s), first: {unseen[0]}", "engine"
            )
        if verdicts:
            wrong = torch.stack([verdict.reshape(()).to(self._device) for _, verdict in verdicts])
            for index in wrong.cpu().nonzero().flatten().tolist():
                verdicts[index][0]()
        return layers, rows

    def _shards(self, name: str, tensors: Mapping[str, Any]) -> list[Shard] | None:
        if name in self._tied:  # published as the embedding, which is stored; here it is multiplied with
            shared = Shard.find(self._tied[name], tensors)
            return None if shared is None else [dataclasses.replace(shared, kind="dense")]
        prefix, _, leaf = name.rpartition(".")
        parts = FUSED.get(leaf, (leaf,))
        shards = [Shard.find(f"{prefix}.{part}" if prefix else part, tensors) for part in parts]
        if any(shard is None for shard in shards):
            return None
        if not hasattr(self._modules[name], "quant_method") or "Embedding" in type(self._modules[name]).__name__:
            shards = [dataclasses.replace(shard, kind="stored") for shard in shards if shard is not None]
        return [shard for shard in shards if shard is not None]

    def _stored(self, name: str, module: Any, shard: Shard) -> list[tuple[Callable[[], None], Any]]:
        def explain() -> None:
            raise BridgeError(f"read-back: {name} does not hold the published values", "engine")

        live = module.weight.detach()[: shard.weight.shape[0]]
        published = shard.weight.to(live.device)
        if live.dtype != published.dtype:
            live, published = live.float(), published.float()
        return [(explain, (live != published).any())]

    def _columns(self, picked: np.ndarray, shard: Shard) -> Columns:
        return Columns(picked, shard.width, computing=self._device, staged=shard.weight.device)

    def _functional(
        self, name: str, module: Any, shards: list[Shard], asked: Iterator[Columns]
    ) -> list[tuple[Callable[[], None], Any]]:
        """`asked`: the one-hot rows to push, a chunk at a time."""
        verdicts: list[tuple[Callable[[], None], Any]] = []
        bias = getattr(module, "bias", None)
        if bias is not None:

            def explain_bias() -> None:
                raise BridgeError(f"read-back: the bias of {name} does not hold the published values", "engine")

            want_bias = torch.cat([shard.bias for shard in shards if shard.bias is not None])
            # Marlin keeps a bias in its own order: its values are then compared as a set.
            live, want_bias = bias.detach().float().cpu(), want_bias.float().cpu()
            if "Marlin" in type(getattr(getattr(module, "scheme", None), "kernel", None)).__name__:
                live, want_bias = live.sort().values, want_bias.sort().values
            verdicts.append((explain_bias, torch.tensor(not torch.equal(live, want_bias))))

        def push(columns: Columns) -> tuple[Any, list[Any], Any]:
            got = module.quant_method.apply(module, columns.one_hot, None).float()
            alternatives = [x.to(self._device) for x in expected(shards, columns, self._activations)]
            got = got[:, : alternatives[0].shape[1]]  # a padded vocabulary has rows of its own
            wrong = ~torch.isfinite(got)
            return got, alternatives, wrong | functools.reduce(torch.logical_and, (got != a for a in alternatives))

        # `explain` outlives the layer's turn: it does not hold the rows, but makes them anew.
        for columns in asked:

            def explain(picked: np.ndarray = columns.picked) -> None:
                with torch.inference_mode(), self._context():
                    got, alternatives, wrong = push(self._columns(picked, shards[0]))
                places = wrong.nonzero().cpu()
                if len(places):
                    row, out = (int(i) for i in places[0])
                    raise BridgeError(
                        f"read-back: {name} holds {float(got[row, out])!r} at [{out}, {int(picked[row])}], published "
                        f"was {float(alternatives[0][row, out])!r} ({len(places)} of {wrong.numel()} values differ)",
                        "engine",
                    )
                raise BridgeError(f"read-back: {name} differed, and then did not: its kernel is not stable", "engine")

            verdicts.append((explain, push(columns)[2].any()))
        return verdicts
