# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Random arrays, and parameters after some updates of an optimizer of ours."""

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax.optim import build


def normal(seed, *shape):
    """float32 of `shape`."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(cfg, params, grads_per_step, **kwargs):
    """Parameters after one update per gradient tree."""
    tx = build.make_optimizer(cfg, **kwargs)
    params = jax.tree.map(jnp.asarray, params)
    state = build.init(tx, params)
    step = jax.jit(lambda g, s, p: build.update(tx, g, s, p))
    for grads in grads_per_step:
        params, state, _ = step(jax.tree.map(jnp.asarray, grads), state, params)
    return params
