# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What every objective must satisfy. A new one enters by its line in LOSSES; nothing here names any."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qarl_jax.loss import LOSSES, get_loss, normalized
from qarl_jax.loss.advantages import KINDS, group_advantages
from qarl_jax.loss.common import responses
from qarl_jax.metrics import Max, Mean, merge
from qarl_jax.types import UserError
from tests.reference.loss_batches import inputs, make_batch, objective, rows, unpack, value_and_grad

pytestmark = pytest.mark.parametrize("name", [config.name for config in LOSSES])

# A correction whose weights vary by token, so that it is seen in every sum.
CORRECTED = {"mismatch": "tis"}


def assert_same_metrics(a, b, rtol=2e-5):
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key].value, b[key].value, rtol=rtol, atol=1e-6, err_msg=key)


def assert_same_gradient(found, wanted, rtol=1e-5):
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=1e-9)
    np.testing.assert_array_equal(found == 0, wanted == 0)  # who is kept and who is dropped does not depend on it


@pytest.mark.slow
def test_defaults_give_a_float32_mean_and_typed_metrics(name):
    value, grad, mean, metrics = value_and_grad(get_loss(name), inputs(make_batch()))
    assert isinstance(mean, Mean)
    assert mean.total.dtype == mean.count.dtype == jnp.float32
    assert value == pytest.approx(float(mean.value), rel=1e-6)
    assert np.isfinite(grad).all()
    assert (grad != 0).any()
    for key, metric in metrics.items():
        assert isinstance(metric, Mean | Max), key
        assert metric.value.shape == (), key
        assert np.isfinite(metric.value), key
        assert "/" in key


@pytest.mark.slow
def test_gradient_is_zero_off_the_mask_and_padding_changes_nothing(name):
    loss, batch = get_loss(name, **CORRECTED), make_batch()
    value, grad, _, metrics = value_and_grad(loss, inputs(batch))
    assert (grad[~batch.mask] == 0).all()
    for junk in (np.inf, -1e30):
        other = dataclasses.replace(
            batch, **{f: np.where(batch.mask, getattr(batch, f), junk) for f in ("lp", "lo", "ls", "adv")}
        )
        value2, grad2, _, metrics2 = value_and_grad(loss, inputs(other))
        assert value2 == value
        np.testing.assert_array_equal(grad2, grad)
        assert {k: float(m.value) for k, m in metrics.items()} == {k: float(m.value) for k, m in metrics2.items()}


@pytest.mark.slow
def test_micro_batches_sum_to_the_full_batch(name):
    loss, full = get_loss(name, **CORRECTED), inputs(make_batch())
    value, grad, mean, metrics = value_and_grad(loss, full)
    counts = {
        "num_tokens": jnp.float32(metrics["mismatch/k1"].count),
        "num_sequences": jnp.float32(metrics["loss/seq_zero_adv"].count),
    }
    # Rows in a scattered order; the last micro-batch is nothing but padding.
    shares = [np.array(i) for i in ([5, 0], [1, 3], [4, 6], [2, 7], [7, 7])]
    parts = [value_and_grad(loss, rows(dataclasses.replace(full, **counts), share)) for share in shares]
    np.testing.assert_allclose(sum(p[0] for p in parts), value, rtol=1e-5, atol=1e-6)
    assembled = np.empty_like(grad)
    for share, part in zip(shares, parts, strict=True):
        assembled[share] = part[1]
    assert_same_gradient(assembled, grad)
    merged = functools.reduce(lambda a, b: a + b, (p[2] for p in parts))
    np.testing.assert_allclose(merged.value, mean.value, rtol=1e-5, atol=1e-6)
    assert_same_metrics(functools.reduce(merge, (p[3] for p in parts)), metrics)


@pytest.mark.slow
def test_packed_rows_equal_one_response_per_row(name):
    loss, batch = get_loss(name, **CORRECTED), make_batch()
    packed, single = inputs(batch), inputs(unpack(batch))
    assert single.logprobs.shape[0] > packed.logprobs.shape[0]
    value, grad, mean, metrics = value_and_grad(loss, packed)
    value1, grad1, mean1, metrics1 = value_and_grad(loss, single)
    np.testing.assert_allclose(value1, value, rtol=1e-5)
    assert float(mean.count) == float(mean1.count)
    np.testing.assert_allclose(np.sort(grad1[grad1 != 0]), np.sort(grad[grad != 0]), rtol=1e-5)
    assert_same_metrics(metrics1, metrics)


def test_permuted_rows_give_the_permuted_gradient(name):
    loss, x = get_loss(name, **CORRECTED), inputs(make_batch())
    order = np.array([3, 7, 0, 5, 1, 6, 2, 4])
    value, grad, _, metrics = value_and_grad(loss, x)
    value2, grad2, _, metrics2 = value_and_grad(loss, rows(x, order))
    np.testing.assert_allclose(value2, value, rtol=1e-5)
    assert_same_gradient(grad2, grad[order], rtol=1e-6)
    assert_same_metrics(metrics2, metrics)


@pytest.mark.slow
def test_eight_devices_and_jit_equal_one_device_and_eager(name):
    loss, x = get_loss(name, **CORRECTED), inputs(make_batch())
    value, grad, _, metrics = value_and_grad(loss, x)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x = jax.tree.map(lambda v: jax.device_put(v, NamedSharding(mesh, PartitionSpec("data"))), x)
    step = jax.jit(jax.value_and_grad(objective, has_aux=True), static_argnums=2)
    (value8, (_, metrics8)), grad8 = step(x.logprobs, x, loss)
    assert len(grad8.sharding.device_set) == 8
    np.testing.assert_allclose(value8, value, rtol=1e-5)
    assert_same_gradient(np.asarray(grad8), grad)
    assert_same_metrics(metrics8, metrics)


@pytest.mark.slow
def test_many_responses_per_row_take_the_scatter_path_with_the_same_result(name, monkeypatch):
    loss, x = get_loss(name, mismatch="seq_tis"), inputs(make_batch(), max_segments=None)
    value, grad, _, metrics = value_and_grad(loss, x)
    monkeypatch.setattr(responses, "_DENSE", 0)
    value2, grad2, _, metrics2 = value_and_grad(loss, x)
    np.testing.assert_allclose(value2, value, rtol=1e-5)
    np.testing.assert_allclose(grad2, grad, rtol=1e-5, atol=1e-9)
    assert_same_metrics(metrics2, metrics)


def test_at_ratio_one_the_gradient_is_reinforce(name):
    """d loss / d logprob_t = - w_t A c_t with c_t the token's share under the aggregation."""
    loss, batch = get_loss(name, mismatch="none"), make_batch()
    batch = dataclasses.replace(batch, lo=batch.lp, ls=batch.lp)
    _, grad, mean, _ = value_and_grad(loss, inputs(batch))
    expected = np.zeros_like(grad)
    for b, ts in batch.responses():
        per_response = 1 / len(ts) if loss.config.aggregation == "seq-mean-token-mean" else 1.0
        expected[b, ts] = -batch.adv[b, ts] * per_response / float(mean.count)
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-12)


def test_on_policy_ignores_old_logprobs(name):
    loss, batch = get_loss(name, on_policy=True), make_batch()
    a = value_and_grad(loss, inputs(batch))[1]
    b = value_and_grad(loss, inputs(dataclasses.replace(batch, lo=batch.lo - 3.0)))[1]
    np.testing.assert_array_equal(a, b)
    assert (a != 0).any()


def test_the_samplers_ratio_divides_by_what_the_sampler_said(name):
    none = {"mismatch": "none"}
    batch = make_batch()
    value, grad, _, _ = value_and_grad(get_loss(name, ratio="sampler", **none), inputs(batch))
    as_old = dataclasses.replace(batch, lo=batch.ls)
    wanted, wanted_grad, _, _ = value_and_grad(get_loss(name, **none), inputs(as_old))
    assert value == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_array_equal(grad, wanted_grad)
    moved = dataclasses.replace(batch, lo=batch.lo - 3.0)
    own, other = (value_and_grad(get_loss(name, **none), inputs(each))[1] for each in (batch, moved))
    assert (grad != own).any() == (other != own).any()  # False only where an objective has no ratio


def test_the_samplers_ratio_leaves_nothing_to_correct(name):
    with pytest.raises(UserError, match="both say what the learner is compared with"):
        get_loss(name, ratio="sampler", mismatch="tis")
    with pytest.raises(UserError, match="on_policy both"):
        get_loss(name, ratio="sampler", on_policy=True, mismatch="none")


def test_positive_only_removes_the_push_of_negative_advantages_and_no_denominator(name):
    batch = make_batch()
    x, negative = inputs(batch), batch.mask & (np.nan_to_num(batch.adv) < 0)
    _, grad, mean, _ = value_and_grad(get_loss(name), x)
    _, grad2, mean2, _ = value_and_grad(get_loss(name, positive_only=True), x)
    assert (grad[negative] != 0).any()
    assert (grad2[negative] == 0).all()
    np.testing.assert_array_equal(grad2[~negative], grad[~negative])
    assert float(mean2.count) == float(mean.count)


def test_ten_thousand_nats_between_learner_and_sampler_are_finite(name):
    loss, batch = get_loss(name, **CORRECTED), make_batch()
    gradient = jax.jit(jax.value_and_grad(lambda logprobs, x: objective(logprobs, x, loss), has_aux=True))
    odd = np.arange(batch.lp.size).reshape(batch.lp.shape) % 2
    for field in ("lp", "lo", "ls"):
        for far in (-1e4, 1e4):
            x = inputs(dataclasses.replace(batch, **{field: getattr(batch, field) - far * odd}))
            (value, (_, metrics)), grad = gradient(x.logprobs, x)
            assert np.isfinite([value, *(float(m.value) for m in metrics.values())]).all()
            assert np.isfinite(grad).all()


def test_zero_advantages_and_empty_masks_are_zero_not_nan(name):
    loss, batch = get_loss(name, **CORRECTED), make_batch()
    flat = inputs(dataclasses.replace(batch, adv=np.zeros_like(batch.adv)))
    nothing = inputs(dataclasses.replace(batch, mask=np.zeros_like(batch.mask)))
    for x, count in ((flat, True), (nothing, False)):
        value, grad, mean, metrics = value_and_grad(loss, x)
        assert value == 0
        assert (grad == 0).all()
        assert (float(mean.count) > 0) == count
        assert all(np.isfinite(m.value) for m in metrics.values())
        clips = [float(m.value) for k, m in metrics.items() if k.startswith("clip/")]
        assert not any(clips)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_equal_rewards_has_no_gradient_and_stays_in_the_counts(name, kind):
    loss, batch = get_loss(name, **CORRECTED), make_batch()
    responses, size = batch.responses(), 5
    rewards = np.random.default_rng(0).normal(size=(-(-len(responses) // size), size))
    rewards[1] = np.float32(0.1)  # its mean in float32 is an ulp off
    advantages = group_advantages(rewards, kind).reshape(-1)
    adv = batch.adv.copy()
    for (b, ts), a in zip(responses, advantages, strict=False):
        adv[b, ts] = a
    _, grad, mean, metrics = value_and_grad(loss, inputs(dataclasses.replace(batch, adv=adv)))
    for i, (b, ts) in enumerate(responses):
        assert i // size != 1 or (grad[b, ts] == 0).all()
    assert (grad != 0).any()
    counts = {"tokens": batch.mask.sum(), "sequences": len(responses)}
    assert float(mean.count) == counts[loss.denominator]
    assert float(metrics["loss/seq_zero_adv"].total) == size


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1])
def test_no_or_one_position_in_time(name, length):
    f32 = lambda v: jnp.full((2, length), v, jnp.float32)  # noqa: E731
    x = dataclasses.replace(
        inputs(make_batch(), max_segments=None),
        logprobs=f32(-1.0),
        old_logprobs=f32(-1.0),
        rollout_logprobs=f32(-1.0),
        advantages=f32(2.0),
        loss_mask=jnp.ones((2, length), bool),
        segment_ids=jnp.ones((2, length), jnp.int32),
    )
    step = jax.jit(jax.grad(objective, has_aux=True), static_argnums=2)
    grad, (mean, _) = step(x.logprobs, x, get_loss(name))
    assert float(mean.count) == 2 * length
    np.testing.assert_allclose(grad, np.full((2, length), -1.0), rtol=1e-6)


def test_global_counts_scale_the_gradient(name):
    loss, x = get_loss(name), inputs(make_batch())
    mean, _ = loss(x)
    twice = dataclasses.replace(x, num_tokens=2 * mean.count, num_sequences=2 * mean.count)
    np.testing.assert_allclose(normalized(mean, twice, loss), mean.value / 2, rtol=1e-6)
