# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Every objective and sampler correction agrees with the float64 reference, in value and gradient."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.loss import LOSSES, MISMATCH, get_loss
from tests.reference import loss_reference as reference
from tests.reference.cases import each_once
from tests.reference.loss_batches import ROWS, T, inputs, make_batch, value_and_grad

NAMES = [config.name for config in LOSSES]

EDGES = ("clip_high", "neg_clip_low", "neg_clip_high")
VARIANTS = [
    ("tbpo", {"mismatch": "geometric_mis"}),
    ("tbpo", {"mismatch": "none"}),
    ("tbpo", {"aggregation": "token-mean"}),
    ("tbpo", {"clip_high": 1e-4, "neg_clip_low": 6e-4, "neg_clip_high": 3e-4, "mismatch_cap": 1.2}),
    ("tbpo", {"bands": "length", **dict.fromkeys(EDGES, 3e-5)}),
    ("tbpo", {"bands": "spread", "spread_ref": 0.4, **dict.fromkeys(EDGES, 1e-5)}),
    ("tbpo", {"positive_only": True}),
    ("tbpo", {"on_policy": True}),
    ("grpo", {"aggregation": "seq-mean-token-mean"}),
    ("grpo", {"aggregation": "seq-mean-token-sum", "mismatch": "tis"}),
    ("grpo", {"dual_clip": 1.3}),
    ("grpo", {"off_policy_mask": 0.02, "mismatch": "tis"}),
    ("grpo", {"off_policy_mask": 0.0}),
    ("grpo", {"positive_only": True, "mismatch": "tis"}),
    ("grpo", {"on_policy": True, "mismatch": "tis"}),
    ("grpo", {"mismatch": "mis", "mismatch_low": 0.7, "mismatch_high": 1.5}),
    ("grpo", {"mismatch": "icepop", "mismatch_low": 0.9}),
    ("grpo", {"mismatch": "tis", "mismatch_cap": 1.1}),
    ("dapo", {"mismatch": "acr", "mismatch_cap": 1.2}),
    ("drgrpo", {"max_response_len": 512.0}),
    ("gspo", {"mismatch": "seq_mis"}),
    ("gspo", {"aggregation": "token-mean", "mismatch": "tis", "dual_clip": 10.0}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("dppo", {"divergence": "kl"}),
    ("dppo", {"clip_low": 0.05, "clip_high": 0.08, "ratio_max": 1.2, "mismatch": "tis"}),
    ("cispo", {"ratio_min": 0.9, "ratio_max": 1.1}),
]


def assert_agrees(name, options, batch, rtol):
    expected = reference.loss(name, batch, **options)
    value, grad, _, metrics = value_and_grad(get_loss(name, **options), inputs(batch))
    # Terms of both signs cancel in the value, so its error is relative to the sum of their sizes.
    assert abs(value - expected.value) <= rtol * expected.scale
    np.testing.assert_allclose(grad, expected.grad, rtol=rtol, atol=1e-30)
    np.testing.assert_array_equal(grad == 0, expected.grad == 0)  # decisions are exact
    return expected, metrics


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mismatch"), each_once(NAMES, list(MISMATCH)))
def test_objective_and_correction_agree_with_reference(name, mismatch):
    batch = make_batch()
    expected, metrics = assert_agrees(name, {"mismatch": mismatch}, batch, rtol=1e-5)
    weight = expected.weight[batch.mask]
    np.testing.assert_allclose(metrics["mismatch/w"].value, weight.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["mismatch/w_max"].value, weight.max(), rtol=1e-5)
    assert float(metrics["mismatch/tok_rejected"].total) == (weight == 0).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda v: str(v))
def test_options_agree_with_reference(name, options):
    assert_agrees(name, options, make_batch(seed=1), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_outliers_beyond_the_clamps_agree_with_reference(name):
    # exp turns an absolute error of float32 (1e-6 at a log-ratio of 20) into a relative one.
    assert_agrees(name, {"mismatch": "none"}, make_batch(seed=2, outliers=True), rtol=3e-5)


@pytest.mark.parametrize("mismatch", MISMATCH)
def test_outliers_in_the_sampler_logprobs_agree_with_reference(mismatch):
    assert_agrees("grpo", {"mismatch": mismatch}, make_batch(seed=3, outliers=True), rtol=3e-5)


def test_token_advantages_of_a_critic_agree_with_reference():
    assert_agrees("ppo", {"mismatch": "tis"}, make_batch(seed=4, constant_advantages=False), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tbpo", {}),
        ("grpo", {"mismatch": "tis", "dual_clip": 1.3}),
        ("drgrpo", {"mismatch": "seq_tis"}),
        ("dapo", {"mismatch": "acr"}),
        ("gspo", {"mismatch": "tis"}),
        ("gspo", {"mismatch": "acr", "mismatch_cap": 1.1}),
        ("sapo", {"mismatch": "mis"}),
        ("ppo", {}),
    ],
    ids=lambda v: str(v),
)
def test_closed_form_gradients_of_the_reference_match_central_differences(name, options):
    batch = make_batch(seed=5)
    expected = reference.loss(name, batch, **options).grad
    numeric = reference.central_differences(name, batch, **options)
    np.testing.assert_allclose(numeric, expected, rtol=1e-6, atol=1e-9)


def test_batch_reaches_both_sides_of_every_edge():
    """The batches above would prove little if nothing were clipped, dropped, truncated or rejected in them."""
    metrics = value_and_grad(get_loss("grpo", mismatch="acr", dual_clip=1.4), inputs(make_batch()))[3]
    tbpo = value_and_grad(get_loss("tbpo", mismatch_cap=1.5), inputs(make_batch()))[3]
    for key in (
        "clip/seq_pos_high",
        "clip/seq_neg_low",
        "clip/seq_neg_high",
        "mismatch/w_cap_high",
        "mismatch/w_cap_low",
    ):
        assert 0 < float(tbpo[key].value) < 1, key
    for key in ("clip/pos_high", "clip/neg_low", "clip/dual_neg_high", "clip/out_pos_low", "clip/out_neg_high"):
        assert 0 < float(metrics[key].value) < 1, key
    assert float(metrics["clip/acr_rescued"].value) > 0
    assert 0 < float(tbpo["loss/seq_zero_adv"].value) < 1


def test_tbpo_keeps_and_drops_exactly_the_responses_the_reference_does():
    batch = make_batch(seed=6)
    expected = reference.loss("tbpo", batch)
    _, grad, _, metrics = value_and_grad(get_loss("tbpo"), inputs(batch))
    signed = [(b, ts) for b, ts in batch.responses()]
    for (b, ts), dropped in zip(signed, expected.dropped, strict=True):
        if batch.adv[b, ts[0]] != 0:
            assert (grad[b, ts] == 0).all() == dropped
    assert float(metrics["clip/seq_dropped"].total) == sum(expected.dropped)
    assert float(metrics["clip/seq_dropped"].count) == len(signed)
    tokens = sum(len(ts) for (_, ts), dropped in zip(signed, expected.dropped, strict=True) if dropped)
    assert float(metrics["clip/tok_dropped"].total) == tokens


# ---- negative tests: plausible misreadings are told apart ------------------------------------------------------------


def one_response(log_ratio, advantage, log_weight=0.0):
    """A three-token response with the given mean log-ratio and log-weight, alone in a batch of the common shape."""
    mask = np.zeros((ROWS, T), bool)
    mask[0, :3] = True
    lo = np.zeros((ROWS, T))
    lo[0, :3] = [-1.0, -0.5, -2.0]
    as32 = lambda x: np.float32(x).astype(np.float64)  # noqa: E731
    adv = np.where(mask, float(advantage), 0.0)
    lp, ls = as32(lo + log_ratio * mask), as32(lo - log_weight * mask)
    return reference.Batch(lp=lp, lo=lo, ls=ls, adv=adv, mask=mask, seg=mask * 1)


def test_the_literal_reading_of_equation_5_does_not_match():
    value = value_and_grad(get_loss("tbpo"), inputs(one_response(0.0, 1.0)))[0]
    literal = -np.clip(1.0, -np.log(2.0), np.log(2.0))  # clip(w, [-log c, log c]) on w itself
    np.testing.assert_allclose(value, -1.0, rtol=1e-6)
    assert abs(value - literal) > 0.3


@pytest.mark.parametrize(("log_ratio", "live"), [(9e-4, False), (5e-4, True), (-1e-4, True), (-5e-4, False)])
def test_tbpo_band_for_negative_advantages_is_two_sided(log_ratio, live):
    """Wrapped in min(r A, band A), r = exp(9e-4) would keep its gradient: min picks r A."""
    _, grad, _, _ = value_and_grad(get_loss("tbpo"), inputs(one_response(log_ratio, -1.0)))
    assert (grad[0, :3] != 0).all() == live
    if log_ratio > 7e-4:
        gspo = value_and_grad(get_loss("gspo"), inputs(one_response(log_ratio, -1.0)))[1]
        assert (gspo[0, :3] != 0).all(), "the min() form passes here, so the two objectives are told apart"


@pytest.mark.parametrize(("log_ratio", "live"), [(5e-4, False), (3e-4, True), (-0.5, True)])
def test_tbpo_band_for_positive_advantages_is_one_sided(log_ratio, live):
    _, grad, _, _ = value_and_grad(get_loss("tbpo"), inputs(one_response(log_ratio, 1.0)))
    assert (grad[0, :3] != 0).all() == live


def test_a_dropped_response_stays_in_the_value_and_in_the_count():
    kept, dropped = one_response(0.0, 1.0), one_response(0.1, 1.0)
    both = reference.Batch(
        **{
            f.name: np.roll(getattr(kept, f.name), 1, axis=0) + getattr(dropped, f.name)
            for f in dataclasses.fields(kept)
        }
    )
    value, grad, mean, _ = value_and_grad(get_loss("tbpo"), inputs(both))
    np.testing.assert_allclose(value, -(1.0 + (1 + 4e-4)) / 2, rtol=1e-6)
    np.testing.assert_allclose(grad[1, :3], -1.0 / (2 * 3), rtol=1e-6)
    assert (grad[0] == 0).all()
    assert float(mean.count) == 2


def test_product_and_geometric_levels_differ():
    batch = one_response(0.0, 1.0, log_weight=0.2)  # product e^0.6, geometric mean e^0.2
    product = value_and_grad(get_loss("gspo", mismatch="seq_tis"), inputs(batch))[0]
    geometric = value_and_grad(get_loss("gspo", mismatch="geometric"), inputs(batch))[0]
    np.testing.assert_allclose(-product, np.exp(0.6), rtol=1e-5)
    np.testing.assert_allclose(-geometric, np.exp(0.2), rtol=1e-5)


def test_sequence_ratio_is_a_geometric_mean_not_a_mean_of_ratios():
    batch = make_batch(seed=7)
    value = value_and_grad(get_loss("gspo"), inputs(batch))[0]
    wrong, n = 0.0, 0
    for b, ts in batch.responses():
        s = np.mean(np.exp(batch.lp[b, ts] - batch.lo[b, ts]))
        wrong -= reference.ppo_clip(s, s, batch.adv[b, ts[0]], 3e-4, 4e-4)[0]
        n += 1
    assert abs(value - wrong / n) > 1e-3


def test_clamping_tokens_before_the_mean_is_told_apart():
    batch = one_response(0.0, -1.0)
    batch.lp[0, :3] = np.float32(batch.lo[0, :3] + [30.0, -15.0, -15.0])  # mean 0; clamped first: -10/3
    value, grad, _, _ = value_and_grad(get_loss("tbpo"), inputs(batch))
    np.testing.assert_allclose(value, 1.0, rtol=1e-5)
    assert (grad[0, :3] != 0).all()


def test_rejected_responses_leave_the_denominator_alone():
    batch = make_batch(seed=8)
    loss = get_loss("gspo", mismatch="seq_mis")
    _, _, mean, metrics = value_and_grad(loss, inputs(batch))
    assert float(metrics["mismatch/seq_rejected"].total) > 0
    assert float(mean.count) == len(batch.responses())


def test_everything_rejected_is_loss_zero_and_gradient_zero():
    value, grad, _, metrics = value_and_grad(
        get_loss("gspo", mismatch="seq_mis"), inputs(one_response(0.0, 1.0, log_weight=3.0))
    )
    assert value == 0
    assert (grad == 0).all()
    assert float(metrics["mismatch/seq_rejected"].value) == 1


def test_acr_differs_from_tis_only_where_rho_exceeds_the_cap_and_the_ratio_its_clip():
    batch = make_batch(seed=9)
    x = inputs(batch)
    tis = value_and_grad(get_loss("grpo", mismatch="tis"), x)[1]
    acr, metrics = value_and_grad(get_loss("grpo", mismatch="acr"), x)[1::2]
    with np.errstate(invalid="ignore"):
        where = batch.mask & (batch.lo - batch.ls > np.log(2)) & (batch.adv > 0) & (batch.lp - batch.lo > np.log(1.2))
    changed = ~np.isclose(tis, acr, rtol=1e-6, atol=0)
    assert not (changed & ~where).any()
    assert changed.sum() == float(metrics["clip/acr_rescued"].total)


@pytest.mark.slow
def test_no_gradient_flows_through_weights_or_advantages():
    import jax

    x = inputs(make_batch())
    for name in NAMES:
        loss = get_loss(name, mismatch="tis")
        for field in ("old_logprobs", "rollout_logprobs", "advantages"):
            grad = jax.grad(lambda v, f=field, loss=loss: loss(dataclasses.replace(x, **{f: v}))[0].total)(
                getattr(x, field)
            )
            assert jnp.all(grad == 0), (name, field)
