# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w2a16_shift: the top 2 bits of `w8a16_asym`; a code stands for the lowest of its 64 values (`nested_grid.py`)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qarl_jax.quant.schemes import nested_grid


@dataclasses.dataclass(frozen=True)
class Config(nested_grid.Config):
    """2-bit codes cut out of 8-bit codes, activations in the compute dtype. See `asym_grid.Config`."""

    name: ClassVar[str] = "w2a16_shift"
    bits: ClassVar[int] = 2
    slices: ClassVar[str] = "shift"
