# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Outlier channel splitting of Bit-by-Bit: a layer's input with large weights is duplicated, and each weight is halved.

**The rewrite.** Input m of a layer is duplicated after the norm (before it, RMSNorm would see another mean square). A
weight w of input m, in a group with the step s (s t in `asym_grid.py`), becomes two:

    (w - s/2) / 2   at m        (w + s/2) / 2   at the end of the row

Their sum is w, to one float32 ulp of max(|w|, s). With R(x) = floor(x + 1/2) their codes at the step s add up to w's:
with v = w / 2s + 1/4, R(w / 2s - 1/4) + R(w / 2s + 1/4) = floor(v) + floor(v + 1/2) = floor(2v) = R(w / s), Hermite's
identity. Ties to even would break it, and so would clipped codes, which the asymmetric grid does not have. Halving
alone, (w / 2, w / 2), errs four times as much in squares.

Quantized anew, the halves get other steps, and the identity no longer holds before training. At two bits (8 outliers in
512 normal inputs, groups of 32, no training) a layer's squared error is 0.9 to 1.4 times the unsplit layer's. With
halving alone it is 1.4 to 1.5 times.

**Which inputs.** Those of the largest |X_m|_2 max_j |W_jm|, with X the layer's inputs over some text. Our reading of
"a share that grows linearly with depth": share * l / (L - 1) of the inputs in layer l of L, none in the first. Whole
groups are appended, so their number is rounded up to the group, and no column is left empty.

**In a model** (`models.Linear`) the index is a parameter like a bias, and is never trained. All layers of a stack
have equally many appended columns, as many as the last layer needs, in blocks of 128 if K is a multiple of 128. A layer
that needs fewer fills its index with K, which duplicates a zero: these columns stay zero but take memory. Layers that
an engine fuses have one index.

**Left out.** MoE models, adapters, tensor-parallel engines. Masters are rounded to bfloat16 before they are quantized,
which may move a half over the edge of its code.

Source: Bit-by-Bit, arXiv 2604.07888 (second-hand). Splitting: OCS, arXiv 1901.09504.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from qarl_bridge.protocol import formats

from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Splitting:
    """The splitting of all linear maps of a model.

    Attributes:
      share: the share of inputs that the last layer duplicates, 0 to 1. group: inputs per scale.
    """

    share: float
    group: int

    def places(self, inputs: int) -> int:
        """Returns how many inputs are appended to the K `inputs` of every layer; raises what `number` raises."""
        number(inputs, self.share, 1, 2, self.group)
        return formats.places(inputs, self.share, self.group)


def scores(norms: Float[Array, " K"], w: Float[Array, "N K"]) -> Float[Array, " K"]:
    """Scores each input m by |X_m|_2 max_j |W_jm|; `norms` is |X_m|_2 over the rows of a layer's inputs."""
    return norms * jnp.max(jnp.abs(w), axis=0)


def number(inputs: int, share: float, layer: int, layers: int, group: int) -> int:
    """Returns how many inputs of a layer to duplicate: a share that grows linearly with depth, in whole groups.

    Args:
      inputs: K. share: the last layer's share, 0 to 1. layer: number from 0. layers: L. group: inputs per scale.

    Raises:
      UserError: the share lies outside 0 to 1, or the group does not divide the inputs.
    """
    if not 0 <= share <= 1:
        raise UserError(f"the share of duplicated inputs must lie between 0 and 1, got {share}.")
    if inputs % group:
        raise UserError(f"{inputs} inputs are no multiple of the group {group}: choose another quant.group_size.")
    wanted = inputs * share * layer / max(1, layers - 1)
    return math.ceil(round(wanted, 6) / group) * group


def chosen(score: Float[Array, " K"], count: int) -> Int[Array, " M"]:
    """Returns the indices of the `count` largest scores, in ascending order; of equal scores the first wins."""
    return jnp.sort(jnp.argsort(-score, stable=True)[:count]).astype(jnp.int32)


def duplicated(x: Float[Array, "*B K"], index: Int[Array, " M"]) -> Float[Array, "*B K2"]:
    """Appends a layer's inputs at `index` to the inputs; an index of K appends a zero."""
    return jnp.concatenate([x, jnp.take(x, index, axis=-1, mode="fill", fill_value=0)], axis=-1)


def filled(index: Int[Array, " M"], inputs: int, places: int) -> Int[Array, " P"]:
    """Pads an index to the length `places` with the value K = `inputs`, which duplicates a zero."""
    return jnp.pad(index, (0, places - index.shape[0]), constant_values=inputs)


def split(w: Float[Array, "N K"], steps: Float[Array, "N groups"], index: Int[Array, " M"]) -> Float[Array, "N K2"]:
    """Splits a weight for duplicated inputs: float32 [N, K + M], the second halves in the last M columns.

    Args:
      w: the weight [N, K].
      steps: distance between codes, a column per group of inputs (`asym_grid.Config.steps`).
      index: the duplicated inputs [M].
    """
    half = jnp.take(steps, index // (w.shape[1] // steps.shape[1]), axis=1) * 0.5
    own = jnp.take(w, index, axis=1)
    return jnp.concatenate([w.at[:, index].set((own - half) * 0.5), (own + half) * 0.5], axis=1)


def merged(w: Float[Array, "N K2"], index: Int[Array, " M"]) -> Float[Array, "N K"]:
    """Adds the halves of split weights, and so removes duplicated inputs: the inverse of `split`."""
    inputs = w.shape[1] - index.shape[0]
    return w[:, :inputs].at[:, index].add(w[:, inputs:], mode="drop")  # those of index K are zero
