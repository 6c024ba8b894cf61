# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts in a live vLLM: which it can serve, and how they are read back.

Read-back. An expert's two products have a nonlinearity between them, so one-hot rows do not return a weight. Instead:

  stored      where the layout is known (the bridge's own experts, on a CPU), every value that is
              multiplied with is compared, bit by bit, with the one made anew from the staged tensors;
  functional  random rows are sent through the live layer, each to k of those experts, and compared with the same
              sums in float32 over the staged weights. Roundings and quantized activations leave a distance of
              under 1 % to 5 %, weights that are torn, foreign, permuted or packed twice one of order 1.

On a GPU, where kernels keep layouts of their own, the second alone is done: a change of a weight by less than the
tolerance would pass it, and is excluded only by the fingerprints of what was handed to the loader.
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
    """ "model.layers.0.mlp.experts" of a live module or a published tensor below it; "" of what is in no expert."""
    end = name.find(".experts")
    return "" if end < 0 else name[: end + len(".experts")]


def _groups_of_experts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of a config.json's quantization that hold its experts."""
    groups = formats.groups_of(config)
    own = [group for group in groups if any("experts" in target for target in group["targets"])]
    return own or [group for group in groups if "Linear" in group["targets"]]


def check_format(config: Mapping[str, Any]) -> None:
    """Refuses, before vLLM starts, experts with zero points."""
    if config.get("num_experts") and any(g["format"] in formats.ASYMMETRIC for g in _groups_of_experts(config)):
        raise BridgeError(
            "experts with zero points have no layer in vLLM: give them w4a16 or bf16 (quant.rules, match: experts), or"
            " use the embedded sampler (rollout.engine.name=jax)",
            "setup",
        )


def _width_of(config: Mapping[str, Any], shards: int) -> float:
    """Inner features that each shard has of an expert; 0: no experts."""
    return config.get("moe_intermediate_size", 0) / shards if config.get("num_experts") else 0


def check_shape(config: Mapping[str, Any], shards: int = 1) -> None:
    """Refuses, before vLLM starts on a CPU, a width whose experts a reload would tear."""
    width = _width_of(config, shards)
    if width % 32:
        raise BridgeError(
            f"experts of {width:g} features in each of {shards} shards: vLLM's CPU experts are padded to a multiple of "
            "32, and a padded layer cannot be reloaded in place; use a model whose experts are a multiple of 32 wide, "
            "or fewer shards (rollout.engine.tensor_parallel_size)",
            "setup",
        )


def in_whole_blocks(hidden: int, width: float) -> bool:
    """Tells whether int4 experts of these widths have batch-invariant products (cuda/expert_ops.py)."""
    return hidden % split_k.STEP == 0 and width % split_k.STEP == 0


def check_groups(config: Mapping[str, Any], *, batch_invariant: bool = False, shards: int = 1) -> None:
    """Refuses, before vLLM starts on a GPU, int4 experts whose scales its Marlin kernel would get in a wrong order.

    batch_invariant: experts `in_whole_blocks` are the bridge's own, not Marlin's.

    vLLM 0.25 orders the group scales of gate and up by the expert's width where the width of their inputs is meant
    (`marlin_moe_permute_scales`, size_k), which matters where one has several groups and the other does not.
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
      parts: part ("gate_proj") -> torch tensors [E, ...] by leaf.
      formula: of their format.
      names: of all the tensors.
    """

    parts: Mapping[str, Mapping[str, Any]]
    formula: formulas.Formula
    names: tuple[str, ...]

    @staticmethod
    def by_layer(tensors: Mapping[str, Any], activations: str) -> dict[str, Staged]:
        """All published experts, by the prefix of their layer ("model.layers.0.mlp.experts").

        activations: of int4 experts, "bf16" or "int8".
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
        """The codes of a part, as they are on the wire."""
        return next(tensor for leaf, tensor in self.parts[part].items() if leaf != "weight_shape")

    @property
    def num_experts(self) -> int:
        """Returns the number of experts."""
        return len(self.first(_PARTS[0]))

    def matrix(self, expert: int, which: str) -> Any:
        """[N, K] float64: "w13" (gate above up) or "w2" (down) of one expert, as it is multiplied with."""
        return torch.cat(
            [
                self.formula.served({leaf: tensor[expert] for leaf, tensor in self.parts[part].items()}, torch.float64)
                for part in _PARTS_OF[which]
            ]
        )

    def matrices(self, experts: Any, which: str) -> Any:
        """[experts, N, K] float32: `matrix` of several, but for a rounding; a few operations for all.

        Args:
          experts: int64, where the tensors are.
        """

        def pick(stack: Any) -> Any:
            raw = stack.view(torch.uint8) if stack.dtype == torch.float8_e4m3fn else stack  # cannot be indexed
            return raw.index_select(0, experts).view(stack.dtype)

        parts = [{leaf: pick(stack) for leaf, stack in self.parts[part].items()} for part in _PARTS_OF[which]]
        return torch.cat([self.formula.served(part, torch.float32) for part in parts], dim=1)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Random rows for the experts that are asked, made once for all layers of a kind.

    Attributes:
      x: bfloat16 [R, D].
      places: int64 [R, k], the number of an asked expert: place j of row r goes to (r k + j) mod their count, so that
        every one is asked.
      weights: float32 [R, k].
      share: float32 [asked, R, 1], the weights by expert; 0 where it is not asked.
    """

    x: Any
    places: Any
    weights: Any
    share: Any

    @staticmethod
    def draw(rng: np.random.Generator, device: Any, width: int, asked: int, k: int) -> Rows:
        """Rows of `width` numbers, each for k of `asked` experts."""
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
    """Compares one live layer with what was published. Called in inference mode, in vLLM's config context.

    Args:
      name, module: the live layer.
      staged: what was published for it.
      mode: "sampled" compares some experts value by value, "full" all of them.
      rng: picks experts and rows.
      rows_of: `Rows.draw` of (width, asked, k), the same ones for all layers.

    Returns:
      verdicts (how to explain it, whether it is wrong), and the rows sent through the layer.
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
