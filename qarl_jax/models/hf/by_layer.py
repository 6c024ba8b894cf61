# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint one layer at a time, each as a one-layer model, and names a layer's tensors for writing.

    config = layer_config(whole, 7)                       # one layer, without embedding and head
    params = read_layer(Checkpoint(folder, whole), whole, 7)
    dict(layer_tensors(params, whole, 7))                 # {"model.layers.7.self_attn.q_proj.weight": ...}

No more than one layer is ever in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from qarl_jax.models.config import ModelConfig
from qarl_jax.models.hf.weights import Checkpoint, hf_names, read_parameter
from qarl_jax.models.params import abstract_model, by_path, part_of, split
from qarl_jax.numerics.float32 import dtype_in

_STACK = "stacks.0."


def layer_config(config: ModelConfig, layer: int) -> ModelConfig:
    """Makes the config of a one-layer model of layer `layer`, with one token; equal layers have equal configs."""
    moe_layers = (0,) if layer in config.moe_layers else ()
    return dataclasses.replace(
        config.base, num_layers=1, vocab_size=1, tie_embeddings=True, moe_layers=moe_layers, splits=()
    )


def _names(config: ModelConfig, layer: int) -> dict[str, np.ndarray]:
    """{path in the layer's own model: object array [1] or [1, E] of Hugging Face names}."""
    names = hf_names(config.base)
    number, stack = next((i, s) for i, s in enumerate(config.base.stacks) if s.start <= layer < s.start + s.length)
    at, prefix = layer - stack.start, f"stacks.{number}."
    return {
        _STACK + path.removeprefix(prefix): own[at : at + 1] for path, own in names.items() if path.startswith(prefix)
    }


def read_layer(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> nnx.State:
    """Reads the masters of one layer as params of the model of `layer_config`, without embedding and final norm.

    Raises:
      UserError: as `read_parameter`.
    """
    abstract = part_of(split(abstract_model(layer_config(config, layer)))[1], lambda path: path.startswith(_STACK))
    place, names = SingleDeviceSharding(jax.devices()[0]), _names(config, layer)
    leaves = [
        (
            keys,
            variable.replace(read_parameter(checkpoint, names[".".join(map(str, keys))], variable.get_value(), place)),
        )
        for keys, variable in nnx.to_flat_state(abstract)
    ]
    return nnx.from_flat_state(leaves)


def layer_tensors(params: nnx.State, config: ModelConfig, layer: int, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, array in `dtype`) of one layer's masters, the inverse of `read_layer`."""
    names = _names(config, layer)
    for path, value in by_path(params).items():
        host = np.asarray(jax.device_get(value.astype(dtype_in(value, dtype))))
        for index in np.ndindex(*names[path].shape):
            yield str(names[path][index]), host[index]
