# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The sampler's log-probs in place of a pass that computes them again: the same run to the bit, and no blind belief.

The sampler is the embedded one in float64, which is aligned: its log-probs are the learner's, in another program.
(`tests/test_vllm_run.py` has the live vLLM.)
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from qarl_jax.loop import proximal
from qarl_jax.run import config
from qarl_jax.types import VersionSpan
from qarl_jax.verify import alignment
from tests.reference import processes, tiny
from tests.reference.aligned import SECTIONS, STEPS, Run, assert_same_bits
from tests.reference.bridge_world import free_port
from tests.reference.rollouts import completion, group_of


def without(records, *keys):
    return [{key: value for key, value in record.items() if key not in keys} for record in records]


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
def test_a_token_of_the_first_update_that_differs_discards_it_and_the_pass_is_back_until_a_step_is_equal(run):
    step, response, amount = 1, 5, 0.0
    wanted, found = (run.steps(setting, (step, response, amount)) for setting in ("learner", "auto"))
    assert_same_bits(found[0], wanted[0])
    assert without(found[1], "mismatch/checked") == without(wanted[1], "mismatch/checked")
    assert found[1][step]["mismatch/exact"] < 1 == found[1][step - 1]["mismatch/exact"]
    assert [record["mismatch/checked"] == 1 for record in found[1]][step : step + 2] == [True, True]
    discarded, again = found[2]
    assert discarded.startswith(f"step {step}, update 1 of 2 is discarded: a token has another log-prob")
    assert discarded.endswith("as under train.proximal=learner, until a step is equal.")
    assert again.startswith(f"step {step + 2}: the last step's log-probs are equal")
    assert 2 / STEPS <= found[3] / wanted[3] < 1


@pytest.mark.slow
def test_a_later_token_that_is_checked_and_differs_brings_the_pass_back_before_any_update(run, monkeypatch):
    monkeypatch.setattr(alignment, "CHECKED", 1.0)
    wanted, found = run.steps("learner", (1, 12, 0.0)), run.steps("auto", (1, 12, 0.0))
    assert_same_bits(found[0], wanted[0])
    assert found[1] == wanted[1]
    differs, again = found[2]
    assert differs.startswith("step 1: of the tokens checked, 1 of ")
    assert "the first is token" in differs
    assert again.startswith("step 3: ")


@pytest.mark.slow
def test_a_later_token_that_is_not_checked_is_believed(run, passed, monkeypatch):
    monkeypatch.setattr(alignment, "CHECKED", 0.0)
    state, records, said, passes = run.steps("auto", (1, 12, 0.1))
    assert (said, passes) == ([], 0)
    assert all(record["mismatch/exact"] == 1 for record in records)
    assert max(record["mismatch/checked"] for record in records) < 1
    with pytest.raises(AssertionError):
        assert_same_bits(state, passed[0])


TAMPERED = """
import dataclasses, sys
import numpy as np
from qarl_jax import train
from qarl_jax.rollout.embedded.engine import JaxSampler
draw, steps = JaxSampler.draw, iter(range(100))

def drawing(self, requests, *, sampling):
    step = next(steps)
    for index, drawn in draw(self, requests, sampling=sampling):
        if (step, index) == (1, 5):
            logprobs = drawn.logprobs.copy()
            logprobs[1] = np.nextafter(logprobs[1], np.float32(-100))
            drawn = dataclasses.replace(drawn, logprobs=logprobs)
        yield index, drawn

JaxSampler.draw = drawing
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_two_processes_discard_the_update_together_and_equal_one_to_the_bit(tmp_path):
    """Two devices: sums over them have one order."""
    settings = dict(SECTIONS, mesh={"fsdp": 2}, train={"steps": 3}, eval={"at_start": False, "at_end": False})
    worlds, said = {}, []
    for setting, count in (("learner", 1), ("auto", 2)):
        worlds[setting] = world = (
            tiny.World(tmp_path)
            .changed(**settings)
            .changed(run_dir=str(tmp_path / setting), train={"proximal": setting}, log={"view": "lines"})
        )
        port = free_port()

        def arguments(number, count=count, port=port, world=world):
            who = [f"coordinator=localhost:{port}", f"num_processes={count}", f"process_id={number}"]
            return ["-c", TAMPERED, *world.command(*(f"distributed.{one}" for one in who if count > 1))]

        codes, said = processes.launch(arguments, count=count, devices=2 // count, programs=str(tmp_path / "programs"))
        assert not any(codes), said
    found, wanted = (without(worlds[setting].records(), "mismatch/checked") for setting in ("auto", "learner"))
    assert found == wanted
    assert [record["mismatch/checked"] == 1 for record in worlds["auto"].records()] == [False, True, True]
    assert said[0].count("is discarded: a token has another log-prob in its forward") == 1
    for a, b in zip(*(processes.masters(worlds[setting]) for setting in ("auto", "learner")), strict=True):
        assert a.tobytes() == b.tobytes()


# ---- the decision ---------------------------------------------------------------------------------------------------

GIVEN = ["model.path=/m", "data.source={name: jsonl, path: /d.jsonl}", "quant.forward=w8a8"]
VLLM = ["rollout.engine.name=vllm", "quant.engine=cuda"]


def decision(*overrides, distrusted=False):
    cfg, said = config.load(None, [*GIVEN, *overrides]), []
    made = proximal.Proximal(cfg, SimpleNamespace(facts=None), said.append, distrusted=distrusted)
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


def test_once_a_token_differed_nothing_is_taken_until_a_step_is_equal():
    made, said = decision(*VLLM)
    made.compared(lambda: True)
    made.distrust("step 3, update 1 of 2 is discarded")
    for step in (3, 4):
        assert not made.takes_step(groups(step), step)
        made.compared(lambda: False)
    assert not made.takes_step(groups(5), 5)
    made.compared(lambda: True)
    assert made.takes_step(groups(6), 6)
    told, again = said
    assert not made.distrusted
    assert told.startswith("step 3, update 1 of 2 is discarded; the learner scores old log-probs, as under train.prox")
    assert again.startswith("step 6: ")


@pytest.mark.parametrize("equal", [False, True])
def test_a_resumed_run_waits_for_an_equal_step_as_the_killed_one_did(equal):
    killed, _ = decision(*VLLM)
    killed.distrust("step 3, update 1 of 2 is discarded")
    killed.compared(lambda: equal)
    assert killed.distrusted is not equal
    resumed, _ = decision(*VLLM, distrusted=killed.distrusted)
    assert killed.wanted(4) is resumed.wanted(4) is equal
    resumed.compared(lambda: True)
    assert resumed.takes_step(groups(5), 5)


def test_the_steps_that_are_checked_are_drawn_by_seed_and_step_alone():
    (made, _), (again, _), (other, _) = decision(*VLLM), decision(*VLLM), decision(*VLLM, "seed=1")
    first = [made.checks(step) for step in range(2000)]
    assert first == [again.checks(step) for step in range(2000)]
    assert first != [other.checks(step) for step in range(2000)]
    assert np.mean(first) == pytest.approx(alignment.CHECKED, rel=0.3)
