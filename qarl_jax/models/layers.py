# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The small parts of a layer: linear maps, RMSNorm, SwiGLU's activation, rotary embedding.

Elementwise math runs in float32 and is rounded where a tensor is stored in the compute dtype. An engine's further
roundings are fields of its `Numerics` profile; they are made here by `round_to`, an operation that XLA cannot remove.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from qarl_jax import quant
from qarl_jax.models.config import Lora, ModelConfig
from qarl_jax.models.hf.config import RopeScaling
from qarl_jax.numerics.engine import NormOrder
from qarl_jax.numerics.float32 import divide, from_float64, in_float64, round_to, units_per_one
from qarl_jax.quant import PLAIN, Numerics, splitting
from qarl_jax.runtime.mesh import constrain
from qarl_jax.runtime.remat import INVERSE_RMS, LINEAR_OUTPUT


class Quantized(nnx.Variable):
    """Holds the QTensor that the forward reads instead of a master. It has no gradient; every update replaces it."""


class LowBitBackward(nnx.Variable):
    """Holds the `quant.Backward` of a linear map; only models that are differentiated have such variables."""


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], config: ModelConfig) -> jax.Array:
    """Draws fresh weights: normal with the config's `initializer_range`, in the master dtype."""
    return (jax.random.normal(rngs.params(), shape, jnp.float32) * config.initializer_range).astype(config.param_dtype)


def fresh_a(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws the matrix A of fresh adapters, [*stack, r, K]: uniform in +-1 / sqrt(K)."""
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def folded(b: Float[Array, "*stack N r"], scale: float, dtype: Any) -> Float[Array, "*stack N r"]:
    """Multiplies an adapter's B by its scale, as vLLM does when it loads one: rounded to `dtype` before and after."""
    held = round_to(b, dtype)
    return held if scale == 1 else round_to(held.astype(jnp.float32) * jnp.float32(scale), dtype)


class Linear(nnx.Module):
    """A linear map y = x W^T + b over the last dim, quantized or not (`quant.dot`).

    kernel: [*stack, N, K]; bias: [*stack, N]. The forward reads `quantized` instead of `kernel` where it is present.
    `lax.scan` removes the `stack` dims (layers) before a call; with an `expert` dim left, call `of_experts`. An adapter
    is lora_a [*stack, r, K] and lora_b [*stack, N, r]. index: int32 [*stack, 1, M], the inputs that a model with split
    channels (`quant/splitting.py`) duplicates; K includes them.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        *,
        axis: str,
        config: ModelConfig,
        rngs: nnx.Rngs,
        stack: dict[str, int],
        use_bias: bool = False,
        fused_features: int | None = None,
        spread_inputs: bool = False,
    ):
        """Draws weights. axis: logical axis of N. stack: logical axis -> size of the leading dims. fused_features: N of
        the engine's fused weight that contains this one; None: it is alone. spread_inputs: see `Numerics.of_layer`."""
        lead, axes = tuple(stack.values()), tuple(stack)
        places = 0 if config.splitting is None else config.splitting.places(in_features)
        in_features += places
        self.kernel = nnx.Param(normal(rngs, (*lead, out_features, in_features), config), axes=(*axes, axis, "embed"))
        bias = jnp.zeros((*lead, out_features), config.param_dtype) if use_bias else None
        self.bias = None if bias is None else nnx.Param(bias, axes=(*axes, axis))
        index = jnp.zeros((*lead, 1, places), jnp.int32) if places else None
        self.index = None if index is None else nnx.Param(index, axes=(*axes, None, None))
        self.quantized: Quantized | None = nnx.data(None)
        self.backward: LowBitBackward | None = nnx.data(None)
        self.numerics = config.numerics.of_layer(fused_features or out_features, in_features, spread_inputs)
        self.lora_a: nnx.Param | None = nnx.data(None)
        self.lora_b: nnx.Param | None = nnx.data(None)
        self.lora_scale = 1.0

    def attach_adapter(self, lora: Lora, rngs: nnx.Rngs) -> None:
        """Adds a fresh adapter, as PEFT makes it: A uniform in +-1 / sqrt(K), B zero."""
        kernel, axes = self.kernel.get_value(), self.kernel.get_metadata()["axes"]
        *stack, outputs, inputs = kernel.shape
        self.lora_a = nnx.Param(
            fresh_a(rngs.params(), (*stack, lora.rank, inputs), kernel.dtype), axes=(*axes[:-2], None, axes[-1])
        )
        self.lora_b = nnx.Param(jnp.zeros((*stack, outputs, lora.rank), kernel.dtype), axes=(*axes[:-1], None))
        self.lora_scale = lora.scale

    def __call__(self, x: Float[Array, "*B K"]) -> Float[Array, "*B N"]:
        """Computes y in x.dtype."""
        if self.index is not None:
            x = splitting.duplicated(x, self.index.get_value()[0])
        master, weight = self.held(x.dtype)
        # At rest weights are sharded over fsdp too; in use they are whole over fsdp.
        weight = jax.tree.map(lambda part: constrain(part, "tensor", None), weight)
        x = constrain(x, *("batch",) * (x.ndim > 2), *(None,) * (x.ndim - (x.ndim > 2)))
        bias = None if self.bias is None else round_to(self.bias.get_value(), x.dtype)  # as the engine holds it
        backward = None if self.backward is None else self.backward.get_value()
        y = quant.dot(x, master, weight, bias, numerics=self.numerics, backward=backward)
        return checkpoint_name(y if self.lora_a is None else self._adapted(x, y), LINEAR_OUTPUT)

    def _adapted(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """round(y + d), d = round(B' h), h = round(A x): vLLM's order. B' is B with the scale folded in."""
        assert self.lora_a is not None
        assert self.lora_b is not None
        a, b = self.lora_a.get_value(), self.lora_b.get_value()
        whole = dataclasses.replace(self.numerics, splits=1, shards=1)
        used = round_to(jax.lax.stop_gradient(a), x.dtype), folded(jax.lax.stop_gradient(b), self.lora_scale, x.dtype)
        used = constrain(used[0], None, None), constrain(used[1], "tensor", None)
        h = quant.dot(x, a, used[0], numerics=self.numerics.of_adapter(x.shape[-1]))
        d = quant.dot(h, b * jnp.asarray(self.lora_scale, b.dtype), used[1], numerics=whole)
        return round_to(y.astype(jnp.float32) + d.astype(jnp.float32), x.dtype)

    def held(self, dtype: Any) -> tuple[jax.Array, Any]:
        """Returns the master [*stack, N, K], and the product's operand: its QTensor, or it rounded to `dtype`. An
        all-gather of the operand moves one or two bytes per weight and not the master's four."""
        master = self.kernel.get_value()
        if self.quantized is not None:
            return master, self.quantized.get_value()
        return master, round_to(jax.lax.stop_gradient(master), dtype)

    def of_experts(
        self,
        rows: Float[Array, "M K"],
        held: tuple[jax.Array, Any],
        group_sizes: Int[Array, " E"],
    ) -> Float[Array, "M N"]:
        """Multiplies each row by the weight of its expert; returns the rows' dtype.

        Args:
          rows: sorted by expert.
          held: the experts' weights as `held` returns them, or one device's shard of them.
          group_sizes: number of rows of each expert in `held`; rows after the last group give zeros.
        """
        master, weight = held
        y = quant.expert_dot(rows, master, weight, group_sizes, numerics=self.numerics)
        return checkpoint_name(y, LINEAR_OUTPUT)


def inverse_rms(x: Float[Array, "*B D"], eps: float, *, order: NormOrder = "any") -> Float[Array, "*B 1"]:
    """Computes 1 / sqrt(mean(x^2) + eps) in float32.

    order: the order of the sum. One ulp of the sum moves one element of a norm in some 10^5 across a rounding boundary;
    under w8a8 this changes int8 codes of later layers.
      "float64": squares are rounded to multiples of a power of two, so that their float64 sum is exact in every order
        (`_exact_mean_square`); eps is rounded to float32, and the result to float32 once. D is at most 65,536.
      "torch": the bits of torch on x86 (x.pow(2).mean(-1), then rsqrt), if D is a multiple of 32; else as "any".
      "any": the compiler's order.
    """
    return _inverse_rms(x, eps, "any" if order == "torch" and x.shape[-1] % 32 else order)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _inverse_rms(x: jax.Array, eps: float, order: str) -> jax.Array:
    if order == "float64":
        # The maximum changes nothing. It keeps XLA from making one rounding of the root's and the division's.
        root = lambda x: jnp.sqrt(_exact_mean_square(x) + float(np.float32(eps)))  # noqa: E731
        return from_float64(lambda x: 1 / jnp.maximum(root(x), 1e-300), x)
    squares = jnp.square(x)
    if order == "any":
        return jax.lax.rsqrt(jnp.mean(squares, axis=-1, keepdims=True) + jnp.float32(eps))
    width = jnp.full((*x.shape[:-1], 1), x.shape[-1], jnp.float32)
    # The squares are rounded before they are summed. To keep the compiler from fusing the two, their bits meet a zero
    # that only the data knows to be zero: the sign bit of a maximum of absolute values.
    zero = jax.lax.shift_right_logical(
        jax.lax.bitcast_convert_type(jnp.abs(x).max(axis=-1, keepdims=True), jnp.int32), 31
    )
    squares = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(squares, jnp.int32) ^ zero, jnp.float32)
    mean = divide(_sum_torch(squares), width) + jnp.float32(eps)
    return divide(jnp.ones_like(mean), jnp.sqrt(mean))


def _exact_mean_square(x: jax.Array) -> jax.Array:
    """Computes the mean of squares of float64 [*B, D], each rounded to a multiple of 2^(2E - 34): [*B, 1].

    2^E is the largest power of two up to a row's maximum. In these units a square is an integer below 2^36. The engine
    computes the same (`qarl_bridge.engine.cuda.norm_ops`).
    """
    scale = units_per_one(x, 18)
    squares = jax.lax.round(jnp.square(x * scale), jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    # A division by D alone XLA makes a product with 1 / D.
    return squares.sum(axis=-1, keepdims=True) / (x.shape[-1] * scale * scale)


@_inverse_rms.defjvp
def _inverse_rms_jvp(
    eps: float, order: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    r = checkpoint_name(_inverse_rms(x, eps, order), INVERSE_RMS)
    return r, -(r * r * r) * jnp.mean(x * dx, axis=-1, keepdims=True)


def _sum_torch(x: jax.Array) -> jax.Array:
    """Sums [*B, D] to [*B, 1] in the order of torch's cascade sum with 8-float vectors, for D < 8192. Above it, one
    more level is summed in sequence. It has four interleaved accumulators, a fresh set every 16 additions. The sets
    are added, then the four, then the eight lanes."""
    *lead, width = x.shape
    rows = width // 32
    blocks = rows // 16
    x = x.reshape(*lead, rows, 4, 8)

    def sequential(parts: list[jax.Array]) -> jax.Array:
        return functools.reduce(jnp.add, parts)

    total = []
    if rows % 16:
        total.append(sequential([x[..., i, :, :] for i in range(16 * blocks, rows)]))
    if blocks:
        full = x[..., : 16 * blocks, :, :].reshape(*lead, blocks, 16, 4, 8)
        sets = sequential([full[..., i, :, :] for i in range(16)])
        total.append(sequential([sets[..., i, :, :] for i in range(blocks)]))
    four = jax.lax.optimization_barrier(sequential(total))  # otherwise each lane's sum is computed again for each lane
    lanes = sequential([four[..., i, :] for i in range(4)])
    return sequential([lanes[..., i : i + 1] for i in range(8)])


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last dim (arXiv 1910.07467), with or without the residual addition before it."""

    def __init__(self, width: int, *, config: ModelConfig, stack: dict[str, int]):
        shape = (*stack.values(), width)
        self.weight = nnx.Param(jnp.ones(shape, config.param_dtype), axes=(*stack, "norm"))
        self.eps = config.rms_norm_eps
        self.numerics, self.order = config.numerics, config.norm_order
        self.dtype = config.compute_dtype

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalizes x (compute dtype, or float32 when not yet rounded); returns the compute dtype."""
        x = x.astype(jnp.float32)
        weight = round_to(self.weight.get_value(), self.dtype).astype(jnp.float32)
        y = x * inverse_rms(x, self.eps, order=self.order)
        return round_to(y * weight.reshape((1,) * (y.ndim - 1) + weight.shape), self.dtype)

    def add(self, delta: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (norm(residual + delta), residual + delta), [..., D] in the compute dtype. The norm reads the
        rounded sum if `Numerics.round_sum_before_norm` is set, else the exact one."""
        total = residual.astype(jnp.float32) + delta.astype(jnp.float32)
        stored = round_to(total, self.dtype)
        return self(stored if self.numerics.round_sum_before_norm else total), stored


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def lookup(
    table: Float[Array, "V D"], qtensor: quant.QTensor | None, tokens: Int[Array, "B T"], dtype: Any
) -> Float[Array, "B T D"]:
    """Looks up rows for tokens, in `dtype`: those of `qtensor`, or of `table` if it is None. Gradients go to `table`.
    They are summed in float32, because in bfloat16 a frequent token's sum would stop growing."""
    if qtensor is None:
        return round_to(jnp.take(table, tokens, axis=0, mode="clip"), dtype)
    rows = quant.decoded(quant.rows_of(qtensor, tokens.reshape(-1)), dtype)
    return rows.reshape(*tokens.shape, table.shape[1])


def _lookup_fwd(table: jax.Array, qtensor: Any, tokens: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    return lookup(table, qtensor, tokens, dtype), (jnp.zeros((table.shape[0], 0), table.dtype), tokens)


def _lookup_bwd(dtype: Any, saved: Any, dy: jax.Array) -> tuple[jax.Array, None, None]:
    like, tokens = saved
    out = jnp.zeros((like.shape[0], dy.shape[-1]), jnp.float32).at[tokens].add(dy.astype(jnp.float32), mode="clip")
    return out.astype(like.dtype), None, None


lookup.defvjp(_lookup_fwd, _lookup_bwd)


def silu_and_mul(gate: jax.Array, up: jax.Array, numerics: Numerics = PLAIN) -> jax.Array:
    """Computes silu(gate) * up, [..., F], in float32 or float64, rounded to gate's dtype. `numerics` decides whether
    silu(gate) is also rounded, and whether it is an IEEE division or the compiler's product with a reciprocal (an ulp
    off)."""
    if numerics.float64:
        return round_to(_float64_swiglu(gate, up), gate.dtype)
    rounded, divided = numerics.round_silu, numerics.divided_silu
    looked_up = divided and rounded and gate.dtype == jnp.bfloat16 and gate.size >= 2**16
    silu = _looked_up_silu if looked_up else _divided_silu if divided else jax.nn.silu
    act = silu(gate.astype(jnp.float32))
    if rounded:
        act = round_to(act, gate.dtype).astype(jnp.float32)
    return round_to(act * up.astype(jnp.float32), gate.dtype)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return gate / (1 + jnp.exp(-gate)) * up


# exp(89) is infinite in float32. Below -80 SiLU is flat: its derivative is under 1e-33.
_float64_swiglu = in_float64(_swiglu, gradient_of=lambda gate, up: _swiglu(jnp.maximum(gate, -80.0), up))


def _with_gradient_of_silu(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    made = jax.custom_jvp(function)
    made.defjvp(lambda x, dx: (made(*x), jax.jvp(jax.nn.silu, x, dx)[1]))
    return made


@_with_gradient_of_silu
def _divided_silu(x: jax.Array) -> jax.Array:
    # Of all bfloat16 x, -2^-8 is a tie when it is rounded and three more are within 4 ulps of one.
    return divide(x, 1.0 + jnp.exp(-x))


@_with_gradient_of_silu
def _looked_up_silu(x: jax.Array) -> jax.Array:
    """`_divided_silu` of bfloat16 numbers, rounded to bfloat16, all in float32. There are only 2^16 of them, and the
    hundred instructions of a division take a GPU longer than to read and write its operands."""
    every = jax.lax.optimization_barrier(jnp.arange(2**16, dtype=jnp.uint16))  # else the compiler takes its own exp
    table = round_to(_divided_silu(jax.lax.bitcast_convert_type(every, jnp.bfloat16).astype(jnp.float32)), jnp.bfloat16)
    places = (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.int32)
    return table.at[places].get(mode="promise_in_bounds").astype(jnp.float32)


def _rope_exponents(config: ModelConfig) -> Float[np.ndarray, " H/2"]:
    return np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)


def rope_frequencies(config: ModelConfig) -> Float[np.ndarray, " H/2"]:
    """Computes RoPE's frequencies theta^(-2i/H) in float32, as transformers and vLLM do on a CPU. At position 4096
    one ulp of a frequency is 2e-4 rad."""
    exponent = _rope_exponents(config)
    # The power in float64, rounded once: numpy's own float32 power is another on CPUs with AVX-512.
    power = np.power(np.float64(config.rope_theta), exponent.astype(np.float64)).astype(np.float32)
    return stretch_frequencies(np.float32(1.0) / power, config.rope_scaling, np)


def stretch_frequencies(frequency: Any, scaling: RopeScaling | None, xp: Any) -> Any:
    """Stretches RoPE frequencies as Llama 3.1 does (arXiv 2407.21783; transformers' `_compute_llama3_parameters`).

    Wavelengths that are long against the original context are multiplied by `factor`; short wavelengths are kept;
    between the two it interpolates. Args: frequency: [H/2] float32. scaling: None changes nothing. xp: numpy or
    jax.numpy.
    """
    if scaling is None:
        return frequency
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = (2 * math.pi) / frequency
    smooth = (length / wavelength - low) / (high - low) if high != low else 0.0 * frequency
    stretched = frequency / scaling.factor
    mixed = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    slow = xp.where(wavelength > length / low, stretched, mixed)
    return xp.where(wavelength < length / high, frequency, slow)


def _rope_frequencies_on_gpu(config: ModelConfig) -> Float[Array, " H/2"]:
    """Computes `rope_frequencies` by the GPU's power function, as vLLM does on a GPU; some differ by an ulp."""
    start = (jnp.float32(config.rope_theta), jnp.asarray(_rope_exponents(config)))
    theta, exponent = jax.lax.optimization_barrier(start)
    power = theta**exponent  # not folded by the compiler, which would take the host's
    return stretch_frequencies(divide(jnp.ones_like(power), power), config.rope_scaling, jnp)


def rope_table(config: ModelConfig, positions: Int[Array, "B T"]) -> tuple[jax.Array, jax.Array]:
    """Computes cos and sin of position * theta^(-2i/H), each [B, T, 1, H/2] float32 (arXiv 2104.09864).

    Under the profile `cuda` the table is rounded to the compute dtype, because vLLM's CUDA kernels keep it in that.
    """
    if config.numerics.float64:
        frequency = jnp.asarray(rope_frequencies(config))[None, None, None]
        position = jnp.maximum(positions, 0)[:, :, None, None]
        return from_float64(lambda p, f: (jnp.cos(p * f), jnp.sin(p * f)), position, frequency)
    on_device = config.numerics.rope_on_device and jax.default_backend() == "gpu"
    frequency = _rope_frequencies_on_gpu(config) if on_device else jnp.asarray(rope_frequencies(config))
    frequency = frequency[None, None, None, :]
    angle = jnp.maximum(positions, 0).astype(jnp.float32)[:, :, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if config.numerics.round_rope_table:
        cos, sin = (round_to(part, config.compute_dtype).astype(jnp.float32) for part in (cos, sin))
    return cos, sin


def apply_rope(
    x: Float[Array, "B T N H"], table: tuple[jax.Array, jax.Array], numerics: Numerics = PLAIN
) -> Float[Array, "B T N H"]:
    """Rotates pairs (x[i], x[i + H/2]) in float32 or float64 (`numerics`) and rounds once to x.dtype: RoPE."""
    rotate = in_float64(_rotated) if numerics.float64 else _rotated
    return round_to(rotate(x.astype(jnp.float32), *table), x.dtype)


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
