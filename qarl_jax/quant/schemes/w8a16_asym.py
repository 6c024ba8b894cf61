# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w8a16_asym: 8-bit weights with zero points, an e4m3 scale per group, activations in the compute dtype.

It is the first stage of Bit-by-Bit (arXiv 2604.07888). The top bits of its codes are the codes of narrower schemes.

Grid, bytes, product, backward, export and sources: `asym_grid.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qarl_jax.quant.schemes import asym_grid


@dataclasses.dataclass(frozen=True)
class Config(asym_grid.Config):
    """8-bit weights with zero points, activations in the compute dtype. See `asym_grid.Config`."""

    name: ClassVar[str] = "w8a16_asym"
    bits: ClassVar[int] = 8
    slices: ClassVar[str] = "midpoint"
