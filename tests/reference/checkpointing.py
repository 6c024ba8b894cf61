# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Small trees of arrays to save, and their comparison."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def tree(seed=0):
    return {
        "layers": {"kernel": normal(seed, 2, 16, 8), "norm": normal(seed + 1, 2, 8)},
        "embed": normal(seed + 2, 32, 8),
    }


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def largest_file(directory):
    return max((p for p in directory.rglob("*") if p.is_file() and "/d/" in str(p)), key=lambda p: p.stat().st_size)
