# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: which groups train, how often more are drawn, and that a resumed step repeats itself."""

import dataclasses

import numpy as np
import pytest

from qarl_jax.data import PromptStream, packing
from qarl_jax.loop import updates
from qarl_jax.loop.collector import Collector
from qarl_jax.rollout import dynamic_sampling
from qarl_jax.rollout.dynamic_sampling import Config
from qarl_jax.rollout.partial_rollouts import Buffer
from qarl_jax.run import config
from qarl_jax.types import Turn, UserError
from tests.reference import tiny
from tests.reference.numbered import Source
from tests.reference.rollouts import completion, group_of


def response(reason="stop", length=2):
    return completion((5,) * length, prompt=(3, 4), finish_reason=reason)


class Sampler:
    """Prompt i gets rewards (0, 1) where `useful(i)` and (0, 0) elsewhere; remembers what it was asked."""

    def __init__(self, useful):
        self.useful, self.asked = useful, []

    def __call__(self, prompts, batch):
        self.asked.append([int(prompt.uid) for prompt in prompts])
        assert batch == len(self.asked) - 1
        groups = [
            group_of((response(), response()), (0, self.useful(int(prompt.uid))), prompt=prompt) for prompt in prompts
        ]
        return groups, {"exact": np.concatenate([group.rewards for group in groups])}


def uids(groups):
    return [int(group.prompt.uid) for group in groups]


@pytest.fixture
def stream():
    return PromptStream(Source(40), seed=7, prompts_per_step=4)


def test_a_full_first_batch_asks_for_no_more_and_keeps_the_streams_order(stream):
    sampler = Sampler(lambda i: True)
    got = dynamic_sampling.collect(Config(max_batches=10), stream, 3, sampler)
    assert sampler.asked == [stream.indices(3)]
    assert uids(got.groups) == stream.indices(3)
    assert got.metrics == {"rollout/batches": 1, "rollout/groups_dropped": 0, "rollout/groups_filled": 0}


def test_rewards_that_differ_by_a_rounding_have_no_signal():
    same = group_of((response(), response()), (np.float32(0.4) + np.float32(0.55), 0.95))
    assert same.rewards[0] != same.rewards[1]
    assert not dynamic_sampling.informative([same], {}).any()


def test_groups_without_a_signal_are_replaced_and_the_step_is_cut_to_its_size(stream):
    sampler = Sampler(lambda i: i % 2)
    got = dynamic_sampling.collect(Config(max_batches=10), stream, 0, sampler)
    asked = [i for batch in sampler.asked for i in batch]
    assert len(asked) == len(set(asked))  # no prompt twice in a step
    odd = [i for i in asked if i % 2]
    assert uids(got.groups) == odd[:4]
    assert sum(i % 2 for batch in sampler.asked[:-1] for i in batch) < 4  # the last batch was needed
    assert got.metrics["rollout/groups_dropped"] == pytest.approx(1 - len(odd) / len(asked))
    assert got.metrics["rollout/groups_filled"] == 0
    assert uids(got.sampled) == asked
    assert len(got.parts["exact"]) == 2 * len(asked)


def test_the_bound_holds_and_the_step_is_filled_up(stream):
    useful = stream.indices(5)[2]
    sampler = Sampler(lambda i: i == useful)
    got = dynamic_sampling.collect(Config(max_batches=3), stream, 5, sampler)
    assert [len(batch) for batch in sampler.asked] == [4, 4, 4]
    assert uids(got.groups) == [useful, *[i for i in stream.indices(5) if i != useful]]
    assert got.metrics["rollout/batches"] == 3
    assert got.metrics["rollout/groups_filled"] == 0.75


def test_a_small_data_set_ends_the_search():
    stream = PromptStream(Source(6), seed=0, prompts_per_step=4)
    sampler = Sampler(lambda i: False)
    got = dynamic_sampling.collect(Config(max_batches=10), stream, 0, sampler)
    assert [len(batch) for batch in sampler.asked] == [4, 2]
    assert len(got.groups) == 4


def test_a_resumed_step_draws_the_same_prompts(stream):
    first, again = Sampler(lambda i: i % 3 == 0), Sampler(lambda i: i % 3 == 0)
    dynamic_sampling.collect(Config(max_batches=10), stream, 8, first)
    resumed = PromptStream(Source(40), seed=7, prompts_per_step=4)
    dynamic_sampling.collect(Config(max_batches=10), resumed, 8, again)
    assert len(first.asked) > 1
    assert again.asked == first.asked
    other = Sampler(lambda i: i % 3 == 0)
    dynamic_sampling.collect(Config(max_batches=10), stream, 9, other)
    assert other.asked[1] != first.asked[1]


def test_the_metric_decides_and_not_the_total():
    # All wrong, but one is longer and so punished: the total differs, the outcome does not.
    groups = [group_of((response(), response()), rewards) for rewards in ((0, -0.5), (1, 0))]
    parts = {"exact": np.array([0, 0, 1, 0], np.float32), "overlong": np.array([0, -0.5, 0, 0], np.float32)}
    assert dynamic_sampling.informative(groups, parts).tolist() == [True, True]
    assert dynamic_sampling.informative(groups, parts, "exact").tolist() == [False, True]
    with pytest.raises(UserError, match=r"the reward has no such term; it has exact, overlong"):
        dynamic_sampling.informative(groups, parts, "accuracy")


def turns_of(prompt, *rewards):
    """A group whose responses have two turns with these rewards each."""
    turns = [(Turn(start=0, end=1, reward=a), Turn(start=2, end=3, reward=b)) for a, b in rewards]
    own = [dataclasses.replace(response(length=3), turns=both) for both in turns]
    return group_of(own, np.sum(rewards, 1), prompt=prompt)


@pytest.mark.parametrize(("level", "dropped"), [("turn", 0.5), ("response", 1.0)])
def test_groups_without_an_advantage_are_dropped_and_no_others(stream, level, dropped):
    def sample(step, prompts, batch):
        spread = [(1, 0), (0, 1)]
        groups = [turns_of(prompt, spread[i % 2], (0, 1)) for i, prompt in enumerate(prompts)]
        return groups, {"exact": np.ones(2 * len(prompts))}

    settings = ["loss.name=grpo", f"advantage={{name: grpo, level: {level}}}", "rollout.environment.name=calculator"]
    cfg = config.load(tiny.ROOT / "configs/quickstart.yaml", [*settings, "rollout.dynamic.max_batches=2"])
    collector = Collector(cfg, None, None, None, (), stream, Buffer(), None)
    collector._sampled = sample
    got = collector.collect(0)
    assert got.metrics["rollout/groups_dropped"] == dropped
    _, advantages = updates.advantages_of(cfg, got.sampled)
    assert 1 - advantages.reshape(len(advantages), -1).any(1).mean() == dropped
    assert not dynamic_sampling.informative(got.sampled, got.parts, "exact", by_turn=True).any()


def test_settings_that_decide_nothing_are_refused():
    with pytest.raises(UserError, match="max_batches must be at least 1"):
        Config(max_batches=0)
    with pytest.raises(UserError, match="decides nothing"):
        Config(metric="exact")


def test_truncated_responses_leave_loss_and_denominators():
    group = group_of((response("stop", 3), response("length", 5), response("abort", 1)), (1, 0, 0))
    (got,) = dynamic_sampling.without_truncated([group])
    packed = packing.pack([got], np.array([[1.0, -0.5, -0.5]]), row_len=8)
    assert (packed.num_tokens, packed.num_sequences) == (3, 1)
    assert packed.batch.advantages.sum() == 3
    assert got.rewards is group.rewards
    whole = packing.pack([group], np.array([[1.0, -0.5, -0.5]]), row_len=8)
    assert (whole.num_tokens, whole.num_sequences) == (9, 3)
