# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w2a16: 2-bit integer weights in groups along the input, activations in the compute dtype. For experiments.

**Grid.** As `w4a16` with the codes [-2, 1]: s = bf16(absmax / 1.5), q = RNE(w / s) clamped to [-2, 1].
A group's largest weight becomes two thirds of its value where it is positive, and four thirds where it is negative.

**Product, backward, bytes, and purpose.** As `w3a16`.

**Left out.** Dense packing of 2-bit codes, learned or clipped ranges, ternary grids (BitNet, arXiv 2402.17764).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qarl_jax.quant.schemes import w4a16


@dataclasses.dataclass(frozen=True)
class Config(w4a16.Config):
    """2-bit weights, activations in compute dtype. See `int4_grid.Config`."""

    name: ClassVar[str] = "w2a16"
    needs_training: ClassVar[bool] = True
    bits: ClassVar[int] = 2
    baseline_k3: ClassVar[float | None] = None
