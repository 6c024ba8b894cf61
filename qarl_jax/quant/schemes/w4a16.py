# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w4a16: int4 weights in groups along the input, activations in the compute dtype.

**Grid.** Symmetric, zero point 0. Per output channel and group of G = 128 (or 64, 32, or -1: the whole row) inputs,
from the bfloat16-rounded master: s = bf16(absmax / 7.5), q = RNE(w / s) clamped to [-8, 7] against the *rounded* scale.
vLLM's scale parameter is bfloat16, so that a float32 scale in a file would be rounded on load. A zero group gets the
scale 2**-7.

**Product.** w = bf(q * s), then an ordinary product of compute-dtype operands with float32 accumulation, rounded once:
y = bf(acc + b). Machete, Marlin and Humming on sm90 round the weight to bf(q * s) before they multiply, too; a float32
q * s would change 33-40 % of the outputs. They cut K by the number of rows, so on CUDA the bridge's product takes their
place, with parts of K that the weight's shape decides (`qarl_bridge.protocol.split_k`); on a CPU the sum is float64.

**Backward.** Straight through: dX = dY bf(q * s), dMaster = dY^T x.

**What vLLM does with the bytes.** `weight_packed` int32 [N, K/8] (nibble i of word j is q + 8 of element 8j+i),
`weight_scale` bfloat16 [N, K/G], `weight_shape` int64 [2] (compressed-tensors `pack-quantized`).

**Left out.** Zero points, activation reordering (GPTQ, arXiv 2210.17323), learned clipping. Marlin applies per-channel
scales after the product (with a second rounding) where Machete and this file apply them before.

Sources: QaRL, arXiv 2604.07853; Marlin, arXiv 2408.11743.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from qarl_jax.quant.schemes import int4_grid


@dataclasses.dataclass(frozen=True)
class Config(int4_grid.Config):
    """int4 weights, activations in compute dtype. See `int4_grid.Config`."""

    name: ClassVar[str] = "w4a16"
    decoded: ClassVar[bool] = True
    held_twice: ClassVar[bool] = True
    of_tables: ClassVar[bool] = True
    baseline_k3: ClassVar[float | None] = 1.2
