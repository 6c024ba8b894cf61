# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Stacks that a scan fills are not filled with zeros before, and hold the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.runtime import compilation

pytestmark = pytest.mark.gpu


def test_stacks_for_the_backward_are_not_zeroed_and_the_gradient_keeps_its_bits():
    options = compilation.backward_options()
    assert options is not None, "this XLA does not know the option"
    weights = jax.random.normal(jax.random.key(0), (6, 512, 512), jnp.float32) / 16
    x = jax.random.normal(jax.random.key(1), (256, 512), jnp.float32)

    def loss(weights, x):
        out, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.sum(out**2)

    gradient = jax.grad(loss, argnums=(0, 1))
    plain, lean = (jax.jit(gradient, compiler_options=given).lower(weights, x).compile() for given in (None, options))
    assert lean.as_text().count("AllocateBuffer") > plain.as_text().count("AllocateBuffer")
    for one, other in zip(jax.tree.leaves(plain(weights, x)), jax.tree.leaves(lean(weights, x)), strict=True):
        assert np.array_equal(one, other)
