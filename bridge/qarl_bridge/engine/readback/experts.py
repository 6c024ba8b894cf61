# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads back the experts of a live vLLM model, and refuses experts that vLLM cannot serve.

An expert's two products have a nonlinearity between them, so one-hot rows do not return a weight. Two other checks:

  stored      where the layout is known (the bridge's own experts, on a CPU), every value of the live weights is
              compared, bit by bit, with the value computed from the staged tensors;
  functional  random rows are sent through the live layer, each to k experts, and compared with a float32 computation
              over the staged weights. Roundings and quantized activations leave a relative distance of under 1 % to
              5 %; torn, foreign, permuted or twice packed weights leave one of order 1.

On a GPU kernels have their own layouts, so only the functional check runs. It does not see a weight change below the
tolerance; only the fingerprints of the loaded tensors exclude one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from qarl_bridge.engine.readback import formulas
from qarl_bridge.protocol import formats, split_k
from qarl_bridge.protocol.errors import BridgeError

# How to explain a difference, and whether there is one (a bool tensor, perhaps still on its way).
Verdict = tuple[Callable[[], None], Any]

_PARTS = ("gate_proj", "up_proj", "down_proj")
_PARTS_OF = {"w13": _PARTS[:2], "w2": _PARTS[2:]}
_ROWS = 16  # random rows per layer, at least; more where it takes more for every expert to have one
_SAMPLED = 8  # experts compared value by value in "sampled" mode
# Largest relative L2 distance of a row, by the largest code of the activations (`Formula.top`).
_TOLERANCE = {None: 0.02, 127.0: 0.06, 448.0: 0.15}


def is_experts(module: Any) -> bool:
    """Tells whether this module holds the fused weights of routed experts."""
    return hasattr(module, "quant_method") and any(hasattr(module, n) for n in ("w13_weight", "w13_weight_packed"))


def prefix_of(name: str) -> str:
    """Returns the experts' prefix, such as "model.layers.0.mlp.experts", in a module's or tensor's name; "" if none."""
    end = name.find(".experts")
    return "" if end < 0 else name[: end + len(".experts")]


def _groups_of_experts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the quantization groups of a config.json that apply to experts."""
    groups = formats.groups_of(config)
    own = [group for group in groups if any("experts" in target for target in group["targets"])]
    return own or [group for group in groups if "Linear" in group["targets"]]


def check_format(config: Mapping[str, Any]) -> None:
    """Raises BridgeError("setup") for a model whose experts have zero points, which vLLM cannot serve."""
    if config.get("num_experts") and any(g["format"] in formats.ASYMMETRIC for g in _groups_of_experts(config)):
        raise BridgeError(
            "experts with zero points have no layer in vLLM: give them w4a16 or bf16 (quant.rules, match: experts), or"
            " use the embedded sampler (rollout.engine.name=jax)",
            "setup",
        )


def _width_of(config: Mapping[str, Any], shards: int) -> float:
    """Returns the number of inner features that each shard has of an expert; 0 without experts."""
    return config.get("moe_intermediate_size", 0) / shards if config.get("num_experts") else 0


def check_shape(config: Mapping[str, Any], shards: int = 1) -> None:
    """Raises BridgeError("setup") if a shard's experts' width is no multiple of 32: vLLM's CPU cannot reload it."""
    width = _width_of(config, shards)
    if width % 32:
        raise BridgeError(
            f"experts of {width:g} features in each of {shards} shards: vLLM's CPU experts are padded to a multiple of "
            "32, and a padded layer cannot be reloaded in place; use a model whose experts are a multiple of 32 wide, "
            "or fewer shards (rollout.engine.tensor_parallel_size)",
            "setup",
        )


def in_whole_blocks(hidden: int, width: float) -> bool:
    """Tells whether both widths are multiples of 128, as batch-invariant int4 experts need (cuda/expert_ops.py)."""
    return hidden % split_k.STEP == 0 and width % split_k.STEP == 0


def check_groups(config: Mapping[str, Any], *, batch_invariant: bool = False, shards: int = 1) -> None:
    """Raises BridgeError("setup") for int4 experts whose scales vLLM's Marlin kernel would permute wrongly.

    batch_invariant: the bridge, not Marlin, computes experts that are `in_whole_blocks`.

    vLLM 0.25 permutes the group scales of gate and up by the expert's width instead of their input width
    (`marlin_moe_permute_scales`, size_k). This matters where only one of the widths has several groups.
    """
    width = _width_of(config, shards)
    if not width or (batch_invariant and in_whole_blocks(config["hidden_size"], width)):
        return
    for group in _groups_of_experts(config):
        weights = group["weights"]
        size = weights.get("group_size", 0)
        if (weights["num_bits"], weights["type"]) == (4, "int") and width <= size < config["hidden_size"]:
            raise BridgeError(
                f"experts of {width:g} features with int4 groups of {size}: vLLM on CUDA scrambles the scales of such "
                f"experts; use a group size below {width:g} (w4a16:g32 or g64), or w8a8 or fp8 for them",
                "setup",
            )


@dataclasses.dataclass(frozen=True)
class Staged:
    """The published experts of one layer, as stacks (expert_stacks.py).

    Attributes:
      parts: stacked torch tensors [E, ...] by projection ("gate_proj") and leaf.
      formula: the formula of the experts' format.
      names: names of all published tensors.
    """

    parts: Mapping[str, Mapping[str, Any]]
    formula: formulas.Formula
    names: tuple[str, ...]

    @staticmethod
    def by_layer(tensors: Mapping[str, Any], activations: str) -> dict[str, Staged]:
        """Groups published expert tensors by layer prefix ("model.layers.0.mlp.experts").

        activations: how int4 experts take activations, "bf16" or "int8".
        """
        found: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {}
        for name, tensor in tensors.items():
            prefix, is_expert, rest = name.partition(".experts.")
            if not is_expert:
                continue
            parts, names = found.setdefault(f"{prefix}.experts", ({}, []))
            names.append(name)
            _, part, leaf = rest.split(".")
            parts.setdefault(part, {})[leaf] = tensor
        return {
            prefix: Staged(parts, formulas.find(parts[_PARTS[0]], activations), tuple(names))
            for prefix, (parts, names) in found.items()
        }

    def first(self, part: str) -> Any:
        """Returns the published codes of a projection, stacked over experts."""
        return next(tensor for leaf, tensor in self.parts[part].items() if leaf != "weight_shape")

    @property
    def num_experts(self) -> int:
        """Returns the number of experts."""
        return len(self.first(_PARTS[0]))

    def matrix(self, expert: int, which: str) -> Any:
        """Computes one expert's weight "w13" (gate above up) or "w2" (down), [N, K] float64, as kernels multiply it."""
        return torch.cat(
            [
                self.formula.served({leaf: tensor[expert] for leaf, tensor in self.parts[part].items()}, torch.float64)
                for part in _PARTS_OF[which]
            ]
        )

    def matrices(self, experts: Any, which: str) -> Any:
        """Computes `matrix` of several experts at once, in float32: [experts, N, K].

        Args:
          experts: expert indices, int64, on the tensors' device.
          which: "w13" (gate above up) or "w2" (down).
        """

        def pick(stack: Any) -> Any:
            raw = stack.view(torch.uint8) if stack.dtype == torch.float8_e4m3fn else stack  # cannot be indexed
            return raw.index_select(0, experts).view(stack.dtype)

        parts = [{leaf: pick(stack) for leaf, stack in self.parts[part].items()} for part in _PARTS_OF[which]]
        return torch.cat([self.formula.served(part, torch.float32) for part in parts], dim=1)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Random inputs and routing for the functional check, made once for all layers of a kind.

    Attributes:
      x: inputs, bfloat16 [R, D].
      places: int64 [R, k], indices among the checked experts; choice j of row r is (r k + j) mod their number, so every
        checked expert gets rows.
      weights: routing weights, float32 [R, k].
      share: float32 [checked experts, R, 1], the routing weight of each expert and row; 0 where not routed.
    """

    x: Any
    places: Any
    weights: Any
    share: Any

    @staticmethod
    def draw(rng: np.random.Generator, device: Any, width: int, asked: int, k: int) -> Rows:
        """Draws rows of `width` numbers, each routed to k of `asked` experts."""
        rows = max(_ROWS, -(-asked // k))
        places = np.arange(rows * k).reshape(rows, k) % asked
        weights = rng.uniform(0.5, 1.5, (rows, k)).astype(np.float32)
        share = np.zeros((rows, asked), np.float32)
        np.put_along_axis(share, places, weights, axis=1)
        x = torch.from_numpy(rng.standard_normal((rows, width)).astype(np.float32)).to(device).bfloat16()
        there = [torch.from_numpy(array).to(device) for array in (places, weights, share.T[..., None].copy())]
        return Rows(x, *there)


def read_back(
    name: str,
    module: Any,
    staged: Staged,
    *,
    mode: str,
    rng: np.random.Generator,
    rows_of: Callable[[int, int, int], Rows],
) -> tuple[list[Verdict], int]:
    """Compares one live MoE layer with its published experts, in inference mode and vLLM's config context.

    Args:
      name, module: the live layer.
      mode: "sampled" compares some experts value by value, "full" all of them.
      rng: picks the experts.
      rows_of: `Rows.draw` of (width, asked, k), cached, so that all layers share rows.

    Returns:
      (verdicts, number of rows sent through the layer). A verdict is a function that raises the error, and a bool
      tensor that is true if the layer differs.
    """
    experts = np.arange(staged.num_experts)
    if mode != "full":
        few = max(_SAMPLED, int(module.quant_method.moe.experts_per_token))
        experts = np.sort(rng.choice(experts, min(few, len(experts)), replace=False))
    verdicts = [_stored(name, module, staged, which, int(expert)) for which in ("w13", "w2") for expert in experts]
    functional, rows = _functional(name, module, staged, experts, rows_of)
    return [v for v in (*verdicts, functional) if v is not None], rows


def _stored(name: str, module: Any, staged: Staged, which: str, expert: int) -> Verdict | None:
    if not type(module.quant_method).__name__.startswith("Float64"):
        return None
    live = getattr(module, f"{which}_float64")[expert]
    if (factors := getattr(module, f"{which}_weight_global_scale", None)) is not None:
        live = live * factors[expert].double()[:, None]
    wanted = staged.matrix(expert, which)

    def explain() -> None:
        raise BridgeError(
            f"read-back: expert {expert} of {name} ({which}) does not hold the published values", "engine"
        )

    return explain, (live != wanted).any()


def _functional(
    name: str,
    module: Any,
    staged: Staged,
    experts: np.ndarray,
    rows_of: Callable[[int, int, int], Rows],
) -> tuple[Verdict | None, int]:
    method = module.quant_method
    if method.is_monolithic:  # it routes by itself: no expert can be named
        return None, 0
    device = next(module.parameters()).device
    held = staged.first(_PARTS[2])
    asked = len(experts)
    rows = rows_of(held.shape[1], asked, min(int(method.moe.experts_per_token), asked))
    index = torch.from_numpy(experts).to(held.device)
    ids = index.to(device)[rows.places]
    accepted = inspect.signature(method.apply).parameters
    extra = {name: None for name in ("shared_experts", "shared_experts_input") if name in accepted}
    got = method.apply(
        layer=module,
        x=rows.x.clone(),  # a kernel may write into it
        topk_weights=rows.weights.clone(),
        topk_ids=ids.to(method.topk_indices_dtype or torch.int32),
        **extra,
    ).float()
    # Every expert over every row, a few experts at once: few operations, and nothing is waited for. Rows it was not
    # asked for weigh 0.
    x, wanted = rows.x.float(), torch.zeros_like(got)
    for start in range(0, asked, _SAMPLED):
        few = slice(start, start + _SAMPLED)
        first, second = (staged.matrices(index[few], which).to(device) for which in ("w13", "w2"))
        gate, up = (x @ first.mT).chunk(2, dim=-1)  # [few, rows, F]
        out = (torch.nn.functional.silu(gate) * up) @ second.mT
        wanted += (out * rows.share[few]).sum(dim=0)
    distance = (got - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)
    limit = _TOLERANCE[staged.formula.top]
    wrong = ~(distance <= limit) & ~((wanted.norm(dim=1) == 0) & (got.norm(dim=1) == 0))  # NaN is wrong, too

    def explain() -> None:
        row = int(wrong.nonzero()[0])
        raise BridgeError(
            f"read-back: {name} answers a row for experts {ids[row].tolist()} {float(distance[row]):.3g} away from "
            f"the published weights (at most {limit} is rounding; {int(wrong.sum())} of {len(x)} rows differ)",
            "engine",
        )

    return (explain, wrong.any()), len(x)
