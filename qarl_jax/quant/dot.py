# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The only seam between models and schemes: `dot` and `expert_dot`, each one custom_vjp.

    forward    y = scheme(x, QTensor)        the engine's arithmetic; the master's value is never read
    backward   dX = dY W_q                   W_q, x_q: the dequantized operands the forward used, in the compute dtype
               dMaster = dY^T x_q            float32 accumulation; never quantized
               db = sum dY

This is the straight-through estimator (arXiv 1308.3432) with the quantized operands on both sides, as in QaRL (arXiv
2604.07853). The master enters as the differentiated carrier only, so its cotangent has its shape and dtype.

AQT (`aqtp`) performs the integer contractions, here and nowhere else. Its calibration, grids and dequantization are not
used: they do not reproduce vLLM's outputs. What remains is its dot_general with int32 accumulation, which lowers to
exactly one `dot_general(int8, int8) -> int32`, with no float conversions around it (there is a test on the lowered
text).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from aqt.jax.v2 import aqt_dot_general, aqt_tensor
from jax import lax
from jaxtyping import Array, Float, Int

from qarl_jax.quant.arithmetic import round_to
from qarl_jax.quant.numerics import Numerics
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.schemes import dequantize, module_of

_PLAIN = Numerics("plain")

# Dimension numbers of [M, K] x [N, K] -> [M, N] and of the two backward products.
_CONTRACT_LAST = (((1,), (1,)), ((), ()))
_DY_W = (((1,), (0,)), ((), ()))  # [M, N] x [N, K] -> [M, K]
_DY_X = (((0,), (0,)), ((), ()))  # [M, N] x [M, K] -> [N, K]


def _integer_dot_general(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> jax.Array:
    """int8 x int8 -> int32 through AQT: exact."""
    config = aqt_dot_general.dot_general_raw_make(None, None)
    config.dg_accumulator_dtype = jnp.int32
    out, _ = config(
        # AQT reads the result dtype off these two; with the codes given below it computes nothing from their values.
        lhs.astype(jnp.int32),
        rhs.astype(jnp.int32),
        _codes(lhs),
        _codes(rhs),
        dimension_numbers,
    )
    return out


def _codes(x: jax.Array) -> aqt_tensor.QTensor:
    return aqt_tensor.QTensor(qvalue=x, scale=[], scale_t=None, bias=[], dequant_dtype=jnp.int32)


def _float_dot_general(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> jax.Array:
    """Two operands of the compute dtype -> float32, accumulated in float32.

    float32 operands are multiplied in full float32 (no TF32, no bfloat16 passes). bfloat16 operands go to the
    hardware's own units, except on CPU, where XLA's bfloat16 product is slower than a float32 product of the same
    values.
    """
    if lhs.dtype == jnp.float32:
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )

    def upcast(lhs, rhs):
        return lax.dot_general(
            lhs.astype(jnp.float32),
            rhs.astype(jnp.float32),
            dimension_numbers,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def native(lhs, rhs):
        return lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=jnp.float32)

    return lax.platform_dependent(lhs, rhs, cpu=upcast, default=native)


class Dense:
    """Contractions of activations [M, K] with one weight [N, K]."""

    def integer(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """int8 [M, K], int8 [N, K] -> int32 [M, N], exact."""
        return _integer_dot_general(x, w, _CONTRACT_LAST)

    def floating(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """[M, K] in compute dtype, [N, K] -> float32 [M, N]."""
        return _float_dot_general(x, w.astype(x.dtype), _CONTRACT_LAST)

    def float8(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """float8 [M, K], float8 [N, K] -> float32 [M, N]."""
        return _float_dot_general(x, w, _CONTRACT_LAST)

    def per_output(self, s: jax.Array) -> jax.Array:
        """[N] per-output values, to be broadcast against [M, N]."""
        return s[None, :]

    def grad_x(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        return _float_dot_general(dy, w.astype(dy.dtype), _DY_W)

    def grad_w(self, dy: jax.Array, x: jax.Array) -> jax.Array:
        return _float_dot_general(dy, x.astype(dy.dtype), _DY_X)


class Ragged:
    """Contractions of activations [M, K], rows sorted by expert, with expert weights [E, N, K].

    Rows beyond sum(group_sizes) give zeros.
    """

    def __init__(self, group_sizes: jax.Array, num_rows: int):
        self.group_sizes = group_sizes
        ends = jnp.cumsum(group_sizes)
        # The expert of each row; rows past the last group take the last expert and are masked.
        rows = jnp.arange(num_rows, dtype=ends.dtype)
        self.expert = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), group_sizes.shape[0] - 1)

    def integer(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), self.group_sizes, preferred_element_type=jnp.int32)

    def floating(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return self._float(x, jnp.swapaxes(w.astype(x.dtype), 1, 2))

    def float8(self, x: jax.Array, w: jax.Array) -> jax.Array:
        # e4m3 codes are exact in bfloat16, which every backend's ragged product takes.
        return self._float(x.astype(jnp.bfloat16), jnp.swapaxes(w.astype(jnp.bfloat16), 1, 2))

    def per_output(self, s: jax.Array) -> jax.Array:
        """[E, N] per-output values -> [M, N], each row its expert's."""
        return s[self.expert]

    def grad_x(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        return self._float(dy, w.astype(dy.dtype))

    def grad_w(self, dy: jax.Array, x: jax.Array) -> jax.Array:
        """[M, N], [M, K] -> [E, N, K]."""
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=_DY_X, lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )

        def upcast(dy, x):
            return lax.ragged_dot_general(
                dy.astype(jnp.float32),
                x.astype(jnp.float32),
                self.group_sizes,
                numbers,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )

        def native(dy, x):
            return lax.ragged_dot_general(dy, x, self.group_sizes, numbers, preferred_element_type=jnp.float32)

        if dy.dtype == jnp.float32:
            return upcast(dy, x.astype(dy.dtype))
        return lax.platform_dependent(dy, x.astype(dy.dtype), cpu=upcast, default=native)

    def _float(self, x: jax.Array, w: jax.Array) -> jax.Array:
        def upcast(x, w):
            return lax.ragged_dot(
                x.astype(jnp.float32),
                w.astype(jnp.float32),
                self.group_sizes,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )

        def native(x, w):
            return lax.ragged_dot(x, w, self.group_sizes, preferred_element_type=jnp.float32)

        if x.dtype == jnp.float32:
            return upcast(x, w)
        return lax.platform_dependent(x, w, cpu=upcast, default=native)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What the backward must know and cannot read off arrays."""

    numerics: Numerics
    master_dtype: Any
    bias_dtype: Any = None


def _forward(product, spec: _Spec, x, master, qtensor, bias):
    """-> y in float32, and what the backward needs: (activations as used, weight as used)."""
    bias = None if bias is None else bias.astype(jnp.float32)[None, :]
    if qtensor is None:
        w = master.astype(x.dtype)
        y = product.floating(x, w)
        return (y if bias is None else y + bias), (x, w)
    y, saved = module_of(qtensor.scheme).forward(x, qtensor, bias, numerics=spec.numerics, product=product)
    return y, (saved, qtensor)


def _backward(product, saved, weight, dy):
    """-> (dx, dw) in float32."""
    if isinstance(weight, QTensor):
        saved = module_of(weight.scheme).saved_activation(saved, dy.dtype)
        weight = dequantize(weight, dy.dtype)
    return product.grad_x(dy, weight), product.grad_w(dy, saved)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(spec: _Spec, x, master, qtensor, bias):
    return _dense_fwd(spec, x, master, qtensor, bias)[0]


def _dense_fwd(spec, x, master, qtensor, bias):
    y, (saved, weight) = _forward(Dense(), spec, x, master, qtensor, bias)
    return round_to(y, x.dtype), (saved, weight)


def _dense_bwd(spec, residuals, dy):
    saved, weight = residuals
    dx, dw = _backward(Dense(), saved, weight, dy)
    db = None if spec.bias_dtype is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(spec.bias_dtype)
    return round_to(dx, dy.dtype), round_to(dw, spec.master_dtype), None, db


_dense.defvjp(_dense_fwd, _dense_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(spec: _Spec, x, master, qtensor, group_sizes):
    return _ragged_fwd(spec, x, master, qtensor, group_sizes)[0]


def _ragged_fwd(spec, x, master, qtensor, group_sizes):
    product = Ragged(group_sizes, x.shape[0])
    y, (saved, weight) = _forward(product, spec, x, master, qtensor, None)
    return round_to(y, x.dtype), (saved, weight, group_sizes)


def _ragged_bwd(spec, residuals, dy):
    saved, weight, group_sizes = residuals
    dx, dw = _backward(Ragged(group_sizes, dy.shape[0]), saved, weight, dy)
    return round_to(dx, dy.dtype), round_to(dw, spec.master_dtype), None, None


_ragged.defvjp(_ragged_fwd, _ragged_bwd)


@functools.partial(jax.jit, static_argnames="numerics")
def dot(
    x: Float[Array | np.ndarray, "*B K"],
    master: Float[Array | np.ndarray, "N K"],
    qtensor: QTensor | None = None,
    bias: Float[Array | np.ndarray, " N"] | None = None,
    *,
    numerics: Numerics = _PLAIN,
) -> Float[Array, "*B N"]:
    """y = x W^T + b, with W the QTensor's weight, in the arithmetic of the engine `numerics` names.

    Args:
      x: activations in the compute dtype, bfloat16 or float32; any leading dimensions.
      master: the high-precision weight. With a QTensor its value is never read; it receives the gradient.
      qtensor: the weight as quantized once for this update; None: a plain product with master in the compute dtype.
      bias: optional.
      numerics: the engine mirrored.

    Returns:
      y in x.dtype, rounded once from float32 (twice where the engine does).
    """
    n, k = master.shape
    if qtensor is not None and qtensor.shape != (n, k):
        raise ValueError(f"qtensor of shape {qtensor.shape} does not belong to a master of shape {(n, k)}")
    spec = _Spec(numerics, jnp.dtype(master.dtype), None if bias is None else jnp.dtype(bias.dtype))
    y = _dense(spec, x.reshape(-1, k), master, qtensor, bias)
    return y.reshape(*x.shape[:-1], n)


@functools.partial(jax.jit, static_argnames="numerics")
def expert_dot(
    x: Float[Array | np.ndarray, "M K"],
    master: Float[Array | np.ndarray, "E N K"],
    qtensor: QTensor | None,
    group_sizes: Int[Array | np.ndarray, " E"],
    *,
    numerics: Numerics = _PLAIN,
) -> Float[Array, "M N"]:
    """`dot` for mixture-of-experts: row m is multiplied with the weight of the expert whose group it falls into.

    Args:
      x: [M, K] activations, rows sorted by expert.
      master: [E, N, K] high-precision weights, the carriers of the gradient.
      qtensor: the quantized experts, or None.
      group_sizes: [E] int32, rows per expert; rows beyond their sum give zeros.
      numerics: the engine mirrored.

    Returns:
      [M, N] in x.dtype.
    """
    if qtensor is not None and qtensor.shape != master.shape:
        raise ValueError(f"qtensor of shape {qtensor.shape} does not belong to masters of shape {master.shape}")
    return _ragged(_Spec(numerics, jnp.dtype(master.dtype)), x, master, qtensor, group_sizes)
