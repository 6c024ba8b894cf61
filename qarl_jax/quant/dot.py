# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The only seam between models and schemes: `dot` and `expert_dot`, two doors to one custom_vjp.

    forward    y = scheme(x, QTensor)        the engine's arithmetic; the master's value is never read
    backward   dX = dY W_q                   W_q, x_q: the dequantized operands the forward used, in the compute dtype
               dMaster = dY^T x_q            float32 accumulation; never quantized
               db = sum dY

This is the straight-through estimator (arXiv 1308.3432) with the quantized operands on both sides, as in QaRL (arXiv
2604.07853). The master enters as the differentiated carrier only, so its cotangent has its shape and dtype.

A scheme says what is multiplied, `contractions.py` how; whether a kernel of ours takes a layer is asked here alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from qarl_jax.kernels import products as kernels
from qarl_jax.numerics.engine import PLAIN, Numerics
from qarl_jax.numerics.float32 import round_to
from qarl_jax.quant.contractions import Dense, Product, Ragged
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.schemes import OfLowBitActivations, dequantize, module_of
from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a product must know and cannot read off arrays, the backward's included.

    Attributes:
      numerics: the engine mirrored.
      x, master, bias: dtypes; bias: None where there is none.
    """

    numerics: Numerics
    x: Any
    master: Any
    bias: Any = None


def _linear(product: Product, x: jax.Array, w: jax.Array, bias: jax.Array | None, numerics: Numerics) -> jax.Array:
    """x w^T + b of unquantized activations, summed in the parts of `numerics`; rounded, or yet to be."""
    if not product.experts and kernels.serves("bf16", x, w.shape, numerics):
        return kernels.floating(x, w.astype(x.dtype), bias, parts=numerics.parts)
    if bias is None:
        return product.floating(x, w, x.dtype, parts=numerics.parts)
    return product.floating(x, w, parts=numerics.parts) + bias


def _forward(
    product: Product, static: _Static, x: jax.Array, master: jax.Array, qtensor: Any, bias: jax.Array | None
) -> tuple[jax.Array, Any, Any]:
    """-> y, rounded or yet to be; the activations and the weight as used, which the backward needs."""
    numerics = static.numerics
    bias = None if bias is None else bias.astype(jnp.float32)[None, :]
    if not isinstance(qtensor, QTensor):
        w = master.astype(x.dtype) if qtensor is None else qtensor
        return _linear(product, x, w, bias, numerics), x, w
    scheme = module_of(qtensor.scheme)
    if not isinstance(scheme, OfLowBitActivations):
        w = scheme.dequantize(qtensor).astype(jnp.bfloat16)
        return _linear(product, x, w, bias, numerics), x, qtensor
    used = scheme.activations(x, numerics=numerics)
    multiply = functools.partial(scheme.multiply, numerics=numerics, product=product, dtype=x.dtype)
    if product.experts or not kernels.serves(scheme.NAME, x, qtensor.qvalue.shape, numerics):
        return multiply(used, qtensor, bias), used, qtensor

    def kernel(used: Any, qt: QTensor, bias: jax.Array | None, **options: Any) -> jax.Array:
        codes, scale = used
        return kernels.eight_bit(codes, scale, qt.qvalue, qt.scale, bias, **options)

    def default(*operands: Any) -> jax.Array:
        return round_to(multiply(*operands), x.dtype)

    return lax.platform_dependent(used, qtensor, bias, cuda=kernel, default=default), used, qtensor


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(static: _Static, x: Any, master: Any, qtensor: Any, bias: Any, group_sizes: Any) -> jax.Array:
    """y [M, N] of x [M, K]; group_sizes: None for one weight."""
    return _multiply_fwd(static, x, master, qtensor, bias, group_sizes)[0]


def _multiply_fwd(static: _Static, x: Any, master: Any, qtensor: Any, bias: Any, group_sizes: Any) -> tuple[Any, Any]:
    wide_sums = static.numerics.float64
    product: Product = Dense(wide_sums) if group_sizes is None else Ragged(group_sizes, x.shape[0], wide_sums)
    y, used, weight = _forward(product, static, x, master, qtensor, bias)
    return round_to(y, x.dtype), (used, weight, group_sizes)


def _multiply_bwd(static: _Static, saved: Any, dy: jax.Array) -> tuple[Any, ...]:
    """dx in dy's dtype and dw in the master's, each rounded once."""
    used, weight, group_sizes = saved
    product: Product = Dense() if group_sizes is None else Ragged(group_sizes, dy.shape[0])
    dy = round_to(dy, static.x)
    if isinstance(used, tuple):  # codes and scales of rows
        codes, scale = used
        used = codes.astype(jnp.float32) * scale
    if isinstance(weight, QTensor):
        used, weight = used.astype(dy.dtype), dequantize(weight, dy.dtype)
    dx, dw = product.grad_x(dy, weight), product.grad_w(dy, used, static.master)
    db = None if static.bias is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(static.bias)
    return dx, dw, None, db, None


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


@functools.partial(jax.jit, static_argnames="numerics")
def dot(
    x: Float[Array | np.ndarray, "*B K"],
    master: Float[Array | np.ndarray, "N K"],
    qtensor: QTensor | Float[Array | np.ndarray, "N K"] | None = None,
    bias: Float[Array | np.ndarray, " N"] | None = None,
    *,
    numerics: Numerics = PLAIN,
) -> Float[Array, "*B N"]:
    """y = x W^T + b, with W the QTensor's weight, in the arithmetic of the engine `numerics` names.

    Args:
      x: activations in the compute dtype, bfloat16 or float32; any leading dimensions.
      master: the high-precision weight; it receives the gradient, and its value is read only where `qtensor` is None.
      qtensor: the weight as quantized once for this update, or, for a plain product, as rounded to the compute dtype;
        None: rounded here.
      bias: optional.
      numerics: the engine mirrored.

    Returns:
      y in x.dtype, rounded once from float32 (twice where the engine does).

    Raises:
      ValueError: `qtensor` has another shape than the master.
    """
    n, k = master.shape
    if numerics.shards > 1:
        return _of_shards(x, master, qtensor, bias, numerics)
    if qtensor is not None and qtensor.shape != (n, k):
        raise ValueError(f"qtensor of shape {qtensor.shape} does not belong to a master of shape {(n, k)}")
    static = _Static(
        numerics, jnp.dtype(x.dtype), jnp.dtype(master.dtype), None if bias is None else jnp.dtype(bias.dtype)
    )
    y = _multiply(static, x.reshape(-1, k), master, qtensor, bias, None)
    return y.reshape(*x.shape[:-1], n)


def _of_shards(x: Any, master: Any, qtensor: Any, bias: Any, numerics: Numerics) -> jax.Array:
    """`dot` of a layer whose inputs a tensor-parallel engine spreads over shards: each rounds the sum of its own."""
    inputs, shards = master.shape[1], numerics.shards
    if inputs % shards or (isinstance(qtensor, QTensor) and not _can_be_cut(qtensor, shards)):
        raise UserError(
            f"a layer with {inputs} inputs cannot be spread over {shards} engine shards without cutting a group of its"
            " weight: set rollout.engine.tensor_parallel_size=1, or a smaller quant.group_size."
        )
    alone = dataclasses.replace(numerics, shards=1)

    def part(of: Any, shard: int) -> Any:
        """[.., K] -> the shard's share of the last dim."""
        size = of.shape[-1] // shards
        return of[..., shard * size : (shard + 1) * size]

    total: Any = None
    for shard in range(shards):
        codes = qtensor
        if isinstance(qtensor, QTensor):
            scale = qtensor.scale if qtensor.scale.shape[-1] == 1 else part(qtensor.scale, shard)
            codes = QTensor(part(qtensor.qvalue, shard), scale, qtensor.scheme)
        elif qtensor is not None:
            codes = part(qtensor, shard)
        own = dot(part(x, shard), part(master, shard), codes, None if shard else bias, numerics=alone)
        wide = own.astype(jnp.float32)
        total = wide if total is None else total + wide
    return round_to(total, x.dtype)


def _can_be_cut(qtensor: QTensor, shards: int) -> bool:
    groups = qtensor.scale.shape[-1]
    return qtensor.qvalue.shape[-1] % shards == 0 and (groups == 1 or groups % shards == 0)


@functools.partial(jax.jit, static_argnames="numerics")
def expert_dot(
    x: Float[Array | np.ndarray, "M K"],
    master: Float[Array | np.ndarray, "E N K"],
    qtensor: QTensor | Float[Array | np.ndarray, "E N K"] | None,
    group_sizes: Int[Array | np.ndarray, " E"],
    *,
    numerics: Numerics = PLAIN,
) -> Float[Array, "M N"]:
    """`dot` for mixture-of-experts: row m is multiplied with the weight of the expert whose group it falls into.

    Args:
      x: [M, K] activations, rows sorted by expert.
      master: [E, N, K] high-precision weights, the carriers of the gradient.
      qtensor: the experts, as in `dot`.
      group_sizes: [E] int32, rows per expert; rows beyond their sum give zeros.
      numerics: the engine mirrored.

    Returns:
      [M, N] in x.dtype, rounded once.

    Raises:
      ValueError: `qtensor` has another shape than the masters.
    """
    if qtensor is not None and qtensor.shape != master.shape:
        raise ValueError(f"qtensor of shape {qtensor.shape} does not belong to masters of shape {master.shape}")
    static = _Static(numerics, jnp.dtype(x.dtype), jnp.dtype(master.dtype))
    return _multiply(static, x, master, qtensor, None, group_sizes)
