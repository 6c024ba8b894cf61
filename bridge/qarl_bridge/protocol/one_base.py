# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The places of a frozen nvfp4 base that a trainer and its engine hold once, in the trainer's memory.

The trainer allocates a buffer for each kind of fused module (q, k and v; gate and up; ...) of a stack of layers. It
writes the weights there in the layout that the engine multiplies, and computes with them itself. The engine is started
on these places: its layers read the buffers, and no version brings their weights.

    words      int32 [layers, K/128, N, 16]     of 128 inputs: nibble i + 4 e of word 4 t + 2 f + h is the code of input
                                                64 h + 16 i + 8 f + 2 t + e
    scales     e4m3 [layers, K/16, N], as uint8; 0 where a scale is below 2^-6
    divisors   float32 [layers, parts], g of each part of N
    bias       bfloat16 [layers, N], where the module has one
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np

from qarl_bridge.protocol import messages

FILE = "base.json"  # in an engine's model folder
INPUTS = 128  # of a block of words
OUTPUTS = 16  # N is a multiple, as the CUDA layer wants it
_ALIGNMENT = 512  # bytes; CUDA's own


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One buffer.

    Attributes:
      modules: live modules of the engine, a layer each.
      outputs: N of each part that a module fuses, in order.
      inputs: K.
      has_bias: whether the modules have a bias.
      memory: the buffer.
    """

    modules: Annotated[list[messages.Name], msgspec.Meta(min_length=1)]
    outputs: Annotated[list[int], msgspec.Meta(min_length=1)]
    inputs: int
    has_bias: bool
    memory: messages.HostMemory | messages.DeviceMemory


class Array(msgspec.Struct, frozen=True):
    """An array of a buffer: its first byte, dtype and shape, layers first."""

    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return math.prod(self.shape) * self.dtype.itemsize


def arrays(layers: int, outputs: list[int], inputs: int, *, has_bias: bool) -> dict[str, Array]:
    """The arrays of a buffer, by name; see the module docstring."""
    n = sum(outputs)
    listed = {
        "words": ("int32", (inputs // INPUTS, n, 16)),
        "scales": ("uint8", (inputs // 16, n)),
        "divisors": ("float32", (len(outputs),)),
    } | ({"bias": ("bfloat16", (n,))} if has_bias else {})
    found, end = {}, 0
    for name, (dtype, shape) in listed.items():
        found[name] = Array(end, messages.DTYPES[dtype], (layers, *shape))
        end += -(-found[name].nbytes // _ALIGNMENT) * _ALIGNMENT
    return found


def arrays_of(place: Place) -> dict[str, Array]:
    """`arrays` of a place."""
    return arrays(len(place.modules), place.outputs, place.inputs, has_bias=place.has_bias)


def size(found: dict[str, Array]) -> int:
    """Bytes of a buffer with these arrays."""
    return max(-(-(a.offset + a.nbytes) // _ALIGNMENT) * _ALIGNMENT for a in found.values())
