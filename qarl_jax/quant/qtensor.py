# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The quantized weight `QTensor`: a pytree of named arrays, and functions of it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from qarl_jax.types import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A weight [..., N, K] (out, in) in the bytes that are published.

    The scheme's layout (`qarl_bridge.protocol.formats.Layout`) lists the arrays with dtypes and shapes: always "codes",
    mostly "scales", and a grid's other arrays. Every array has the weight's leading dimensions (stacked layers,
    experts). It has one row, or a row per output, and a column per fixed number of inputs (packed word or group).

    Example: quantize([[0.5, -1.0, ...]], w8a8.Config()) -> codes int8 [[64, -128, ...]], scales float32 [[1/127.5]].

    Attributes:
      arrays: the arrays by name.
      scheme: the `Scheme`, static under jit.
    """

    arrays: dict[str, Any]
    scheme: Any = dataclasses.field(metadata={"static": True})

    @property
    def codes(self) -> Any:
        """The array of codes, packed as they are published."""
        return self.arrays["codes"]

    @property
    def scales(self) -> Any:
        """The array of scales, one per output channel or group of inputs; KeyError if the grid has none."""
        return self.arrays["scales"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        return self.scheme.shape(self.arrays)

    @property
    def ndim(self) -> int:
        """Number of dimensions of `shape`: 2 for one weight, 3 or more for stacked weights."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.size * array.dtype.itemsize for array in self.arrays.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded:
    """A weight whose value is read from its QTensor, and whose gradient goes to its master (straight through).

    Attributes:
      master: the high-precision weight [N, K].
      qtensor: the same weight quantized.
    """

    master: Any
    qtensor: QTensor


def rows_of(qtensor: QTensor, index: jax.Array) -> QTensor:
    """Gathers rows of a weight [N, K] into a weight [R, K]. index: int [R]; out of range, the nearest row."""
    own = {array.name for array in qtensor.scheme.wire.arrays if array.outputs}
    take = functools.partial(jnp.take, indices=index, axis=0, mode="clip")
    return QTensor({name: take(x) if name in own else x for name, x in qtensor.arrays.items()}, qtensor.scheme)


def moved_codes(old: QTensor, new: QTensor) -> jax.Array:
    """Returns bool [..., N, K], true where the codes of two QTensors of one scheme differ."""

    def differ(array: Any) -> jax.Array:
        width = 8 * array.dtype.itemsize // array.inputs
        words = (
            jax.lax.bitcast_convert_type(x.arrays[array.name], f"uint{8 * array.dtype.itemsize}") for x in (old, new)
        )
        bits = jax.lax.bitwise_xor(*words)[..., None]
        shifts = jnp.arange(0, width * array.inputs, width, dtype=bits.dtype).reshape((1,) * (bits.ndim - 1) + (-1,))
        return ((bits >> shifts) & (2**width - 1) != 0).reshape(old.shape)

    parts = [array for array in old.scheme.wire.arrays if array.name.startswith("codes")]
    return functools.reduce(jnp.logical_or, map(differ, parts))


def inputs_of(whole: Any, shard: int, shards: int) -> Any:
    """Slices the inputs (K) of an array or QTensor [.., K] for one tensor-parallel shard; None gives None. Arrays
    without an input dimension, for example scales of whole rows, go to every shard unchanged.

    Raises:
      UserError: the cut would divide a group.
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
    cut = {array.name for array in whole.scheme.wire.arrays if array.inputs}
    arrays = {name: own(array) if name in cut else array for name, array in whole.arrays.items()}
    return QTensor(arrays, whole.scheme)
