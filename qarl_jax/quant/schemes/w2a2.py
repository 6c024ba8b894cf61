# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w2a2: 2-bit weights and activations with zero points and an e4m3 scale per group of inputs, on both sides.

Activations are rounded while the model runs, row by row, in groups of the same size as the weights' groups. Four codes
are few: the scheme is for policies that were trained under it.

Grid, bytes, product, backward, export and sources: `asym_grid.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qarl_jax.quant.schemes import asym_grid


@dataclasses.dataclass(frozen=True)
class Config(asym_grid.Config):
    """2-bit weights and activations with zero points. See `asym_grid.Config`."""

    name: ClassVar[str] = "w2a2"
    needs_training: ClassVar[bool] = True
    bits: ClassVar[int] = 2
    low_bit_activations: ClassVar[bool] = True
    activation_bits: ClassVar[int] = 2
