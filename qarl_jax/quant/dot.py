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
from qarl_bridge.protocol import contract

from qarl_jax.kernels import experts_triton
from qarl_jax.kernels import products as kernels
from qarl_jax.numerics.engine import PLAIN, Numerics
from qarl_jax.numerics.float32 import from_float64, matmul_precision, round_to
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.schemes import dequantize, module_of

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


def _stored(y: jax.Array, dtype: Any) -> jax.Array:
    """A product as it leaves its kernel, in `dtype`: float32, or rounded once.

    Behind a barrier: a compiler that sees a consumer upcast the product again may keep it in float32 instead (the
    residuals of a layer scan are then twice as large, and the rounding is lost), or fuse the consumer into the product
    and give up the library's kernel.
    """
    return lax.optimization_barrier(round_to(y, dtype))


def _float_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    out_dtype: Any,
    gradient: bool = False,
) -> jax.Array:
    """Two operands of the compute dtype -> `out_dtype`, accumulated in float32.

    float32 operands are multiplied as `matmul_precision` says. bfloat16 operands go to the hardware's own units, whose
    kernels round their float32 sums as they write them; on CPU XLA's bfloat16 product is slower than a float32 product
    of the same values, rounded afterwards.
    """

    # Of bfloat16 operands, nothing is lost in any way of multiplying them.
    precision = matmul_precision(jnp.float32, gradient=gradient)

    def upcast(lhs, rhs):
        y = lax.dot_general(
            lhs.astype(jnp.float32),
            rhs.astype(jnp.float32),
            dimension_numbers,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return round_to(y, out_dtype)

    def native(lhs, rhs):
        return _stored(lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=out_dtype), out_dtype)

    if lhs.dtype == jnp.float32:
        return upcast(lhs, rhs)
    return lax.platform_dependent(lhs, rhs, cpu=upcast, default=native)


def _float64_product(
    x: jax.Array, w: jax.Array, s_x: jax.Array | None = None, s_w: jax.Array | None = None
) -> jax.Array:
    """f32(s_x * sum_k x_k w_k), computed in float64: x [M, K], w [N, K]; s_x [M, 1]; s_w [N, G], of groups of K/G
    inputs each, which w is multiplied by first (exactly)."""

    def formula(x, w, s_x, s_w):
        if s_w is not None:
            n, groups = s_w.shape
            w = (w.reshape(n, groups, -1) * s_w[..., None]).reshape(n, -1)
        y = lax.dot_general(x, w, _CONTRACT_LAST)
        return y if s_x is None else s_x * y

    return from_float64(formula, x, w, s_x, s_w)


class Dense:
    """Contractions of activations [M, K] with one weight [N, K]; `wide_sums`: see `Numerics.float64`."""

    dense = True

    def __init__(self, wide_sums: bool = False):
        self.wide_sums = wide_sums

    def integer(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """int8 [M, K], int8 [N, K] -> int32 [M, N], exact."""
        return _integer_dot_general(x, w, _CONTRACT_LAST)

    def floating(self, x: jax.Array, w: jax.Array, out_dtype: Any = jnp.float32, *, parts: int = 1) -> jax.Array:
        """[M, K] in compute dtype, [N, K] -> [M, N] in float32, or rounded once to another dtype.

        parts: of K (`contract.cuts`), each summed by itself and then added in float32, in ascending order.
        """
        w = w.astype(x.dtype)
        if self.wide_sums:
            return round_to(_float64_product(x, w), out_dtype)
        if parts == 1:
            return _float_dot_general(x, w, _CONTRACT_LAST, out_dtype)
        sums = [
            _float_dot_general(x[:, first:end], w[:, first:end], _CONTRACT_LAST, jnp.float32)
            for first, end in contract.cuts(x.shape[1], parts)
        ]
        return round_to(functools.reduce(jnp.add, sums), out_dtype)

    def linear(self, x: jax.Array, w: jax.Array, bias: jax.Array | None, numerics: Numerics) -> jax.Array:
        """[M, K], [N, K], [1, N] -> x w^T + b, summed in the parts of `numerics`, rounded or yet to be rounded."""
        if kernels.serves("bf16", x, w.shape, numerics):
            return kernels.floating(x, w.astype(x.dtype), bias, parts=numerics.parts)
        return _with_bias(self, x, w, bias, numerics)

    def rescaled(self, x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array) -> jax.Array:
        """Codes [M, K] and [N, K], scales [M, 1] and [N, G] -> f32(s_x sum x (w s_w)) [M, N], computed in float64."""
        return _float64_product(x, w, s_x, s_w)

    def float8(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """float8 [M, K], float8 [N, K] -> float32 [M, N]."""
        return _float_dot_general(x, w, _CONTRACT_LAST, jnp.float32)

    def per_output(self, s: jax.Array) -> jax.Array:
        """[N] per-output values, to be broadcast against [M, N]."""
        return s[None, :]

    def grad_x(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        """[M, N], [N, K] -> [M, K] in dy's dtype."""
        return _float_dot_general(dy, w.astype(dy.dtype), _DY_W, dy.dtype, gradient=True)

    def grad_w(self, dy: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
        """[M, N], [M, K] -> [N, K] in the master's dtype."""
        return _float_dot_general(dy, x.astype(dy.dtype), _DY_X, dtype, gradient=True)


class Ragged:
    """Contractions of activations [M, K], rows sorted by expert, with expert weights [E, N, K].

    Rows beyond sum(group_sizes) give zeros.

    Args:
      group_sizes: [E] int32, rows of each expert.
      num_rows: M.
      wide_sums: as in `Dense`.
    """

    dense = False

    def __init__(self, group_sizes: jax.Array, num_rows: int, wide_sums: bool = False):
        self.group_sizes = group_sizes
        self.wide_sums = wide_sums
        ends = jnp.cumsum(group_sizes)
        # The expert of each row; rows past the last group take the last expert and are masked.
        rows = jnp.arange(num_rows, dtype=ends.dtype)
        self.expert = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), group_sizes.shape[0] - 1)

    def integer(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """int8 [M, K], int8 [E, N, K] -> int32 [M, N], exact."""

        def multiply(x, w_NK):
            return _integer_dot_general(x, w_NK, _CONTRACT_LAST)

        def ragged(x, w):
            return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), self.group_sizes, preferred_element_type=jnp.int32)

        kernel = functools.partial(experts_triton.product, group_sizes=self.group_sizes, dtype=jnp.int32)
        return self._choose(self._by_expert(multiply, jnp.int32), ragged, kernel, x, w)

    def floating(self, x: jax.Array, w: jax.Array, out_dtype: Any = jnp.float32, *, parts: int = 1) -> jax.Array:
        """[M, K] in compute dtype, [E, N, K] -> [M, N] in float32, or rounded once to another dtype."""
        del parts  # experts' inputs are not cut: there are enough of them to fill a card
        w = w.astype(x.dtype)
        if self.wide_sums:
            return round_to(self._by_expert(_float64_product, jnp.float32)(x, w), out_dtype)
        return self._float(x, w, out_dtype)

    def rescaled(self, x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array) -> jax.Array:
        """As `Dense.rescaled`, w [E, N, K] and s_w [E, N, G]."""

        def multiply(x, w_s):
            return _float64_product(x, w_s[0], s_x, w_s[1])

        return self._by_expert(multiply, jnp.float32)(x, (w, s_w))

    def linear(self, x: jax.Array, w: jax.Array, bias: jax.Array | None, numerics: Numerics) -> jax.Array:
        """As in `Dense`, in the kernel's own order."""
        return _with_bias(self, x, w, bias, numerics)

    def float8(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """float8 [M, K], float8 [E, N, K] -> float32 [M, N]."""
        # e4m3 codes are exact in bfloat16, which every backend's ragged product takes.
        return self._float(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), jnp.float32)

    def per_output(self, s: jax.Array) -> jax.Array:
        """[E, N] per-output values -> [M, N], each row its expert's."""
        return s[self.expert]

    def grad_x(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        """[M, N], [E, N, K] -> [M, K] in dy's dtype."""
        return self._float(dy, jnp.swapaxes(w.astype(dy.dtype), 1, 2), dy.dtype, gradient=True)

    def grad_w(self, dy: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
        """[M, N], [M, K] -> [E, N, K] in the master's dtype."""

        def by_expert(dy, x):
            def one(_: None, e: jax.Array) -> tuple[None, jax.Array]:
                own = jnp.where(self._rows_of(e), dy, jnp.zeros((), dy.dtype))
                return None, _float_dot_general(own, x, _DY_X, dtype, gradient=True)

            return lax.scan(one, None, self._experts())[1]

        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=_DY_X, lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        ragged = functools.partial(
            lax.ragged_dot_general, group_sizes=self.group_sizes, ragged_dot_dimension_numbers=numbers
        )
        kernel = functools.partial(experts_triton.weight_gradient, group_sizes=self.group_sizes, dtype=dtype)
        return self._choose(by_expert, _rounded(ragged, dtype, True), kernel, dy, x.astype(dy.dtype))

    def _float(self, x: jax.Array, w: jax.Array, out_dtype: Any, gradient: bool = False) -> jax.Array:
        """[M, K], [E, N, K] -> [M, N], accumulated in float32, as in `_float_dot_general`."""

        def multiply(x, w_NK):
            return _float_dot_general(x, w_NK, _CONTRACT_LAST, out_dtype, gradient=gradient)

        def ragged(x, w, **options):
            return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), self.group_sizes, **options)

        kernel = functools.partial(experts_triton.product, group_sizes=self.group_sizes, dtype=out_dtype)
        by_expert = self._by_expert(multiply, out_dtype)
        return self._choose(by_expert, _rounded(ragged, out_dtype, gradient), kernel, x, w)

    def _experts(self) -> jax.Array:
        return jnp.arange(self.group_sizes.shape[0], dtype=self.expert.dtype)

    def _rows_of(self, e: jax.Array) -> jax.Array:
        """[M, 1]: whether a row is one of expert `e`'s."""
        inside = jnp.arange(self.expert.shape[0]) < jnp.sum(self.group_sizes)
        return ((self.expert == e) & inside)[:, None]

    def _by_expert(self, multiply: Any, dtype: Any) -> Any:
        """A function of [M, K] and [E, N, K] (or a tuple of such stacks): one expert after the other over all rows;
        each row keeps its own's.

        What XLA makes of a ragged product where it has no kernel has as many multiplications, and writes every row once
        per expert; and its one contraction over [E, K] adds in another order where a device holds other experts.
        """

        def run(x: jax.Array, w: Any) -> jax.Array:
            def add_expert(y: jax.Array, one: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
                e, w_NK = one
                return jnp.where(self._rows_of(e), multiply(x, w_NK), y), None

            outputs = jax.tree.leaves(w)[0].shape[1]
            return lax.scan(add_expert, jnp.zeros((x.shape[0], outputs), dtype), (self._experts(), w))[0]

        return run

    def _choose(self, by_expert: Any, ragged: Any, kernel: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """`kernel` on an NVIDIA GPU that can have it, `ragged` on a TPU, `by_expert` elsewhere."""
        platforms = {"cuda": kernel} if experts_triton.serves(lhs, rhs) else {}
        return lax.platform_dependent(lhs, rhs, tpu=ragged, default=by_expert, **platforms)


def _with_bias(product: Any, x: jax.Array, w: jax.Array, bias: jax.Array | None, numerics: Numerics) -> jax.Array:
    if bias is None:
        return product.floating(x, w, x.dtype, parts=numerics.parts)
    return product.floating(x, w, parts=numerics.parts) + bias


def _rounded(ragged: Any, out_dtype: Any, gradient: bool) -> Any:
    """A ragged product of floats, accumulated in float32, rounded once."""

    def run(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        wide = lhs.dtype == jnp.float32
        precision = matmul_precision(lhs.dtype, gradient=gradient)
        y = ragged(lhs, rhs, precision=precision, preferred_element_type=jnp.float32 if wide else out_dtype)
        return round_to(y, out_dtype) if wide else _stored(y, out_dtype)

    return run


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What the backward must know and cannot read off arrays."""

    numerics: Numerics
    master_dtype: Any
    bias_dtype: Any = None


def _forward(product, spec: _Spec, x, master, qtensor, bias):
    """-> y in float32, or already rounded; and what the backward needs: (activations as used, weight as used)."""
    bias = None if bias is None else bias.astype(jnp.float32)[None, :]
    if not isinstance(qtensor, QTensor):
        w = master.astype(x.dtype) if qtensor is None else qtensor
        return product.linear(x, w, bias, spec.numerics), (x, w)
    y, saved = module_of(qtensor.scheme).forward(x, qtensor, bias, numerics=spec.numerics, product=product)
    return y, (saved, qtensor)


def _backward(product, spec: _Spec, saved, weight, dy):
    """-> dx in dy's dtype and dw in the master's, each rounded once."""
    if isinstance(weight, QTensor):
        saved = module_of(weight.scheme).saved_activation(saved, dy.dtype)
        weight = dequantize(weight, dy.dtype)
    return product.grad_x(dy, weight), product.grad_w(dy, saved, spec.master_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(spec: _Spec, x, master, qtensor, bias):
    return _dense_fwd(spec, x, master, qtensor, bias)[0]


def _dense_fwd(spec, x, master, qtensor, bias):
    y, (saved, weight) = _forward(Dense(spec.numerics.float64), spec, x, master, qtensor, bias)
    return round_to(y, x.dtype), (saved, weight)


def _dense_bwd(spec, residuals, dy):
    saved, weight = residuals
    dx, dw = _backward(Dense(), spec, saved, weight, dy)
    db = None if spec.bias_dtype is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(spec.bias_dtype)
    return dx, dw, None, db


_dense.defvjp(_dense_fwd, _dense_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(spec: _Spec, x, master, qtensor, group_sizes):
    return _ragged_fwd(spec, x, master, qtensor, group_sizes)[0]


def _ragged_fwd(spec, x, master, qtensor, group_sizes):
    product = Ragged(group_sizes, x.shape[0], spec.numerics.float64)
    y, (saved, weight) = _forward(product, spec, x, master, qtensor, None)
    return round_to(y, x.dtype), (saved, weight, group_sizes)


def _ragged_bwd(spec, residuals, dy):
    saved, weight, group_sizes = residuals
    dx, dw = _backward(Ragged(group_sizes, dy.shape[0]), spec, saved, weight, dy)
    return dx, dw, None, None


_ragged.defvjp(_ragged_fwd, _ragged_bwd)


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
    if qtensor is not None and qtensor.shape != (n, k):
        raise ValueError(f"qtensor of shape {qtensor.shape} does not belong to a master of shape {(n, k)}")
    spec = _Spec(numerics, jnp.dtype(master.dtype), None if bias is None else jnp.dtype(bias.dtype))
    y = _dense(spec, x.reshape(-1, k), master, qtensor, bias)
    return y.reshape(*x.shape[:-1], n)


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
    spec = _Spec(numerics, jnp.dtype(master.dtype))
    return _ragged(spec, x, master, qtensor, group_sizes)
