# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler's log-probs in place of a pass that computes them again: the same run to the bit, and no blind belief.

The sampler is the embedded one in float64, which is aligned: its log-probs are the learner's, in another program.
(`tests/test_vllm_run.py` has the live vLLM.)
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.loop import proximal
from qarl_jax.loop.publisher import Publisher
from qarl_jax.loop.session import Session
from qarl_jax.loop.updates import Updates
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.run import config
from qarl_jax.types import VersionSpan
from qarl_jax.verify import alignment
from tests.reference import tiny
from tests.reference.rollouts import completion, group_of

STEPS = 5


class Run:
    """Five steps of two updates each, under either setting, of one learner and one engine: one set of programs.

    Args:
      rows: `train.micro_batch_rows`; 8: an update is one program, 4: several gradients, then the optimizer.
    """

    def __init__(self, folder, rows):
        self.cfg = (
            tiny.World(folder)
            .changed(
                model={"dtype": "bfloat16"},
                quant={"forward": "w8a8", "engine": "cpu", "code_flips": False},
                optimizer={"name": "adamw", "lr": 0.004},
                loss={"name": "tbpo", "clip_high": 1.0, "neg_clip_low": 1.0, "neg_clip_high": 1.0, "mismatch": "tis"},
                train={"micro_batch_rows": rows},
            )
            .config
        )
        self.session = Session(self.cfg)
        self.masters = jax.device_get(self.session.state.params)
        self.draw, self.score, self.passes = self.session.engine.draw, self.session.learner.score, 0
        self.session.learner.score = self.scoring

    def scoring(self, *args):
        self.passes += 1
        return self.score(*args)

    def steps(self, setting, tampered=None):
        """(state, record per step, sentences, calls of the scoring program) from the first masters on.

        Args:
          setting: train.proximal.
          tampered: (step, response, by how much): its middle token is reported lower, by an ulp at least.
        """
        session, said, self.passes = self.session, [], 0
        session.step, session.state = (
            0,
            session.learner.init(jax.tree.map(lambda x: jnp.array(x, copy=True), self.masters)),
        )
        session._publisher = Publisher(self.cfg, session.learner, session.engine)
        cfg = config.replaced(self.cfg, {"train.proximal": setting})
        session._updates = Updates(cfg, session.learner, session._publisher, PhaseTimer(), say=said.append)
        session.engine.draw = self.draw if tampered is None else functools.partial(self.drawing, *tampered)
        session.publish()
        records = [session.train_step() for _ in range(STEPS)]
        return jax.device_get(session.state.entries()), [steady(record) for record in records], said, self.passes

    def drawing(self, step, response, amount, requests, *, sampling):
        for index, drawn in self.draw(requests, sampling=sampling):
            if (self.session.step, index) == (step, response):
                logprobs = drawn.logprobs.copy()
                middle = len(logprobs) // 2
                logprobs[middle] = np.nextafter(logprobs[middle] - np.float32(amount), np.float32(-100))
                drawn = dataclasses.replace(drawn, logprobs=logprobs)
            yield index, drawn


def steady(record):
    """A record without what depends on the clock."""
    return {key: value for key, value in record.items() if not key.startswith("time/")}


def without(records, *keys):
    return [{key: value for key, value in record.items() if key not in keys} for record in records]


def assert_same_bits(found, wanted):
    leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in leaves:
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


@pytest.fixture(scope="module", params=[8, pytest.param(4, marks=pytest.mark.nightly)])
def run(request, tmp_path_factory):
    made = Run(tmp_path_factory.mktemp("proximal"), request.param)
    yield made
    made.session.close()


@pytest.fixture(scope="module")
def passed(run):
    """With the pass of the learner in every step."""
    return run.steps("learner")


@pytest.mark.slow
def test_with_the_samplers_log_probs_a_run_is_the_same_to_the_bit_and_makes_no_pass(run, passed):
    state, records, said, passes = run.steps("auto")
    assert_same_bits(state, passed[0])
    assert without(records, "mismatch/checked") == without(passed[1], "mismatch/checked")
    assert said == passed[2] == []
    micros = passed[3]
    assert passes < micros / 4
    assert all(record["later/proximal/max_abs"] > 1e-3 for record in records[:2])
    for record, full in zip(records, passed[1], strict=True):
        assert (record["mismatch/exact"], record["mismatch/max_abs"], record["proximal/exact"]) == (1, 0, 1)
        assert 0.2 < record["mismatch/checked"] <= 1 == full["mismatch/checked"]
        assert np.isfinite(record["entropy/mean"])


@pytest.mark.slow
def test_a_token_of_the_first_update_that_differs_discards_it_and_the_pass_is_back(run):
    step, response, amount = 2, 5, 0.0
    wanted, found = (run.steps(setting, (step, response, amount)) for setting in ("learner", "auto"))
    assert_same_bits(found[0], wanted[0])
    assert without(found[1], "mismatch/checked") == without(wanted[1], "mismatch/checked")
    assert found[1][step]["mismatch/exact"] < 1 == found[1][step - 1]["mismatch/exact"]
    assert [record["mismatch/checked"] == 1 for record in found[1]][step:] == [True] * (STEPS - step)
    (said,) = found[2]
    assert said.startswith(f"step {step}, update 1 of 2 is discarded: a token has another log-prob")
    assert said.endswith("as under train.proximal=learner.")
    assert (STEPS - step) / STEPS <= found[3] / wanted[3] < 1


@pytest.mark.slow
def test_a_later_token_that_is_checked_and_differs_brings_the_pass_back_before_any_update(run, monkeypatch):
    monkeypatch.setattr(alignment, "CHECKED", 1.0)
    wanted, found = run.steps("learner", (1, 12, 0.0)), run.steps("auto", (1, 12, 0.0))
    assert_same_bits(found[0], wanted[0])
    assert found[1] == wanted[1]
    (said,) = found[2]
    assert said.startswith("step 1: of the tokens checked, 1 of ")
    assert "the first is token" in said


@pytest.mark.slow
def test_a_later_token_that_is_not_checked_is_believed(run, passed, monkeypatch):
    monkeypatch.setattr(alignment, "CHECKED", 0.0)
    state, records, said, passes = run.steps("auto", (1, 12, 0.1))
    assert (said, passes) == ([], 0)
    assert all(record["mismatch/exact"] == 1 for record in records)
    assert max(record["mismatch/checked"] for record in records) < 1
    with pytest.raises(AssertionError):
        assert_same_bits(state, passed[0])


# ---- the decision ---------------------------------------------------------------------------------------------------

GIVEN = ["model.path=/m", "data.source={name: jsonl, path: /d.jsonl}", "quant.forward=w8a8"]
VLLM = ["rollout.engine.name=vllm", "quant.engine=cuda"]


def decision(*overrides):
    said = []
    made = proximal.Proximal(config.load(None, [*GIVEN, *overrides]), SimpleNamespace(facts=None), said.append)
    return made, said


def groups(*versions):
    """A response of three tokens under each."""
    return [group_of([completion([1, 2, 3], version=version)]) for version in versions]


@pytest.mark.parametrize(
    ("overrides", "takes"),
    [
        (VLLM, True),
        ([*VLLM, "train.proximal=learner"], False),
        ([*VLLM, "rollout.engine.arithmetic=vllm"], False),
        ([*VLLM, "quant.forward=bf16", "quant.rollout=w8a8"], False),
        (["quant.engine=plain"], False),
        (["quant.engine=plain", "train.proximal=sampler"], True),
        (["quant.engine=cpu"], True),
    ],
)
def test_auto_takes_the_samplers_log_probs_where_the_run_is_aligned(overrides, takes):
    made, said = decision(*overrides)
    assert made.takes_step(groups(3, 3), 3) is made.takes(groups(3), 3) is takes
    assert said == []


def test_a_response_that_spans_versions_is_scored_by_the_learner_and_that_is_said_once():
    made, said = decision(*VLLM)
    spans = (VersionSpan(version=2, start=0, end=1), VersionSpan(version=3, start=1, end=3))
    (group,) = groups(3)
    spanning = group_of([dataclasses.replace(group.completions[0], versions=spans)])
    assert not made.takes([spanning], 3)
    assert said == []
    for step in (3, 3):
        assert not made.takes_step([*groups(3), spanning], step)
    assert made.takes_step(groups(4, 4), 4)
    (told,) = said
    assert told.startswith("step 3: the learner scores old log-probs, because a response has tokens of another version")


def test_once_a_token_differed_nothing_is_taken():
    made, said = decision(*VLLM)
    made.distrust("step 3, update 1 of 2 is discarded")
    assert not made.takes_step(groups(4), 4)
    (told,) = said
    assert told.startswith("step 3, update 1 of 2 is discarded; the learner scores old log-probs from here on")


def test_later_micro_batches_are_chosen_by_seed_and_step_alone():
    made, _ = decision(*VLLM)
    again, _ = decision(*VLLM)
    other, _ = decision(*VLLM, "seed=1")
    first = made.chosen(7, 4000)
    assert np.array_equal(first, again.chosen(7, 4000))
    assert not np.array_equal(first, made.chosen(8, 4000))
    assert not np.array_equal(first, other.chosen(7, 4000))
    assert first.mean() == pytest.approx(alignment.CHECKED, rel=0.3)
