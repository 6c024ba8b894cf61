# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Packing loses nothing, invents nothing, and depends on nothing but its arguments."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_jax.data.packing import mini_batches, pack
from qarl_jax.types import UserError
from tests.reference.rollouts import completion, group_of


def make_group(uid, prompt, responses, version=0):
    completions = tuple(
        completion(
            tokens,
            # Every token of every response gets a log-prob of its own, so that a shift or swap cannot cancel out.
            [-(1000 * tokens[i] + 7 * j + i + 1) / 1e4 for i in range(len(tokens))],
            prompt=prompt,
            version=version,
        )
        for j, tokens in enumerate(responses)
    )
    return group_of(completions, uid=uid)


token = st.integers(3, 99)
groups_strategy = st.lists(
    st.tuples(
        st.lists(token, min_size=1, max_size=6),
        st.lists(st.lists(token, min_size=0, max_size=14), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=6,
).map(lambda raw: [make_group(f"g{i}", prompt, responses, version=i) for i, (prompt, responses) in enumerate(raw)])


def numbered(groups):
    """A different non-zero advantage for every response."""
    return [[1.0 + 10 * g + j for j in range(len(group.completions))] for g, group in enumerate(groups)]


@settings(max_examples=60, deadline=None)
@given(groups=groups_strategy, multiple=st.integers(1, 4), limit=st.integers(1, 6))
def test_every_response_is_in_exactly_one_place_with_its_own_logprobs_and_advantage(groups, multiple, limit):
    advantages = numbered(groups)
    packed = pack(groups, advantages, row_len=24, rows_multiple=multiple, max_segments=limit, pad_id=2)
    batch = packed.batch
    full = [(g, j) for g, group in enumerate(groups) for j, c in enumerate(group.completions) if c.tokens]
    assert [(s.group, s.sample) for s in packed.segments] == full
    covered = np.zeros(batch.tokens.shape, int)
    for segment in packed.segments:
        completion = groups[segment.group].completions[segment.sample]
        whole = slice(segment.start, segment.response.stop)
        covered[segment.row, whole] += 1
        assert tuple(batch.tokens[segment.row, whole]) == completion.prompt_tokens + completion.tokens
        assert tuple(batch.positions[segment.row, whole]) == tuple(range(whole.stop - whole.start))
        assert set(batch.segment_ids[segment.row, whole]) == {segment.number}
        assert not batch.loss_mask[segment.row, segment.start : segment.response.start].any()
        assert batch.loss_mask[segment.row, segment.response].all()
        np.testing.assert_array_equal(batch.rollout_logprobs[segment.row, segment.response], completion.logprobs)
        expected = np.float32(advantages[segment.group][segment.sample])
        assert (batch.advantages[segment.row, segment.response] == expected).all()
        assert segment.version == segment.group
    assert covered.max(initial=0) <= 1
    empty = covered == 0
    assert (batch.tokens[empty] == 2).all()
    for zero in (batch.segment_ids, batch.positions, batch.loss_mask, batch.rollout_logprobs, batch.advantages):
        assert not zero[empty].any()
    assert packed.num_sequences == len(full)
    assert packed.num_tokens == batch.loss_mask.sum() == sum(len(groups[g].completions[j].tokens) for g, j in full)
    assert packed.padding_share == pytest.approx(empty.mean())
    assert batch.tokens.shape[0] % multiple == 0
    assert batch.segment_ids.max() <= packed.max_segments == limit


@settings(max_examples=30, deadline=None)
@given(groups=groups_strategy)
def test_shared_rows_and_rows_of_one_response_hold_the_same_responses(groups):
    advantages = numbered(groups)
    packed = pack(groups, advantages, row_len=40)
    single = pack(groups, advantages, row_len=40, max_segments=1)
    assert packed.batch.tokens.shape[0] <= single.batch.tokens.shape[0]
    for field in ("tokens", "rollout_logprobs", "advantages"):
        left = packed.responses(getattr(packed.batch, field))
        right = single.responses(getattr(single.batch, field))
        for a, b in zip(left, right, strict=True):
            np.testing.assert_array_equal(a, b)


def test_numbers_of_a_small_example_by_hand():
    # Segments of 4, 3 and 2 tokens into rows of 6, longest first: 4 opens row 0 (2 left), 3 opens row 1 (3 left), and 2
    # goes where it leaves least room: row 0, which is then full. 9 of 12 positions are used.
    groups = [make_group("a", [5, 6], [[7, 1]]), make_group("b", [8], [[9, 1], [1]])]
    packed = pack(groups, [[0.5], [-1.0, 2.0]], row_len=6)
    np.testing.assert_array_equal(packed.batch.tokens, [[5, 6, 7, 1, 8, 1], [8, 9, 1, 0, 0, 0]])
    np.testing.assert_array_equal(packed.batch.positions, [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]])
    np.testing.assert_array_equal(packed.batch.segment_ids, [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(packed.batch.loss_mask, [[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(packed.batch.advantages, [[0, 0, 0.5, 0.5, 0, 2], [0, -1, -1, 0, 0, 0]])
    assert (packed.num_tokens, packed.num_sequences, packed.padding_share) == (5, 3, 0.25)


def test_micro_batches_cover_the_rows_in_order():
    groups = [make_group(f"g{i}", [3], [[4] * n for n in (9, 8, 7)]) for i in range(3)]
    packed = pack(groups, numbered(groups), row_len=12, rows_multiple=4)
    parts = list(packed.micro_batches(4))
    assert all(part.tokens.shape == (4, 12) for part in parts)
    whole = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    np.testing.assert_array_equal(whole.tokens, packed.batch.tokens)
    with pytest.raises(ValueError, match="cannot be split"):
        list(packed.micro_batches(5))


def test_the_row_length_with_the_smallest_batch_is_taken():
    short = [make_group("a", [3], [[4] * 5, [4] * 5])]
    assert pack(short, numbered(short), row_len=(6, 64)).batch.tokens.shape == (2, 6)
    long = [make_group("a", [3], [[4] * 5, [4] * 30])]
    assert pack(long, numbered(long), row_len=(6, 64)).batch.tokens.shape == (1, 64)


def test_a_response_longer_than_the_row_names_the_prompt_and_the_setting():
    groups = [make_group("chain_sum/7", [3, 3, 3], [[4] * 10])]
    with pytest.raises(UserError, match=r"chain_sum/7 has 3 \+ 10 tokens, too many for a row of 12.* train.row_len"):
        pack(groups, [[1.0]], row_len=12)


def test_a_batch_of_empty_responses_is_all_padding():
    packed = pack([make_group("a", [3], [[], []])], [[1.0, -1.0]], row_len=8, rows_multiple=2)
    assert packed.batch.tokens.shape == (2, 8)
    assert (packed.num_sequences, packed.num_tokens, packed.padding_share, packed.segments) == (0, 0, 1.0, ())


def test_best_fit_wastes_little_on_many_random_lengths():
    # Best fit decreasing needs at most 11/9 of the optimal number of bins; the optimum is at least total / row_len.
    rng = np.random.default_rng(0)
    groups = [make_group(f"g{i}", [3], [[4] * int(n) for n in rng.integers(1, 60, 8)]) for i in range(64)]
    packed = pack(groups, numbered(groups), row_len=128, max_segments=64)
    total = sum(s.prompt_len + s.response_len for s in packed.segments)
    assert packed.batch.tokens.shape[0] <= np.ceil(total / 128) * 11 / 9
    assert packed.padding_share < 0.05


@given(n=st.integers(1, 40), size=st.integers(1, 40), epoch=st.integers(0, 3), step=st.integers(0, 5))
def test_mini_batches_partition_the_prompts(n, size, epoch, step):
    parts = mini_batches(n, size, seed=3, step=step, epoch=epoch)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    again = mini_batches(n, size, seed=3, step=step, epoch=epoch)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_later_passes_see_another_order():
    first, second = (np.concatenate(mini_batches(32, 8, seed=0, step=1, epoch=e)) for e in (0, 1))
    assert first.tolist() == list(range(32))
    assert second.tolist() != first.tolist()
