# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Between a quantized weight's arrays and the checkpoint tensors vLLM's loader expects. numpy only.

A linear layer `P` (an HF module path such as model.layers.0.self_attn.q_proj) travels as

    scheme       format            tensors
    w8a8         int-quantized     P.weight int8 [N, K], P.weight_scale float32 [N, 1]
    fp8          float-quantized   P.weight float8_e4m3fn [N, K], P.weight_scale float32 [N, 1]
    w4a16, w4a8  pack-quantized    P.weight_packed int32 [N, K/8], P.weight_scale bfloat16 [N, K/G],
                                   P.weight_shape int64 [2]
    w3a16, w2a16 pack-quantized    as w4a16: their codes are some of int4's
    bf16         (none)            P.weight bfloat16 [N, K]

Nibble i (bits 4i..4i+3) of word j of weight_packed holds element 8j+i as code + 8. The learner stores its weights in
these bytes already, so packing is naming and checking: no value is recomputed, and arrays are not copied.

A scheme is written as the learner prints it: "w8a8", "fp8", "w4a16:g128", "w4a8:g32", "w4a16:g-1" (per output channel),
"bf16". `quantization_config` writes the matching section of config.json from a scheme for every linear layer, mixed or
not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from qarl_bridge.protocol.messages import BridgeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

# What vLLM (and compressed-tensors) fuse into one module, in row order, as Qwen2, Qwen3, Llama and their kin name it.
# All parts must have one scheme.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERT = re.compile(r"^(?P<layer>.*\.experts)\.\d+\.(?P<proj>[a-z_]+)$")


@dataclasses.dataclass(frozen=True)
class _Layout:
    """One row of the table above.

    Attributes:
      format, weight, activation: of compressed-tensors' config section.
      qvalue, scale: dtypes as they travel.
      grouped: int4 words with scales of groups, or of output channels.
    """

    format: str
    weight: Mapping[str, Any]
    activation: Mapping[str, Any] | None
    qvalue: np.dtype
    scale: np.dtype
    grouped: bool = False


def _args(bits: int, kind: str, strategy: str, dynamic: bool) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": dynamic}


_INT8 = _Layout(
    "int-quantized",
    _args(8, "int", "channel", False),
    _args(8, "int", "token", True),
    np.dtype(np.int8),
    np.dtype(np.float32),
)
_INT4 = _Layout(
    "pack-quantized",
    _args(4, "int", "group", False),
    None,
    np.dtype(np.int32),
    BFLOAT16,
    grouped=True,
)
_LAYOUTS: dict[str, _Layout] = {
    "w8a8": _INT8,
    "fp8": dataclasses.replace(
        _INT8,
        format="float-quantized",
        weight=_args(8, "float", "channel", False),
        activation=_args(8, "float", "token", True),
        qvalue=FLOAT8,
    ),
    "w4a16": _INT4,
    "w4a8": dataclasses.replace(_INT4, activation=_args(8, "int", "token", True)),
    # Fewer of int4's codes are int4 codes: the engine cannot tell, and need not.
    "w3a16": _INT4,
    "w2a16": _INT4,
}
_DEFAULT_GROUP = 128


def parse(scheme: str) -> tuple[str, int | None]:
    """ "w4a16:g64" -> ("w4a16", 64); "w4a16" -> ("w4a16", 128); "w8a8" -> ("w8a8", None); "bf16" -> ("bf16", None)."""
    name, _, suffix = scheme.partition(":")
    layout = _LAYOUTS.get(name)
    if name == "bf16" and not suffix:
        return name, None
    if layout is None or (suffix and not layout.grouped) or (suffix and not re.fullmatch(r"g(-1|[1-9]\d*)", suffix)):
        known = ", ".join(["bf16", *(f"{n}[:g<size>]" if x.grouped else n for n, x in _LAYOUTS.items())])
        raise BridgeError(f"unknown quantization scheme {scheme!r}: use one of {known}", "foreign_scheme")
    if not layout.grouped:
        return name, None
    return name, int(suffix[1:]) if suffix else _DEFAULT_GROUP


def module_name(name: str) -> str:
    """The module path of a weight: "a.q_proj.weight" and "a.q_proj" -> "a.q_proj"."""
    return name.removesuffix(".weight")


def tensor_names(name: str, scheme: str) -> tuple[str, ...]:
    """The checkpoint tensors one weight becomes, in the order `pack` returns them."""
    module, (kind, _) = module_name(name), parse(scheme)
    if kind == "bf16":
        return (f"{module}.weight",)
    if _LAYOUTS[kind].grouped:
        return (f"{module}.weight_packed", f"{module}.weight_scale", f"{module}.weight_shape")
    return (f"{module}.weight", f"{module}.weight_scale")


def pack(name: str, qvalue: np.ndarray, scale: np.ndarray, scheme: str) -> dict[str, np.ndarray]:
    """One weight's codes and scales, as the tensors a checkpoint holds. The arrays are passed on, not copied.

    Args:
      name: HF name of the module, with or without ".weight".
      qvalue: [N, K] int8 or float8_e4m3fn, or [N, K/8] int32; of a stack of experts [E, ...].
      scale: [N, 1] float32, or [N, groups] bfloat16; likewise.
      scheme: how the learner prints it.

    Raises:
      BridgeError("tensor"): dtype or shape does not fit the scheme, or a scale is not finite and positive.
    """
    kind, group = parse(scheme)
    if kind == "bf16":
        raise BridgeError(f"{name}: a bf16 weight has no codes to pack", "tensor")
    layout = _LAYOUTS[kind]
    stack = qvalue.shape[:-2]
    if len(stack) == 1 and scale.shape[:-2] == stack:  # of experts: each row is checked all the same
        codes, scales = (part.reshape(-1, part.shape[-1]) for part in (qvalue, scale))
        _check(name, codes, scales, scheme, layout, group)
    else:
        _check(name, qvalue, scale, scheme, layout, group)
    if not layout.grouped:
        return dict(zip(tensor_names(name, scheme), (qvalue, scale), strict=True))
    shape = np.broadcast_to(np.array([qvalue.shape[-2], qvalue.shape[-1] * 8], np.int64), (*stack, 2)).copy()
    return dict(zip(tensor_names(name, scheme), (qvalue, scale, shape), strict=True))


def unpack(name: str, tensors: Mapping[str, np.ndarray], scheme: str) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `pack`: (qvalue, scale) out of checkpoint tensors; others in the mapping are ignored.

    Raises:
      BridgeError("tensor"): a tensor is missing, or does not fit the scheme.
    """
    kind, group = parse(scheme)
    if kind == "bf16":
        raise BridgeError(f"{name}: a bf16 weight has no codes to unpack", "tensor")
    layout = _LAYOUTS[kind]
    names = tensor_names(name, scheme)
    missing = [n for n in names[:2] if n not in tensors]
    if missing:
        raise BridgeError(f"{name}: tensor {missing[0]} of scheme {scheme} is missing", "tensor")
    qvalue, scale = tensors[names[0]], tensors[names[1]]
    _check(name, qvalue, scale, scheme, layout, group)
    if layout.grouped and names[2] in tensors:
        shape = tuple(int(n) for n in tensors[names[2]])
        if shape != (qvalue.shape[0], qvalue.shape[1] * 8):
            raise BridgeError(f"{name}: {names[2]} says {shape}, {names[0]} holds {qvalue.shape}", "tensor")
    return qvalue, scale


def _check(name: str, qvalue: np.ndarray, scale: np.ndarray, scheme: str, layout: _Layout, group: int | None) -> None:
    def fail(what: str) -> None:
        raise BridgeError(f"{name}, scheme {scheme}: {what}", "tensor")

    if qvalue.dtype != layout.qvalue or qvalue.ndim != 2:
        fail(f"codes are {qvalue.dtype} {qvalue.shape}, expected a matrix of {layout.qvalue}")
    if scale.dtype != layout.scale:
        fail(f"scales are {scale.dtype}, expected {layout.scale}")
    n, stored = qvalue.shape
    k = stored * 8 if layout.grouped else stored
    if layout.grouped and group != -1 and k % group:
        fail(f"K = {k} is not a multiple of the group size")
    columns = k // group if layout.grouped and group != -1 else 1
    if scale.shape != (n, columns):
        fail(f"scales have shape {scale.shape}, expected {(n, columns)}")
    values = scale.astype(np.float32)
    if not (np.isfinite(values).all() and (values > 0).all()):
        fail("a scale is not finite and positive")


def quantization_config(schemes: Mapping[str, str], ignore: Iterable[str] = ("lm_head",)) -> dict[str, Any] | None:
    """The `quantization_config` of config.json for a model whose linear layers have these schemes.

    The most frequent scheme targets the class "Linear"; every other layer is named. Experts of one layer are named by
    one pattern, so the section of a model with thousands of experts stays small.

    Args: schemes: HF module (or weight) name of every linear layer -> scheme, "bf16" included. Routers and the lm_head
      may be
        left out when they are in `ignore`.
      ignore: module names (or "re:" patterns) that stay in bf16 besides those whose scheme is "bf16".

    Returns:
      The section, or None where nothing is quantized.

    Raises:
      BridgeError("foreign_scheme"): the parts of a module vLLM fuses (q/k/v, gate/up, all experts of a layer) differ.
    """
    by_module = {module_name(name): _canonical(scheme) for name, scheme in schemes.items()}
    _check_fused(by_module)
    targets: dict[str, list[str]] = {}
    for module, scheme in by_module.items():
        expert = _EXPERT.match(module)
        target = f"re:^{re.escape(expert['layer'])}\\." if expert else module
        names = targets.setdefault(scheme, [])
        if target not in names[-1:]:
            names.append(target)
    bf16 = [*dict.fromkeys([*ignore, *targets.pop("bf16", [])])]
    if not targets:
        return None
    counts = {scheme: sum(s == scheme for s in by_module.values()) for scheme in targets}
    main = max(targets, key=lambda scheme: counts[scheme])
    groups: dict[str, Any] = {}
    # Named layers first, the class-wide target last, in a stable order.
    for i, scheme in enumerate([*sorted(s for s in targets if s != main), main]):
        names = ["Linear"] if scheme == main else list(dict.fromkeys(targets[scheme]))
        groups[f"group_{i}"] = _group(scheme, names)
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
    """The groups that `quantization_config` put into a config.json, if any."""
    return list((config.get("quantization_config") or {}).get("config_groups", {}).values())


def _canonical(scheme: str) -> str:
    name, group = parse(scheme)
    return name if group is None else f"{name}:g{group}"


def _group(scheme: str, targets: list[str]) -> dict[str, Any]:
    kind, group = parse(scheme)
    layout = _LAYOUTS[kind]
    weights = dict(layout.weight)
    if layout.grouped:
        weights.update({"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group})
    return {
        "targets": targets,
        "format": layout.format,
        "weights": weights,
        "input_activations": None if layout.activation is None else dict(layout.activation),
        "output_activations": None,
    }


def _check_fused(by_module: Mapping[str, str]) -> None:
    """Every set of layers vLLM loads into one module has one scheme."""
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for module, scheme in by_module.items():
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
