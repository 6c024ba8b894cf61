# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic, on a Hopper GPU: the engine's products are the same for every number of rows, and the learner's."""

import functools

import jax
import jax.numpy as jnp
import pytest
from qarl_bridge.protocol import split_k

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(2560, 4096), (6144, 2560), (896, 4864), (1152, 896)], ids=str)
def test_a_rows_product_depends_on_no_other_row_and_is_the_learners(shape):
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine.cuda import ops

    from qarl_jax.kernels import product_hopper

    n, k = shape
    keys = jax.random.split(jax.random.key(n + k), 3)
    x = jax.random.normal(keys[0], (2048, k), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (n, k)) * 0.03).astype(jnp.bfloat16)
    x_t, w_t = (torch.from_dlpack(a) for a in (x, w))
    whole = ops.product(x_t, w_t)
    for rows in (1, 17, 64, 128, 200, 513):
        assert torch.equal(ops.product(x_t[:rows], w_t), whole[:rows])
    words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), device="cuda").to(torch.int32)
    codes = ((words[..., None] >> (4 * torch.arange(8, device="cuda"))) & 15).reshape(n, k) - 8
    words = ops.interleaved(words)
    for group in (32, 128):
        scale = torch.rand(k // group, n, device="cuda").bfloat16()
        served = (codes.float() * scale.t().float().repeat_interleave(group, 1)).bfloat16()
        assert torch.equal(ops.dequantized(words, scale), served)
        dense = ops.product(x_t, served)
        for rows in (1, 17, 64, 128, 200, 2048):
            assert torch.equal(ops.product(x_t[:rows], words, scale), dense[:rows])
    splits = split_k.splits_of(n, k)
    mine = jax.jit(functools.partial(product_hopper.float_product, splits=splits))(x, w)
    assert torch.equal(torch.from_dlpack(mine), whole)
