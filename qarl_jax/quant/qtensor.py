# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of a quantized weight, and its contract."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from qarl_jax.types import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A weight [..., N, K] (out, in) in the bytes that are published.

    Contract, for any leading dimensions (stacked layers, experts):

      * 8-bit: `qvalue` int8 or float8_e4m3fn [..., N, K], `scale` float32 [..., N, 1];
      * 4-bit: `qvalue` int32 [..., N, K/8], eight codes+8 to a word, element 8j+i in bits 4i..4i+3 of word j;
        `scale` bfloat16 [..., N, K/G], or [..., N, 1] per channel;
      * `scale` is finite and > 0;
      * the weight it stands for is code * scale, rounded to bfloat16 for the 4-bit schemes (`dequantize`).

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
        """Dimensions of `shape`: 2 for one weight, 3 and more for stacks."""
        return self.qvalue.ndim

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.qvalue.size * self.qvalue.dtype.itemsize + self.scale.size * self.scale.dtype.itemsize


def inputs_of(whole: Any, shard: int, shards: int) -> Any:
    """A shard's inputs of an array or a weight [.., K] (None: of none); the scale of a whole channel stays with each.

    Raises:
      UserError: a group would be cut.
    """

    def own(a: Any) -> Any:
        size, rest = divmod(a.shape[-1], shards)
        if rest:
            raise UserError(
                f"a layer with {whole.shape[-1]} inputs cannot be spread over {shards} engine shards without cutting a"
                " group of its weight: set rollout.engine.tensor_parallel_size=1, or a smaller quant.group_size."
            )
        return a[..., shard * size : (shard + 1) * size]

    if not isinstance(whole, QTensor):
        return None if whole is None else own(whole)
    scale = whole.scale if whole.scale.shape[-1] == 1 else own(whole.scale)
    return QTensor(own(whole.qvalue), scale, whole.scheme)
