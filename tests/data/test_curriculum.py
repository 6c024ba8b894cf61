# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixes of sources and their stages: shares, order, switches, and that a resumed run is at its place."""

import dataclasses
import json

import numpy as np
import pytest

from qarl_jax.data import PromptStream, curriculum
from qarl_jax.data.curriculum import Curriculum, Stage
from qarl_jax.data.sources import mix
from qarl_jax.loop.collector import Collector
from qarl_jax.loop.step_metrics import rollout_metrics
from qarl_jax.rewards import Grader, Sample, exact, total
from qarl_jax.rollout import dynamic_sampling
from qarl_jax.rollout.partial_rollouts import Buffer
from qarl_jax.run import description, evaluation
from qarl_jax.types import UserError
from tests.reference import tiny
from tests.reference.numbered import Source
from tests.reference.rollouts import Characters, completion, group_of

MATH_THEN_CODE = (Stage(weights={"math": 1}, until=3), Stage(weights={"math": 1, "code": 3}))


def stream(stages=MATH_THEN_CODE, per_step=4, seed=0):
    source = mix.Source({"math": Source(10), "code": Source(7), "chat": Source(5)})
    return PromptStream(source, seed=seed, prompts_per_step=per_step, stages=stages)


def parts(prompts):
    names = [prompt.meta["mix_part"] for prompt in prompts]
    return {name: names.count(name) for name in sorted(set(names))}


def test_a_mix_is_its_parts_one_after_the_other():
    source = mix.Source({"math": Source(2), "code": Source(1)})
    assert [source.prompt(i).uid for i in range(len(source))] == ["math/0", "math/1", "code/0"]
    assert source.prompt(2).meta == {"mix_part": "code"}
    with pytest.raises(IndexError):
        source.prompt(3)
    other = mix.Source({"code": Source(1), "math": Source(2)})
    assert source.fingerprint != other.fingerprint


def test_each_stage_has_its_shares():
    found = stream()
    assert [parts(found.batch(step)) for step in range(5)] == [{"math": 4}] * 3 + [{"code": 3, "math": 1}] * 2


def test_what_a_step_rounds_off_is_made_up_later_and_nothing_is_lost():
    weights = {"math": 1, "code": 1, "chat": 1}
    found = Curriculum([Stage(weights=weights)], list(weights), 4)
    counts = np.array([found.counts(step)[1] for step in range(300)])
    assert (counts >= 0).all()
    assert (counts.sum(1) == 4).all()
    assert counts.sum(0).tolist() == [400, 400, 400]
    np.testing.assert_array_equal(found.counts(299)[0], counts[:299].sum(0))


@pytest.mark.parametrize("seed", range(20))
def test_shares_hold_to_within_a_prompt_whatever_the_weights(seed):
    rng = np.random.default_rng(seed)
    weights = {str(i): float(w) for i, w in enumerate(rng.exponential(1.0, 6) ** 3)}
    found = Curriculum([Stage(weights=weights)], list(weights), int(rng.integers(1, 9)))
    counts = np.array([found.counts(step)[1] for step in range(200)])
    assert (counts >= 0).all()
    assert len(set(counts.sum(1))) == 1
    wanted = np.arange(1, 201)[:, None] * counts[0].sum() * found.weights(0)
    assert np.abs(counts.cumsum(0) - wanted).max() < len(weights)


def test_a_source_is_visited_whole_before_any_prompt_comes_again():
    found = stream((Stage(weights={"math": 1}, until=2), Stage(weights={"code": 1, "math": 1})))
    seen = [prompt.uid for step in range(5) for prompt in found.batch(step) if prompt.meta["mix_part"] == "math"]
    assert sorted(seen[:10]) == sorted(f"math/{i}" for i in range(10))  # over the border between stages
    assert [p.uid for p in stream(MATH_THEN_CODE, seed=1).batch(0)] != [p.uid for p in stream().batch(0)]


def test_positions_are_those_of_the_steps_whoever_asks():
    one, other = stream(), stream()
    steps = [one.indices(step) for step in (3, 0, 2, 1)]
    assert other.positions(0, 16) == [*steps[1], *steps[3], *steps[2], *steps[0]]
    assert other.positions(6, 5) == other.positions(0, 16)[6:11]


def test_a_stage_ends_when_its_reward_is_reached_and_a_resumed_run_knows():
    stages = (Stage(weights={"math": 1}, reach=0.5, window=2, until=50), Stage(weights={"code": 1}))
    found, rewards = stream(stages), [0.9, 0.05, 0.4, 0.6, 0.1, 0.9]
    names = []
    for step, reward in enumerate(rewards):
        names.append(*parts(found.batch(step)))
        found.curriculum.tell(step, reward)
        if step == 2:
            state = json.loads(json.dumps(found.curriculum.state()))
    assert names == ["math"] * 4 + ["code"] * 2  # (0.4 + 0.6) / 2
    resumed = stream(stages)
    resumed.curriculum.restore(state)
    for step, reward in list(enumerate(rewards))[3:]:
        assert resumed.indices(step) == found.indices(step)
        resumed.curriculum.tell(step, reward)
    assert parts(stream(stages).batch(50)) == {"code": 4}  # never reached


def test_rewards_of_one_stage_do_not_end_the_next():
    stages = (
        Stage(weights={"math": 1}, until=2),
        Stage(weights={"code": 1}, reach=0.5, window=2),
        Stage(weights={"chat": 1}),
    )
    found = stream(stages)
    for step, reward in enumerate([1.0, 1.0, 1.0, 0.0, 1.0]):
        found.curriculum.tell(step, reward)
    assert found.curriculum.reached == {1: 4}  # 1.0 and 0.0 of its own


@pytest.mark.parametrize(("until", "end"), [(0, 4), (3, 3)])
def test_a_stage_that_is_reached_keeps_the_steps_whose_prompts_are_begun(until, end):
    """Partial rollouts choose prompts of later steps: none of them is lost, and none comes again."""
    found = stream(
        (Stage(weights={"math": 1}, reach=0.5, window=1, until=until), Stage(weights={"math": 1, "code": 3}))
    )
    begun = found.positions(0, 10)  # of steps 0 to 2
    collector = Collector(None, None, None, None, (), found, Buffer(begun=13), None)
    begun += found.positions(10, 3)  # and one of step 3
    for step in range(3):
        collector._mean_reward = step, 1.0
        collector.keep()
    assert found.curriculum.reached == {0: end}
    seen = begun + found.positions(13, 27)
    for one in (range(10), range(10, 17)):  # the prompts of a part have been drawn equally often, or once more
        times = [seen.count(i) for i in one]
        assert max(times) - min(times) <= 1


def test_further_batches_come_from_the_sources_of_the_stage():
    found = stream()
    more = dynamic_sampling.more_indices(found, 0, 1, found.indices(0))
    assert parts([found.source.prompt(i) for i in more]) == {"math": 4}


def test_a_run_over_other_stages_is_refused():
    with pytest.raises(UserError, match="the data set"):
        stream(MATH_THEN_CODE[1:]).check_state(stream().state(3))
    with pytest.raises(UserError, match=r"set data\.source\.name=mix"):
        PromptStream(Source(9), seed=0, prompts_per_step=2, stages=MATH_THEN_CODE)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (({"weights": {"law": 1}},), "no source 'law'"),
        (({"weights": {"math": 1}}, {"weights": {"code": 1}}), "never ends"),
        (
            ({"weights": {"math": 1}, "until": 3}, {"weights": {"code": 1}, "until": 3}, {"weights": {"math": 1}}),
            "order",
        ),
    ],
)
def test_stages_that_make_no_sense_are_refused(stages, said):
    with pytest.raises(UserError, match=said):
        curriculum.check([Stage(**stage) for stage in stages], ["math", "code"])
    with pytest.raises(UserError, match="a weight above 0"):
        Stage(weights={"math": 0})


# ---- rewards of their own -------------------------------------------------------------------------------------------


def test_each_source_has_its_own_reward_and_metrics():
    source = mix.Source({"math": Source(1), "code": Source(1)})
    rewards = {"math": exact.Config(extract="last_number"), "code": exact.Config(extract="whole")}
    grader = Grader(total.BySource(rewards=rewards), max_response_len=8)
    prompts = [dataclasses.replace(source.prompt(i), answer="7") for i in (0, 1, 0)]
    samples = [Sample(prompt=prompt, text="it is 7", num_tokens=3) for prompt in prompts]
    reward, terms = grader.score(samples)
    assert reward.tolist() == [1, 0, 1]  # "it is 7" is not 7
    np.testing.assert_array_equal(terms["exact"], [1, np.nan, 1])
    np.testing.assert_array_equal(terms["exact#2"], [np.nan, 0, np.nan])
    with pytest.raises(UserError, match="the prompt 0 is of no mix"):
        grader.score([Sample(prompt=Source(1).prompt(0), text="7", num_tokens=3)])
    groups = [
        group_of((completion([4]), completion([5])), r, prompt=source.prompt(i)) for i, r in ((0, (1, 0)), (1, (1, 1)))
    ]
    numbers = rollout_metrics(groups, {}, None, None)
    assert (numbers["source/math/reward"], numbers["source/code/reward"]) == (0.5, 1.0)
    assert numbers["source/math/share"] == 0.5
    terms = {"exact": np.array([1, 0, np.nan, np.nan]), "exact#2": np.array([np.nan, np.nan, 1, 1])}
    numbers = rollout_metrics(groups, terms, None, None)
    assert (numbers["reward/exact"], numbers["reward/exact#2"]) == (0.5, 1)
    assert dynamic_sampling.informative(groups, terms, "exact").tolist() == [True, False]
    assert dynamic_sampling.informative(groups, terms, "exact#2").tolist() == [True, False]


def test_each_part_of_a_mix_is_evaluated_by_its_own_verifier():
    source = mix.Source({"math": Source(6), "code": Source(3)})
    order = source.interleaved()
    assert sorted(order) == list(range(9))
    for count in (3, 6, 9):
        assert sum(index >= 6 for index in order[:count]) == count / 3
    rewards = {"math": exact.Config(extract="last_number"), "code": exact.Config(extract="whole", truncated="score")}
    grader = Grader(total.BySource(rewards=rewards), max_response_len=8)
    prompts = [dataclasses.replace(source.prompt(i), answer="7") for i in (0, 6)]
    drawn = [[completion(map(ord, text)) for text in ("is 7", "7")] for _ in prompts]
    found = evaluation.measure(*grader.grade(Characters(), prompts, drawn), grader)
    assert [record["num_correct"] for record in found.prompts] == [2, 1]
    assert found.metrics["eval/pass_at_1"] == 0.75
    assert (found.metrics["eval/source/math/reward"], found.metrics["eval/source/code/reward"]) == (1, 0.5)


@pytest.mark.slow
def test_a_config_with_stages_loads_and_mistakes_are_told(tmp_path):
    world = tiny.World(tmp_path)
    part = world.tree["data"]["source"]
    world.tree["data"] |= {
        "source": {"name": "mix", "parts": {"sums": part, "more": part}},
        "stages": [{"weights": {"sums": 1}, "until": 1}, {"weights": {"sums": 1, "more": 1}}],
    }
    world.tree["rollout"]["stages"] = [{"until": 1, "num_samples_per_prompt": 2}]
    cfg = world.config
    assert [cfg.rollout.num_samples_at(step) for step in (0, 1)] == [2, 4]
    assert [cfg.rollout.max_response_len_at(step) for step in (0, 1)] == [12, 12]
    assert "steps 0 to 0: response <= 12 tokens, rows of 24, 2 samples" in description.describe(cfg)
    wrong = world.changed(reward={"name": "by_source", "rewards": {"sums": {"name": "exact"}}})
    with pytest.raises(UserError, match="name the same"):
        _ = wrong.config
    wrong = world.changed(rollout={"stages": [{"until": 1, "num_samples_per_prompt": 9}]})
    with pytest.raises(UserError, match="between 2 and"):
        _ = wrong.config
