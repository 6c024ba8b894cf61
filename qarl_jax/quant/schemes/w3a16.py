# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w3a16: 3-bit integer weights in groups along the input, activations in the compute dtype. For experiments.

**Grid.** As `w4a16` with the codes [-4, 3]: s = bf16(absmax / 3.5), q = RNE(w / s) clamped to [-4, 3].

**Product, backward, bytes.** Those of `w4a16`: the codes are int4 codes of which not all are used, so the embedded
sampler, the export and the bridge take them as they are. Nothing is smaller or faster than with four bits; the scheme
serves experiments on how much rounding training tolerates.

**Left out.** Dense packing of 3-bit codes, learned or clipped ranges.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qarl_jax.quant.schemes import w4a16


@dataclasses.dataclass(frozen=True)
class Config(w4a16.Config):
    """3-bit weights, activations in compute dtype. See `int4_grid.Config`."""

    name: ClassVar[str] = "w3a16"
    needs_training: ClassVar[bool] = True
    bits: ClassVar[int] = 3
    baseline_k3: ClassVar[float | None] = None
