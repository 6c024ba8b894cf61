# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of activations [M, K] with one weight [N, K] (`Dense`) or with the weights of experts (`Ragged`).

Schemes call the methods of `Product`, and work with either class. Platform, dtype and shape decide which kernel runs.

AQT (`aqtp`) performs the integer contractions. Its calibration, grids and dequantization are not used: they do not
reproduce vLLM's outputs. Used is its dot_general with int32 accumulation, which lowers to exactly one
`dot_general(int8, int8) -> int32`, without float conversions around it (a test reads the lowered text).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from aqt.jax.v2 import aqt_dot_general, aqt_tensor
from jax import lax
from qarl_bridge.protocol import split_k

from qarl_jax.kernels import experts_triton, products
from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import from_float64, matmul_precision, round_to

# Dimension numbers of [M, K] x [N, K] -> [M, N] and of the two backward products.
_CONTRACT_LAST = (((1,), (1,)), ((), ()))
_DY_W = (((1,), (0,)), ((), ()))  # [M, N] x [N, K] -> [M, K]
_DY_X = (((0,), (0,)), ((), ()))  # [M, N] x [M, K] -> [N, K]
_LONGEST = 2**17  # inputs whose products of int8 codes, 127 x 128 each, an int32 sum surely holds


class Product(Protocol):
    """Contractions of activations [M, K] with one weight [N, K], or of rows with weights of experts [E, N, K]."""

    def integer(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiplies int8 codes by int8 codes: int32 [M, N], exact."""

    def floating(
        self,
        x: jax.Array,
        w: jax.Array,
        bias: jax.Array | None,
        numerics: Numerics,
        factor: jax.Array | None = None,
    ) -> jax.Array:
        """Multiplies x [M, K] by w [.., N, K] and adds a bias, float32 [1, N]: [M, N] in x.dtype or unrounded float32.

        factor: float32 [..], one number per weight. It multiplies the float32 sum, which is then rounded to x.dtype
        before the bias is added.

        K is cut into `numerics.splits` parts (`split_k.cuts`). The parts' sums are added in float32, in ascending
        order. Experts' inputs are not cut, because experts fill a GPU without it; experts have no bias.
        """

    def float8(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiplies float8 codes by float8 codes: float32 [M, N]."""

    def rescaled(self, x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array) -> jax.Array:
        """Multiplies codes and scales [M, 1] and [.., N, G] in float64: f32(s_x sum x (w s_w)), [M, N]."""

    def per_output(self, s: jax.Array) -> jax.Array:
        """Reshapes values per output [.., N] so that they broadcast against [M, N]."""

    def grad_x(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        """Computes the input's gradient from dy [M, N] and w [.., N, K]: [M, K] in dy's dtype."""

    def grad_w(self, dy: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
        """Computes the weight's gradient from dy [M, N] and x [M, K]: [.., N, K] in `dtype`, the master's."""


def _integer_dot_general(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """int8 [M, K], int8 [N, K] -> int32 [M, N] through AQT: exact."""
    config = aqt_dot_general.dot_general_raw_make(None, None)
    config.dg_accumulator_dtype = jnp.int32

    def codes(x: jax.Array) -> aqt_tensor.QTensor:
        return aqt_tensor.QTensor(qvalue=x, scale=[], scale_t=None, bias=[], dequant_dtype=jnp.int32)

    # AQT reads the result dtype off the first two; with the codes given it computes nothing from their values.
    out, _ = config(lhs.astype(jnp.int32), rhs.astype(jnp.int32), codes(lhs), codes(rhs), _CONTRACT_LAST)
    return out


def _stored(y: jax.Array, dtype: Any) -> jax.Array:
    """Rounds a product to `dtype`, once, behind an optimization barrier.

    A compiler that sees a consumer upcast the product may keep it in float32: residuals double, and the rounding is
    lost. Or it fuses the consumer into the product and gives up the library's kernel.
    """
    return lax.optimization_barrier(round_to(y, dtype))


def _float_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, out_dtype: Any, gradient: bool = False
) -> jax.Array:
    """Two operands of the compute dtype -> `out_dtype`, accumulated in float32.

    float32 operands are multiplied as `matmul_precision` says. bfloat16 operands go to the hardware's own units, whose
    kernels round their float32 sums as they write them; on CPU XLA's bfloat16 product is slower than a float32 product
    of the same values, rounded afterwards.
    """
    # Nothing is lost of bfloat16 operands, in whatever way they are multiplied.
    precision = matmul_precision(jnp.float32, gradient=gradient)

    def upcast(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        y = lax.dot_general(
            lhs.astype(jnp.float32),
            rhs.astype(jnp.float32),
            dimension_numbers,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return round_to(y, out_dtype)

    def native(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return _stored(lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=out_dtype), out_dtype)

    if lhs.dtype == jnp.float32:
        return upcast(lhs, rhs)
    return lax.platform_dependent(lhs, rhs, cpu=upcast, default=native)


def _float64_product(
    x: jax.Array, w: jax.Array, s_x: jax.Array | None = None, s_w: jax.Array | None = None
) -> jax.Array:
    """Computes f32(s_x * sum_k x_k w_k) in float64: x [M, K], w [N, K], s_x [M, 1]. First w is multiplied (exactly) by
    s_w [N, G], scales of groups of K/G inputs."""

    def formula(x: jax.Array, w: jax.Array, s_x: jax.Array | None, s_w: jax.Array | None) -> jax.Array:
        if s_w is not None:
            n, groups = s_w.shape
            w = (w.reshape(n, groups, -1) * s_w[..., None]).reshape(n, -1)
        y = lax.dot_general(x, w, _CONTRACT_LAST)
        return y if s_x is None else s_x * y

    return from_float64(formula, x, w, s_x, s_w)


def codes_product(
    x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array, dtype: Any, numerics: Numerics
) -> jax.Array:
    """Computes s_x * (s_w * sum_k x w) of 8-bit codes, rounded once; the low-bit backward calls it (`quant.backward`).

    Args:
      x: [M, K] int8 or float8_e4m3fn; s_x: float32 [M, 1].
      w: [N, K] of the same dtype; s_w: float32 [N].
      dtype: dtype of the result [M, N].
      numerics: decides whether a Hopper GPU may run our kernel, which needs all operands on one device.
    """

    def in_float64(x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array) -> jax.Array:
        # The sum of either format's codes is exact for up to 2^17 inputs: no order can be seen in it.
        formula = lambda x, s_x, w, s_w: s_x * (s_w * lax.dot_general(x, w, _CONTRACT_LAST))  # noqa: E731
        return round_to(from_float64(formula, x, s_x, w, s_w[None]), dtype)

    def native(x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array) -> jax.Array:
        if x.dtype == jnp.int8:
            parts = [slice(first, first + _LONGEST) for first in range(0, x.shape[1], _LONGEST)]
            sums = (_integer_dot_general(x[:, part], w[:, part]).astype(jnp.float32) for part in parts)
            acc = functools.reduce(jnp.add, sums)
        else:
            highest = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
            acc = lax.dot_general(x, w, _CONTRACT_LAST, **highest)  # the highest: not accumulated fast
        return _stored(s_x * (s_w[None] * acc), dtype)

    def kernel(x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array, **options: Any) -> jax.Array:
        promoted = x.dtype != jnp.int8  # tensor cores alone keep some 14 bits of a float32 sum
        return products.eight_bit(x, s_x, w, s_w[:, None], None, promoted=promoted, **options)

    own = x.shape[1] <= _LONGEST and products.serves_gradient(x, dtype, numerics)
    platforms = {"cuda": kernel} if own else {}
    return lax.platform_dependent(x, s_x, w, s_w, cpu=in_float64, default=native, **platforms)


class Dense:
    """`Product` with one weight [N, K]."""

    def integer(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return _integer_dot_general(x, w)

    def floating(
        self,
        x: jax.Array,
        w: jax.Array,
        bias: jax.Array | None,
        numerics: Numerics,
        factor: jax.Array | None = None,
    ) -> jax.Array:
        w = w.astype(x.dtype)
        if products.serves("bf16", x, w.shape, numerics):
            return products.floating(x, w, bias, factor, splits=numerics.splits)
        dtype = x.dtype if bias is None and factor is None else jnp.float32
        if numerics.float64:
            y = round_to(_float64_product(x, w), dtype)
        elif numerics.splits == 1:
            y = _float_dot_general(x, w, _CONTRACT_LAST, dtype)
        else:
            sums = [
                _float_dot_general(x[:, first:end], w[:, first:end], _CONTRACT_LAST, jnp.float32)
                for first, end in split_k.cuts(x.shape[1], numerics.splits)
            ]
            y = round_to(functools.reduce(jnp.add, sums), dtype)
        if factor is not None:
            y = round_to(y * factor, x.dtype).astype(jnp.float32)
        return y if bias is None else y + bias

    def float8(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return _float_dot_general(x, w, _CONTRACT_LAST, jnp.float32)

    def rescaled(self, x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array) -> jax.Array:
        return _float64_product(x, w, s_x, s_w)

    def per_output(self, s: jax.Array) -> jax.Array:
        return s[None, :]

    def grad_x(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        return _float_dot_general(dy, w.astype(dy.dtype), _DY_W, dy.dtype, gradient=True)

    def grad_w(self, dy: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
        return _float_dot_general(dy, x.astype(dy.dtype), _DY_X, dtype, gradient=True)


class Ragged:
    """`Product` with the weights of experts [E, N, K], rows sorted by expert; rows beyond sum(group_sizes) give zeros.

    Args:
      group_sizes: [E] int32, rows of each expert.
      num_rows: M.
    """

    def __init__(self, group_sizes: jax.Array, num_rows: int):
        self.group_sizes = group_sizes
        ends = jnp.cumsum(group_sizes)
        # The expert of each row; rows past the last group take the last expert and are masked.
        rows = jnp.arange(num_rows, dtype=ends.dtype)
        self.expert = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), group_sizes.shape[0] - 1)

    def integer(self, x: jax.Array, w: jax.Array) -> jax.Array:
        def ragged(x: jax.Array, w: jax.Array) -> jax.Array:
            return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), self.group_sizes, preferred_element_type=jnp.int32)

        kernel = functools.partial(experts_triton.product, group_sizes=self.group_sizes, dtype=jnp.int32)
        return self._choose(self._by_expert(_integer_dot_general, jnp.int32), ragged, kernel, x, w)

    def floating(
        self,
        x: jax.Array,
        w: jax.Array,
        bias: jax.Array | None,
        numerics: Numerics,
        factor: jax.Array | None = None,
    ) -> jax.Array:
        del bias
        w = w.astype(x.dtype)
        if numerics.float64:
            y = self._by_expert(_float64_product, jnp.float32)(x, w)
        else:
            y = self._float(x, w, x.dtype if factor is None else jnp.float32)
        return y if factor is None else y * factor[self.expert][:, None]

    def float8(self, x: jax.Array, w: jax.Array) -> jax.Array:
        # e4m3 codes are exact in bfloat16, which every backend's ragged product takes.
        return self._float(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), jnp.float32)

    def rescaled(self, x: jax.Array, s_x: jax.Array, w: jax.Array, s_w: jax.Array) -> jax.Array:
        def multiply(x: jax.Array, w_s: tuple[jax.Array, jax.Array]) -> jax.Array:
            return _float64_product(x, w_s[0], s_x, w_s[1])

        return self._by_expert(multiply, jnp.float32)(x, (w, s_w))

    def per_output(self, s: jax.Array) -> jax.Array:
        return s[self.expert]

    def grad_x(self, dy: jax.Array, w: jax.Array) -> jax.Array:
        return self._float(dy, jnp.swapaxes(w.astype(dy.dtype), 1, 2), dy.dtype, gradient=True)

    def grad_w(self, dy: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
        def by_expert(dy: jax.Array, x: jax.Array) -> jax.Array:
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

        def multiply(x: jax.Array, w_NK: jax.Array) -> jax.Array:
            return _float_dot_general(x, w_NK, _CONTRACT_LAST, out_dtype, gradient=gradient)

        def ragged(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
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

    def _by_expert(self, multiply: Callable[..., jax.Array], dtype: Any) -> Callable[..., jax.Array]:
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


def _rounded(ragged: Callable[..., jax.Array], out_dtype: Any, gradient: bool) -> Callable[..., jax.Array]:
    """A ragged product of floats, accumulated in float32, rounded once."""

    def run(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        wide = lhs.dtype == jnp.float32
        precision = matmul_precision(lhs.dtype, gradient=gradient)
        y = ragged(lhs, rhs, precision=precision, preferred_element_type=jnp.float32 if wide else out_dtype)
        return round_to(y, out_dtype) if wide else _stored(y, out_dtype)

    return run
