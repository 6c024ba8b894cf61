# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""KL to a reference and the critic's value loss: terms of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.loss import TERMS, get_term, normalized
from qarl_jax.loss.kl import KINDS
from qarl_jax.loss.value import explained_variance
from qarl_jax.metrics import merge
from qarl_jax.types import UserError
from tests.reference import loss_reference as reference
from tests.reference.loss_batches import inputs, make_batch, rows, value_and_grad


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
    assert explained_variance(metrics) == pytest.approx(1 - (ret - v)[m].var() / ret[m].var(), rel=1e-4)
    plain = get_term("value", clip=None)(x)[0].value
    np.testing.assert_allclose(plain, 0.5 * ((v - ret)[m] ** 2).mean(), rtol=1e-5)


@pytest.mark.parametrize("name", [config.name for config in TERMS])
def test_terms_add_over_micro_batches_and_vanish_on_an_empty_mask(name):
    x = value_inputs()[-1]
    x = dataclasses.replace(x, ref_logprobs=x.old_logprobs)
    term = get_term(name)
    mean, metrics = term(x)

    def part(index):
        extra = {f: getattr(x, f)[index] for f in ("ref_logprobs", "values", "old_values", "returns")}
        return term(dataclasses.replace(rows(x, index), **extra))

    parts = [part(np.array(i)) for i in ([0, 1, 2, 3], [4, 5, 6, 7])]
    np.testing.assert_allclose((parts[0][0] + parts[1][0]).value, mean.value, rtol=1e-5)
    both = merge(parts[0][1], parts[1][1])
    for key in metrics:
        np.testing.assert_allclose(both[key].value, metrics[key].value, rtol=1e-5, atol=1e-6)
    empty, metrics = term(dataclasses.replace(x, loss_mask=jnp.zeros_like(x.loss_mask)))
    assert float(empty.value) == 0
    assert all(np.isfinite(m.value) for m in metrics.values())


def test_missing_inputs_of_a_term_are_named():
    with pytest.raises(UserError, match="ref_logprobs"):
        get_term("kl")(inputs(make_batch()))
    with pytest.raises(UserError, match="values"):
        get_term("value")(inputs(make_batch()))
