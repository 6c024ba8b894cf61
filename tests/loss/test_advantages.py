# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Group advantages, GAE over packed rows with holes, whitening."""

import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.loss.advantages import KINDS, gae, group_advantages, group_metrics, token_rewards, whiten
from qarl_jax.types import UserError
from tests.reference import loss_reference as reference
from tests.reference.loss_batches import make_batch

REWARDS = np.array(
    [[1, 0, 0, 1, 0.5], [0, 0, 0, 0, 1], [3.5, -2, 7, 0.25, 0], [0.1] * 5, [1e6, 1e6 + 1, 1e6, 1e6, 1e6]]
)


@pytest.mark.parametrize("kind", KINDS)
def test_group_advantages_agree_with_reference_on_host_and_device(kind):
    expected = reference.group_advantages(REWARDS, kind)
    host = group_advantages(REWARDS, kind)
    assert isinstance(host, np.ndarray)
    assert host.dtype == np.float32
    np.testing.assert_allclose(host, expected, rtol=1e-6, atol=1e-7)
    device = group_advantages(jnp.asarray(REWARDS[:4], jnp.float32), kind)
    np.testing.assert_allclose(device, expected[:4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exactly_zero(kind, as_array):
    """Eight float32 rewards of 0.1: the mean is one ulp off, which 1 / (0 + 1e-6) would turn into -7e-3."""
    rewards = as_array(np.full((1, 8), 0.1, np.float32))
    np.testing.assert_array_equal(group_advantages(rewards, kind), np.zeros((1, 8)))
    naive = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert np.isfinite(np.asarray(naive)).all()


def test_a_group_of_one_is_zero_and_counted():
    rewards = np.array([[5.0, 0, 0], [1, 1, 0], [1, 0, 0]])
    valid = np.array([[True, False, False], [True, True, False], [True, True, True]])
    out = group_advantages(rewards, valid=valid)
    np.testing.assert_array_equal(out[:2], 0)
    np.testing.assert_allclose(out[2], reference.group_advantages(rewards[2:], "grpo")[0], rtol=1e-6)
    metrics = group_metrics(rewards, valid=valid)
    assert float(metrics["advantage/single"].value) == pytest.approx(1 / 3)
    assert float(metrics["advantage/zero_variance"].value) == pytest.approx(1 / 3)


def test_absent_responses_enter_no_statistic():
    rewards = np.array([[1.0, 0.0, 1.0, np.nan]])
    out = group_advantages(rewards, valid=np.array([[True, True, True, False]]))
    np.testing.assert_allclose(out[0, :3], reference.group_advantages(rewards[:, :3], "grpo")[0], rtol=1e-6)
    assert out[0, 3] == 0


def test_bad_rewards_are_refused():
    with pytest.raises(UserError, match="did you mean 'drgrpo'"):
        group_advantages(REWARDS, "dr_grpo")
    with pytest.raises(UserError, match="not finite"):
        group_advantages(np.array([[1.0, np.nan]]))
    with pytest.raises(UserError, match="shape"):
        group_advantages(np.zeros(3))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_over_packed_rows_with_holes_agrees_with_reference(gamma, lam):
    batch, rng = make_batch(), np.random.default_rng(0)
    rewards, values = (np.where(batch.mask, rng.normal(size=batch.mask.shape), np.nan) for _ in range(2))
    expected = reference.gae(rewards, values, batch.mask, batch.seg, gamma, lam)
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    got = gae(f32(rewards), f32(values), jnp.asarray(batch.mask), jnp.asarray(batch.seg), gamma=gamma, lam=lam)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_score_lands_on_the_last_token_of_each_response_and_kl_on_all():
    mask = jnp.asarray([[False, True, False, True, False, True, False, False]])
    seg = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 0]])
    scores, kl = jnp.where(seg == 1, 3.0, 5.0), jnp.full(seg.shape, 2.0)
    np.testing.assert_array_equal(token_rewards(scores, mask, seg), [[0, 0, 0, 3, 0, 5, 0, 0]])
    np.testing.assert_array_equal(token_rewards(scores, mask, seg, kl=kl, kl_coef=0.5), [[0, -1, 0, 2, 0, 4, 0, 0]])


def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_mask():
    batch = make_batch()
    x = jnp.asarray(
        np.where(batch.mask, np.random.default_rng(1).normal(2.0, 3.0, batch.mask.shape), np.nan), jnp.float32
    )
    out = np.asarray(whiten(x, jnp.asarray(batch.mask)))
    np.testing.assert_allclose(out[batch.mask].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(out[batch.mask].var(ddof=1), 1, rtol=1e-5)
    assert (out[~batch.mask] == 0).all()
    one = jnp.zeros_like(x, bool).at[0, 0].set(True)
    np.testing.assert_array_equal(whiten(jnp.ones_like(x), one)[0, 0], 1.0)
