# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""KL to a reference and the critic's value loss: terms of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qarl_jax.loss import TERMS, get_term, normalized
from qarl_jax.loss.kl import KINDS, estimate
from qarl_jax.loss.value import explained_variance
from qarl_jax.metrics import merge
from qarl_jax.types import UserError
from tests.reference import loss_reference as reference
from tests.reference.loss_batches import inputs, make_batch, rows, unpack, value_and_grad


def f32(x):
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_agrees_with_reference_beyond_its_clamps(kind):
    batch = make_batch()
    rng = np.random.default_rng(0)
    ref = np.where(batch.mask, batch.lp - rng.normal(size=batch.lp.shape), np.nan)
    for i, far in enumerate([25.0, -25.0, -4.0]):  # past +-20 on both sides, and k3 past 10
        b, ts = batch.responses()[i]
        ref[b, ts[0]] = batch.lp[b, ts[0]] - far
    ref = ref.astype(np.float32).astype(np.float64)
    value, grad = reference.kl(batch, ref, kind)
    got = value_and_grad(get_term("kl", kind=kind), inputs(batch, ref_logprobs=f32(ref)))
    np.testing.assert_allclose(got[0], value, rtol=1e-5)
    np.testing.assert_allclose(got[1], grad, rtol=1e-5, atol=1e-8)
    assert float(got[3]["kl/max_abs"].value) == pytest.approx(25.0, rel=1e-5)


def test_k3_keeps_the_digits_of_a_small_kl():
    d = np.linspace(-1e-4, 1e-4, 101, dtype=np.float32)
    wanted = np.expm1(-d.astype(np.float64)) + d.astype(np.float64)
    np.testing.assert_allclose(estimate(d, "k3"), wanted, atol=1e-11)


def value_inputs(seed=0):
    batch, rng = make_batch(), np.random.default_rng(seed)
    v, old, ret = (
        np.where(batch.mask, rng.normal(size=batch.lp.shape), np.nan).astype(np.float32).astype(np.float64)
        for _ in range(3)
    )
    return batch, v, old, ret, inputs(batch, values=f32(v), old_values=f32(old), returns=f32(ret))


def test_value_loss_agrees_with_reference():
    batch, v, old, ret, x = value_inputs()
    term = get_term("value", clip=0.5)
    expected, expected_grad = reference.value_loss(batch, v, old, ret, 0.5)

    def scalar(values):
        mean, metrics = term(dataclasses.replace(x, values=values))
        return normalized(mean, x, term), metrics

    (value, metrics), grad = jax.value_and_grad(scalar, has_aux=True)(x.values)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-8)
    assert (expected_grad[batch.mask] == 0).any(), "the clip is never reached"
    m = batch.mask
    assert float(metrics["critic/value_mean"].value) == pytest.approx(v[m].mean(), rel=1e-5)
    clipped = ((np.clip(v, old - 0.5, old + 0.5) - ret) ** 2 > (v - ret) ** 2)[m].mean()
    assert float(metrics["critic/clip_fraction"].value) == pytest.approx(clipped, rel=1e-6)
    assert 0 < clipped < 1
    plain = get_term("value", clip=None)(x)[0].value
    np.testing.assert_allclose(plain, 0.5 * ((v - ret)[m] ** 2).mean(), rtol=1e-5)


def test_explained_variance_follows_its_definition_and_keeps_its_digits():
    rng = np.random.default_rng(4)
    returns = rng.normal(size=200)
    values = returns + 0.5 * rng.normal(size=200) + 3.0  # a constant offset explains nothing and costs nothing
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert explained_variance(values, returns) == pytest.approx(expected, rel=1e-12)
    assert 0.5 < expected < 0.9
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.zeros(200), returns) == pytest.approx(0, abs=1e-12)
    far = 1e4  # where squares of float32 keep no digit of the variance
    assert explained_variance(values + far, returns + far) == pytest.approx(expected, rel=1e-6)
    for constant in (np.zeros(0), np.zeros(1), np.full(5, 0.1)):
        assert explained_variance(constant + 1, constant) == 0


# ---- what every term must satisfy: the battery of the objectives, for those that are none ---------------------------

EXTRA = ("ref_logprobs", "values", "old_values", "returns")
DIFFERENTIATED = {"kl": "logprobs", "value": "values"}
every_term = pytest.mark.parametrize("name", [config.name for config in TERMS])


def batch_of_terms(change=lambda batch: batch):
    """Inputs of all terms, after `change` of the rows that hold them."""
    batch, v, old, ret, _ = value_inputs()
    other = change(dataclasses.replace(batch, lp=v, lo=old, ls=ret))
    batch = change(batch)
    with np.errstate(invalid="ignore"):
        reference_logprobs = np.where(batch.mask, batch.lp - batch.ls, np.nan)
    extra = dict(zip(EXTRA, map(f32, (reference_logprobs, other.lp, other.lo, other.ls)), strict=True))
    return batch, inputs(batch, **extra)


def chosen(x, index):
    return dataclasses.replace(rows(x, index), **{name: getattr(x, name)[index] for name in EXTRA})


def scalar(y, x, term):
    x = dataclasses.replace(x, **{DIFFERENTIATED[term.name]: y})
    mean, metrics = term(x)
    return normalized(mean, x, term), (mean, metrics)


def evaluated(x, term):
    """(value, gradient [B, T], Mean, metrics)."""
    field = getattr(x, DIFFERENTIATED[term.name])
    (value, (mean, metrics)), grad = jax.value_and_grad(scalar, has_aux=True)(field, x, term)
    return float(value), np.asarray(grad), mean, metrics


def assert_same_metrics(found, wanted):
    assert found.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_allclose(found[key].value, wanted[key].value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.slow
@every_term
def test_terms_sum_over_micro_batches_and_follow_permuted_rows(name):
    term, (_, x) = get_term(name), batch_of_terms()
    value, grad, mean, metrics = evaluated(x, term)
    assert value != 0
    whole = dataclasses.replace(x, num_tokens=jnp.float32(mean.count))
    shares = [np.array(i) for i in ([5, 0], [1, 3], [4, 6], [2, 7])]
    parts = [evaluated(chosen(whole, share), term) for share in shares]
    np.testing.assert_allclose(sum(part[0] for part in parts), value, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), grad[np.concatenate(shares)], rtol=1e-6)
    assert_same_metrics(functools.reduce(merge, (part[3] for part in parts)), metrics)


@every_term
def test_terms_are_the_same_with_a_row_per_response(name):
    term, (_, x), (_, single) = get_term(name), batch_of_terms(), batch_of_terms(unpack)
    assert single.logprobs.shape[0] > x.logprobs.shape[0]
    value, grad, _, metrics = evaluated(x, term)
    value1, grad1, _, metrics1 = evaluated(single, term)
    np.testing.assert_allclose(value1, value, rtol=1e-5)
    np.testing.assert_allclose(np.sort(grad1[grad1 != 0]), np.sort(grad[grad != 0]), rtol=1e-5)
    assert_same_metrics(metrics1, metrics)


@every_term
def test_terms_on_eight_devices_equal_one(name):
    term, (_, x) = get_term(name), batch_of_terms()
    value, grad, _, metrics = evaluated(x, term)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x = jax.tree.map(lambda v: jax.device_put(v, NamedSharding(mesh, PartitionSpec("data"))), x)
    step = jax.jit(jax.value_and_grad(scalar, has_aux=True), static_argnums=2)
    (value8, (_, metrics8)), grad8 = step(getattr(x, DIFFERENTIATED[name]), x, term)
    assert len(grad8.sharding.device_set) == 8
    np.testing.assert_allclose(value8, value, rtol=1e-5)
    np.testing.assert_allclose(grad8, grad, rtol=1e-5, atol=1e-9)
    assert_same_metrics(metrics8, metrics)


@every_term
def test_terms_ignore_what_stands_in_padding_and_vanish_without_a_token(name):
    term, (batch, x) = get_term(name), batch_of_terms()
    value, grad, _, _ = evaluated(x, term)
    assert (grad[~batch.mask] == 0).all()
    fields = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", *EXTRA)
    junk = {field: jnp.where(x.loss_mask, getattr(x, field), jnp.inf) for field in fields}
    value1, grad1, _, _ = evaluated(dataclasses.replace(x, **junk), term)
    assert value1 == value
    np.testing.assert_array_equal(grad1, grad)
    value, grad, _, metrics = evaluated(dataclasses.replace(x, loss_mask=jnp.zeros_like(x.loss_mask)), term)
    assert value == 0
    assert (grad == 0).all()
    assert all(np.isfinite(m.value) for m in metrics.values())


def test_missing_inputs_of_a_term_are_named():
    with pytest.raises(UserError, match="ref_logprobs"):
        get_term("kl")(inputs(make_batch()))
    with pytest.raises(UserError, match="values"):
        get_term("value")(inputs(make_batch()))
