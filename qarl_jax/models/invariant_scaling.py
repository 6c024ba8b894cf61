# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Update-aware quantization (UAQ; QuRL, arXiv 2602.13953, sec. 4.3): invariant scaling, and the size of updates.

At lr 1e-6 an update moves a weight by far less than a quantization step, so a quantized sampler may not notice it. UAQ
scales once, before training: for every norm that feeds linear maps directly,

    gain <- s gain        W <- W / s        s = 1.5

    attention norm -> q, k, v          MLP norm -> gate, up, and in an MoE model the router, which reads it too

The model's function does not change (logits are equal up to float32 rounding), and the matrices shrink by s. Steps of
Adam and Muon do not scale with the gradient, so they move the matrices s times as far relative to their size. The s^2
of the paper's eq. 12 holds for SGD alone. Quantizers that scale by the absolute maximum give equal codes for W / s and
W, so the sampler at step 0 does not change either. o and down follow no norm and are not scaled.

A scaled model can be exported like any other. `invariant_scaling(params, 1 / s)` undoes the scaling.

    params = invariant_scaling(params, 1.5)
    relative_norm(squares(updates), squares(params))      # eq. 13: ||dW||^2 / ||W||^2
    quantization_error(params, qweights)                  # eq. 14: ||Q(W) - W||^2 / ||W||^2

The sampler notices an update if `relative_norm` is not small against `quantization_error`.
"""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from qarl_jax import quant
from qarl_jax.optim.build import path_name
from qarl_jax.quant import QTensor
from qarl_jax.types import UserError

_KERNEL = re.compile(r"^stacks\..*\.(kernel|lora_[ab])$")
_NORM = re.compile(r"(^|\.)(attn_norm|mlp_norm)\.weight$")
_FED = re.compile(r"(^|\.)(attn\.(q|k|v)|(mlp|moe)\.(gate|up)|moe\.router)\.kernel$")


def factor(path: str, scale: float) -> float:
    """Returns the factor of invariant scaling for the parameter at `path` ("stacks.0.attn.q.kernel"); 1: none."""
    if _NORM.search(path):
        return scale
    return 1.0 / scale if _FED.search(path) else 1.0


def invariant_scaling(params: nnx.State, scale: float) -> nnx.State:
    """Multiplies norm gains by `scale` and divides the kernels that they feed by it; placement and dtype stay.

    Args:
      params: `models.split`'s params.
      scale: s > 0; 1.5 in the paper, 1 / s to undo, 1 returns `params` as it is.

    Raises:
      UserError: `scale` is not positive and finite, or the model has no such norms or kernels.
    """
    if not (scale > 0 and math.isfinite(scale)):
        raise UserError(f"uaq_scale must be positive (1: off, 1.5 in QuRL), got {scale}.")
    if scale == 1:
        return params
    flat = nnx.to_flat_state(params)
    out, touched = [], {"norm": 0, "kernel": 0}
    for keys, variable in flat:
        by = factor(".".join(map(str, keys)), scale)
        if by != 1.0:
            touched["norm" if keys[-1] == "weight" else "kernel"] += 1
            value = variable.get_value()
            # A division, not a product with a rounded 1 / s: W / s is then the nearest float to it.
            scaled = _times(value, scale) if by == scale else _over(value, scale)
            variable = variable.replace(scaled)
        out.append((keys, variable))
    if not all(touched.values()):
        raise UserError("uaq_scale: this model has no attention and MLP norms that feed q/k/v and gate/up.")
    return nnx.from_flat_state(out)


@jax.jit
def _times(x: jax.Array, scale: Any) -> jax.Array:
    return (x.astype(jnp.float32) * jnp.asarray(scale, jnp.float32)).astype(x.dtype)


@jax.jit
def _over(x: jax.Array, scale: Any) -> jax.Array:
    return (x.astype(jnp.float32) / jnp.asarray(scale, jnp.float32)).astype(x.dtype)


def kernels(params: nnx.State, qweights: nnx.State) -> list[tuple[jax.Array, QTensor]]:
    """Lists (master [*stack, N, K], QTensor) for every weight that has a QTensor, in model order."""
    masters = dict(nnx.to_flat_state(params))
    return [(masters[(*keys[:-1], "kernel")].get_value(), q.get_value()) for keys, q in nnx.to_flat_state(qweights)]


def _ratio(squares: list[tuple[jax.Array, jax.Array]]) -> Float[Array, ""]:
    if not squares:
        return jnp.zeros((), jnp.float32)
    above, below = (jnp.stack(part).sum() for part in zip(*squares, strict=True))
    return above / jnp.maximum(below, jnp.float32(1e-30))


def _squares(x: jax.Array) -> jax.Array:
    """The sum of squares of each row: rows may lie on several devices, but none is cut."""
    return jnp.square(x.astype(jnp.float32)).sum(-1)


@jax.jit
def quantization_error(params: nnx.State, qweights: nnx.State) -> Float[Array, ""]:
    """Computes ||Q(W) - W||^2 / ||W||^2 over all weights that have a QTensor (QuRL, eq. 14), float32; 0 without any.

    It dequantizes one layer of a stack at a time, and embedding and head whole. Devices add their sums once all layers
    are done: a collective in one weight's loop would have no order among those of another's.
    """

    def one(pair: tuple[jax.Array, QTensor]) -> tuple[jax.Array, jax.Array]:
        master, qtensor = pair
        return _squares(quant.dequantize(qtensor, jnp.float32) - master.astype(jnp.float32)), _squares(master)

    pairs = kernels(params, qweights)
    squares = [one(pair) if pair[0].ndim == 2 else jax.lax.map(one, pair) for pair in pairs]
    return _ratio([(above.sum(), below.sum()) for above, below in squares])


def relative_norm(updates: Any, params: Any) -> Float[Array, ""]:
    """Computes ||dW||^2 / ||W||^2 over the layers' kernels or adapters (QuRL, eq. 13). It can be traced by jit.

    Args:
      updates, params: trees with the structure of the parameters, whose leaves are sums of squares
        (`optim.leafwise.squares`) of the optimizer's updates and of the parameters.
    """
    pairs = zip(jax.tree.leaves_with_path(updates), jax.tree.leaves(params), strict=True)
    return _ratio([(dw, w) for (path, dw), w in pairs if _KERNEL.search(path_name(path))])
