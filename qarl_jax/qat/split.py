# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Outlier channel splitting of one layer, before it is trained (`quant/splitting.py` has the formulas and the source).

A linear map duplicates its inputs of the largest |X_m|_2 max_j |W_jm|. X are the layer's inputs over the training rows,
after the trained layers before it. Maps that an engine fuses (q, k and v; gate and up) duplicate the same inputs. A
weight is split at the quantization steps of the final scheme.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from qarl_jax import models, quant
from qarl_jax.models.layers import Linear, rope_table
from qarl_jax.models.params import path_keys
from qarl_jax.models.transformer import attending
from qarl_jax.quant import splitting
from qarl_jax.quant.schemes import asym_grid
from qarl_jax.types import UserError

SHARING = (("attn.q", "attn.k", "attn.v"), ("attn.o",), ("mlp.gate", "mlp.up"), ("mlp.down",))
"""Linear maps of a layer that have the same inputs."""


def asked(share: float, config: models.ModelConfig, rules: quant.Rules) -> splitting.Splitting:
    """Makes and checks the `Splitting` of a model whose last layer duplicates a share of its inputs.

    Args:
      rules: the final scheme's rules.

    Raises:
      UserError: the share lies outside 0 to 1, the model is a MoE model, or the scheme has no zero points.
    """
    schemes = {scheme for _, scheme in rules.rules}
    if len(schemes) != 1 or not isinstance(scheme := schemes.pop(), asym_grid.Config) or scheme.slices:
        raise UserError(
            "split needs one scheme with zero points as the last of stages, for example w2a16_asym, and no widths."
        )
    found = splitting.Splitting(share, scheme.group_size)
    for inputs in (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim):
        found.places(inputs)
    dataclasses.replace(config, splitting=found)
    return found


class _Recorder:
    """Stands in for a linear map, and keeps the sum of squares of each of its inputs."""

    def __init__(self, linear: Linear, sums: dict[str, jax.Array], name: str):
        self.linear, self.sums, self.name = linear, sums, name

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sums[self.name] = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(x.ndim - 1)))
        return self.linear(x)


@functools.partial(jax.jit, static_argnums=0)
def _squares(config: models.ModelConfig, params: nnx.State, stream: Float[Array, "B 2 T D"]) -> dict[str, jax.Array]:
    """Sums of squares of the inputs of a layer's maps, by the first map that has them: [K] float32."""
    layer = nnx.merge(*_one_layer(config, params))
    sums = dict[str, jax.Array]()
    for first, *_ in SHARING:
        room, name = first.split(".")
        object.__setattr__(getattr(layer, room), name, _Recorder(getattr(getattr(layer, room), name), sums, first))
    positions = jnp.broadcast_to(jnp.arange(stream.shape[2], dtype=jnp.int32), (stream.shape[0], stream.shape[2]))
    layer(stream[:, 0], stream[:, 1], rope_table(config, positions), attending(config))
    return sums


def _one_layer(config: models.ModelConfig, params: nnx.State) -> tuple[Any, nnx.State]:
    """(graphdef, state) of a layer that can be called, from the masters of a one-layer model in full precision."""
    structure, state = nnx.split(models.abstract_model(config).stacks[0])
    held = models.by_path(params)
    flat = [
        (keys, leaf.replace(held[".".join(map(str, ("stacks", 0, *keys)))][0]))
        for keys, leaf in nnx.to_flat_state(state)
    ]
    return structure, nnx.from_flat_state(flat)


def split(
    config: models.ModelConfig,
    params: nnx.State,
    streams: Iterable[Float[Array, "B 2 T D"]],
    wanted: splitting.Splitting,
    rules: quant.Rules,
    layer: int,
    layers: int,
) -> nnx.State:
    """Splits the outlier channels of one layer, and returns its masters with indices of duplicated inputs.

    Args:
      config: config of the one-layer model, in full precision and not split. params: its masters.
      streams: batches of the layer's inputs, (delta, residual) as in `Transformer.through`.
      wanted: the model's splitting. rules: the final scheme's rules.
      layer, layers: the layer's number from 0, and the number of layers.
    """
    total = None
    for stream in streams:
        found = _squares(config, params, stream)
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    assert total is not None
    served = dataclasses.replace(config, quant=rules)
    masters = dict(nnx.to_flat_state(params))
    for names in SHARING:
        inputs = total[names[0]].shape[0]
        keys = [path_keys(f"stacks.0.{name}.kernel") for name in names]
        weights = [masters[key].get_value()[0] for key in keys]
        count = splitting.number(inputs, wanted.share, layer, layers, wanted.group)
        scores = splitting.scores(jnp.sqrt(total[names[0]]), jnp.concatenate(weights))
        index, places = splitting.chosen(scores, count), wanted.places(inputs)
        if not places:
            continue
        for key, weight in zip(keys, weights, strict=True):
            scheme = served.scheme_of(".".join(map(str, key)))
            assert isinstance(scheme, asym_grid.Config)
            wider = splitting.split(weight, scheme.steps(scheme.quantize(weight)), index)
            wider = jnp.pad(wider, ((0, 0), (0, places - count)))
            masters[key] = masters[key].replace(wider[None])
            own = splitting.filled(index, inputs, places)[None, None]
            masters[(*key[:-1], "index")] = nnx.Param(own, axes=("layers", None, None))
    return nnx.from_flat_state(list(masters.items()))
