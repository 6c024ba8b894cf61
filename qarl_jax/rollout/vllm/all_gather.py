# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Casts stacked weights to their published dtypes, and all-gathers those that are sharded over several GPUs.

One program casts and gathers some tensors of some stacks (`gathered`). `batches` bounds how many at once: meanwhile a
GPU holds them twice, and launching a program takes longer than copying a small stack.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qarl_jax.runtime.mesh import launch_lock

PIECE_BYTES = 2**30
"""Most bytes cast or gathered at once while a version is staged whole, as they travel; at least one tensor."""


class Stack(NamedTuple):
    """A stacked weight: an array, its published dtype, and whether its first dimension counts tensors (lead 1)."""

    array: jax.Array
    dtype: jnp.dtype
    lead: int

    @property
    def tensors(self) -> int:
        """The number of tensors."""
        return self.array.shape[0] if self.lead else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the stack in its published dtype."""
        return self.array.size * self.dtype.itemsize

    @property
    def is_there(self) -> bool:
        """Tells whether the array lies on one GPU in its published dtype, so that it needs no copy."""
        return len(self.array.devices()) == 1 and self.array.dtype == self.dtype


class Piece(NamedTuple):
    """Tensors `wanted` of a stack; a stack that `is_there` is used in place, and `wanted` then begins with 0."""

    stack: Stack
    wanted: range


def batches(wanted: Mapping[Any, Piece], limit: int | None = None) -> Iterator[list[tuple[Any, Piece]]]:
    """Splits wanted tensors, in order, into lists of (key, piece) of at most `limit` bytes, or one tensor, each.

    A stack is cut into equal pieces, so that few programs are compiled.

    Args:
      limit: bytes; PIECE_BYTES if None.
    """
    limit = PIECE_BYTES if limit is None else limit
    batch: list[tuple[Any, Piece]] = []
    room = limit
    for key, (stack, tensors) in wanted.items():
        each = stack.nbytes // max(1, stack.tensors)
        most = max(1, limit // max(1, each))
        size = max(n for n in range(1, len(tensors) + 1) if len(tensors) % n == 0 and (n <= most or stack.is_there))
        for start in tensors[::size]:
            nbytes = 0 if stack.is_there else size * each
            if batch and nbytes > room:
                yield batch
                batch, room = [], limit
            batch.append((key, Piece(stack, range(start, start + size))))
            room -= nbytes
    if batch:
        yield batch


@functools.partial(jax.jit, static_argnames=("sizes", "dtypes", "parts", "place"))
def _cut(
    arrays: list[jax.Array],
    starts: list[jax.Array],
    sizes: tuple[int, ...],
    dtypes: tuple[Any, ...],
    parts: tuple[Any, ...],
    place: Any,
) -> list[jax.Array]:
    """`sizes` of the arrays' first dimensions from `starts` on, in `dtypes`.

    Args:
      parts: the sharding of each cut before the all-gather, which is its array's.
      place: the sharding after the all-gather; None: one GPU.
    """

    def one(x: jax.Array, start: jax.Array, size: int, dtype: Any, part: Any) -> jax.Array:
        x = lax.dynamic_slice_in_dim(x, start, size).astype(dtype)
        if place is None:
            return x
        x = lax.with_sharding_constraint(x, part)  # else the compiler gathers the whole array, and cuts then
        return lax.with_sharding_constraint(x, place)

    return [one(*each) for each in zip(arrays, starts, sizes, dtypes, parts, strict=True)]


def gathered(pieces: Sequence[Piece]) -> list[dict[int, jax.Array]]:
    """Casts and all-gathers pieces. Returns, per piece, its array by local GPU number, on its stack's local GPUs."""
    found: list[dict[int, jax.Array]] = [{} for _ in pieces]
    together: dict[Any, list[int]] = {}  # by where they are to be: the pieces that one program makes
    for number, (stack, _) in enumerate(pieces):
        if stack.is_there:
            (device,) = stack.array.devices()
            found[number] = {int(device.local_hardware_id): jax.block_until_ready(stack.array)}
        else:
            together.setdefault(_places(stack)[1], []).append(number)
    for place, numbers in together.items():
        mine = [pieces[number] for number in numbers]
        with launch_lock(1 if place is None else place.mesh.size):
            made = _cut(
                [stack.array for stack, _ in mine],
                [jnp.uint32(wanted.start if stack.lead else 0) for stack, wanted in mine],
                tuple(len(wanted) if stack.lead else stack.array.shape[0] for stack, wanted in mine),
                tuple(stack.dtype for stack, _ in mine),
                tuple(_places(stack)[0] for stack, _ in mine),
                place,
            )
            jax.block_until_ready(made)
        for number, array in zip(numbers, made, strict=True):
            found[number] = {int(part.device.local_hardware_id): part.data for part in array.addressable_shards}
    return found


def _places(stack: Stack) -> tuple[NamedSharding | None, NamedSharding | None]:
    """Returns the shardings of a cut before the all-gather (its stack's) and after it. None: one GPU."""
    lies = stack.array.sharding
    if not isinstance(lies, NamedSharding):
        return None, None
    spec = [None] * stack.lead + list(lies.spec)[stack.lead :]
    return NamedSharding(lies.mesh, PartitionSpec(*spec)), NamedSharding(lies.mesh, PartitionSpec())
