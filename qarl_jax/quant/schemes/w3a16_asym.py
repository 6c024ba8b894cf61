# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w3a16_asym: 3-bit weights with zero points, an e4m3 scale per group, activations in the compute dtype.

Codes are stored in two arrays, their upper two bits and their lowest bit, so that a 3-bit code takes three bits.

Grid, bytes, product, backward, export and sources: `asym_grid.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qarl_jax.quant.schemes import asym_grid


@dataclasses.dataclass(frozen=True)
class Config(asym_grid.Config):
    """3-bit weights with zero points, activations in the compute dtype. See `asym_grid.Config`."""

    name: ClassVar[str] = "w3a16_asym"
    needs_training: ClassVar[bool] = True
    bits: ClassVar[int] = 3
