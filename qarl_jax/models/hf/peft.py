# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes LoRA adapters as PEFT folders (adapter_config.json, adapter_model.safetensors).

A written folder has one rank and one alpha for all linear maps, and tensors in the compute dtype. It has no
`rank_pattern` or `alpha_pattern`, because vLLM 0.25 ignores them. When a folder is read, a scale that differs from the
run's is folded into B. An adapter of a smaller rank is padded with fresh rows of A and zero columns of B.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from qarl_jax.models.config import ModelConfig
from qarl_jax.models.families import ADAPTER
from qarl_jax.models.hf import safetensors
from qarl_jax.models.hf.weights import hf_names
from qarl_jax.models.params import abstract_model, by_path, split
from qarl_jax.types import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What an adapter may have and ours has not: a setting with another value than these.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "use_rslora": (None, False, True),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    # PiSSA, OLoRA, CorDA, LoftQ and the like move the base's own weights.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


def _own_names(config: ModelConfig) -> dict[str, np.ndarray]:
    """{path of an adapter's leaf: names of its tensors in a PEFT folder, [L]}."""
    names = {path: own for path, own in hf_names(config).items() if path.rpartition(".")[2] in ADAPTER}
    return {path: np.array([_PREFIX + name for name in own.tolist()], dtype=object) for path, own in names.items()}


def write_peft(
    folder: pathlib.Path, config: ModelConfig, params: nnx.State, *, alpha: float, rslora: bool, base: str
) -> None:
    """Writes the adapters of `params` into an existing folder.

    Args:
      config: the model's config, with `lora`.
      params: masters; leaves that are no adapter's are ignored. Adapters are written in the compute dtype.
      alpha, rslora: the LoRA settings from which `config.lora.scale` was computed.
      base: the base model's folder or name, written for readers of the folder.
    """
    assert config.lora is not None
    dtype, own, names = np.dtype(config.compute_dtype), by_path(params), _own_names(config)
    shapes = {name: (dtype, own[path].shape[1:]) for path in names for name in names[path]}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for path in names:
            stack = np.asarray(jax.device_get(own[path])).astype(dtype)
            yield from zip(names[path], stack, strict=True)

    safetensors.write(folder / WEIGHTS, shapes, tensors())
    targets = sorted({name.split(".")[-3] for each in names.values() for name in each})
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": rslora,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")


def check_peft(folder: str, config: ModelConfig) -> dict[str, list[np.ndarray]]:
    """Reads a PEFT folder and checks that its adapters fit `config`, without a JAX device.

    Returns:
      {path of an adapter's leaf: a float32 array per layer, of the file's rank, with the folder's scale folded into B}.

    Raises:
      UserError: there is no such folder, or its kind of adapter, base, rank or targets do not fit, or numbers are not
        finite; the message names the file, and the setting or tensor.
    """
    assert config.lora is not None
    path = pathlib.Path(folder)
    if not (path / CONFIG).is_file():
        raise UserError(
            f"lora.init={folder}: no {CONFIG} there; give a folder that PEFT or `export --format peft` wrote."
        )
    try:
        values = json.loads((path / CONFIG).read_text())
        if not isinstance(values, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise UserError(f"{path / CONFIG} is not JSON ({error}).") from None
    for key, known in _PLAIN.items():
        if values.get(key) not in known:
            raise UserError(
                f"{path / CONFIG}: {key}={values.get(key)!r} is not supported; merge it, or train plain LoRA."
            )
    if not (path / WEIGHTS).is_file():
        raise UserError(f"{path}: no {WEIGHTS} there; other formats are not read.")
    file, names = safetensors.SafetensorsFile(path / WEIGHTS), _own_names(config)
    _check_names({name for own in names.values() for name in own}, set(file.entries), file.path)
    shapes = {own: leaf.shape[1:] for own, leaf in by_path(split(abstract_model(config))[1]).items() if own in names}
    found = {own: [_tensor(file, name, shape) for name in names[own]] for own, shape in shapes.items()}
    for own in (own for own in found if own.endswith("lora_a")):
        other = own.removesuffix("lora_a") + "lora_b"
        for number, (name, a, b) in enumerate(zip(names[own], found[own], found[other], strict=True)):
            if len(a) != b.shape[1]:
                raise UserError(f"{file.path}: {name} has rank {len(a)} and its lora_B {b.shape[1]}; get it again.")
            with np.errstate(over="ignore", invalid="ignore"):
                folded = b * np.float32(_scale_of(values, _module(name), len(a), path / CONFIG) / config.lora.scale)
            if not np.isfinite(folded).all():
                raise UserError(f"{path / CONFIG}: lora_alpha or alpha_pattern leaves {name} no finite numbers.")
            found[other][number] = folded
    return found


def read_peft(folder: str, config: ModelConfig, fresh: nnx.State) -> nnx.State:
    """Reads adapters of `config` from a PEFT folder.

    Args:
      fresh: fresh adapters (`fresh_adapters`), for placement, dtypes, and rows of A above the folder's rank.

    Raises:
      UserError: as `check_peft`.
    """
    found, out = check_peft(folder, config), []
    for keys, variable in nnx.to_flat_state(fresh):
        like, own = variable.get_value(), ".".join(map(str, keys))
        stack = np.asarray(jax.device_get(like)).astype(np.float32)
        for layer, tensor in zip(stack, found[own], strict=True):
            layer[: tensor.shape[0], : tensor.shape[1]] = tensor
        out.append((keys, variable.replace(jax.device_put(stack.astype(like.dtype), like.sharding))))
    return nnx.from_flat_state(out)


def _check_names(wanted: set[str], found: set[str], path: pathlib.Path) -> None:
    """Raises UserError where tensors are missing or unexpected."""
    for names, said in (
        (wanted - found, "missing that lora.targets asks for"),
        (found - wanted, "that lora.targets leaves no place for"),
    ):
        if names:
            some = ", ".join(sorted(names)[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
            raise UserError(f"{path}: {len(names)} tensor(s) {said}: {some}.")


def _tensor(file: safetensors.SafetensorsFile, name: str, like: tuple[int, ...]) -> np.ndarray:
    """A finite tensor of the base's width and at most the run's rank, float32."""
    dtype, shape, _ = file.entries[name]
    ranked = int(".lora_B." in name)  # dim of the rank
    if not jax.dtypes.issubdtype(dtype, np.floating):
        raise UserError(f"{file.path}: {name} is {dtype}, and an adapter's tensors are floats; get the adapter again.")
    if len(shape) != 2 or shape[1 - ranked] != like[1 - ranked]:
        raise UserError(f"{file.path}: {name} has shape {shape}, and the base asks for {like}: it is another base's.")
    if not shape[ranked]:
        raise UserError(f"{file.path}: {name} has rank 0; get the adapter again.")
    if shape[ranked] > like[ranked]:
        raise UserError(f"{file.path}: {name} has rank {shape[ranked]}, above lora.rank={like[ranked]}; raise that.")
    values = np.asarray(file.tensor(name)).astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"{file.path}: {name} has numbers that are not finite; get the adapter again.")
    return values


def _module(name: str) -> str:
    """The module of an adapter's tensor, as patterns name it."""
    return name.removeprefix(_PREFIX).rsplit(".", 2)[0]


def _scale_of(values: Mapping[str, Any], module: str, rank: int, path: pathlib.Path) -> float:
    """The scale that PEFT gives a module's adapter; raises UserError where the settings in `path` say none."""

    def said(key: str, patterns: str) -> float:
        each = values.get(patterns) or {}
        found = (value for pattern, value in each.items() if re.match(rf"(.*\.)?({pattern})$", module))
        return float(next(found, values.get(key, 8)))  # PEFT's default of either

    try:
        alpha, own = said("lora_alpha", "alpha_pattern"), said("r", "rank_pattern")
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise UserError(f"{path}: r, lora_alpha, or a pattern of either, gives {module} no scale ({error}).") from None
    if not math.isfinite(alpha):
        raise UserError(f"{path}: lora_alpha or alpha_pattern gives {module} the scale {alpha}.")
    if own != rank:
        raise UserError(f"{path}: r or rank_pattern gives {module} the rank {own:g}, and its tensors have {rank}.")
    return alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)
