# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A model folder with its outlier channels split, as `qat` splits them, and not trained: the same function."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np

from qarl_jax import models
from qarl_jax.models.hf.by_layer import layer_config, layer_tensors, read_layer
from qarl_jax.models.hf.weights import Checkpoint, tensor_shapes, write_hf
from qarl_jax.qat import split
from qarl_jax.run import export


def make(model, folder, scheme, share, dtype="float32"):
    """Writes the folder; what flows into a layer is random."""
    config, rules = models.read_config(model), models.parse_rules(scheme)
    wanted, rng = split.asked(share, config, rules), np.random.default_rng(0)
    other, tensors, checkpoint = dataclasses.replace(config, splitting=wanted), {}, Checkpoint(model, config)
    for layer in range(config.num_layers):
        params = read_layer(checkpoint, config, layer)
        rows = [jnp.asarray(rng.normal(size=(2, 2, 8, config.hidden_size)), jnp.float32)]
        own = layer_config(config, layer)
        params = split.split(own, params, rows, wanted, rules, layer, config.num_layers)
        tensors |= dict(layer_tensors(params, other, layer, jnp.dtype(dtype)))
    pathlib.Path(folder).mkdir()
    export.copy_kept(model, pathlib.Path(folder))
    named = (
        (name, tensors[name] if name in tensors else np.asarray(checkpoint.tensor(name, shape)).astype(kind))
        for name, (kind, shape) in tensor_shapes(other, jnp.dtype(dtype)).items()
    )
    write_hf(folder, other, named, dtype)
