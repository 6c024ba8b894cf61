# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The prompts of a step are a function of (seed, step): resuming cannot skip, repeat or reorder them."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qarl_jax.data.stream import PromptStream
from qarl_jax.types import Prompt, UserError


class Numbers:
    """A source of n prompts, named by their index."""

    def __init__(self, n, fingerprint="numbers"):
        self.n = n
        self.fingerprint = fingerprint

    def __len__(self):
        return self.n

    def prompt(self, i):
        return Prompt(uid=str(i), tokens=(i + 1,), text=str(i), answer=str(i))


@given(n=st.integers(1, 30), size=st.integers(1, 30), seed=st.integers(0, 5), steps=st.integers(1, 12))
def test_a_resumed_run_sees_the_prompts_of_an_uninterrupted_one(n, size, seed, steps):
    size = min(size, n)
    whole = PromptStream(Numbers(n), seed, size)
    expected = [whole.batch(step) for step in range(steps)]
    for stop in range(steps):
        resumed = PromptStream(Numbers(n), seed, size)  # a new process at step `stop`, which may be an epoch border
        assert [resumed.batch(step) for step in range(stop, steps)] == expected[stop:]


@given(n=st.integers(1, 30), size=st.integers(1, 30), epochs=st.integers(1, 4))
def test_every_epoch_visits_every_prompt_once(n, size, epochs):
    size = min(size, n)
    stream = PromptStream(Numbers(n), 0, size)
    steps = -(-n * epochs // size)
    visited = [i for step in range(steps) for i in stream.indices(step)]
    for epoch in range(epochs):
        assert collections.Counter(visited[epoch * n : (epoch + 1) * n]) == collections.Counter(range(n))


def test_epochs_and_seeds_differ_in_order():
    stream = PromptStream(Numbers(50), 0, 50)
    assert stream.indices(0) != stream.indices(1)
    assert stream.indices(0) != PromptStream(Numbers(50), 1, 50).indices(0)


def test_the_order_is_frozen():
    # A changed shuffle would silently break resuming old checkpoints.
    assert PromptStream(Numbers(8), 0, 4).indices(0) == EXPECTED_ORDER


EXPECTED_ORDER = [5, 7, 0, 1]


def test_too_few_prompts_are_refused():
    with pytest.raises(UserError, match="prompts_per_step=9 is more than the 8 prompts"):
        PromptStream(Numbers(8), 0, 9)
    with pytest.raises(UserError, match="no prompts"):
        PromptStream(Numbers(0), 0, 1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PromptStream(Numbers(9), 0, 4), "the number of prompts changed"),
        (PromptStream(Numbers(8), 1, 4), "seed changed"),
        (PromptStream(Numbers(8), 0, 2), "train.prompts_per_step changed"),
        (PromptStream(Numbers(8, "other"), 0, 4), "the data set .* changed"),
    ],
)
def test_resuming_over_other_data_is_refused(other, message):
    state = PromptStream(Numbers(8), 0, 4).state(5)
    assert state["step"] == 5
    PromptStream(Numbers(8), 0, 4).check_state(state)
    with pytest.raises(UserError, match=message):
        other.check_state(state)
