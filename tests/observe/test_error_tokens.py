# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Error tokens: planted ones are found, where they are and nowhere else; micro-batches add up; repetition is seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_jax.metrics import merge, values
from qarl_jax.observe import error_tokens
from qarl_jax.types import LossInputs

LOW, HIGH = np.float32(np.log(1e-4)), np.float32(np.log(0.5))


def batch(old, rollout, advantages, segment_ids, mask=None):
    old, rollout = np.asarray(old, np.float32), np.asarray(rollout, np.float32)
    segment_ids = np.asarray(segment_ids, np.int32)
    return LossInputs(
        logprobs=jnp.asarray(old),
        old_logprobs=jnp.asarray(old),
        rollout_logprobs=jnp.asarray(rollout),
        advantages=jnp.asarray(np.asarray(advantages, np.float32)),
        loss_mask=jnp.asarray(segment_ids > 0 if mask is None else mask),
        segment_ids=jnp.asarray(segment_ids),
        max_segments=3,
    )


def planted():
    """Two rows of 20: a response of 10 with a cluster from position 4 (A < 0) beside one of 8 with two low tokens
    (A > 0); a response of 12 without (A > 0)."""
    ids = np.zeros((2, 20), np.int32)
    ids[0, 1:11], ids[0, 12:20], ids[1, 3:15] = 1, 2, 1
    old = np.full((2, 20), HIGH)
    old[0, [5, 7, 9]] = LOW  # 4, 6 and 8 tokens into the response
    old[0, [13, 15]] = LOW
    rollout = np.full((2, 20), HIGH)
    rollout[0, [5, 13, 15]] = LOW  # the sampler was surprised by these; 7 and 9 are hidden
    advantages = np.where(ids == 1, -1.0, 1.0)
    advantages[1] = 1.0
    for array in (old, rollout, advantages):
        array[ids == 0] = np.nan
    return batch(old, rollout, advantages, ids)


@pytest.mark.slow
def test_planted_tokens_are_counted_by_who_was_surprised_and_by_sign():
    got = values(error_tokens.token_metrics(planted()))
    assert got["error/tok_learner"] == pytest.approx(5 / 30)
    assert got["error/tok_sampler"] == pytest.approx(3 / 30)
    assert got["error/tok_hidden"] == pytest.approx(2 / 30)
    assert got["error/tok_learner_neg"] == pytest.approx(3 / 10)
    assert got["error/tok_learner_pos"] == pytest.approx(2 / 20)
    assert got["error/tok_hidden_neg"] == pytest.approx(2 / 10)
    assert got["error/tok_hidden_pos"] == 0


@pytest.mark.slow
def test_only_three_low_tokens_within_eight_positions_make_a_cluster():
    got = values(error_tokens.token_metrics(planted()))
    assert got["error/cluster_tok_learner"] == pytest.approx(3 / 30)
    assert got["error/cluster_tok_sampler"] == 0
    assert got["error/seq_learner"] == pytest.approx(1 / 3)
    assert (got["error/seq_learner_neg"], got["error/seq_learner_pos"]) == (1, 0)


def test_the_onset_is_counted_from_the_response_that_has_it():
    got = values(error_tokens.token_metrics(planted()))
    assert got["error/onset"] == 4
    assert got["error/onset_share"] == pytest.approx(0.4)


@pytest.mark.slow
def test_nothing_low_means_zeros_and_no_nan():
    ids = np.ones((1, 6), np.int32)
    got = values(error_tokens.token_metrics(batch(np.full((1, 6), HIGH), np.full((1, 6), HIGH), np.ones((1, 6)), ids)))
    assert set(got.values()) == {0.0}
    empty = batch(np.full((1, 6), np.nan), np.full((1, 6), np.nan), np.full((1, 6), np.nan), 0 * ids)
    assert set(values(error_tokens.token_metrics(empty)).values()) == {0.0}


@pytest.mark.slow
def test_rows_apart_add_up_to_rows_together():
    x = planted()
    rows = [jax.tree.map(lambda a, i=i: a[i : i + 1], x) for i in range(2)]
    apart = merge(*(error_tokens.token_metrics(row) for row in rows))
    assert values(apart) == pytest.approx(values(error_tokens.token_metrics(x)))


def by_hand(low, ids, window, least):
    """Every window written out."""
    out = np.zeros_like(low)
    for b in range(low.shape[0]):
        for start in range(-window, low.shape[1]):
            span = range(max(start, 0), min(start + window, low.shape[1]))
            for segment in set(ids[b, list(span)]) if len(span) else ():
                inside = [t for t in span if ids[b, t] == segment and low[b, t]]
                if len(inside) >= least:
                    out[b, inside] = True
    return out


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data(), window=st.sampled_from([1, 2, 3, 8]), least=st.integers(1, 4))
def test_clusters_are_those_of_every_window_written_out(data, window, least):
    length = 24
    ids = np.array([np.sort(data.draw(st.lists(st.integers(1, 3), min_size=length, max_size=length)))], np.int32)
    low = np.array([data.draw(st.lists(st.booleans(), min_size=length, max_size=length))])
    got = error_tokens.clustered(jnp.asarray(low), jnp.asarray(ids), window=window, least=least)
    np.testing.assert_array_equal(got, by_hand(low, ids, window, least))


@pytest.mark.slow
def test_a_cluster_does_not_reach_into_the_neighbouring_response():
    ids = np.array([[1, 1, 1, 2, 2, 2]], np.int32)
    low = np.array([[False, True, True, True, False, False]])
    assert not np.asarray(error_tokens.clustered(jnp.asarray(low), jnp.asarray(ids))).any()
    assert np.asarray(error_tokens.clustered(jnp.asarray(low), jnp.ones_like(jnp.asarray(ids)))).sum() == 3


# ---- repetition ----------------------------------------------------------------------------------------------------


def test_a_loop_is_repetition_from_its_fourth_round():
    tokens = [7, 8, 9, 10] * 6
    marks = error_tokens.repeated(tokens)
    assert len(marks) == 21
    assert not marks[:12].any()
    assert marks[12:].all()
    assert error_tokens.repeated_share(list(range(50))) == 0
    assert error_tokens.repeated_share([1, 2, 3]) == 0


@given(tokens=st.lists(st.integers(0, 2) | st.integers(150_000, 150_002), max_size=60))
def test_repetition_is_that_of_a_dictionary_of_ngrams(tokens):
    seen, expected = {}, []
    for i in range(len(tokens) - 3):
        gram = tuple(tokens[i : i + 4])
        expected.append(seen.get(gram, 0) >= 3)
        seen[gram] = seen.get(gram, 0) + 1
    assert error_tokens.repeated(tokens).tolist() == expected


def test_a_response_of_any_length_is_measured():
    few, many = [7, 8, 9, 10] * 17_000, [*range(70_000)] * 4
    assert error_tokens.repeated_share(few) == pytest.approx(1, abs=1e-3)
    marks = error_tokens.repeated(many)
    assert (marks.sum(), marks[-1], marks[209_999]) == (70_000 - 3, True, False)


def test_a_loop_compresses_and_noise_does_not():
    noise = "".join(chr(c) for c in np.random.default_rng(0).integers(33, 127, 2000))
    assert error_tokens.zlib_ratio("so we get " * 200) < 0.05
    assert error_tokens.zlib_ratio(noise) > 0.7
    assert error_tokens.zlib_ratio("") == 0
    assert error_tokens.zlib_ratio("\ud800") > 0  # a lone surrogate from a broken decode must not end a run


def test_text_metrics_average_over_responses():
    got = error_tokens.text_metrics([[1, 2, 3, 4] * 20, list(range(30)), []], ["a" * 500, "plain text", ""])
    assert got["text/loops"] == pytest.approx(1 / 3)
    assert 0.2 < got["text/repeated"] < 1 / 3
    assert got["text/zlib_ratio"] == pytest.approx(
        (error_tokens.zlib_ratio("a" * 500) + error_tokens.zlib_ratio("plain text")) / 2
    )
    assert set(error_tokens.text_metrics([], []).values()) == {0.0}
