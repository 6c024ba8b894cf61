# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The embedded sampler: its distribution, its agreement with the learner, its independence of scheduling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qarl_jax import models
from qarl_jax.models.logprobs import token_logprobs
from qarl_jax.rollout import SamplingConfig
from qarl_jax.rollout.embedded.draw import draw, processed_logits
from qarl_jax.rollout.embedded.engine import Config, JaxSampler, bucket, fingerprint
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import UserError
from tests.reference import launches
from tests.reference.tiny_policies import VOCAB, policy, prompts

# One prompt bucket and one response bucket for all tests, so that they share compiled programs.
SMALL = Config(batch_size=8, min_slots=8, prompt_bucket=16, response_bucket=48)
HALVING = dataclasses.replace(SMALL, min_slots=2)


@functools.cache
def learner_forward(graphdef, temperature):
    """The learner's forward: no cache, no compute form."""

    @jax.jit
    def forward(params, qweights, ids, segments):
        model = models.merge(graphdef, params, qweights)
        hidden = model.hidden_states(ids, None, segments)
        return token_logprobs(hidden, model.head_weight(), ids, segments, temperature=temperature)[0]

    return forward


def learner_logprobs(weights, completions, temperature=1.0):
    """What the learner says about each completion's tokens; all rows padded to one shape."""
    ids, segments = np.zeros((2, 8, 32), np.int32)
    for row, completion in enumerate(completions):
        text = completion.prompt_tokens + completion.tokens
        ids[row, : len(text)], segments[row, : len(text)] = text, 1
    scores = np.asarray(
        learner_forward(weights.graphdef, temperature)(
            weights.params, weights.qweights, jnp.asarray(ids), jnp.asarray(segments)
        )
    )
    starts = [len(c.prompt_tokens) for c in completions]
    return [scores[i, s : s + len(c.tokens)] for i, (s, c) in enumerate(zip(starts, completions, strict=True))]


def assert_learner_agrees(weights, groups, atol, temperature=1.0):
    completions = [c for group in groups for c in group]
    for completion, want in zip(completions, learner_logprobs(weights, completions, temperature), strict=True):
        np.testing.assert_allclose(completion.logprobs, want, atol=atol)


@functools.cache
def engine_for(graphdef, config):
    """Tests of one model and config share an engine, hence its compiled programs."""
    del graphdef
    return JaxSampler(config)


def sampled(weights, requests, *, config=SMALL, num_samples=1, key=0, **sampling):
    engine = engine_for(weights.graphdef, config)
    engine.publish(weights, 0)
    return engine.generate(
        requests, num_samples=num_samples, sampling=SamplingConfig(**{"max_response_len": 9, **sampling}), key=key
    ), engine


# ---- the distribution -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_draw_inverts_the_distribution_function():
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=VOCAB)).astype(np.float32)
    cdf = np.cumsum(np.exp(logits.astype(np.float64)))
    cdf /= cdf[-1]
    uniform = rng.random(2000).astype(np.float32)
    tokens, logprobs = draw(
        jnp.broadcast_to(jnp.asarray(logits), (2000, VOCAB)), jnp.asarray(uniform), SamplingConfig(max_response_len=1)
    )
    tokens = np.asarray(tokens)
    below = np.where(tokens > 0, cdf[tokens - 1], 0.0)
    # The token's interval of the distribution function holds the number, up to float32 sums.
    assert (below <= uniform + 1e-5).all()
    assert (uniform <= cdf[tokens] + 1e-5).all()
    logp = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    np.testing.assert_allclose(logprobs, logp[tokens], atol=1e-5)


@pytest.mark.slow
def test_draw_frequencies_follow_the_temperature():
    logits = jnp.asarray([[0.0, 1.0, 2.0, -jnp.inf, 0.5]])
    n = 20000
    uniform = (np.arange(n, dtype=np.float32) + 0.5) / n  # stratified: frequencies are exact to 1/n
    tokens, _ = draw(
        jnp.broadcast_to(logits, (n, 5)), jnp.asarray(uniform), SamplingConfig(max_response_len=1, temperature=0.5)
    )
    p = np.exp(np.array([0.0, 2.0, 4.0, -np.inf, 1.0]))
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / n, p / p.sum(), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_masked_entries_are_never_drawn(uniform):
    logits = np.full((3, VOCAB), -np.inf, np.float32)
    logits[0, [7, 140]] = [0.0, 1.0]
    logits[1, 299] = -50.0
    logits[2, :2] = 1e4
    tokens, logprobs = draw(jnp.asarray(logits), jnp.full((3,), uniform), SamplingConfig(max_response_len=1))
    assert int(tokens[0]) in (7, 140)
    assert int(tokens[1]) == 299
    assert int(tokens[2]) in (0, 1)
    assert np.isfinite(logprobs).all()
    assert float(logprobs[1]) == 0.0


@pytest.mark.slow
def test_top_p_masks_and_renormalizes():
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32)
    logits = jnp.asarray(np.log(p))[None, [3, 0, 4, 2, 1]]  # any order

    def kept(**options):
        z = processed_logits(logits, SamplingConfig(max_response_len=1, **options))
        return np.isfinite(np.asarray(z))[0].nonzero()[0].tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_p=0.6) == [1, 4]  # 0.4 has not reached 0.6, 0.7 has
    assert kept(top_p=0.75) == [1, 3, 4]
    assert kept(top_p=1e-6) == [1]
    _, logprob = draw(logits, jnp.zeros(1), SamplingConfig(max_response_len=1, top_p=0.6))
    np.testing.assert_allclose(logprob, np.log(0.4 / 0.7), rtol=1e-5)


def test_ties_at_the_cut_are_all_kept():
    z = processed_logits(jnp.asarray([[1.0, 1.0, 1.0, 0.0]]), SamplingConfig(max_response_len=1, top_p=0.5))
    assert np.isfinite(np.asarray(z)).tolist() == [[True, True, True, False]]


def test_greedy_takes_the_largest_logit_with_its_undivided_logprob():
    logits = jnp.asarray([[0.0, 3.0, 1.0]])
    token, logprob = draw(logits, jnp.zeros(1), SamplingConfig(max_response_len=1, temperature=0.0))
    assert int(token[0]) == 1
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits)[:, 1], rtol=1e-6)


# ---- agreement with the learner -------------------------------------------------------------------------------------


nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "temperature"), [nightly("w4a16", 1.0), nightly("w4a16", 0.8), ("w8a8", 1.0), nightly("bf16", 0.8)]
)
def test_reported_logprobs_are_the_learners(scheme, temperature):
    weights = policy(scheme)
    groups, _ = sampled(weights, prompts(4), num_samples=2, temperature=temperature)
    assert_learner_agrees(weights, groups, atol=1e-5, temperature=temperature)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moe", "scheme"), [*(nightly(*c) for c in ((False, "w8a8"), (False, "w4a16"), (True, "w8a8"))), (True, "w4a16")]
)
def test_biases_untied_heads_and_experts_agree_with_the_learner(scheme, moe):
    weights = policy(scheme, tied=False, moe=moe)
    groups, _ = sampled(weights, prompts(4), num_samples=2)
    if scheme == "w4a16":
        assert_learner_agrees(weights, groups, atol=2e-5)
        return
    # An activation on the edge between two codes may take either (test_moved_codes.py), here in one token of 36.
    completions = [c for group in groups for c in group]
    wanted = np.concatenate(learner_logprobs(weights, completions))
    apart = np.abs(np.concatenate([c.logprobs for c in completions]) - wanted)
    assert np.mean(apart < 2e-5) > 0.9
    assert apart.max() < 0.05


@pytest.mark.slow
def test_bfloat16_agrees_within_roundings():
    weights = policy("w4a16", dtype="bfloat16")
    groups, _ = sampled(weights, prompts(4))
    # Sums of a cached and an uncached attention may round a bf16 activation to different neighbours (2^-8 relative).
    assert_learner_agrees(weights, groups, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [nightly("w4a16"), "w8a8"])
def test_masters_of_quantized_weights_are_never_read(scheme):
    weights = policy(scheme)
    poisoned = jax.tree.map(lambda x: x, weights.params)
    for linear in ("q", "k", "v", "o"):
        kernel = poisoned["stacks"][0]["attn"][linear]["kernel"]
        poisoned["stacks"][0]["attn"][linear]["kernel"] = kernel.replace(jnp.full_like(kernel.get_value(), jnp.nan))
    groups, _ = sampled(weights, prompts(2))
    again, _ = sampled(dataclasses.replace(weights, params=poisoned), prompts(2))
    assert [c.tokens for (c,) in groups] == [c.tokens for (c,) in again]


@pytest.mark.slow
def test_publishing_copies_so_that_the_learner_may_donate():
    weights = policy("w4a16", seed=3)
    mine = jax.tree.map(jnp.copy, weights.params)
    engine = engine_for(weights.graphdef, SMALL)
    engine.publish(dataclasses.replace(weights, params=mine), 0)
    jax.tree.map(lambda x: x.delete(), mine)
    assert len(engine.generate(prompts(1), num_samples=1, sampling=SamplingConfig(max_response_len=2), key=0)) == 1


# ---- scheduling -----------------------------------------------------------------------------------------------------


def same(a, b, atol=1e-5):
    assert [c.tokens for group in a for c in group] == [c.tokens for group in b for c in group]
    for x, y in zip((c for g in a for c in g), (c for g in b for c in g), strict=True):
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=atol)


def stops(count=60):
    """Enough stop tokens that sequences end at different times."""
    return tuple(range(0, VOCAB, VOCAB // count))


@pytest.mark.slow
def test_completions_do_not_depend_on_slots_batch_or_order():
    requests = prompts(7)
    options = {"num_samples": 3, "stop_token_ids": stops(), "max_response_len": 14}
    wide, _ = sampled(policy("w4a16"), requests, config=dataclasses.replace(SMALL, batch_size=21), **options)
    lengths = {len(c.tokens) for group in wide for c in group}
    assert len(lengths) > 4  # the case is real: sequences end at many different times
    narrow, engine = sampled(policy("w4a16"), requests, **options)
    assert engine.stats["refills"] > 2
    same(wide, narrow)
    halving, _ = sampled(policy("w4a16"), requests, config=HALVING, **options)
    same(wide, halving)
    backwards, _ = sampled(policy("w4a16"), requests[::-1], **options)
    same(wide, backwards[::-1])
    alone, _ = sampled(policy("w4a16"), requests[4:5], **options)
    same(wide[4:5], alone)


@pytest.mark.slow
def test_waiting_sequences_take_over_finished_slots():
    _, engine = sampled(policy("w4a16"), prompts(16), num_samples=2, stop_token_ids=stops(20), max_response_len=40)
    # Waves of 8 slots, each waiting for its longest sequence, would cost up to 4 x 39 steps.
    assert engine.stats["decode_steps"] < 0.75 * 4 * 39
    assert engine.stats["tokens"] / engine.stats["slot_steps"] > 0.5


@pytest.mark.slow
def test_the_tail_runs_in_fewer_slots():
    options = {"stop_token_ids": stops(20), "max_response_len": 40}
    halved = sampled(policy("w4a16"), prompts(8), config=HALVING, **options)[1].stats
    fixed = sampled(policy("w4a16"), prompts(8), **options)[1].stats
    assert halved["tokens"] == fixed["tokens"]
    assert halved["slot_steps"] < 0.8 * fixed["slot_steps"]


@pytest.mark.slow
def test_a_group_shares_one_prefill():
    _, engine = sampled(policy("w4a16"), prompts(5), num_samples=8)
    assert engine.stats["prefilled"] == 5


@pytest.mark.slow
def test_programs_are_few_and_nothing_recompiles_once_the_shapes_are_known():
    engine = JaxSampler(HALVING)
    for version in range(6):
        engine.publish(policy("w4a16", seed=version % 2), version)
        sampling = SamplingConfig(max_response_len=13 + version, stop_token_ids=stops())  # all in one bucket
        requests = prompts(9 + version, seed=version)
        engine.generate(requests, num_samples=2, sampling=sampling, key=version)
    # publish, empty, prefill, insert, decode in 8, 4 and 2 slots, and compaction 8 -> 4, 8 -> 2, 4 -> 2.
    assert engine.compiled_programs <= 10


@pytest.mark.slow
def test_repeated_prompts_get_different_completions():
    request = prompts(1)[0]
    groups, _ = sampled(policy("w4a16"), [request, request], num_samples=2)
    assert len({c.tokens for group in groups for c in group}) == 4
    # and the first copy is what it is without the second
    alone, _ = sampled(policy("w4a16"), [request], num_samples=2)
    same(groups[:1], alone)


@pytest.mark.slow
def test_eight_devices_draw_what_one_draws_and_wait_for_a_learners_launch():
    weights = policy("w8a8")
    one, _ = sampled(weights, prompts(4), num_samples=2)
    mesh = make_mesh(fsdp=2, tensor=4)

    def spread(x):
        """Rows of every matrix over the mesh, where they divide."""
        spec = P(*[None] * (x.ndim - 2), ("fsdp", "tensor")) if x.ndim >= 2 and x.shape[-2] % 8 == 0 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    sharded = dataclasses.replace(
        weights, params=jax.tree.map(spread, weights.params), qweights=jax.tree.map(spread, weights.qweights)
    )
    engine = JaxSampler(SMALL)
    engine.publish(sharded, 0)

    def draw_many():
        with jax.set_mesh(mesh):
            return engine.generate(prompts(4), num_samples=2, sampling=SamplingConfig(max_response_len=9), key=0)

    same(one, draw_many())
    assert launches.waiting(mesh, [draw_many]) == [True]


# ---- edges ----------------------------------------------------------------------------------------------------------


def test_buckets_and_fingerprints():
    assert [bucket(n, 16) for n in (1, 16, 17, 33, 64, 65)] == [16, 16, 32, 64, 64, 128]
    assert fingerprint("a") != fingerprint("b")
    assert fingerprint("chain_sum/17") == fingerprint("chain_sum/17")
    assert all(0 <= word < 2**32 for word in fingerprint(""))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_response_len": 0}, "max_response_len must be at least 1"),
        ({"max_response_len": 1, "temperature": -1.0}, "temperature must not be negative"),
        ({"max_response_len": 1, "temperature": float("nan")}, "temperature must not be negative"),
        ({"max_response_len": 1, "top_p": 0.0}, "top_p must be in"),
    ],
)
def test_impossible_sampling_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        SamplingConfig(**options)


def test_bad_config_is_refused():
    with pytest.raises(UserError, match="batch_size must be at least 1"):
        Config(batch_size=0)
    with pytest.raises(UserError, match="refill_fraction"):
        Config(refill_fraction=0.0)


@pytest.mark.slow
def test_token_outside_the_vocabulary_names_the_prompt():
    request = dataclasses.replace(prompts(1)[0], uid="bad/7", tokens=(1, VOCAB))
    with pytest.raises(UserError, match=r"bad/7.*300"):
        sampled(policy("w4a16"), [request])
