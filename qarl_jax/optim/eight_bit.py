# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Eight-bit formats for optimizer moments: a code per element, a float32 scale per block of 256 along the last axis.

    x [..., K]  ->  codes [..., K], one byte each;  scale [..., ceil(K / 256)]:  x ~ scale * level(code)

The scale is the block's largest absolute value (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv
2110.02861, sec. 2.1): an outlier coarsens only its block, and a block that decays as a whole decays exactly, in its
scale. An element takes 1.016 bytes. The last block is short where 256 does not divide K; stored codes are not padded,
so that they are sharded as their parameter is.

Three grids of levels in [-1, 1] serve the three kinds of moments:

  LINEAR    n / 127, to nearest. Muon's momentum: its error counts against the norm of the whole matrix, and Muon is
            known to bear a linear grid where AdamW does not (Gupta et al., arXiv 2509.23106).
  SIGNED    0 and +-2^(-16 (127 - n) / 126): 16 octaves, 9.2 % apart. AdamW's first moment: it is divided by the root of
            the second, element by element, so that what counts is the error relative to each element.
  UNSIGNED  2^(-24 (255 - n) / 255): 24 octaves (7.2 decades), 6.7 % apart. AdamW's second moment. It has no zero: one
            would divide by eps alone (the "zero-point problem" of Li et al., arXiv 2309.01507). What is smaller is
            taken for the smallest level, which shortens a step and never lengthens it.

Dettmers' dynamic map spends its codes on the top decade (0.7 % apart there, over 10 % from the fourth down) and needs a
table; logarithmic levels are 2 instructions. Both logarithmic grids are rounded stochastically, to one of the two
neighbouring levels with probabilities that make the expectation exact: an average with b2 = 0.999 moves by a thousandth
of an element, which no nearest level of 256 would follow. The two ranges fit: the smallest root of a second moment is
2^-12 of the block's, so that rounding a first moment from 0 up to its smallest level, 2^-16, moves a weight by 1/16 of
a step at most.

Left out: Dettmers' stable embedding layer (it changes the model) and percentile clipping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.numerics.stochastic import random_bits

MomentDtype = Literal["float32", "bfloat16", "int8"]

BLOCK = 256
"""Elements to a scale: bitsandbytes' block for optimizer states; Dettmers et al. used 2,048."""


class Blocks(NamedTuple):
    """One quantized array: `codes` [..., K] int8 or uint8, `scale` [..., ceil(K / 256)] float32."""

    codes: Any
    scale: Any


@dataclasses.dataclass(frozen=True)
class Grid:
    """A grid of magnitudes, the levels, from 0 or the smallest positive level to 1.

    Attributes:
      dtype: dtype of the codes, "int8" (sign and magnitude) or "uint8".
      top: the code of level 1.
      octaves: log2 of the ratio of level 1 to the smallest positive level, evenly spaced in the logarithm; 0: linear.
    """

    dtype: str
    top: int
    octaves: float = 0.0

    @property
    def signed(self) -> bool:
        """Tells whether the grid has negative levels and a zero."""
        return self.dtype == "int8"

    @property
    def step(self) -> float:
        """The distance of neighbouring levels in octaves."""
        return self.octaves / (self.top - self.signed)

    def level(self, code: Float[Array, "*S"]) -> Float[Array, "*S"]:
        """Converts codes 0 .. top, given as float32, to levels."""
        if not self.octaves:
            return code / self.top
        level = jnp.exp2((code - self.top) * self.step)
        return jnp.where(code > 0, level, 0.0) if self.signed else level

    def place(self, y: Float[Array, "*S"]) -> Float[Array, "*S"]:
        """Converts a magnitude y to the real-valued code whose level is y: the inverse of `level`."""
        return self.top + jnp.log2(y) / self.step if self.octaves else y * self.top


LINEAR = Grid("int8", 127)
SIGNED = Grid("int8", 127, 16.0)
UNSIGNED = Grid("uint8", 255, 24.0)


def zeros(shape: Sequence[int], grid: Grid) -> Blocks:
    """Makes blocks that decode to zeros of `shape` (at least one axis): scales of 0."""
    scales = (*shape[:-1], -(-shape[-1] // BLOCK))
    return Blocks(codes=jnp.zeros(shape, grid.dtype), scale=jnp.zeros(scales, jnp.float32))


def _spread(scale: Float[Array, "*S G"], size: int) -> Float[Array, "*S K"]:
    """Each block's number on each of its elements."""
    return jnp.repeat(scale, BLOCK, axis=-1, total_repeat_length=scale.shape[-1] * BLOCK)[..., :size]


def encode(x: Float[Array, "*S K"], grid: Grid, seed: Any = None) -> Blocks:
    """Quantizes float32 numbers to codes and scales.

    Args:
      x: [..., K] float32; not negative where the grid is unsigned.
      grid: LINEAR, SIGNED or UNSIGNED.
      seed: uint32 scalar for stochastic rounding, different for every call; None: round to the nearest level.
    """
    size = x.shape[-1]
    blocks = -(-size // BLOCK)
    padded = jnp.pad(jnp.abs(x), [(0, 0)] * (x.ndim - 1) + [(0, blocks * BLOCK - size)])
    scale = padded.reshape(*x.shape[:-1], blocks, BLOCK).max(-1)
    y = jnp.abs(x) / _spread(jnp.where(scale > 0, scale, 1.0), size)
    # The neighbour below; y = 1 counts as the end of the last interval.
    low = jnp.clip(jnp.floor(grid.place(y)), 0.0, grid.top - 1.0)
    below, above = grid.level(low), grid.level(low + 1.0)
    share = (y - below) / (above - below)
    threshold = 0.5 if seed is None else (random_bits(x.shape, seed) >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-24
    code = low + (share > threshold).astype(jnp.float32)
    return Blocks(codes=(jnp.sign(x) * code if grid.signed else code).astype(grid.dtype), scale=scale)


def decode(blocks: Blocks, grid: Grid) -> Float[Array, "*S K"]:
    """Dequantizes codes and scales to float32."""
    code = blocks.codes.astype(jnp.float32)
    level = jnp.sign(code) * grid.level(jnp.abs(code)) if grid.signed else grid.level(code)
    return level * _spread(blocks.scale, code.shape[-1])
