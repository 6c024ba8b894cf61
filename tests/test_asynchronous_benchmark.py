# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The timed comparison of asynchronous training: its engine draws what the sampler draws, and its numbers add up."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qarl_bridge.protocol import messages

from benchmarks import asynchronous, jax_bridge
from qarl_jax.rollout import PolicyWeights, Request, SamplingConfig
from qarl_jax.rollout.embedded import engine as embedded
from qarl_jax.rollout.vllm.engine import engine_tensors
from qarl_jax.run import config
from qarl_jax.types import Prompt
from tests.reference.fleet_world import weights

SAMPLER = embedded.Config(batch_size=8, min_slots=8)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16:g32", pytest.param("w8a8", marks=pytest.mark.nightly)])
def test_the_engine_behind_a_bridge_draws_what_the_sampler_draws(scheme):
    w = weights(3, scheme)
    engine = jax_bridge.JaxEngine(w.graphdef, SAMPLER, max_model_len=64)
    tensors = dict(engine_tensors(w, stacked=True))
    assert {name: (messages.dtype_name(array.dtype), list(array.shape)) for name, array in tensors.items()} == {
        name: (one.dtype, one.shape) for name, one in engine.expected.items()
    }
    engine.load([tensors])
    assert engine.read_back([tensors], "full", 0)[0] == len(tensors)
    lengths = [5, 1, 7, 5]
    for i, length in enumerate(lengths):
        engine.submit(str(i), messages.Draw(prompt=[1, 2, 3 + i], seed=i), messages.Sampling(max_tokens=length))
    found = {}
    while engine.running():
        found |= {one.request_id: one for one in engine.step()}

    sampler = embedded.JaxSampler(SAMPLER)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), w.params)  # what the wire carries
    sampler.publish(PolicyWeights(graphdef=w.graphdef, params=rounded, qweights=w.qweights), 0)
    prompts = [Prompt(uid="", tokens=(1, 2, 3 + i), text="", answer="") for i in range(len(lengths))]
    requests = [
        Request(prompt=p, number=0, key=i, max_tokens=n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    for i, one in enumerate(sampler.extend(requests, sampling=SamplingConfig(max_response_len=7))):
        assert found[str(i)].tokens.tolist() == list(one.tokens)
        assert found[str(i)].logprobs.tobytes() == one.logprobs.tobytes()
        assert found[str(i)].finish_reason == one.finish_reason == "length"


@pytest.mark.parametrize("learner", asynchronous.LEARNERS)
@pytest.mark.parametrize("loss", asynchronous.LOSSES)
def test_every_arm_is_a_config_that_loads(loss, learner):
    run = asynchronous.Run(seed=1, staleness=4, loss=loss, learner=learner)
    cfg = config.load(asynchronous.CONFIG, run.overrides("/tmp/f", ["train.steps=7"]))
    assert cfg.loss.name == loss
    assert (cfg.quant.forward == cfg.quant.rollout_scheme) == (learner == "aligned")
    assert cfg.train.asynchronous.max_staleness == 4
    assert not cfg.is_lockstep
    assert len(cfg.rollout.engine.endpoints) == asynchronous.ENGINES


def test_the_phases_of_a_step_that_waited_and_of_one_that_did_not(tmp_path):
    own = {"reward/mean": 0.5, "mismatch/k3": 1e-6, "time/publish_s": 0.1, "time/reward_s": 0.0}
    (tmp_path / "eval.jsonl").write_text(json.dumps({"eval/reward/mean": 0.25}) + "\n")

    def summary(**times):
        lines = [json.dumps({"step": i, **own, **times}) for i in range(asynchronous.WARM_UP + 2)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return asynchronous.summary(tmp_path)

    waits = summary(**{"time/step_s": 3.1, "time/rollout_s": 1.0})
    assert (waits["rollout_s"], waits["learning_s"], waits["over_the_longer"]) == (1.0, 2.0, 1.55)
    ahead = {"time/ahead_rollout_s": 1.2, "time/ahead_reward_s": 0.1}
    overlaps = summary(**{"time/step_s": 2.2, "time/rollout_s": 0.1}, **ahead)
    assert (overlaps["rollout_s"], overlaps["wait_s"], overlaps["learning_s"]) == (1.3, 0.1, 2.0)
    assert overlaps["over_the_longer"] == 1.1


def test_the_table_sets_a_run_beside_the_one_that_waits():
    phases = {"rollout_s": 1.0, "learning_s": 2.0, "publish_s": 0.1}
    lines = [
        {"seed": seed, "staleness": k, "loss": "grpo", "learner": "bf16", "k3": 1e-3, "reward": [0.1, 0.9],
         "held_out": [0.2, 0.8], "step_s": 3.0 if k == 0 else 2.2, **phases}
        for k, seed in itertools.product((0, 1), (0, 1))
    ]  # fmt: skip
    head, _, waits, overlaps = asynchronous.table(lines).splitlines()
    ratio = head.split("|").index(" of the bound ")
    assert [row.split("|")[ratio].strip() for row in (waits, overlaps)] == ["1.50 ± 0.00", "1.10 ± 0.00"]
    assert np.isfinite(float(overlaps.split("|")[-3].split("±")[0]))
