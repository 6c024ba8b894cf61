# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The products that models call for quantized linear layers: `dot` and `expert_dot`, around one custom_vjp.

    forward    y = scheme(x, QTensor)        the engine's arithmetic; the master's value is never read
    backward   dX = dY W_q                   W_q, x_q: the dequantized operands the forward used, in the compute dtype
               dMaster = dY^T x_q            float32 accumulation; never quantized
               db = sum dY
    low-bit    dX and dMaster from codes of dY, W_q and x_q (`backward.py`), where a `Backward` comes with the operands

This is the straight-through estimator (arXiv 1308.3432) with quantized operands in forward and backward, as in QaRL
(arXiv 2604.07853). The master is an argument only so that it gets a gradient, in its shape and dtype.

A scheme decides which operands are multiplied; `contractions.py` decides how.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from qarl_jax.kernels import products
from qarl_jax.numerics.engine import PLAIN, Numerics
from qarl_jax.numerics.float32 import round_to
from qarl_jax.quant.backward import Backward, gradients
from qarl_jax.quant.contractions import Dense, Product, Ragged
from qarl_jax.quant.qtensor import QTensor, inputs_of
from qarl_jax.quant.scheme import Scheme
from qarl_jax.quant.schemes import dequantize


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    numerics: Numerics, dtypes: Any, x: Any, master: Any, qtensor: Any, bias: Any, sizes: Any, backward: Any
) -> jax.Array:
    """Computes y [M, N] of x [M, K]. dtypes: of master and bias; sizes: rows per expert, None for one weight."""
    return _multiply_fwd(numerics, dtypes, x, master, qtensor, bias, sizes, backward)[0]


def _multiply_fwd(
    numerics: Numerics, dtypes: Any, x: Any, master: Any, qtensor: Any, bias: Any, sizes: Any, backward: Any
) -> Any:
    """Computes y; returns it with the activations and weight that the backward reads."""
    product: Product = Dense() if sizes is None else Ragged(sizes, x.shape[0])
    bias = None if bias is None else bias.astype(jnp.float32)[None, :]
    scheme: Scheme | None = qtensor.scheme if isinstance(qtensor, QTensor) else None
    if scheme is not None and scheme.own_layer:
        used, weight = scheme.activations(x, numerics=numerics), qtensor

        def engine(used: Any, qt: QTensor, bias: Any) -> jax.Array:
            y = scheme.multiply(used, qt, bias, numerics=numerics, product=product)
            return round_to(y, x.dtype)

        def kernel(used: Any, qt: QTensor, bias: Any, **options: Any) -> jax.Array:
            codes, scale = used
            return products.eight_bit(codes, scale, qt.codes, qt.scales, bias, **options)

        if sizes is None and products.serves(scheme.kernel, x, qtensor.codes.shape, numerics):
            y = lax.platform_dependent(used, qtensor, bias, cuda=kernel, default=engine)
        else:
            y = engine(used, qtensor, bias)
    else:
        used, weight = x, round_to(master, x.dtype) if qtensor is None else qtensor
        plain = weight if scheme is None else round_to(scheme.dequantize(qtensor), jnp.bfloat16)
        y = round_to(product.floating(x, plain, bias, numerics), x.dtype)
    return y, (used, weight, sizes, backward)


def _multiply_bwd(numerics: Numerics, dtypes: Any, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    """Computes dx in dy's dtype and dw in the master's dtype, each rounded once."""
    used, weight, sizes, backward = saved
    master, bias = dtypes
    if backward is not None:
        dx, dw = gradients(backward, dy, used, weight, master, numerics)
    else:
        product: Product = Dense() if sizes is None else Ragged(sizes, dy.shape[0])
        if isinstance(used, tuple):  # codes and scales of rows
            codes, scale = used
            used = codes.astype(jnp.float32) * scale
        if isinstance(weight, QTensor):
            used, weight = used.astype(dy.dtype), dequantize(weight, dy.dtype)
        dx, dw = product.grad_x(dy, weight), product.grad_w(dy, used, master)
    db = None if bias is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(bias)
    return dx, dw, None, db, None, None


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


@functools.partial(jax.jit, static_argnames="numerics")
def dot(
    x: Float[Array | np.ndarray, "*B K"],
    master: Float[Array | np.ndarray, "N K"],
    qtensor: QTensor | Float[Array | np.ndarray, "N K"] | None = None,
    bias: Float[Array | np.ndarray, " N"] | None = None,
    *,
    numerics: Numerics = PLAIN,
    backward: Backward | None = None,
) -> Float[Array, "*B N"]:
    """Computes y = x W^T + b with the QTensor's weight W, in the arithmetic of the engine that `numerics` names.

    Args:
      x: activations in the compute dtype, bfloat16 or float32; any leading dimensions.
      master: the high-precision weight; it receives the gradient, and its value is read only where `qtensor` is None.
      qtensor: the weight, quantized once for this update; for an unquantized layer, the master rounded to the compute
        dtype. None: `dot` rounds the master.
      bias: optional.
      numerics: the arithmetic of the mirrored engine.
      backward: the low-bit format of the gradients' products; None: they are made in the compute dtype.

    Returns:
      y in x.dtype, rounded once from float32 (twice where the engine does).

    Raises:
      ValueError: `qtensor` has another shape than the master.
    """
    _check(master, qtensor)
    if (shards := numerics.shards) > 1:  # of a tensor-parallel engine: each rounds the sum of its own inputs
        alone = dataclasses.replace(numerics, shards=1)
        sums = [
            dot(
                *(inputs_of(a, i, shards) for a in (x, master, qtensor)),
                None if i else bias,
                numerics=alone,
                backward=None if backward is None else backward.part(i, shards),
            )
            for i in range(shards)
        ]
        return sum_of_shards(sums)
    dtypes = jnp.dtype(master.dtype), None if bias is None else jnp.dtype(bias.dtype)
    y = _multiply(numerics, dtypes, x.reshape(-1, x.shape[-1]), master, qtensor, bias, None, backward)
    return y.reshape(*x.shape[:-1], master.shape[0])


@functools.partial(jax.jit, static_argnames="numerics")
def expert_dot(
    x: Float[Array | np.ndarray, "M K"],
    master: Float[Array | np.ndarray, "E N K"],
    qtensor: QTensor | Float[Array | np.ndarray, "E N K"] | None,
    group_sizes: Int[Array | np.ndarray, " E"],
    *,
    numerics: Numerics = PLAIN,
) -> Float[Array, "M N"]:
    """`dot` for the experts of a MoE layer: row m is multiplied with the weight of its group's expert.

    Args:
      x, master, qtensor: as in `dot`, the rows sorted by expert.
      group_sizes: [E] int32, rows per expert; rows beyond their sum give zeros.
      numerics: the arithmetic of the mirrored engine.

    Returns:
      [M, N] in x.dtype, rounded once.

    Raises:
      ValueError: `qtensor` has another shape than the masters.
    """
    _check(master, qtensor)
    if isinstance(qtensor, QTensor):
        # Else XLA may transpose the codes of a whole stack before its loop: a second copy of all layers.
        qtensor = jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), qtensor)
    return _multiply(numerics, (jnp.dtype(master.dtype), None), x, master, qtensor, None, group_sizes, None)


def sum_of_shards(sums: Sequence[jax.Array]) -> jax.Array:
    """Adds what the shards of a tensor-parallel engine have rounded, arrays of one shape: by rank, in float32, rounded
    once to their dtype."""
    if len(sums) == 1:
        return sums[0]
    return round_to(functools.reduce(jnp.add, (y.astype(jnp.float32) for y in sums)), sums[0].dtype)


def _check(master: Any, qtensor: Any) -> None:
    if qtensor is not None and qtensor.shape != master.shape:
        raise ValueError(f"qtensor of shape {qtensor.shape} does not belong to a master of shape {master.shape}")
