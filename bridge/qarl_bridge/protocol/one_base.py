# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Describes buffers through which trainer and engine share one copy of a frozen nvfp4 base in the trainer's memory.

The trainer allocates a buffer for each kind of fused module (q, k and v; gate and up; ...) of a stack of layers. It
writes the weights in the layout of the engine's kernels, and computes with them, too. The engine reads the file
`base.json` at its start and maps the buffers; no version brings their weights.

    words      int32 [layers, K/128, N, 16]     of 128 inputs: pair i of word 4 t + 2 f + h has the codes of inputs
                                                64 h + 16 i + 8 f + 2 t and the next
    scales     int32 [layers, K/64, N]          four e4m3 scales, of 16 inputs each, the first in the lowest byte; 0
                                                where a scale is below 2^-6
    divisors   float32 [layers, parts], the global scale g of each linear layer that a module fuses
    bias       bfloat16 [layers, N], where the module has one

A decoder needs each pair as a register of two bfloat16: the sign in bit 15 of each half, the code's other bits in bits
6 to 8, and 0 elsewhere. A word w holds pairs so that eight instructions make all four:

    pair 0   w & mask                                      mask 0x81c081c0
    pair 1   (w rotated to the right by 6) & mask
    pair 2   (w rotated to the right by 3) & mask
    pair 3   ((w & 0x1b001b) * 0x4108) & mask
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
    """One shared buffer: its location, and the modules whose weights it holds.

    Attributes:
      modules: names of the engine's modules, one for each layer.
      outputs: number of outputs of each linear layer that a module fuses, in order.
      inputs: K, the number of inputs.
      has_bias: whether the modules have a bias.
      memory: the location of the buffer.
    """

    modules: Annotated[list[messages.Name], msgspec.Meta(min_length=1)]
    outputs: Annotated[list[int], msgspec.Meta(min_length=1)]
    inputs: int
    has_bias: bool
    memory: messages.HostMemory | messages.DeviceMemory


class Array(msgspec.Struct, frozen=True):
    """The layout of one array in a buffer: byte offset, dtype and shape, whose first dimension is layers."""

    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes, all layers together."""
        return math.prod(self.shape) * self.dtype.itemsize


def arrays(layers: int, outputs: list[int], inputs: int, *, has_bias: bool) -> dict[str, Array]:
    """Lays out a buffer: returns the arrays of the module docstring, by name, for `layers` layers."""
    n = sum(outputs)
    listed = {
        "words": ("int32", (inputs // INPUTS, n, 16)),
        "scales": ("int32", (inputs // 64, n)),
        "divisors": ("float32", (len(outputs),)),
    } | ({"bias": ("bfloat16", (n,))} if has_bias else {})
    found, end = {}, 0
    for name, (dtype, shape) in listed.items():
        found[name] = Array(end, messages.DTYPES[dtype], (layers, *shape))
        end += -(-found[name].nbytes // _ALIGNMENT) * _ALIGNMENT
    return found


def arrays_of(place: Place) -> dict[str, Array]:
    """Lays out the arrays of a buffer that a `Place` describes, as `arrays` does."""
    return arrays(len(place.modules), place.outputs, place.inputs, has_bias=place.has_bias)


def size(found: dict[str, Array]) -> int:
    """Computes the size in bytes of a buffer with these arrays."""
    return max(-(-(a.offset + a.nbytes) // _ALIGNMENT) * _ALIGNMENT for a in found.values())
