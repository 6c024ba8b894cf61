# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/kernel_order.py: a product adds in the order its table dictates; tables are those of Machete's tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kernel_order
from qarl_jax.numerics import machete


@pytest.mark.parametrize("promote", [False, True])
def test_a_product_adds_its_parts_in_the_order_of_the_table(promote):
    x, w = np.ones((32, 256), np.float32), np.zeros((256, 256), np.float32)
    w[:, 0], w[:, [64, 128, 192]] = 2.0**24, 1.0
    parts = [(0, 64), (64, 128), (128, 192), (192, 256)]

    def run(table):
        operands = (jnp.asarray(v, jnp.bfloat16) for v in (x, w))
        y = kernel_order.products(*operands, jnp.asarray(table), promote=promote, dtype=jnp.float32, interpret=True)
        return np.asarray(y)

    lost, kept = 2.0**24, 2.0**24 + 4  # one after the other onto 2^24, a one is lost; three at once are 2^24 + 4
    np.testing.assert_array_equal(run(kernel_order.same_parts(256, 32, parts)), np.full((32, 256), lost))
    np.testing.assert_array_equal(run(kernel_order.same_parts(256, 32, parts[::-1])), np.full((32, 256), kept))
    table = kernel_order.table_of(256, 32, lambda output, row: parts if output == 128 and row == 16 else parts[::-1])
    want = np.full((32, 256), kept)
    want[16:, 128:] = lost
    np.testing.assert_array_equal(run(table), want)


def test_a_product_refuses_a_table_of_another_shape():
    x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((128, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="not one for 128 outputs and 32 rows"):
        kernel_order.products(x, w, jnp.asarray(kernel_order.same_parts(128, 16, [(0, 64)])), interpret=True)


def test_every_small_tile_has_the_parts_of_the_tile_of_machetes_it_lies_in():
    plan = machete.plan(512, 2048, 2048)  # stream-K in tiles of 128 x 128
    assert plan.mode == "stream-K"
    table = kernel_order.planned(2048, 512, plan)
    assert table.shape == (16, 32, kernel_order.WIDTH, 2)
    for i, j in ((0, 0), (7, 9), (15, 31)):
        parts = plan.parts(i, j // 8)
        np.testing.assert_array_equal(table[i, j, : len(parts)], 64 * np.array(parts))
        assert not table[i, j, len(parts) :].any()


def test_the_orders_tried_cover_all_of_k_once():
    for k in (384, 1024, 6144):
        found = kernel_order.orders(k)
        assert ("groups" in found) == (k <= 1536)
        assert ("split_8" in found) == (k >= 512)
        for parts in found.values():
            assert sorted(i for first, end in parts for i in range(first, end)) == list(range(k))


def test_a_schedules_name_holds_its_tile():
    assert kernel_order.tile_named("256x128_2x1x1_TmaMI__TmaCoop_streamK") == machete.Tile(256, 128, 2)
