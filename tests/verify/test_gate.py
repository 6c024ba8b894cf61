# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: the gate finds a single token that differs, and its negative control cannot pass unnoticed."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from benchmarks import gate, random_folder
from qarl_jax import models
from qarl_jax.quant import QTensor
from qarl_jax.rollout.vllm.engine import VllmEngine
from qarl_jax.verify import ladder, layers

pytestmark = pytest.mark.usefixtures("compiled_programs")
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
        return np.concatenate([np.asarray(q.codes).reshape(-1) for q in leaves])

    before = codes(weights)
    assert (codes(gate.one_weight_changed(weights)) != before).sum() == 1
    assert (codes(gate.moved(weights, jax.random.key(0), by=1e-3)) != before).sum() > 1000


@pytest.mark.parametrize(
    ("unequal", "of_vllm", "control", "cached", "code"),
    [
        pytest.param(0, 900, 5, 64, 0, id="all as it should be"),
        pytest.param(1, 900, 5, 64, 1, id="a single token differs"),
        pytest.param(0, 0, 5, 64, 1, id="another engine option goes unnoticed"),
        pytest.param(0, 900, 0, 64, 1, id="a changed code goes unnoticed"),
        pytest.param(0, 900, 5, 0, 1, id="nothing was met in the prefix cache"),
    ],
)
def test_the_gate_passes_only_if_tokens_are_equal_controls_are_found_and_conditions_came_about(
    monkeypatch, unequal, of_vllm, control, cached, code
):
    class Engine:
        facts = None

        def __init__(self, config, run_id):
            self.arithmetic = config

        def publish(self, weights, version):
            pass

        def close(self):
            pass

    def observed(engine, weights, name, args, seed):
        count = unequal if engine.arithmetic == gate.INVARIANT else of_vllm
        return None, 1.0, {"condition": name, "unequal": count, "met": {"cached_tokens": cached}}

    weights = types.SimpleNamespace(graphdef=None)
    for name, fake in {
        "leave_memory_to_vllm": lambda: None,
        "engine_of": lambda tight, config, arithmetic, args: arithmetic,
        "VllmEngine": Engine,
        "observed": observed,
        "moved": lambda weights, key: weights,
        "one_weight_changed": lambda weights: weights,
        "unequal": lambda *_, **__: np.array([control]),
    }.items():
        monkeypatch.setattr(gate, name, fake)
    monkeypatch.setattr(ladder, "load", lambda *_, **__: weights)
    monkeypatch.setattr(models, "config_of", lambda _: None)
    arguments = ["--model", "x", "--schemes", "w8a8", "bf16", "--conditions", "plain", "samples", "--vllm-arithmetic"]
    assert gate.main(arguments) == code


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_changed_code_is_found_in_its_block_of_a_live_engine_that_records_experts(tmp_path):
    pytest.importorskip("vllm")
    random_folder.make(tmp_path / "model", random_folder.config_of("tiny-moe"), deviation=0.06)
    weights = ladder.load(str(tmp_path / "model"), "w8a8", "cpu")
    options = ladder.Options(prompts=1, prompt_len=60, response_len=1, threads=1)
    engine = VllmEngine(options.engine(models.config_of(weights.graphdef)), run_id="gate")
    try:
        engine.publish(weights, 0)
        assert layers.first_difference(engine.probe, weights, range(50)) == ""
        where = layers.first_difference(engine.probe, gate.one_weight_changed(weights), range(50))
    finally:
        engine.close()
    assert where.startswith("block 0, from token ")
