# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Functional read-back: checks by one-hot inputs which weights the live layers use.

A one-hot row sent through a linear layer returns a column of the weight matrix that its kernel uses, in any layout.
Expected values are computed from the staged tensors by the kernel's formula, on the tensors' device (host or GPU):

    activations bf16    y[n] = bf16(q*s)                          exact
    on a grid           y[n] = bf16(bf16((q-z)*s) * one)          one is 1, rounded to two or four bits (w2a2, w4a4)
    8-bit ones          s_x = 1/top, x_q = top: y[n] = bf16((top*q*s_x)*s_w), top 127 (int8) or 448 (e4m3)
                        (in either order on a GPU; on a CPU in float64, rounded to float32 first)

`formulas.py` has the codes q and scales s of every format. Rows of embeddings, norms and biases are compared as stored;
every row of an embedding with codes is looked up (`table_layers.py`).
Experts are read back through the fused layer (experts.py). On a GPU all layers run first, and their verdicts are
fetched together, without a wait for each layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from qarl_bridge.engine.readback import experts as readback_experts
from qarl_bridge.engine.readback import formulas
from qarl_bridge.engine.readback.formulas import Columns
from qarl_bridge.engine.units import ROUTER, in_units
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.protocol.formats import INDEX, stems

# One-hot rows per layer and publish in "sampled" mode, the same for all layers of a width; another 16 each time.
SAMPLED_ROWS = 16
_CHUNK = 256  # one-hot rows pushed at once in "full" mode
_TOKENS = 8192  # rows of an embedding that are looked up at once


@dataclasses.dataclass(frozen=True)
class Weight:
    """The published tensors of one module: a linear layer, an embedding or a norm.

    Attributes:
      prefix: Hugging Face name of the module.
      tensors: all its published torch tensors, by leaf ("weight", "weight_scale", ...).
    """

    prefix: str
    tensors: Mapping[str, Any]

    @property
    def first(self) -> Any:
        """The tensor of codes, or of unquantized values."""
        return next(tensor for leaf, tensor in self.tensors.items() if leaf not in formulas.NO_ARRAYS)

    @property
    def twice(self) -> Any | None:
        """The indices of duplicated inputs, int32 [M]; None if no channel is split."""
        index = self.tensors.get(INDEX)
        return None if index is None else index[0]

    @property
    def bias(self) -> Any | None:
        """The published bias, or None."""
        return self.tensors.get("bias")


class ReadBack:
    """Compares a live model's weights with staged tensors.

    Args:
      modules: every live module by name.
      tied: name of each head that shares an embedding's weight -> the embedding's name.
      device: the model's device.
      activations: how int4 layers take activations: "bf16" or "int8".
      context: makes the context manager in which layers are called (vLLM's config context).
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

    def compare(
        self, parts: Iterable[Mapping[str, Any]], mode: str, seed: int, *, partial: bool = False
    ) -> tuple[int, int]:
        """Compares live layers with published tensors; returns counts (layers, one-hot rows).

        Args:
          parts: torch tensors by Hugging Face name, on the host or on the model's device, in parts of whole layers.
          mode: "sampled" (SAMPLED_ROWS inputs of every layer, drawn from `seed`) or "full".
          partial: `parts` may lack layers, also experts.

        Raises:
          BridgeError("engine"): names the first layer that differs.
        """
        rng = np.random.default_rng(seed)
        missing = {readback_experts.prefix_of(n): n for n, m in self._modules.items() if readback_experts.is_experts(m)}
        layers = rows = 0
        for tensors in parts:
            compared, pushed = self._compare(tensors, mode, rng)
            layers, rows = layers + compared, rows + pushed
            for prefix in {readback_experts.prefix_of(name) for name in tensors}:
                missing.pop(prefix, None)
        if missing and not partial:
            raise BridgeError(f"read-back: no experts were published for {next(iter(missing.values()))}", "engine")
        return layers, rows

    def _compare(self, tensors: Mapping[str, Any], mode: str, rng: np.random.Generator) -> tuple[int, int]:
        layers = rows = 0
        seen: set[str] = set()
        verdicts: list[tuple[Callable[[], None], Any]] = []  # how to explain it, whether it is wrong
        banks = readback_experts.Staged.by_layer(tensors, self._activations)
        published: dict[str, dict[str, Any]] = {}
        for full, tensor in tensors.items():
            prefix, _, leaf = full.rpartition(".")
            published.setdefault(prefix, {})[leaf] = tensor
        sampled: dict[int, Columns] = {}  # by width; all layers of a width are asked for the same inputs
        rows_of = functools.cache(functools.partial(readback_experts.Rows.draw, rng, self._device))  # for experts
        with torch.inference_mode(), self._context():
            for name, module in self._modules.items():
                if readback_experts.is_experts(module):
                    staged = banks.get(readback_experts.prefix_of(name))
                    if staged is None:
                        continue
                    found, pushed = readback_experts.read_back(
                        name, module, staged, mode=mode, rng=rng, rows_of=rows_of
                    )
                    verdicts += found
                    seen.update(staged.names)
                    rows += pushed
                    layers += 1
                    continue
                weights = self._weights(name, published)
                if weights is None:
                    continue
                is_table = getattr(getattr(module, "quant_method", None), "is_table", False)
                if self._is_stored(name, weights[0]) and not is_table:
                    seen.update(f"{name}.{leaf}" for leaf in ("weight", "bias"))
                    verdicts += self._stored(name, module, weights[0])
                else:
                    seen.update(f"{weight.prefix}.{leaf}" for weight in weights for leaf in weight.tensors)
                    formula = formulas.find(weights[0].tensors, self._activations)
                    if is_table:
                        verdicts.append(self._looked_up(name, module, weights[0], formula))
                    if not is_table or module.quant_method.multiplies:
                        asked, pushed = self._asked(weights[0], formula, mode, rng, sampled)
                        verdicts += self._functional(name, module, weights, formula, asked)
                        rows += pushed
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

    def _asked(
        self,
        weight: Weight,
        formula: formulas.Formula,
        mode: str,
        rng: np.random.Generator,
        sampled: dict[int, Columns],
    ) -> tuple[Iterator[Columns], int]:
        """Returns the one-hot rows for a layer, in chunks, and their number. sampled: those of each width."""
        first, twice = weight.first, weight.twice
        width = first.shape[1] * formula.inputs - (0 if twice is None else len(twice))
        if mode == "full":
            every = np.arange(width)
            chunks = (every[start : start + _CHUNK] for start in range(0, width, _CHUNK))
            return (self._columns(chunk, width, first) for chunk in chunks), width
        if width not in sampled:
            picked = np.sort(rng.choice(width, min(SAMPLED_ROWS, width), replace=False))
            sampled[width] = self._columns(picked, width, first)
        return iter([sampled[width]]), len(sampled[width].picked)

    def _weights(self, name: str, published: Mapping[str, Mapping[str, Any]]) -> list[Weight] | None:
        """Collects the published tensors of a live module, in row order; None if any are missing."""
        # A tied head is published as the embedding, which is stored; here it is multiplied with.
        prefixes = [self._tied[name]] if name in self._tied else stems(name)
        found = [Weight(prefix, published[prefix]) for prefix in prefixes if prefix in published]
        return found if len(found) == len(prefixes) else None

    def _is_stored(self, name: str, weight: Weight) -> bool:
        """Tells whether a module's values are compared as stored, because it is no linear layer."""
        module = self._modules[name]
        multiplies = hasattr(module, "quant_method") and "Embedding" not in type(module).__name__
        return name not in self._tied and (not multiplies or weight.first.ndim != 2)

    def _stored(self, name: str, module: Any, shard: Weight) -> list[tuple[Callable[[], None], Any]]:
        def explain() -> None:
            raise BridgeError(f"read-back: {name} does not hold the published values", "engine")

        live = module.weight.detach()[: shard.first.shape[0]]
        published = shard.first.to(live.device)
        if live.dtype != published.dtype:
            live, published = live.float(), published.float()
        return [(explain, (live != published).any())]

    def _looked_up(
        self, name: str, module: Any, weight: Weight, formula: formulas.Formula
    ) -> tuple[Callable[[], None], Any]:
        """Compares every row that an embedding or a head with codes looks up."""

        def explain() -> None:
            raise BridgeError(f"read-back: {name} does not look up the published rows", "engine")

        count, wrong = weight.first.shape[0], []
        for start in range(0, count, _TOKENS):
            own = slice(start, start + _TOKENS)
            tensors = {leaf: x[own] if x.ndim == 2 else x for leaf, x in weight.tensors.items()}
            wanted = formula.served(tensors, torch.float32).to(self._device)
            got = module.quant_method.embedding(module, torch.arange(count, device=self._device)[own])
            wrong.append((got.float() != wanted).any())
        return explain, torch.stack(wrong).any()

    def _columns(self, picked: np.ndarray, width: int, staged: Any) -> Columns:
        return Columns(picked, width, computing=self._device, staged=staged.device)

    def _functional(
        self, name: str, module: Any, weights: list[Weight], formula: formulas.Formula, asked: Iterator[Columns]
    ) -> list[tuple[Callable[[], None], Any]]:
        """Compares a linear layer's outputs for one-hot rows with the expected columns. asked: rows, in chunks."""
        verdicts: list[tuple[Callable[[], None], Any]] = []
        bias = getattr(module, "bias", None)
        if bias is not None:

            def explain_bias() -> None:
                raise BridgeError(f"read-back: the bias of {name} does not hold the published values", "engine")

            want_bias = torch.cat([weight.bias for weight in weights if weight.bias is not None])
            # Marlin keeps a bias in its own order: its values are then compared as a set.
            live, want_bias = bias.detach().float().cpu(), want_bias.float().cpu()
            if "Marlin" in type(getattr(getattr(module, "scheme", None), "kernel", None)).__name__:
                live, want_bias = live.sort().values, want_bias.sort().values
            verdicts.append((explain_bias, torch.tensor(not torch.equal(live, want_bias))))

        def push(columns: Columns) -> tuple[Any, list[Any], Any]:
            got = module.quant_method.apply(module, columns.one_hot, None).float()
            found = formula.expected_split([w.tensors for w in weights], columns, weights[0].twice)
            if name.endswith(ROUTER) and weights[0].first.dtype == torch.bfloat16:  # as some engines round its weight
                rounded = in_units(weights[0].first, 16).bfloat16()  # which loses nothing
                found = [*found, *formula.expected([{"weight": rounded}], columns)]
            alternatives = [x.to(self._device) for x in found]
            got = got[:, : alternatives[0].shape[1]]  # a padded vocabulary has rows of its own
            wrong = ~torch.isfinite(got)
            return got, alternatives, wrong | functools.reduce(torch.logical_and, (got != a for a in alternatives))

        # `explain` outlives the layer's turn: it does not hold the rows, but makes them anew.
        for columns in asked:

            def explain(picked: np.ndarray = columns.picked, width: int = columns.width) -> None:
                with torch.inference_mode(), self._context():
                    got, alternatives, wrong = push(self._columns(picked, width, weights[0].first))
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
