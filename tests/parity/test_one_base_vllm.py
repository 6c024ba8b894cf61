# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A base that learner and a real vLLM hold once: the same tokens and bits as with two copies, across a restart."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest

from qarl_jax import models
from qarl_jax.rollout import SamplingConfig
from qarl_jax.rollout.vllm import one_base
from qarl_jax.rollout.vllm.engine import VllmEngine
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.verify import ladder

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.nightly]
CONFIG = {  # with biases
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two versions of adapters on one base whose biases matter."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = models.random_model(models.read_config(folder, param_dtype="float32"), 0)
    graphdef, params, qweights = models.split(model)

    def drawn(path, x):
        named = "bias" in jax.tree_util.keystr(path)
        return jax.random.normal(jax.random.key(1), x.shape, x.dtype) if named else x

    models.save_hf(models.merge(graphdef, jax.tree.map_with_path(drawn, params), qweights), folder)
    base = ladder.load(str(folder), "nvfp4", "cpu")
    return [ladder.with_adapters(base, 4, seed=seed) for seed in (0, 1)]


def sampled(engine, policy, number):
    prompts = ladder.random_prompts(models.config_of(policy.graphdef).vocab_size, 6, 12, number)
    drawn = engine.generate(prompts, num_samples=1, sampling=SamplingConfig(max_response_len=12), key=number)
    return ladder.Sampled.of(ladder.flat(drawn))


def same(x, y):
    return np.array_equal(x.tokens, y.tokens) and np.array_equal(x.logprobs, y.logprobs)


@pytest.fixture(scope="module")
def found(policies):
    pytest.importorskip("vllm")
    config = ladder.Options(prompts=6, prompt_len=12, response_len=12, threads=1).engine(
        models.config_of(policies[0].graphdef)
    )
    reports, drawn, scores, lines = {}, {}, {}, []
    for way in ("twice", "once"):
        versions = policies
        with contextlib.closing(VllmEngine(config, run_id=way, log=lines.append)) as engine:
            if way == "once":
                held = engine.hold_once(policies[0].graphdef, make_mesh())
                first = one_base.moved_into(held, policies[0])
                versions = [first, dataclasses.replace(policies[1], qweights=first.qweights)]
            reports[way] = [engine.publish(versions[0], 0)]
            drawn[way] = [sampled(engine, versions[0], 0)]
            reports[way].append(engine.publish(versions[1], 1))
            drawn[way].append(sampled(engine, versions[1], 1))
            scores[way] = [ladder.score(version, own)[0] for version, own in zip(versions, drawn[way], strict=True)]
            if way == "once":
                notes = engine.facts.notes
                engine.fleet.replicas[0].bridge.process.kill()
                again = sampled(engine, versions[1], 1)
                restarts = engine.restarts
    return {"reports": reports, "drawn": drawn, "scores": scores, "notes": notes, "again": again, "restarts": restarts}


def test_tokens_and_log_probs_are_those_of_two_copies_to_the_bit(found):
    for once, twice in zip(found["drawn"]["once"], found["drawn"]["twice"], strict=True):
        assert same(once, twice)
    for once, twice in zip(found["scores"]["once"], found["scores"]["twice"], strict=True):
        assert np.array_equal(once, twice)


def test_no_token_differs_between_learner_and_engine(found):
    for own, logprobs in zip(found["drawn"]["once"], found["scores"]["once"], strict=True):
        assert (logprobs == own.logprobs)[own.response].all()


def test_the_base_travels_with_no_version_and_is_read_back(found):
    (once, _), (twice, _) = found["reports"]["once"], found["reports"]["twice"]
    layers = 2
    assert twice["tensors"] - once["tensors"] == layers * (7 * 3 + 3)  # codes, scales, a divisor; biases of q, k and v
    assert once["weights_read_back"] == twice["weights_read_back"]
    assert f"{4 * layers} layers read the trainer's memory" in found["notes"]


def test_an_engine_that_starts_again_maps_the_base_and_draws_the_same(found):
    assert found["restarts"] == 1
    assert same(found["again"], found["drawn"]["once"][1])
