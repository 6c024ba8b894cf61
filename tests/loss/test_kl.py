# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The KL term in the learner: its gradient is added with its coefficient, and a reference that stays stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import models, train
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loss import get_loss, get_term
from qarl_jax.loss.kl import estimate
from qarl_jax.metrics import values
from qarl_jax.optim import build, leafwise
from qarl_jax.runtime import mesh
from qarl_jax.types import TrainBatch
from tests.reference import tiny

pytestmark = pytest.mark.usefixtures("shared_learners")

ROWS, LENGTH = 4, 16


@functools.cache
def made_learner(coef, kind):
    graphdef = models.split(tiny.random_model())[0]
    return Learner(
        models.with_scheme(graphdef, "w4a16:g32"),
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.Muon(lr=0.02)),
        mesh=mesh.make_mesh(),
        options=Options(max_segments=1, logprob_chunk=64, kl_coef=coef, kl=get_term("kl", kind=kind)),
    )


def learner(coef, kind="k3"):
    made, params = made_learner(coef, kind), models.split(tiny.random_model())[1]
    return made, made.init(jax.tree.map(lambda x: jnp.array(x, copy=True), params))


def batch():
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    mask = np.broadcast_to(np.arange(LENGTH) >= 4, shape)
    return TrainBatch(
        tokens=rng.integers(3, 30, shape).astype(np.int32),
        positions=np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
        segment_ids=np.ones(shape, np.int32),
        loss_mask=mask,
        rollout_logprobs=np.full(shape, -3, np.float32),
        advantages=np.where(mask, rng.choice([-1, 1], (ROWS, 1)), 0).astype(np.float32),
    )


def gradient(coef, reference, kind="k3"):
    made, state = learner(coef, kind)
    micro = made.put(batch())
    counts = float(batch().loss_mask.sum()), float(ROWS)
    grads, metrics = made.accumulate_grads(
        made.zero_grads(state), state.params, made.quantize(state.params), micro, None, *counts, ref_logprobs=reference
    )
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(grads)])
    return flat, values(metrics)


@pytest.mark.parametrize("kind", ["k2", "k3+"])
def test_over_all_tokens_the_gradient_is_that_of_the_reverse_kl(kind):
    """Five tokens with probabilities p under the policy and q under the teacher; d KL(p || q) / d logit_j, by hand, is
    p_j (log p_j - log q_j - KL). Averaged over the policy's tokens, k3 gives something else."""
    logits, teacher = np.random.default_rng(4).normal(size=(2, 5)) * 1.5
    log_p, log_q = (x - np.log(np.exp(x).sum()) for x in (logits, teacher))
    p = np.exp(log_p)
    exact = p * (log_p - log_q - (p * (log_p - log_q)).sum())

    def pulled(kind):
        def each(z, y):
            return estimate((jax.nn.log_softmax(z) - jnp.asarray(log_q, jnp.float32))[y], kind)

        grads = [jax.grad(each)(jnp.asarray(logits, jnp.float32), y) for y in range(5)]
        return np.einsum("y,yj->j", p, np.stack(grads))

    np.testing.assert_allclose(pulled(kind), exact, atol=2e-6)
    assert np.abs(pulled("k3") - exact).max() > 0.05


def own_scores():
    made, state = learner(1.0)
    return made.score(*made.reference(state.params), made.put(batch()))[0]


@pytest.mark.slow
def test_the_gradient_is_linear_in_the_coefficient():
    reference = own_scores() + jnp.float32(0.3) * jnp.asarray(
        np.random.default_rng(1).normal(size=(ROWS, LENGTH)), jnp.float32
    )
    none, half, whole = (gradient(coef, reference)[0] for coef in (0.0, 0.5, 1.0))
    assert np.abs(whole - none).max() > 1e-3
    np.testing.assert_allclose(whole - none, 2 * (half - none), atol=1e-5 * np.abs(whole).max())


@pytest.mark.slow
def test_a_reference_equal_to_the_policy_has_no_kl_and_no_pull():
    none, _ = gradient(0.0, None)
    own, metrics = gradient(1.0, own_scores())
    assert metrics["kl/k3"] < 1e-6
    assert metrics["kl/max_abs"] < 1e-4
    np.testing.assert_allclose(own, none, atol=1e-4 * np.abs(none).max())


@pytest.mark.slow
def test_a_reference_survives_the_policys_updates():
    made, state = learner(1.0)
    reference, micro = made.reference(state.params), made.put(batch())
    before = np.asarray(made.score(*reference, micro)[0])
    grads = jax.tree.map(jnp.ones_like, made.zero_grads(state))
    state, _ = made.apply_update(state, grads)
    np.testing.assert_array_equal(made.score(*reference, micro)[0], before)
    moved = made.score(state.params, made.quantize(state.params), micro)[0]
    assert np.abs(np.asarray(moved) - before).max() > 1e-3


@pytest.mark.slow
def test_a_run_measures_its_distance_from_where_it_started(tmp_path):
    world = tiny.World(tmp_path)
    world = world.changed(kl={"coef": 1e-3}, train={"mask_truncated": True}, rollout={"dynamic": {"max_batches": 2}})
    assert train.main(world.command()) == 0
    first, second = world.records()
    assert 0 < first["kl/k3"] < second["kl/k3"]  # the second update of the first step has moved already
    assert first["rollout/batches"] in (1, 2)
    # Resumed from its checkpoint, it still measures from the start.
    assert train.main(world.command("train.steps=3")) == 0
    assert world.records()[2]["kl/k3"] > second["kl/k3"] / 4
