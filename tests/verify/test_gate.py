# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: the gate finds a single token that differs, and its negative control cannot pass unnoticed."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import gate
from qarl_jax.quant import QTensor
from qarl_jax.verify import ladder

TINY = "assets/tiny-qwen3"


def sampled_by(weights):
    """Responses whose reported log-probs are the learner's own: an engine that keeps the promise."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 60, (2, 24)).astype(np.int32)
    response = np.zeros(tokens.shape, bool)
    response[:, 8:] = True
    blank = ladder.Sampled(tokens, np.ones_like(tokens), response, np.zeros(tokens.shape, np.float32))
    logprobs = np.where(response, ladder.score(weights, blank)[0], 0.0)
    return dataclasses.replace(blank, logprobs=logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", pytest.param("w4a16", marks=pytest.mark.nightly), "bf16"])
def test_one_changed_weight_or_one_changed_token_is_found(scheme):
    weights = ladder.load(TINY, scheme, "plain")
    sampled = sampled_by(weights)
    assert not gate.unequal(weights, sampled).any()
    assert gate.unequal(gate.one_weight_changed(weights), sampled).any()
    sampled.logprobs[1, 20] = np.nextafter(sampled.logprobs[1, 20], np.float32(0))
    assert np.argwhere(gate.unequal(weights, sampled)).tolist() == [[1, 20]]


@pytest.mark.slow
def test_the_control_changes_one_code_and_a_move_changes_many():
    weights = ladder.load(TINY, "w8a8", "plain")

    def codes(policy):
        leaves = jax.tree.leaves(policy.qweights, is_leaf=lambda x: isinstance(x, QTensor))
        return np.concatenate([np.asarray(q.qvalue).reshape(-1) for q in leaves])

    before = codes(weights)
    assert (codes(gate.one_weight_changed(weights)) != before).sum() == 1
    assert (codes(gate.moved(weights, jax.random.key(0), by=1e-3)) != before).sum() > 1000
