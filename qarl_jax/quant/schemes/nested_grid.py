# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Nested grids: codes of 4 and 2 bits that are the top bits of one 8-bit grid, so that one model has several widths.

**Grid.** The master grid is `w8a16_asym`: q, z, s and t of `asym_grid.py` with eight bits. A slice of b bits keeps s, t
and the master's own zero point z, and of a code its top bits:

    q_b = q >> d, d = 8 - b
    shift      w = (q_b 2^d - z) s t                 as Bit-by-Bit writes it: half a step too low on average
    midpoint   w = (q_b 2^d + 2^(d - 1) - z) s t     the middle of the steps that the code stands for, rounded up

Over evenly spread codes shift errs by -31.5 steps of the master on average at two bits, and by -7.5 at four; midpoint
by 1/2 at both. Their rms errors are 36.5 and 18.5 steps at two bits. Rounding instead (MatQuant, arXiv 2502.06786)
needs a clipped top code, so that codes are no longer the master's bits.

**Use.** Training under a slice trains the master through it, straight through. `quant.over_widths` is the mean of a
loss over several widths of one master, {8}, {8, 4} or {8, 4, 2}; all are cut from codes that were made once. `export
--bits` cuts a checkpoint's. A publish under another width's scheme switches the embedded sampler to it. An engine that
serves all eight bits, vLLM too, is switched by a slice that is filled up to eight bits.

**Bytes, product, backward.** Those of `asym_grid.py`; midpoint calls its zero points `weight_zero_point_mid`.

Sources: Bit-by-Bit, arXiv 2604.07888 (second-hand); MatQuant, arXiv 2502.06786.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.schemes import asym_grid, w8a16_asym


@dataclasses.dataclass(frozen=True)
class Config(asym_grid.Config):
    """The base class of schemes whose codes are the top bits of 8-bit codes. See `asym_grid.Config`."""

    def quantize(self, w: Float[Array, "*L N K"]) -> QTensor:
        """Quantizes a master to eight bits and keeps the top `bits` of each code."""
        return sliced(w8a16_asym.Config(self.group_size).quantize(w), self)


@dataclasses.dataclass(frozen=True)
class W4Midpoint(Config):
    """The top 4 bits of `w8a16_asym`; a code stands for the middle of its 16 values."""

    name: ClassVar[str] = "w4a16_midpoint"
    bits: ClassVar[int] = 4
    slices: ClassVar[str] = "midpoint"


@dataclasses.dataclass(frozen=True)
class W2Midpoint(W4Midpoint):
    """The top 2 bits of `w8a16_asym`; a code stands for the middle of its 64 values."""

    name: ClassVar[str] = "w2a16_midpoint"
    needs_training: ClassVar[bool] = True
    bits: ClassVar[int] = 2


@dataclasses.dataclass(frozen=True)
class W4Shift(Config):
    """The top 4 bits of `w8a16_asym`; a code stands for the lowest of its 16 values."""

    name: ClassVar[str] = "w4a16_shift"
    bits: ClassVar[int] = 4
    slices: ClassVar[str] = "shift"


@dataclasses.dataclass(frozen=True)
class W2Shift(W4Shift):
    """The top 2 bits of `w8a16_asym`; a code stands for the lowest of its 64 values."""

    name: ClassVar[str] = "w2a16_shift"
    needs_training: ClassVar[bool] = True
    bits: ClassVar[int] = 2


def sliced(master: QTensor, scheme: asym_grid.Config) -> QTensor:
    """Cuts an 8-bit QTensor to the top bits that `scheme` has; scales and zero points are kept as they are."""
    if scheme.bits == 8:
        return master
    codes = master.scheme.codes(master) >> (8 - scheme.bits)
    return QTensor(master.arrays | {"codes": asym_grid.pack(codes.astype(jnp.uint8), scheme.bits)}, scheme)


def filled(qt: QTensor) -> QTensor:
    """Fills a slice's codes up to eight bits: a QTensor of `w8a16_asym` that stands for the same weights.

    A QTensor whose scheme has no slices, such as a table's, stays.
    """
    scheme: asym_grid.Config = qt.scheme
    if not getattr(scheme, "slices", ""):
        return qt
    return QTensor(qt.arrays | {"codes": scheme.steps_of_eight(qt)}, w8a16_asym.Config(scheme.group_size))
