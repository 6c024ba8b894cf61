# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Converts a policy to the form that decodes with the least work per step and computes equal numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from qarl_jax import models, quant
from qarl_jax.models.layers import folded
from qarl_jax.models.params import part_of
from qarl_jax.models.transformer import quantizable
from qarl_jax.numerics.float32 import round_to


@dataclasses.dataclass(frozen=True)
class Policy:
    """The static half of a policy in compute form: hashable, so that jitted programs can close over it.

    graphdef: the static half of the model (`models.split`) in compute form.
    """

    graphdef: Any

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model knows."""
        return models.config_of(self.graphdef).vocab_size

    @property
    def numerics(self) -> quant.Numerics:
        """The arithmetic of the model."""
        return models.config_of(self.graphdef).numerics

    def model(self, weights: Any) -> Any:
        """Merges `weights` of `compute_form` into a model."""
        return models.merge(self.graphdef, *weights)

    def head(self, weights: Any) -> jax.Array:
        """Returns the output projection [V, D] in the compute dtype."""
        return self.model(weights).head_weight()


def compute_form(graphdef: Any, params: Any, qweights: Any) -> tuple[Policy, tuple[Any, Any]]:
    """Converts a split model to (policy, weights) that compute equal numbers with less work per step. Traceable.

    A decoding step multiplies every weight with a few rows only, so decoding or casting a weight costs as much as its
    product:

      * a scheme without a layer of its own multiplies with decoded weights: they are stored, in the compute dtype, as
        a plain kernel;
      * other kernels, embedding and head are stored in the compute dtype instead of being cast at every step;
      * adapters are stored as an engine multiplies with them, the scale folded in;
      * the codes of the other schemes are multiplied as they are, and their masters are dropped.
    """
    model = models.merge(graphdef, params, qweights)
    config = model.config
    for linear in quantizable(model).values():
        qtensor = None if linear.quantized is None else linear.quantized.get_value()
        if qtensor is None:
            linear.kernel.set_value(linear.kernel.get_value().astype(config.compute_dtype))
        elif not qtensor.scheme.own_layer:
            linear.kernel.set_value(quant.dequantize(qtensor, config.compute_dtype))
            linear.quantized = None
        if linear.lora_a is not None and linear.lora_b is not None:
            linear.lora_a.set_value(round_to(linear.lora_a.get_value(), config.compute_dtype))
            linear.lora_b.set_value(folded(linear.lora_b.get_value(), linear.lora_scale, config.compute_dtype))
            linear.lora_scale = 1.0
    for table in (model.embed, model.head):
        if table is not None:
            table.kernel.set_value(table.kernel.get_value().astype(config.compute_dtype))
    graphdef, params, qweights = models.split(model)
    coded = models.by_path(qweights)
    return Policy(graphdef), (part_of(params, lambda path: path not in coded), qweights)
