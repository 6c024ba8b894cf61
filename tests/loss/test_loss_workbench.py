# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""TBPO's bands from the data, DPPO's mask and AIS's weight: values derived by hand, and the claims made for them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.loss import get_loss
from qarl_jax.loss.dppo import binary_divergence
from qarl_jax.types import LossInputs

STD = 0.0256  # the spread for which TBPO's edges hold as written


def one_per_row(logprobs, old, *, sampler=None, advantage=1.0):
    """Rows of one full response each; arrays [B, T]."""
    now = jnp.asarray(logprobs, jnp.float32)
    old = jnp.asarray(old, jnp.float32)
    return LossInputs(
        logprobs=now,
        old_logprobs=old,
        rollout_logprobs=old if sampler is None else jnp.asarray(sampler, jnp.float32),
        advantages=jnp.full(now.shape, advantage, jnp.float32),
        loss_mask=jnp.ones(now.shape, bool),
        segment_ids=jnp.ones(now.shape, jnp.int32),
        max_segments=1,
    )


@functools.partial(jax.jit, static_argnums=1)
def push(x, loss):
    """The terms that the objective adds to each log-prob, times the number of tokens or responses."""
    return -jax.grad(lambda lp: loss(dataclasses.replace(x, logprobs=lp))[0].total)(x.logprobs)


def dropped(x, loss):
    return ((np.asarray(push(x, loss)) == 0) | ~np.asarray(x.loss_mask)).all(1)


def share_dropped(bands, tokens, std, shape=(2000, 64)):
    noise = np.random.default_rng([tokens, int(std * 1e4)]).normal(size=shape) * std
    x = one_per_row(noise - 1.0, np.full(shape, -1.0))
    x = dataclasses.replace(x, loss_mask=jnp.broadcast_to(jnp.arange(shape[1]) < tokens, shape))
    return dropped(x, get_loss("tbpo", bands=bands)).mean()


def test_a_band_as_wide_as_length_and_spread_say():
    """Four tokens, d = m + (3, -1, 1, -3)/100: s = 0.01 sqrt(20/3) = 0.02582. With spread_ref = s/2 the
    edges are 32 x 2 times as written: at clip_high = 0.01/16 they lie at a ratio of 1.04, m = log 1.04 = 0.03922."""
    s = 0.01 * math.sqrt(20 / 3)
    options = {"clip_high": 0.01 / 16, "spread_ref": s / 2}
    d = np.array([[3, -1, 1, -3]]) / 100 + np.array([[0.0391], [0.0393], [0.0199]])
    x = one_per_row(d - 2.0, np.full(d.shape, -2.0))
    by_spread = get_loss("tbpo", bands="spread", **options)
    assert dropped(x, by_spread).tolist() == [False, True, False]
    assert float(by_spread(x)[1]["loss/band_width"].value) == pytest.approx(64.0, rel=1e-5)
    # By length alone they lie at 1.02 (m = 0.01980), as written at 1.0006.
    assert dropped(x, get_loss("tbpo", bands="length", **options)).tolist() == [True, True, True]
    assert dropped(x, get_loss("tbpo", **options)).tolist() == [True, True, True]


def test_bands_by_spread_drop_the_same_share_under_every_scheme_and_length():
    """Noise alone, A > 0: one standard error above the mean lies 15.9 % of a normal distribution."""
    for tokens, std in ((16, STD), (64, 2 * STD), (64, 8 * STD)):
        assert share_dropped("spread", tokens, std) == pytest.approx(0.159, abs=0.03)
    assert share_dropped("length", 16, STD) == pytest.approx(0.159, abs=0.03)
    assert share_dropped("length", 64, 8 * STD) > 0.4
    assert share_dropped("fixed", 16, STD) > 0.45


def test_bands_do_not_widen_for_a_response_that_moves_as_a_whole():
    """A mean of 0.1 over 64 tokens with the reference's noise: 30 standard errors."""
    noise = np.random.default_rng(0).normal(size=(50, 64)) * STD
    x = one_per_row(noise - 1.0 + 0.1, np.full(noise.shape, -1.0))
    assert dropped(x, get_loss("tbpo", bands="spread")).all()


def test_nothing_that_has_not_moved_is_dropped():
    x = one_per_row(np.full((3, 5), -1.5), np.full((3, 5), -1.5), advantage=-1.0)
    for bands in ("fixed", "length", "spread"):
        assert not dropped(x, get_loss("tbpo", bands=bands)).any()


def test_binary_divergences_by_hand():
    """From 0.99 to 0.8: TV 0.19; KL 0.99 log(0.99 / 0.8) + 0.01 log(0.01 / 0.2) = 0.210962 - 0.029957 = 0.181005."""
    p, q = jnp.log(jnp.float32([0.8, 1e-3, 0.5])), jnp.log(jnp.float32([0.99, 1e-5, 0.5]))
    np.testing.assert_allclose(binary_divergence(p, q, "tv"), [0.19, 9.9e-4, 0.0], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(binary_divergence(p, q, "kl"), [0.181005, 9.4444e-4, 0.0], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_keeps_a_rare_token_that_grows_and_drops_a_sure_one_that_falls(kind):
    """The paper's two examples, which a clip of ratios decides the other way round."""
    dppo, ppo = get_loss("dppo", divergence=kind), get_loss("grpo", clip_low=0.2, clip_high=0.2)
    grows = one_per_row(np.log([[1e-3]]), np.log([[1e-5]]))
    falls = one_per_row(np.log([[0.8]]), np.log([[0.99]]), advantage=-1.0)
    assert (dropped(grows, dppo)[0], dropped(grows, ppo)[0]) == (False, True)
    assert (dropped(falls, dppo)[0], dropped(falls, ppo)[0]) == (True, False)
    # What brings a token back is never dropped.
    assert not dropped(one_per_row(np.log([[0.8]]), np.log([[0.99]])), dppo)[0]


def test_dppo_takes_the_sampler_for_its_trust_region_where_it_is_asked_to():
    x = one_per_row(np.log([[0.9]]), np.log([[0.9]]), sampler=np.log([[0.6]]))
    assert not dropped(x, get_loss("dppo"))[0]
    assert dropped(x, get_loss("dppo", ratio="sampler"))[0]


def test_ais_mixes_by_reliability_and_divergence():
    """rho = (2, 1/2): ESS/L = 2.5^2 / (2 x 4.25) = 0.735294, k3 = (1 - log 2 + log 2 - 1/2) / 2 = 0.25, so
    m = 1 - 0.735294 exp(-0.25) = 0.427352; with C = 1.5 the weights are 1 + m/2 and 1 - m/2."""
    log = np.log([[2.0, 0.5], [1.0, 1.0]])
    x = one_per_row(np.full((2, 2), -1.0), np.full((2, 2), -1.0), sampler=-1.0 - log)
    loss = get_loss("grpo", mismatch="ais", mismatch_cap=1.5)
    np.testing.assert_allclose(push(x, loss), [[1.213676, 0.786324], [1.0, 1.0]], rtol=1e-5)
    assert float(loss(x)[1]["mismatch/ais_mix"].value) == pytest.approx(0.427352 / 2, rel=1e-5)


def test_ais_is_uncorrected_where_policies_agree_and_tis_where_they_do_not():
    rng = np.random.default_rng(1)
    old = np.full((1, 32), -2.0)
    for spread, like in ((1e-3, "none"), (6.0, "tis")):
        x = one_per_row(old, old, sampler=old + rng.normal(size=old.shape) * spread)
        weights = [push(x, get_loss("grpo", mismatch=name)) for name in ("ais", like)]
        np.testing.assert_allclose(*weights, atol=0.05)
