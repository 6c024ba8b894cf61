# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Group advantages, GAE over packed rows with holes, whitening."""

import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.loss.advantages import (
    ADVANTAGES,
    KINDS,
    Gae,
    finite,
    gae,
    group_advantages,
    moments,
    over_turns,
    token_rewards,
    turn_advantages,
    turn_starts,
    whiten,
)
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


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_rewards_that_differ_by_a_rounding_give_exactly_zero(kind):
    rewards = np.array([[np.float32(0.4) + np.float32(0.55), 0.95] * 4], np.float32)
    assert np.ptp(rewards) > 0
    np.testing.assert_array_equal(group_advantages(rewards, kind), 0)
    turns = [[[0.3, np.float32(0.7) - 0.3], [0.1, np.float32(0.5) - 0.1]]]  # 0.4 is to come in both
    np.testing.assert_array_equal(turn_advantages(turns, kind)[:, :, 1], 0)


def test_a_group_of_one_is_zero_and_counted():
    rewards = np.array([[5.0, 0, 0], [1, 1, 0], [1, 0, 0]])
    valid = np.array([[True, False, False], [True, True, False], [True, True, True]])
    out = group_advantages(rewards, valid=valid)
    np.testing.assert_array_equal(out[:2], 0)
    np.testing.assert_allclose(out[2], reference.group_advantages(rewards[2:], "grpo")[0], rtol=1e-6)


def test_absent_responses_enter_no_statistic():
    rewards = np.array([[1.0, 0.0, 1.0, np.nan]])
    out = group_advantages(rewards, valid=np.array([[True, True, True, False]]))
    np.testing.assert_allclose(out[0, :3], reference.group_advantages(rewards[:, :3], "grpo")[0], rtol=1e-6)
    assert out[0, 3] == 0


def test_a_turns_advantage_is_its_reward_to_go_against_the_same_turn_of_the_group():
    rewards = [[[1.0, 2.0], [0.0, 4.0, 1.0], [5.0]]]  # to go: 3, 2; 5, 5, 1; 5
    out = turn_advantages(rewards, "drgrpo")
    third = np.float32(13 / 3)
    np.testing.assert_allclose(out[0], [[3 - third, -1.5, 0], [5 - third, 1.5, 0], [5 - third, 0, 0]], rtol=1e-6)
    whole = group_advantages(np.array([[3.0, 5.0, 5.0]]), "grpo")
    np.testing.assert_allclose(turn_advantages(rewards, "grpo")[:, :, 0], whole, rtol=1e-6)
    valid = turn_advantages(rewards, "drgrpo", valid=[[True, True, False]])  # the last one's environment failed
    np.testing.assert_allclose(valid[0], [[-1, -1.5, 0], [1, 1.5, 0], [0, 0, 0]], rtol=1e-6)


def test_bad_rewards_are_refused():
    with pytest.raises(UserError, match="did you mean 'drgrpo'"):
        group_advantages(REWARDS, "dr_grpo")
    with pytest.raises(UserError, match="not finite"):
        group_advantages(np.array([[1.0, np.nan]]))
    with pytest.raises(UserError, match="not finite"):
        finite(np.array([[1.0], [np.inf]]))
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


def test_score_lands_on_the_last_token_of_each_response():
    mask = jnp.asarray([[False, True, False, True, False, True, False, False]])
    seg = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 0]])
    scores = jnp.where(seg == 1, 3.0, 5.0)
    np.testing.assert_array_equal(token_rewards(scores, mask, seg), [[0, 0, 0, 3, 0, 5, 0, 0]])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.95, 0.0)])
def test_gae_is_the_weighted_sum_of_temporal_differences(gamma, lam):
    """Another route than the recursion: A_t = sum over k of (gamma lam)^k delta_(t+k), within the response alone."""
    batch, rng = make_batch(), np.random.default_rng(1)
    rewards, values = (np.where(batch.mask, rng.normal(size=batch.mask.shape), np.nan) for _ in range(2))
    expected = np.zeros(values.shape)
    for b, ts in batch.responses():
        v = np.append(values[b, ts], 0.0)  # nothing follows the last token
        delta = rewards[b, ts] + gamma * v[1:] - v[:-1]
        for k in range(len(ts)):
            expected[b, ts[k]] = (delta[k:] * (gamma * lam) ** np.arange(len(ts) - k)).sum()
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    got, returns = gae(f32(rewards), f32(values), jnp.asarray(batch.mask), jnp.asarray(batch.seg), gamma=gamma, lam=lam)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns, np.where(batch.mask, expected + np.nan_to_num(values), 0), rtol=1e-5, atol=1e-5)


def test_with_turns_for_steps_gae_runs_over_turns_and_every_token_of_one_has_its_advantage():
    seg = jnp.asarray([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]])
    mask = jnp.asarray([[0, 1, 1, 0, 1, 1, 0, 1, 1, 0]], bool)
    starts = turn_starts(mask, seg)
    np.testing.assert_array_equal(starts, np.array([[0, 1, 0, 0, 1, 0, 0, 1, 0, 0]], bool))
    reward = jnp.asarray([[9.0, 1, 1, 9, 3, 3, 9, 5, 5, 9]])  # broadcast over each turn
    value = jnp.asarray([[9.0, 0.5, 9, 9, 2, 9, 9, 4, 9, 9]])
    advantages, returns = gae(reward, value, starts, seg, gamma=0.5, lam=0.5)
    # Turn 1 of the first: 3 - 2 = 1; turn 0: 1 + 0.5 * 2 - 0.5 + 0.25 * 1 = 1.75; the other response: 5 - 4 = 1.
    expected = [[0, 1.75, 1.75, 0, 1, 1, 0, 1, 1, 0]]
    np.testing.assert_allclose(over_turns(advantages, starts, mask), expected)
    np.testing.assert_allclose(returns, [[0, 2.25, 0, 0, 3, 0, 0, 5, 0, 0]])
    whole = turn_starts(jnp.ones((1, 4), bool), jnp.asarray([[1, 1, 2, 2]]))  # responses without a hole between them
    np.testing.assert_array_equal(whole, [[True, False, True, False]])


def test_nothing_of_one_response_reaches_another_in_its_row():
    batch, rng = make_batch(), np.random.default_rng(2)
    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    rewards, values = (np.where(batch.mask, rng.normal(size=batch.mask.shape), 0) for _ in range(2))
    seg, mask = jnp.asarray(batch.seg), jnp.asarray(batch.mask)
    before = [np.asarray(x) for x in gae(f32(rewards), f32(values), mask, seg, gamma=0.9, lam=0.8)]
    second = batch.seg == 2
    after = gae(f32(rewards + 1e3 * second), f32(values - 1e2 * second), mask, seg, gamma=0.9, lam=0.8)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[~second], np.asarray(b)[~second])
        assert (a != np.asarray(b))[second & batch.mask].all()


def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_rollout_batch():
    batch = make_batch()
    x = np.where(batch.mask, np.random.default_rng(1).normal(2.0, 3.0, batch.mask.shape), np.nan)
    mean, variance = moments(x[batch.mask])
    parts = [  # two micro-batches of one rollout batch
        whiten(jnp.asarray(x[i], jnp.float32), jnp.asarray(batch.mask[i]), jnp.float32(mean), jnp.float32(variance))
        for i in (slice(0, 3), slice(3, None))
    ]
    out = np.concatenate(parts)
    np.testing.assert_allclose(out[batch.mask].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(out[batch.mask].var(ddof=1), 1, rtol=1e-5)
    assert (out[~batch.mask] == 0).all()
    assert abs(np.asarray(parts[0])[batch.mask[:3]].mean()) > 1e-3  # of a part it is not


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_tokens_are_not_whitened(count):
    assert moments(np.full(count, 5.0)) == (0.0, 1.0)
    one = whiten(jnp.full((1, 2), 5.0), jnp.asarray([[True, False]]), jnp.float32(0.0), jnp.float32(1.0))
    np.testing.assert_array_equal(one, [[5.0, 0.0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.1}, "advantage 'gae': gamma = 1.1: must be at most 1"),
        ({"lam": -0.1}, "advantage 'gae': lam = -0.1: must be at least 0"),
        ({"whiten": 1}, "advantage 'gae': whiten = 1: must be true or false"),
    ],
    ids=str,
)
def test_bad_options_of_gae_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Gae(**options)


def test_every_kind_of_advantage_is_known_by_its_name():
    assert {name: kind.name for name, kind in ADVANTAGES.items()} == {name: name for name in ADVANTAGES}
    assert set(KINDS) | {"gae", "none"} == set(ADVANTAGES)
