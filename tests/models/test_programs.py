# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Scoring, the gradient and the sampler are three programs. Under quantized activations an ulp between them moves
codes, and log-probs with them, by more than TBPO's bands are wide; so what they sum has one order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import models, quant
from qarl_jax.models.logprobs import token_logprobs
from tests.reference.tiny import ALPHABET, model_config

ROWS, LENGTH = 16, 64


def two_programs(scheme):
    """Log-probs [ROWS, LENGTH] of one policy, from a program that computes nothing else and from its gradient's."""
    config = model_config(128, quant=models.parse_rules(scheme), num_layers=4, initializer_range=0.05)
    graphdef, params, qweights = models.split(models.random_model(config, seed=3))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(3, len(ALPHABET), (ROWS, LENGTH)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), tokens.shape)
    ids = jnp.ones_like(tokens)

    def logprobs(params):
        model = models.merge(graphdef, params, qweights)
        hidden = model.hidden_states(tokens, positions, None, 1, None)
        return token_logprobs(hidden, model.head_weight(), tokens, ids, chunk=LENGTH)[0]

    def loss(params):
        found = logprobs(params)
        return (found * jnp.cos(positions)).sum(), found

    scored = jax.jit(logprobs)(params)
    (_, found), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return np.asarray(scored), np.asarray(found)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", *(pytest.param(s, marks=pytest.mark.nightly) for s in ("w4a8", "fp8"))])
def test_the_program_of_the_gradient_sees_the_log_probs_that_were_scored(scheme):
    scored, found = two_programs(scheme)
    np.testing.assert_allclose(found, scored, rtol=0, atol=2e-6)  # log-softmax alone; a code moves it by 1e-3


@pytest.mark.slow
def test_norms_have_an_order_where_activations_are_quantized():
    def order(scheme, engine="plain"):
        return model_config(quant=models.parse_rules(scheme), numerics=quant.resolve(engine)).norm_order

    assert order("bf16") == order("w4a16") == order([{"match": "mlp", "scheme": "w4a16"}]) == "any"
    assert order("w8a8") == order("fp8") == order([{"match": "mlp", "scheme": "w8a8"}]) == "torch"
    assert order("w8a8", "cuda") == order("w4a16", "cuda") == "float64"
    assert quant.quantizes_activations(quant.parse_scheme("w4a8"))
    assert not quant.quantizes_activations(None)
