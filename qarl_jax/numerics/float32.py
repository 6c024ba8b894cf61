# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Float32 operations with equal bits on every backend, jitted or not.

Compilers rewrite float operations in three ways that can change a quantization code:

  * XLA turns `a / constant` and `a / broadcast(b)` into a multiplication by a reciprocal (4 % of the quotients by 127
    are then one ulp off, 26 % of general ones), and XLA:GPU's own float32 division is not IEEE at all;
  * XLA:CPU contracts `a * b + c` into one fused operation, or does not, depending on what it fused around it;
  * "excess precision" lets XLA drop a float32 -> bfloat16 -> float32 pair, that is, an intended rounding.

`divide` is immune to the first two by construction and `round_to` to the third. Functions computed `in_float64` are
immune to all three, to the order of sums, and to the compiler's approximations of exp and cos.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

_MANTISSA = 0x007FFFFF
_EXPONENT = 0x7F800000
_SIGN = -0x80000000
_ONE = 0x3F800000  # the bits of 1.0


def matmul_precision(dtype: Any, *, gradient: bool = False) -> lax.Precision | None:
    """Returns JAX's `precision` for a product of operands of `dtype`; None: its default.

    Where log-probs are computed, float32 is full float32 on every backend (no TF32, no bfloat16 passes), because
    sampler and learner must agree. Products of a `gradient` with float32 operands may be TF32 (a GPU: inputs of 10 bits
    of mantissa, float32 sums, several times as fast) or three bfloat16 passes (a TPU). If
    `jax_default_matmul_precision` (JAX_DEFAULT_MATMUL_PRECISION) is set, it decides in both cases.
    """
    chosen = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # jax sets it by name
    if jnp.dtype(dtype) != jnp.float32 or chosen is not None:
        return None
    return lax.Precision.HIGH if gradient else lax.Precision.HIGHEST


def round_to(x: Float[Array | np.ndarray, "*S"], dtype: Any) -> Float[Array, "*S"]:
    """Casts `x` to `dtype` with a rounding (nearest, ties to even) that no compiler pass may drop."""
    if jnp.dtype(dtype) == jnp.bfloat16 and x.dtype == jnp.float32:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return jnp.asarray(x).astype(dtype)


def dtype_in(array: Any, dtype: Any) -> Any:
    """Returns the dtype of a leaf in a model cast to `dtype`: integers keep their dtype."""
    return array.dtype if jnp.issubdtype(array.dtype, jnp.integer) else dtype


def from_float64(formula: Callable[..., Any], *operands: Any) -> Any:
    """Computes formula(*operands) in float64, whether or not jax_enable_x64 is set, and rounds each result to float32.

    Operands are arrays or None; floats and integers are converted to float64, bools are not. It has no gradient: see
    `in_float64`.
    """

    def widened(x: Any) -> Any:
        return x if x is None or x.dtype == jnp.bool_ else lax.convert_element_type(x, jnp.float64)

    with jax.enable_x64(True):
        results = formula(*map(widened, operands))
        # Rounded as float64 first: the conversion is then exact, and a pass that drops it loses nothing.
        return jax.tree.map(lambda y: lax.reduce_precision(y, 8, 23).astype(jnp.float32), results)


def in_float64(formula: Callable[..., Any], gradient_of: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Makes a function that computes `formula` by `from_float64`, with the gradient of the formula in float32.

    gradient_of: another form of the formula, whose derivative does not overflow in float32; None: `formula` itself.
    """

    @jax.custom_jvp
    def rounded(*operands: Any) -> Any:
        return from_float64(formula, *operands)

    @rounded.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        def in_float32(*operands: Any) -> Any:
            return (gradient_of or formula)(*(x.astype(jnp.float32) for x in operands))

        return rounded(*primals), jax.jvp(in_float32, primals, tangents)[1]

    return rounded


def units_per_one(x: Float[Array, "*B D"], bits: int) -> Float[Array, "*B 1"]:
    """Computes a power of two for each float64 row: multiplied by it, the row's largest number has `bits` bits before
    the point. Call it in float64.

    A sum of numbers that are rounded to multiples of one unit is exact in every order while it has fewer than 53 bits.
    The engine's is `qarl_bridge.engine.cuda.norm_ops.units_per_one`. Rows below 2^-300 have the unit of 2^-300.
    """
    exponent = lax.bitcast_convert_type(jnp.abs(x).max(axis=-1, keepdims=True), jnp.int64) >> 52
    return lax.bitcast_convert_type((2045 + bits - jnp.maximum(exponent, 723)) << 52, jnp.float64)


def round_bf16(x: Float[Array | np.ndarray, "*S"]) -> Float[Array, "*S"]:
    """Rounds float32 to the nearest bfloat16 value (ties to even), still stored as float32."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def round_half_up(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes floor(x + 1/2) of float32 without rounding x + 1/2 first: 0.49999997 gives 0."""
    whole = jnp.floor(x)
    return whole + (x - whole >= 0.5).astype(x.dtype)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """Views int32 bits as float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Computes 2.0 ** exponent exactly, in float32, for int32 exponents in [-126, 127]."""
    return float_of((exponent + 127) << 23)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x = high + low with at most 12 significant bits in each, so that products of two halves are exact."""
    high = float_of(_bits(x) & ~0xFFF)
    return high, x - high


def _remainder(a: jax.Array, q: jax.Array, b: jax.Array) -> jax.Array:
    """a - q * b, exactly, for q within two ulps of a / b. All in [0.5, 4).

    Every product below has at most 24 significant bits and every difference is exact (the leading bits cancel), so it
    does not matter whether the compiler fuses them.
    """
    q_high, q_low = _split(q)
    b_high, b_low = _split(b)
    return ((a - q_high * b_high) - q_high * b_low - q_low * b_high) - q_low * b_low


def divide(a: Float[Array | np.ndarray, "*#S"], b: Float[Array | np.ndarray, "*#S"]) -> Float[Array, "*#S"]:
    """Divides float32 a by b, correctly rounded (IEEE), under jit and on every backend.

    The mantissas are divided by a reciprocal multiplication and corrected once with the exact remainder. The quotient
    moves by one ulp if the remainder shows that the neighbour is nearer; a quotient of two floats is never a tie.
    Exponents are put back by exact multiplications. Shapes must be equal or one operand a scalar or of broadcastable
    equal rank.

    Zero, infinite and NaN operands follow IEEE. Subnormal operands count as zero, as they do on XLA.
    """
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    a_bits, b_bits = _bits(a), _bits(b)
    m = float_of((a_bits & _MANTISSA) | _ONE)  # [1, 2)
    n = float_of((b_bits & _MANTISSA) | _ONE)
    reciprocal = 1.0 / n  # any reciprocal within an ulp or two will do
    q = m * reciprocal
    q = q + _remainder(m, q, n) * reciprocal
    rest = _remainder(m, q, n)
    # The neighbour the remainder points at, and half the gap to it, exactly.
    neighbour = float_of(_bits(q) + jnp.where(rest > 0, 1, -1))
    q = jnp.where(jnp.abs(rest) > 0.5 * jnp.abs(neighbour - q) * n, neighbour, q)
    exponent = ((a_bits & _EXPONENT) >> 23) - ((b_bits & _EXPONENT) >> 23)
    # Two steps, because the difference of two exponents may leave the range of one float.
    half = exponent >> 1
    q = q * power_of_two(half) * power_of_two(exponent - half)
    q = float_of(_bits(q) | ((a_bits ^ b_bits) & _SIGN))
    special = (a == 0) | (b == 0) | ~jnp.isfinite(a) | ~jnp.isfinite(b)
    return jnp.where(special, a / b, q)


def fused_multiply_add(
    a: Float[Array, "*#S"], b: Float[Array, "*#S"], c: Float[Array, "*#S"], nonnegative: Float[Array, "*#S"]
) -> Float[Array, "*S"]:
    """Computes a * b + c in float32 with one rounding, whether or not the compiler would fuse the two operations.

    The rounding errors of the product (Dekker, 1971) and of the sum (Knuth's two-sum) are computed exactly and added
    last. To keep the compiler from fusing operations, operands are xor-ed with the sign bits of `nonnegative`, which
    are zero but unknown to the compiler.

    The result is right to the last bit unless the exact one lies within 2^-24 ulp of the middle between two floats.
    Overflow and subnormal products are not supported.
    """
    zero = lax.shift_right_logical(_bits(nonnegative), 31)
    a, b = float_of(_bits(a) ^ zero), float_of(_bits(b) ^ zero)
    product = float_of(_bits(a * b) ^ zero)
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    lost = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    of_c = total - product
    return total + (((product - (total - of_c)) + (c - of_c)) + lost)


def pack_int4(codes: Int[Array | np.ndarray, "... K"]) -> Int[Array, "... K8"]:
    """Packs int8 codes in [-8, 7] into int32 words of eight nibbles (uint4b8).

    Element 8j+i of the last dimension sits in bits 4i..4i+3 of word j, stored as code + 8.
    """
    nibbles = codes.astype(jnp.int32) + 8
    nibbles = nibbles.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    word = jnp.asarray(nibbles[..., 0])
    for i in range(1, 8):
        word = word | (nibbles[..., i] << (4 * i))
    return word


def unpack_int4(words: Int[Array | np.ndarray, "... K8"]) -> Int[Array, "... K"]:
    """Unpacks int32 words to int8 codes in [-8, 7]: the inverse of `pack_int4`."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32)
    shifts = shifts.reshape((1,) * words.ndim + (8,))
    nibbles = lax.shift_right_logical(
        jnp.broadcast_to(words[..., None], (*words.shape, 8)), jnp.broadcast_to(shifts, (*words.shape, 8))
    )
    codes = ((nibbles & 0xF) - 8).astype(jnp.int8)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * 8)
