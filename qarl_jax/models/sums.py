# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A scan over layers whose backward adds each layer's gradient to an accumulator in place.

The backward of `lax.scan` returns the gradients of all layers at once, beside the accumulator to which they are added
afterwards: a second copy of the policy, 15 GiB at 8B in bfloat16. `run` is a scan with a custom backward, which carries
the accumulator and writes a layer's rows in place:

    forward     layer 0 ──► ... ──► layer L-1        keeps per layer what `remat` keeps
    backward    layer L-1: sums[L-1] += dW  ──► ... ──► layer 0: sums[0] += dW

Of the residuals of a layer's `jax.vjp`, only activations are stacked; weights and arrays shared by all layers are read
again. The sums have the bits of a gradient that is added as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qarl_jax.models.config import ModelConfig

Leaves = dict[Any, jax.Array]
"""Arrays by the keys of their leaf within a stack."""


def gradient_dtype(config: ModelConfig, wanted: Any) -> jnp.dtype:
    """Returns the dtype of the backward's gradients: `wanted` where it is the compute dtype, else the masters' dtype.

    A gradient has the dtype of the differentiated array, and `Learner` rounds masters to `wanted` in the first case.
    """
    return jnp.dtype(wanted if config.compute_dtype == wanted else config.param_dtype)


def in_place(dtype: Any) -> bool:
    """Tells whether XLA writes rows of a dtype in place. On a CPU it copies bfloat16 arrays through float32 instead."""
    return jnp.dtype(dtype).itemsize == 4 or jax.default_backend() != "cpu"


def carried(sums: nnx.State, config: ModelConfig) -> nnx.State | None:
    """Returns the accumulators if the model's backward can add to them in place (`run`), else None."""
    dtype = jax.tree.leaves(sums)[0].dtype
    return sums if gradient_dtype(config, dtype) == dtype and in_place(dtype) else None


def of_stack(sums: nnx.State | None, number: int) -> Leaves:
    """Returns the accumulators of the leaves of stack `number`; empty if there are none."""
    flat = [] if sums is None else nnx.to_flat_state(sums)
    return {keys[2:]: leaf.get_value() for keys, leaf in flat if keys[:2] == ("stacks", number)}


def total(sums: nnx.State, grads: nnx.State, *, inside: bool) -> nnx.State:
    """Adds a micro-batch's gradients to accumulators. inside: gradients of stacks contain the accumulators already."""
    before = dict(nnx.to_flat_state(sums))

    def of(keys: Any, grad: Any) -> Any:
        return (
            grad if inside and keys[0] == "stacks" else grad.replace(added(before[keys].get_value(), grad.get_value()))
        )

    return nnx.from_flat_state([(keys, of(keys, grad)) for keys, grad in nnx.to_flat_state(grads)])


def added(total: jax.Array, grad: jax.Array) -> jax.Array:
    """Adds `grad` to `total`, of one shape, in float32 and rounds to the dtype of `total`."""
    return (total.astype(jnp.float32) + grad.astype(jnp.float32)).astype(total.dtype)


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def run(body: Callable[..., Any], stream: tuple[Any, Any], elements: Any, own: Leaves, sums: Leaves) -> Any:
    """Computes `lax.scan(body, stream, elements)[0]`; its gradient with respect to `own` is `sums` plus the gradient.

    Args:
      body: (stream, element) -> (stream, None), under a `remat` policy.
      stream: (delta, residual). The body, and what reads the result, use nothing but their sum. So their cotangents
        are equal, and the backward carries one; XLA would copy the other in every layer.
      elements: (state of a stack, anything else), arrays [L, ...]; only the leaves in `own` get a gradient.
      own: the leaves of the state that learn. sums: an accumulator for each, of its shape and dtype.
    """
    elements = jax.lax.stop_gradient(elements)
    length = len(next(iter(own.values())))

    def layer(stream: Any, weights: Leaves, element: Any) -> Any:
        state, rest = element
        flat = nnx.to_flat_state(state)
        put = [(keys, leaf.replace(weights[keys]) if keys in weights else leaf) for keys, leaf in flat]
        return body(stream, (nnx.from_flat_state(put), rest))[0]

    def weights_of(element: Any) -> Leaves:
        return {keys: leaf.get_value() for keys, leaf in nnx.to_flat_state(element[0]) if keys in own}

    first = _at(elements, jnp.int32(0))
    layer, shared = jax.closure_convert(layer, stream, weights_of(first), first)
    kept: dict[str, Any] = {}  # how what a layer keeps is put together: the same for all of them

    @jax.custom_vjp
    def through(stream: Any, own: Leaves, sums: Leaves) -> Any:
        return forward(stream, own, sums)[0]

    def forward(stream: Any, own: Leaves, sums: Leaves) -> Any:
        def one(stream: Any, index: jax.Array) -> tuple[Any, list[jax.Array]]:
            element = _at(elements, index)
            read = [*jax.tree.leaves(element), *shared]
            out, vjp = jax.vjp(lambda stream, own: layer(stream, own, element, *shared), stream, weights_of(element))
            leaves, kept["structure"] = jax.tree.flatten(vjp)
            kept["places"] = [next((i for i, x in enumerate(read) if x is leaf), None) for leaf in leaves]
            return out, [leaf for leaf, place in zip(leaves, kept["places"], strict=True) if place is None]

        out, saved = jax.lax.scan(one, stream, jnp.arange(length, dtype=jnp.int32))
        return out, (saved, sums)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, Leaves, None]:
        saved, sums = residuals

        def one(carry: Any, given: Any) -> tuple[Any, None]:
            (both, sums), (index, own_saved) = carry, given
            read, rest = [*jax.tree.leaves(_at(elements, index)), *shared], iter(own_saved)
            leaves = [next(rest) if place is None else read[place] for place in kept["places"]]
            (both, _), grads = jax.tree.unflatten(kept["structure"], leaves)((both, both))
            return (both, jax.tree.map(functools.partial(_add_row, index), sums, grads)), None

        order = jnp.arange(length, dtype=jnp.int32)
        (both, sums), _ = jax.lax.scan(one, (cotangent[0], sums), (order, saved), reverse=True)
        return (both, both), sums, None

    through.defvjp(forward, backward)
    return through(stream, own, sums)


def _add_row(index: jax.Array, sums: jax.Array, grad: jax.Array) -> jax.Array:
    """Accumulators [L, ...] with a layer's gradient added."""
    row = added(jax.lax.dynamic_slice_in_dim(sums, index, 1), grad[None])
    return jax.lax.dynamic_update_slice_in_dim(sums, row, index, 0)
