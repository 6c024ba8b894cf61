# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts a quantized weight's arrays to the checkpoint tensors that an engine loads, and back. numpy only.

A scheme's module (`qarl_jax/quant/schemes`) describes its arrays as a `Layout`; this file knows no scheme by name. A
linear layer `P` (a Hugging Face module path such as model.layers.0.self_attn.q_proj) has one tensor `P.<leaf>` for each
array, and `quantization_config` writes the section of config.json that describes them:

    int8, fp8    P.weight [N, K], P.weight_scale float32 [N, 1]
    int4         P.weight_packed int32 [N, K/8], P.weight_scale bfloat16 [N, K/G], P.weight_shape int64 [2]
    bf16         P.weight bfloat16 [N, K]            (no layout: nothing is quantized)

Nibble i (bits 4i..4i+3) of word j of weight_packed holds element 8j+i as code + 8. The learner stores its weights in
these bytes already, so packing only names and checks arrays: nothing is recomputed or copied.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from qarl_bridge.protocol import split_k
from qarl_bridge.protocol.messages import BridgeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

# Formats of weights with zero points, which no other engine knows: a code stands for its first step, or for the middle.
ASYMMETRIC = ("qarl-asymmetric", "qarl-asymmetric-midpoint")
LANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}  # bits of their codes -> of a code's parts, the upper first

# What vLLM (and compressed-tensors) fuse into one module, in row order, as Qwen2, Qwen3, Llama and their kin name it.
# All parts must have one scheme.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SPLITTING = "qarl_splitting"  # of config.json, where outlier channels are split: the arguments of `places`
INDEX = "input_index"  # leaf of a split layer: int32 [1, M], the inputs that it has twice, K for a zero
_EXPERT = re.compile(r"^(?P<layer>.*\.experts)\.\d+\.(?P<proj>[a-z_]+)$")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a quantized weight [N, K].

    Attributes:
      name: its name in the learner's QTensor: "codes", "scales" or another one (block scales, zero points, ...).
      leaf: last part of the checkpoint tensor's name ("weight_packed").
      dtype: the checkpoint tensor's dtype.
      inputs: inputs that a column covers; 0: all of them (one column).
      outputs: outputs that a row covers; 0: all of them. The array is then one number, [1, 1] in the learner and [1]
        in a checkpoint.
      is_scale: True if every value must be finite and positive.
    """

    name: str
    leaf: str
    dtype: np.dtype
    inputs: int = 1
    outputs: int = 1
    is_scale: bool = False

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Computes the array's shape in the learner for a weight [n, k]."""
        return -(-n // self.outputs) if self.outputs else 1, k // self.inputs if self.inputs else 1

    def sent(self, held: tuple[int, ...]) -> tuple[int, ...]:
        """Computes the shape in a checkpoint from the shape in the learner; leading dimensions stay."""
        return held if self.outputs else held[:-1]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The checkpoint layout of one scheme's weights.

    Attributes:
      scheme: the scheme's name, for messages.
      format, weights, activations: fields of the scheme's group in a compressed-tensors config.
      arrays: the arrays of a weight, codes first.
      shape_leaf: last part of the name of a tensor that holds (N, K), int64 [2]; empty: none.
    """

    scheme: str
    format: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None
    arrays: tuple[Array, ...]
    shape_leaf: str = ""

    @property
    def codes(self) -> Array:
        """The array of codes, which is the first; the weight's shape follows from its shape."""
        return self.arrays[0]

    def names(self, name: str) -> dict[str, str]:
        """Maps array names to checkpoint tensor names; the key "" is the tensor of the weight's shape, if any.

        Args:
          name: the module's name, with or without ".weight".
        """
        module = module_name(name)
        found = {array.name: f"{module}.{array.leaf}" for array in self.arrays}
        return found | ({"": f"{module}.{self.shape_leaf}"} if self.shape_leaf else {})


def zero_points(midpoint: bool = False, activation_bits: int = 0) -> str:
    """Names a weight's zero points by the layer that multiplies them, so that another scheme's layer refuses them.

    midpoint: codes stand for their middle. activation_bits: of an activation's code; 0: activations are bfloat16.
    """
    return "weight_zero_point" + "_mid" * midpoint + (f"_a{activation_bits}" if activation_bits else "")


def layer_of(name: str) -> str:
    """Returns the layer in a tensor's name, such as "model.layers.3", or outside of layers the module's name."""
    found = re.match(r"(.*\.layers\.\d+)\.", name)
    return found[1] if found else name.rpartition(".")[0]


def places(inputs: int, share: float, group: int) -> int:
    """Counts the duplicated inputs of a layer whose outlier channels are split: `share` of `inputs`, rounded up to a
    multiple of `group`, and of `split_k.STEP` if `inputs` is one."""
    unit = group if inputs % split_k.STEP else math.lcm(group, split_k.STEP)
    return math.ceil(round(inputs * share, 6) / unit) * unit


def live_module(name: str) -> str:
    """Names the vLLM module that holds a published tensor, such as qkv_proj for q_proj, or a layer's experts."""
    module = name.rpartition(".")[0]
    experts, found, _ = module.partition(".experts.")
    if found:
        return f"{experts}.experts"
    parent, dot, leaf = module.rpartition(".")
    return parent + dot + next((fused for fused, parts in FUSED.items() if leaf in parts), leaf)


def stems(prefix: str) -> list[str]:
    """Lists the published names of the linear layers that a live module fuses: a.qkv_proj gives a.q_proj, ..."""
    parent, _, leaf = prefix.rpartition(".")
    return [f"{parent}.{part}" if parent else part for part in FUSED.get(leaf, (leaf,))]


def arguments(
    bits: int, kind: str, strategy: str, *, group_size: int = 0, dynamic: bool = False, symmetric: bool = True
) -> dict[str, Any]:
    """Builds a compressed-tensors quantization-arguments dict.

    Args:
      kind: "int" or "float". strategy: "channel", "token", "group" or "tensor_group".
      group_size: inputs per scale; 0: left out. dynamic: True for activations, quantized when they are computed.
    """
    made = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": dynamic}
    return made | ({"group_size": group_size} if group_size else {})


def module_name(name: str) -> str:
    """Returns the module path of a weight: "a.q_proj.weight" and "a.q_proj" give "a.q_proj"."""
    return name.removesuffix(".weight")


def fused_with(name: str) -> tuple[str, ...]:
    """Lists the other modules that vLLM fuses with this one: a.q_proj gives a.k_proj and a.v_proj."""
    parent, _, leaf = module_name(name).rpartition(".")
    return tuple(f"{parent}.{part}" for parts in FUSED.values() if leaf in parts for part in parts if part != leaf)


def pack(name: str, arrays: Mapping[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
    """Converts one weight's arrays to checkpoint tensors by name, without copying them.

    Args:
      name: Hugging Face name of the module, with or without ".weight".
      arrays: the arrays of `layout`, by name; a stack of experts has a leading dimension.

    Raises:
      BridgeError("tensor"): dtype or shape does not fit the layout, or a scale is not finite and positive.
    """
    n, k = _check(name, arrays, layout)
    codes = arrays[layout.codes.name]
    names = layout.names(name)
    tensors = {}
    for array in layout.arrays:
        held = arrays[array.name]
        tensors[names[array.name]] = held if array.outputs else held.reshape(array.sent(held.shape))
    if "" in names:
        tensors[names[""]] = np.broadcast_to(np.array([n, k], np.int64), (*codes.shape[:-2], 2)).copy()
    return tensors


def unpack(name: str, tensors: Mapping[str, np.ndarray], layout: Layout) -> dict[str, np.ndarray]:
    """Converts checkpoint tensors back to one weight's arrays, the inverse of `pack`; extra tensors are ignored.

    Raises:
      BridgeError("tensor"): a tensor is missing, or does not fit the layout.
    """
    names = layout.names(name)
    arrays = {}
    for array in layout.arrays:
        tensor = tensors.get(names[array.name])
        if tensor is None:
            raise BridgeError(f"{name}: tensor {names[array.name]} of scheme {layout.scheme} is missing", "tensor")
        arrays[array.name] = tensor if array.outputs else tensor[..., None]
    found = _check(name, arrays, layout)
    if "" in names and names[""] in tensors:
        said = tuple(int(size) for size in tensors[names[""]])
        if said != found:
            raise BridgeError(f"{name}: {names['']} says {said}, the codes are those of {found}", "tensor")
    return arrays


def _check(name: str, arrays: Mapping[str, np.ndarray], layout: Layout) -> tuple[int, int]:
    """Checks dtypes, shapes and scales of a weight's arrays; returns the weight's shape (N, K)."""

    def fail(what: str) -> None:
        raise BridgeError(f"{name}, scheme {layout.scheme}: {what}", "tensor")

    if set(arrays) != {array.name for array in layout.arrays}:
        fail(f"has arrays {', '.join(sorted(arrays))}, expected {', '.join(a.name for a in layout.arrays)}")
    codes = arrays[layout.codes.name]
    lead = codes.shape[:-2]
    if codes.ndim < 2 or len(lead) > 1:
        fail(f"codes have shape {codes.shape}, expected a matrix, or one per expert")
    n, k = codes.shape[-2], codes.shape[-1] * layout.codes.inputs
    for array in layout.arrays:
        held = arrays[array.name]
        if held.dtype != array.dtype:
            fail(f"{array.name} are {held.dtype}, expected {array.dtype}")
        if array.inputs and k % array.inputs:
            fail(f"K = {k} is not a multiple of {array.inputs}, the inputs of one column of {array.name}")
        if held.shape != (*lead, *array.shape(n, k)):
            fail(f"{array.name} have shape {held.shape}, expected {(*lead, *array.shape(n, k))}")
        if array.is_scale:
            values = held.astype(np.float32)
            if not (np.isfinite(values).all() and (values > 0).all()):
                fail(f"a value of {array.name} is not finite and positive")
    return n, k


def quantization_config(
    layouts: Mapping[str, Layout | None], ignore: Iterable[str] = ("lm_head",)
) -> dict[str, Any] | None:
    """Builds the `quantization_config` of config.json for a model whose linear layers have these layouts.

    The most frequent layout targets the class "Linear"; layers with another layout are listed by name. One pattern
    names all experts of a layer, so the section stays small.

    Args:
      layouts: layout of every linear layer by Hugging Face module (or weight) name; None: bf16. Routers and the
        lm_head may be left out when they are in `ignore`.
      ignore: module names (or "re:" patterns) that stay in bf16 besides those without a layout.

    Returns:
      The section, or None where nothing is quantized.

    Raises:
      BridgeError("foreign_scheme"): the parts of a module vLLM fuses (q/k/v, gate/up, all experts of a layer) differ.
    """
    by_module = {module_name(name): layout for name, layout in layouts.items()}
    _check_fused(by_module)
    targets: dict[str, list[str]] = {}
    known: dict[str, Layout] = {}
    counts: dict[str, int] = {}
    for module, layout in by_module.items():
        scheme = _scheme(layout)
        if layout is not None:
            known[scheme] = layout
        expert = _EXPERT.match(module)
        target = f"re:^{re.escape(expert['layer'])}\\." if expert else module
        names = targets.setdefault(scheme, [])
        counts[scheme] = counts.get(scheme, 0) + 1
        if target not in names[-1:]:
            names.append(target)
    bf16 = [*dict.fromkeys([*ignore, *targets.pop("bf16", [])])]
    if not targets:
        return None
    main = max(targets, key=lambda scheme: counts[scheme])
    groups: dict[str, Any] = {}
    # Named layers first, the class-wide target last, in a stable order.
    for i, scheme in enumerate([*sorted(s for s in targets if s != main), main]):
        layout = known[scheme]
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if scheme == main else list(dict.fromkeys(targets[scheme])),
            "format": layout.format,
            "weights": dict(layout.weights),
            "input_activations": None if layout.activations is None else dict(layout.activations),
            "output_activations": None,
        }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": bf16,
        "config_groups": groups,
    }


def groups_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the config groups in a config.json's `quantization_config`; empty if it has none."""
    return list((config.get("quantization_config") or {}).get("config_groups", {}).values())


def is_int4(group: Mapping[str, Any]) -> bool:
    """Tells whether a config group's weights are symmetric int4, which vLLM's own layers compute."""
    weights = group["weights"]
    return weights["num_bits"] == 4 and weights["type"] == "int" and group["format"] not in ASYMMETRIC


def _scheme(layout: Layout | None) -> str:
    return "bf16" if layout is None else layout.scheme


def _check_fused(by_module: Mapping[str, Layout | None]) -> None:
    """Raises BridgeError if layers that vLLM fuses into one module have different schemes."""
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for module, layout in by_module.items():
        scheme = _scheme(layout)
        parent, _, leaf = module.rpartition(".")
        expert = _EXPERT.match(module)
        if expert:
            key = (expert["layer"], "all experts")
        else:
            parts = next((parts for parts in FUSED.values() if leaf in parts), None)
            if parts is None:
                continue
            key = (parent, "/".join(parts))
        other, other_scheme = first.setdefault(key, (module, scheme))
        if other_scheme != scheme:
            raise BridgeError(
                f"{module} is {scheme} but {other} is {other_scheme}: vLLM loads {key[1]} of {key[0]} into one module, "
                "which needs one scheme; change the quantization rules",
                "foreign_scheme",
            )
