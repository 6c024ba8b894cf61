# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a quantized weight, and its contract."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A weight [..., N, K] (out, in) in the bytes that are published.

    Contract, for any leading dimensions (stacked layers, experts):

      * 8-bit: `qvalue` int8 or float8_e4m3fn [..., N, K], `scale` float32 [..., N, 1];
      * 4-bit: `qvalue` int32 [..., N, K/8], eight codes+8 to a word, element 8j+i in bits 4i..4i+3 of word j;
        `scale` bfloat16 [..., N, K/G], or [..., N, 1] per channel;
      * `scale` is finite and > 0;
      * the weight it stands for is code * scale, rounded to bfloat16 for the 4-bit schemes (`dequantize`); under
        `w4a8_fp8` it is one of the sixteen levels the engine makes of the scale.

    Example: quantize([[0.5, -1.0, ...]], w8a8.Config()) -> qvalue [[64, -128, ...]], scale [[1/127.5]].

    Attributes:
      qvalue: the codes, in wire layout.
      scale: the scales.
      scheme: the scheme's frozen Config, static.
    """

    qvalue: Any
    scale: Any
    scheme: Any = dataclasses.field(metadata={"static": True})

    @property
    def packing(self) -> int:
        """Codes per stored element: 8 in int32 words, otherwise 1."""
        return 8 if self.qvalue.dtype == "int32" else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        *leading, stored = self.qvalue.shape
        return (*leading, stored * self.packing)

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def nbytes(self) -> int:
        return self.qvalue.size * self.qvalue.dtype.itemsize + self.scale.size * self.scale.dtype.itemsize
