# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What an objective says it did with each token is what its float64 formula does. Enrolled by the line in LOSSES."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.loss import LOSSES, get_loss
from qarl_jax.loss.common import token_effects
from qarl_jax.loss.common.token_effects import FATES
from tests.reference import loss_reference
from tests.reference.cases import each_once
from tests.reference.loss_batches import inputs, make_batch, unpack

NAMES = [config.name for config in LOSSES]
ABOVE, BELOW, REJECTED, NO_SIGNAL = (FATES.index(fate) for fate in FATES[1:])

# A correction that rejects tokens (bounds the batch's weights straddle), and one that rejects responses.
CORRECTIONS = {"none": {"mismatch": "none"}, "token": {"mismatch": "icepop"}, "response": {"mismatch": "seq_mis"}}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "correction"), each_once(NAMES, list(CORRECTIONS)))
def test_gain_weight_and_fate_are_those_of_the_formula(name, correction):
    options = CORRECTIONS[correction]
    batch = make_batch()
    got = jax.device_get(token_effects.effects(inputs(batch), get_loss(name, **options)))
    reference = loss_reference.loss(name, batch, **options)
    # At ratio 1 without correction every objective is REINFORCE: the push that a gain multiplies.
    unit = loss_reference.loss(name, dataclasses.replace(batch, lp=batch.lo, ls=batch.lo), mismatch="none").grad
    signal = unit != 0
    np.testing.assert_allclose(got.gain[signal], reference.grad[signal] / unit[signal], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.gain[~signal], 0)
    np.testing.assert_allclose(got.weight[batch.mask], reference.weight[batch.mask], rtol=1e-5, atol=1e-7)

    expected = np.zeros(batch.mask.shape, np.int32)
    for b, ts in batch.responses():
        log = batch.lp[b, ts] - batch.lo[b, ts]
        log = np.full(len(ts), log.mean()) if get_loss(name).config.level == "response" else log
        for t, ratio in zip(ts, log, strict=True):
            if batch.adv[b, t] == 0:
                expected[b, t] = NO_SIGNAL
            elif reference.weight[b, t] == 0:
                expected[b, t] = REJECTED
            elif reference.grad[b, t] == 0:
                expected[b, t] = ABOVE if ratio > 0 else BELOW
    np.testing.assert_array_equal(got.fate, expected)
    if correction != "none":
        assert (expected == REJECTED).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_share_of_dropped_tokens_is_the_objectives_own_metric(name):
    x, loss = inputs(make_batch()), get_loss(name, mismatch="none")
    _, metrics = loss(x)
    fate = np.asarray(token_effects.effects(x, loss).fate)
    share = ((fate == ABOVE) | (fate == BELOW)).sum() / np.asarray(x.loss_mask).sum()
    known = [key for key in ("clip/frac", "clip/tok_dropped") if key in metrics]
    assert share == pytest.approx(float(metrics[known[0]].value) if known else 0.0, rel=1e-6)
    assert not known or share > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_level_is_whose_ratio_decides(name):
    """One token of a response runs away: with a band on responses its neighbours' gains follow, else they stay."""
    one = jnp.zeros((1, 6), jnp.float32)
    x = inputs(make_batch())
    x = dataclasses.replace(
        x,
        **dict.fromkeys(("old_logprobs", "rollout_logprobs"), one - 1),
        advantages=one + 1,
        loss_mask=one == 0,
        segment_ids=jnp.ones((1, 6), jnp.int32),
        max_segments=1,
    )
    loss = get_loss(name)
    runaway = token_effects.effects(dataclasses.replace(x, logprobs=(one - 1).at[0, 2].set(2.0)), loss)
    still = np.delete(np.asarray(runaway.gain[0]), 2)
    if loss.config.level == "response":
        np.testing.assert_array_equal(still, 0)
    else:
        np.testing.assert_allclose(still, 1, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_or_one_response_per_row_or_padding_change_nothing(name):
    loss, batch = get_loss(name, mismatch="tis"), make_batch()
    packed, single = (jax.device_get(token_effects.effects(inputs(b), loss)) for b in (batch, unpack(batch)))
    for field in dataclasses.fields(packed):
        one, other = getattr(packed, field.name), getattr(single, field.name)
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one[~batch.mask], 0)
        np.testing.assert_allclose(np.sort(one[one != 0]), np.sort(other[other != 0]), rtol=1e-4, atol=1e-7)


def test_positive_only_leaves_negative_responses_without_signal():
    batch = make_batch()
    fate = np.asarray(token_effects.effects(inputs(batch), get_loss("grpo", positive_only=True)).fate)
    with np.errstate(invalid="ignore"):
        assert (fate[batch.mask & (batch.adv <= 0)] == NO_SIGNAL).all()
        assert (fate[batch.mask & (batch.adv > 0)] != NO_SIGNAL).all()
