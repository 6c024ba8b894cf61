# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The arrays whose elements a kernel in Pallas' Triton reaches.

JAX computes the place of an element, a number of elements, in 64 bits if the array has more than 2^32 bytes, else in 32
(`_compute_offsets_from_indices` of its lowering; 0.10, 0.11). Triton takes 32 bits as signed. So in an array of one
byte an element, with 2^31 to 2^32 of them, the upper places are negative: a kernel reads and writes before the array.
"""

from __future__ import annotations

from typing import Any

_SIGNED = 2**31  # elements that 32 bits can place
_WIDE_BYTES = 2**32  # beyond which JAX takes 64 bits


def in_reach(size: int, dtype: Any) -> bool:
    """Tells whether a kernel in Pallas' Triton reaches all of `size` elements of a dtype."""
    return not _SIGNED < size <= _WIDE_BYTES // dtype.itemsize
