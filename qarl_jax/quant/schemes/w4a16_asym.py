# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w4a16_asym: 4-bit weights with zero points, an e4m3 scale per group, activations in the compute dtype.

Grid, bytes, product, backward, export and sources: `asym_grid.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qarl_jax.quant.schemes import asym_grid


@dataclasses.dataclass(frozen=True)
class Config(asym_grid.Config):
    """4-bit weights with zero points, activations in the compute dtype. See `asym_grid.Config`."""

    name: ClassVar[str] = "w4a16_asym"
    bits: ClassVar[int] = 4
    of_tables: ClassVar[bool] = True
