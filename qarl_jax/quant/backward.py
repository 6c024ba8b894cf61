# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The two backward products of a linear layer with 8-bit operands (`quant.backward`), under the straight-through rule.

    dX = dY W_q           contracts outputs:  dY' = dY s_w     W_q = s_w W'
    dMaster = dY^T x_q    contracts rows:     dY' = dY s_x     x_q = s_x x'

**What is rounded.** Every operand is quantized, with a scale per row or column that is not contracted, from its largest
magnitude. Under fp8 with an `fp8` forward only dY is quantized: weight and activations are e4m3 codes already, whose
scales lie along the contraction and are multiplied into dY. int8 lacks the range for this. Under `w8a8` it lowered the
cosine to bf16's gradient from 0.987 to 0.954 at Qwen2.5-Coder-0.5B, because of the weight's scales per output.

**Grids.** int8: absmax / 127, codes in [-127, 127]. fp8: e4m3, absmax / 448. Whole rows and columns have one scale on
every mesh: a maximum has no order, so a mesh moves no code.

**Rounding.** Stochastic, with the bits of `numerics.stochastic`: a hash of the update's number, the micro-batch, the
layer, the operand and the position. Two operands draw independent bits, so the expected product is the product of the
unrounded operands. The codes of dY for dX and for dW share a hash, 16 bits each. Linear maps with common inputs
share the codes of these. A zero stays zero. An infinite or NaN element spoils its whole row or column, and the
optimizer's guard sees it.

**Sums.** int8 in int32, exact. e4m3 in float32: Hopper's tensor cores alone keep some 14 bits of a sum, so our kernel
adds up 128 inputs at a time outside of them (`product_hopper.py`). Over several GPUs XLA multiplies, asked for its
highest precision. On a CPU both are summed in float64, where they are exact. Scales come after the sum.

**Left out.** Scales per block along the contraction (DeepSeek-V3, arXiv 2412.19437), which would keep one large row
from coarsening a column; e5m2; random rotations; experts' weights.

Sources: stochastic rounding, Gupta et al., arXiv 1502.02551; int8 training with it, SwitchBack (arXiv 2304.13013) and
Jetfire (arXiv 2403.12422).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qarl_jax.kernels import rounding_triton
from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import divide
from qarl_jax.numerics.stochastic import halves, random_bits, rounding_seed, to_e4m3, to_int8
from qarl_jax.quant.contractions import codes_product
from qarl_jax.quant.qtensor import QTensor

Format = Literal["int8", "fp8"]
KERNELS = {"bf16": "", "int8": "int8", "fp8": "e4m3"}
"""The `Scheme.kernel` whose products a backward of each format has."""
_TINY = 2.0**-100  # the least maximum that a scale is made of: its reciprocal is finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Backward:
    """The low-bit format of gradients, and the seeds of their rounding, for one layer or a stack of layers.

    Attributes:
      format: the codes' format, "int8" or "fp8"; static under jit.
      seed: uint32 scalar, or [layers], of dY and of the weight; every linear map, layer and micro-batch has another.
      inputs: uint32 scalar, or [layers], of the layer's inputs. Where it is equal, XLA makes equal inputs' codes once.
    """

    format: Format = dataclasses.field(metadata={"static": True})
    seed: Any
    inputs: Any

    def part(self, number: int, of: int) -> Backward:
        """Returns a copy with the seeds of part `number` of `of` parts, which are rounded independently."""
        seed, inputs = (random_bits((of,), each)[number] for each in (self.seed, self.inputs))
        return dataclasses.replace(self, seed=seed, inputs=inputs)


def root_seed(updates: Any, micro_batch: Any) -> Array:
    """Derives the uint32 scalar from which all rounding seeds of a micro-batch's backward are derived.

    Args:
      updates, micro_batch: int32 scalars: optimizer updates before this one, and the number of the micro-batch.
    """
    return random_bits((), rounding_seed(updates, 0) + jnp.asarray(micro_batch).astype(jnp.uint32))


def of_layers(form: Format, root: Any, number: int, layers: int, start: int = 0) -> Backward:
    """Makes the backward of the `number`-th stack of linear maps, with seeds, uint32 [layers], from `root_seed`.

    start: the model's layer with which the stack begins. Linear maps of one layer share its inputs' seed, no others do.
    """
    seed, inputs = (random_bits((layers,), rounding_seed(root, each, start)) for each in (number + 1, 0))
    return Backward(form, seed, inputs)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The codes of a format: their dtype, the largest code, and the function that rounds float32 to them and clips.
    `takes_codes`: the forward's codes are used without quantizing them again."""

    dtype: Any
    largest: float
    rounded: Callable[[Array, Array], Array]
    takes_codes: bool


GRIDS: dict[str, Grid] = {
    "int8": Grid(jnp.int8, 127.0, to_int8, takes_codes=False),
    "fp8": Grid(jnp.float8_e4m3fn, 448.0, to_e4m3, takes_codes=True),
}


def _scales(largest: Float[Array, " C"], grid: Grid) -> tuple[Array, Array]:
    """Computes float32 scales from the largest magnitudes, and the scales' reciprocals, each by one division."""
    amax = jnp.maximum(largest, _TINY)
    top = jnp.full_like(amax, grid.largest)
    return divide(amax, top), divide(top, amax)


def codes_of(x: Float[Array, "A B"], axis: int, grid: Grid, bits: Array) -> tuple[Array, Array]:
    """Quantizes float32 x: codes [A, B], and float32 scales of its rows [A, 1] or columns [1, B].

    Args:
      axis: the axis along which x will be contracted; elements along it share a scale.
      grid: the codes' format. bits: uint32 [A, B], 16 random bits each.
    """
    scale, inverse = (jnp.expand_dims(each, axis) for each in _scales(jnp.max(jnp.abs(x), axis=axis), grid))
    return grid.rounded(x * inverse, bits), scale


class _Contraction(NamedTuple):
    """A product in which a matrix [A, B] is an operand.

    Attributes:
      axis: the contracted axis; each row or column along it has a scale.
      factor: float32 [1, B] or [A, 1], multiplied into the contracted elements first; None: no factor.
    """

    axis: int
    factor: Any = None


def _coded(
    x: Float[Array, "A B"], grid: Grid, numerics: Numerics, seed: Any, *ways: _Contraction
) -> list[tuple[Array, Array]]:
    """Quantizes x for one or two contractions: codes with the contracted axis last, and float32 scales [.., 1]."""

    def plain(x: Array) -> list[tuple[Array, Array]]:
        wide, bits, made = x.astype(jnp.float32), halves(random_bits(x.shape, seed)), []
        for way, own in zip(ways, bits, strict=False):
            codes, scale = codes_of(wide if way.factor is None else wide * way.factor, way.axis, grid, own)
            made.append((codes if way.axis else codes.T, scale.reshape(-1, 1)))
        return made

    def kernel(x: Array, **options: Any) -> list[tuple[Array, Array]]:
        along = [rounding_triton.Along(*way) for way in ways]
        scales = [_scales(largest, grid) for largest in rounding_triton.maxima(x, along, **options)]
        along = [each._replace(inverse=inverse) for each, (_, inverse) in zip(along, scales, strict=True)]
        made = rounding_triton.codes(x, seed, along, grid.rounded, grid.dtype, **options)
        return [(codes, scale.reshape(-1, 1)) for codes, (scale, _) in zip(made, scales, strict=True)]

    platforms = {"cuda": kernel} if rounding_triton.serves(x, numerics) else {}
    return jax.lax.platform_dependent(x, default=plain, **platforms)


def misrounded(form: Format, numerics: Numerics) -> tuple[int, int]:
    """Rounds a matrix on this host's first device; counts codes that are no neighbours of their numbers, and all codes.

    A compiler can break the rounding without an error: CUDA 13.0 did so on an H200 (`stochastic.to_int8`).
    """
    grid, wrong, rounded = GRIDS[form], 0, 0
    numbers = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.bfloat16)
    for ways in ((_Contraction(1), _Contraction(0)), (_Contraction(0),)):
        made = jax.jit(lambda x, ways=ways: _coded(x, grid, numerics, jnp.uint32(0), *ways))(numbers)
        for way, found in zip(ways, made, strict=True):
            codes, scale = (np.asarray(part, np.float64) for part in found)
            x = np.asarray(numbers, np.float64) / (scale if way.axis else scale.T)
            x = x if way.axis else x.T
            step = 1 if form == "int8" else np.maximum(np.abs(x) / 8, 2.0**-9)  # between neighbours, at most
            wrong += int(np.sum(~(np.abs(codes - x) <= step * (1 + 1e-5))))
            rounded += codes.size
    return wrong, rounded


def _transposed(x: Array, numerics: Numerics) -> Array:
    """Transposes codes [A, B]. On a GPU a kernel does it, because XLA would store their source in that layout."""
    platforms = {"cuda": rounding_triton.transposed} if rounding_triton.serves(x, numerics) else {}
    return jax.lax.platform_dependent(x, default=jnp.transpose, **platforms)


def _parts(operand: Any) -> tuple[Array, Array | None]:
    """Splits an operand [C, F] into its array and its rows' float32 scales [C, 1] (None: no scales)."""
    if isinstance(operand, QTensor):
        one_scale = bool(operand.scheme.kernel)
        return (operand.codes, operand.scales) if one_scale else (operand.scheme.dequantize(operand), None)
    return operand if isinstance(operand, tuple) else (operand, None)


def gradients(
    backward: Backward, dy: Float[Array, "M N"], used: Any, weight: Any, master: Any, numerics: Numerics
) -> tuple[Array, Array]:
    """Computes (dX [M, K] in dY's dtype, dMaster [N, K] in dtype `master`) from 8-bit codes; each is rounded once.

    Args:
      backward: format and seed of the codes.
      dy: cotangent of the layer's output.
      used: activations [M, K] as the forward used them: an array, or codes and scales [M, 1].
      weight: [N, K]: a QTensor, or an array in the compute dtype.
      master: dtype of the master.
      numerics: decides whether a GPU may run our kernels.
    """
    grid, seeds = GRIDS[backward.format], random_bits((2,), backward.seed)
    others, ways = [], []
    for axis, operand, seed in ((1, weight, seeds[1]), (0, used, backward.inputs)):
        values, factor = _parts(operand)
        if grid.takes_codes and factor is not None and values.dtype == grid.dtype:
            others.append((_transposed(values, numerics), jnp.ones((values.shape[1], 1), jnp.float32)))
            ways.append(_Contraction(axis, factor if axis == 0 else factor.T))
        else:
            others += _coded(values, grid, numerics, seed, _Contraction(0, factor))
            ways.append(_Contraction(axis))
    made = _coded(dy, grid, numerics, seeds[0], *ways)
    dx, dw = (
        codes_product(*of_dy, codes, scale[:, 0], dtype, numerics)
        for of_dy, (codes, scale), dtype in zip(made, others, (dy.dtype, master), strict=True)
    )
    return dx, dw
