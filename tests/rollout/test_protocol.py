# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What every rollout engine must do. An engine joins by adding how to build it to ENGINE_FACTORIES."""

import dataclasses

import numpy as np
import pytest

from qarl_jax import rollout
from qarl_jax.rollout import Request, RolloutEngine, SamplingConfig
from qarl_jax.rollout.embedded.engine import Config
from qarl_jax.types import UserError
from tests.reference.tiny_policies import VOCAB, policy, prompts

ENGINE_FACTORIES = {
    "jax": lambda: rollout.make_engine("jax", Config(batch_size=8, min_slots=4, prompt_bucket=8, response_bucket=16)),
}
STOPS = tuple(range(0, VOCAB, 6))
SAMPLING = SamplingConfig(max_response_len=12, stop_token_ids=STOPS)


@pytest.fixture(params=ENGINE_FACTORIES)
def engine(request):
    made = ENGINE_FACTORIES[request.param]()
    yield made
    made.close()


@pytest.fixture(params=ENGINE_FACTORIES, scope="module")
def running(request):
    """One engine for the whole file: starting one may take a minute."""
    made = ENGINE_FACTORIES[request.param]()
    yield made
    made.close()


@pytest.fixture
def served(running):
    running.publish(policy("w8a8"), 0)
    return running


def test_it_is_a_rollout_engine(engine):
    assert isinstance(engine, RolloutEngine)


@pytest.mark.slow
def test_every_token_has_a_finite_logprob(served):
    groups = served.generate(prompts(5), num_samples=3, sampling=SAMPLING, key=1)
    assert [len(group) for group in groups] == [3] * 5
    for completion in (c for group in groups for c in group):
        assert completion.logprobs.shape == (len(completion.tokens),)
        assert completion.logprobs.dtype == np.float32
        assert np.isfinite(completion.logprobs).all()
        assert (completion.logprobs <= 0).all()
        assert all(type(token) is int and 0 <= token < VOCAB for token in completion.tokens)


@pytest.mark.slow
def test_completions_come_in_the_order_of_the_prompts(served):
    requests = prompts(6)
    groups = served.generate(requests, num_samples=2, sampling=SAMPLING, key=1)
    assert [[c.prompt_tokens for c in group] for group in groups] == [[p.tokens] * 2 for p in requests]


@pytest.mark.slow
def test_a_stop_token_ends_a_response_and_is_part_of_it(served):
    groups = served.generate(prompts(6), num_samples=4, sampling=SAMPLING, key=2)
    reasons = set()
    for completion in (c for group in groups for c in group):
        reasons.add(completion.finish_reason)
        assert not set(completion.tokens[:-1]) & set(STOPS)
        if completion.finish_reason == "stop":
            assert completion.tokens[-1] in STOPS
            assert len(completion.tokens) <= SAMPLING.max_response_len
        else:
            assert completion.finish_reason == "length"
            assert len(completion.tokens) == SAMPLING.max_response_len
    assert reasons == {"stop", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_limit_is_exact(served, limit):
    groups = served.generate(prompts(3), num_samples=2, sampling=SamplingConfig(max_response_len=limit), key=3)
    assert {len(c.tokens) for group in groups for c in group} == {limit}
    assert {c.finish_reason for group in groups for c in group} == {"length"}


@pytest.mark.slow
def test_equal_keys_give_equal_completions_and_other_keys_others(served):
    def tokens(key):
        return [c.tokens for g in served.generate(prompts(4), num_samples=2, sampling=SAMPLING, key=key) for c in g]

    first = tokens(5)
    assert tokens(5) == first
    assert tokens(6) != first
    assert tokens(5 + 2**32) != first  # all 64 bits of the key count


@pytest.mark.slow
def test_a_longer_limit_only_appends(served):
    short = served.generate(prompts(3), num_samples=2, sampling=SamplingConfig(max_response_len=4), key=7)
    long = served.generate(prompts(3), num_samples=2, sampling=SamplingConfig(max_response_len=10), key=7)
    for a, b in zip((c for g in short for c in g), (c for g in long for c in g), strict=True):
        assert b.tokens[:4] == a.tokens


@pytest.mark.slow
def test_completions_carry_the_version_they_were_drawn_under(served):
    for version in (1, 2, 7):
        metrics = served.publish(policy("w8a8", seed=version), version)
        assert served.version == version
        assert all(isinstance(value, float) for value in metrics.values())
        for completion in served.generate(prompts(2), num_samples=1, sampling=SAMPLING, key=0)[0]:
            assert completion.policy_version == version
            assert completion.versions[0].start == 0
            assert completion.versions[-1].end == len(completion.tokens)


def test_publishing_changes_what_is_sampled(served):
    def logprobs():
        sampling = SamplingConfig(max_response_len=1, temperature=0.0)
        return served.generate(prompts(2), num_samples=1, sampling=sampling, key=0)[0][0].logprobs

    before = logprobs()
    served.publish(policy("w8a8", seed=1), 1)
    assert (logprobs() != before).any()
    served.publish(policy("w8a8", seed=0), 2)
    np.testing.assert_array_equal(logprobs(), before)


def test_generating_before_publishing_is_refused(engine):
    with pytest.raises(UserError, match="publish"):
        engine.generate(prompts(1), num_samples=1, sampling=SAMPLING, key=0)


def test_no_prompts_give_no_groups(served):
    assert served.generate([], num_samples=2, sampling=SAMPLING, key=0) == []


def test_empty_prompts_and_zero_samples_are_refused(served):
    empty = dataclasses.replace(prompts(1)[0], tokens=())
    with pytest.raises(UserError, match="no tokens"):
        served.generate([empty], num_samples=1, sampling=SAMPLING, key=0)
    with pytest.raises(UserError, match="num_samples"):
        served.generate(prompts(1), num_samples=0, sampling=SAMPLING, key=0)


# ---- going on with a response ---------------------------------------------------------------------------------------


def requests_of(asked, num_samples, tokens=None, **fields):
    """A request per sample, as `generate` numbers them; `tokens`: the response so far, by prompt and sample."""
    return [
        Request(prompt=prompt, number=j, tokens=tokens[i][j] if tokens else (), **{"key": 1, "max_tokens": 12} | fields)
        for i, prompt in enumerate(asked)
        for j in range(num_samples)
    ]


@pytest.mark.slow
def test_a_response_begun_draws_as_it_does_in_generate(served):
    asked = prompts(3)
    groups = served.generate(asked, num_samples=2, sampling=SAMPLING, key=1)
    begun = served.extend(requests_of(asked, 2), sampling=SAMPLING)
    assert [c.tokens for c in begun] == [c.tokens for group in groups for c in group]
    assert [c.finish_reason for c in begun] == [c.finish_reason for group in groups for c in group]


@pytest.mark.slow
def test_what_is_added_comes_alone_in_order_and_within_each_limit(served):
    asked = prompts(4)
    so_far = [[(5, 7, 11)[: 1 + i % 3], ()] for i in range(4)]
    wanted = requests_of(asked, 2, so_far)
    wanted = [dataclasses.replace(request, max_tokens=1 + i) for i, request in enumerate(wanted)]
    added = served.extend(wanted, sampling=SamplingConfig(max_response_len=6))
    assert [len(c.tokens) for c in added] == [1, 2, 3, 4, 5, 6, 6, 6]  # the request's own limit, and the call's
    for request, completion in zip(wanted, added, strict=True):
        assert completion.prompt_tokens == request.prompt.tokens
        assert completion.finish_reason == "length"
        assert completion.policy_version == served.version
        assert completion.versions[-1].end == len(completion.tokens) == len(completion.logprobs)
    # The first token that was added is the one that comes after prompt and response, in whichever way they are given.
    greedy = SamplingConfig(max_response_len=1, temperature=0.0)
    wholes = [dataclasses.replace(request.prompt, tokens=request.context) for request in wanted]
    others = served.generate(wholes, num_samples=1, sampling=greedy, key=0)
    for one, (other,) in zip(served.extend(wanted, sampling=greedy), others, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.slow
def test_what_is_added_depends_on_the_place_and_not_on_the_company(served):
    asked = prompts(5)
    so_far = [[(3,), (3, 4)]] * 5
    many = served.extend(requests_of(asked, 2, so_far), sampling=SAMPLING)
    one = served.extend(requests_of(asked, 2, so_far)[7:8], sampling=SAMPLING)
    assert one[0].tokens == many[7].tokens
    assert served.extend(requests_of(asked, 2, so_far, key=2), sampling=SAMPLING)[7].tokens != many[7].tokens
    assert served.extend([], sampling=SAMPLING) == []


def test_unknown_engines_name_the_known_ones():
    with pytest.raises(UserError, match="jax, vllm"):
        rollout.make_engine("jaxx")
