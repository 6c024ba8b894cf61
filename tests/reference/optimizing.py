# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Random arrays, parameters after some updates of an optimizer of ours, and their comparison."""

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax.optim import leafwise


def normal(seed, *shape):
    """float32 of `shape`."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def has_same_bits(x, y):
    """Whether the arrays of two trees are equal to the last bit."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def run(cfg, params, grads_per_step, **kwargs):
    """Parameters after one update per gradient tree."""
    tx = leafwise.Optimizer(cfg, **kwargs)
    params = jax.tree.map(jnp.asarray, params)
    state = leafwise.init(tx, params)
    step = jax.jit(lambda g, s, p: leafwise.update(tx, g, s, p))
    for grads in grads_per_step:
        params, state, _ = step(jax.tree.map(jnp.asarray, grads), state, params)
    return params


def unguarded(tx, grads, state, params):
    """(updates, state after it) of all parameters, whatever the gradient is: an update that a zero does not stop."""
    scalars = tx.scalars(state.count, leafwise.clipping_norm(grads))
    arrays = jax.tree.leaves(grads), jax.tree.leaves(params), leafwise.moments_of(params, state)
    each = zip(tx.leaves(params), *arrays, strict=True)
    updates, moments = zip(*(tx.step(leaf, scalars, *arguments) for leaf, *arguments in each), strict=True)
    after = leafwise.with_moments(params, state.count + 1, moments)
    return jax.tree.unflatten(jax.tree.structure(params), updates), after
