# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The estimators of an evaluation against brute force, and intervals that cover."""

import itertools

import numpy as np
import pytest
from scipy import stats

from qarl_jax.run.estimators import default_ks, interval, maj_at_k, majority, pass_at_k, standard_error


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_correct_response(n):
    counts = np.arange(n + 1)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), k))
        wanted = [np.mean([min(subset) < c for subset in subsets]) for c in counts]  # the first c are correct
        np.testing.assert_allclose(pass_at_k(counts, n, k), wanted, rtol=1e-12, atol=0)


def test_pass_at_k_is_unbiased():
    rng, p, n, k = np.random.default_rng(0), 0.3, 8, 4
    counts = rng.binomial(n, p, size=200_000)
    assert pass_at_k(counts, n, k).mean() == pytest.approx(1 - (1 - p) ** k, abs=3e-3)


def test_pass_at_k_survives_many_samples():
    values = pass_at_k(np.array([0, 1, 5000, 10_000]), 10_000, 5000)
    np.testing.assert_allclose(values, [0.0, 0.5, 1.0, 1.0], atol=1e-9)


@pytest.mark.parametrize("k", [0, 3])
def test_k_beyond_the_samples_is_refused(k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(np.array([1]), 2, k)
    with pytest.raises(ValueError, match=f"maj@{k}"):
        maj_at_k([["a", "b"]], np.ones((1, 2), bool), k)


@pytest.mark.parametrize(
    ("votes", "winner"),
    [
        (["a"], 0),
        (["a", "b", "b"], 1),
        (["a", "b"], 0),  # a tie: the one that came first
        (["b", "a", "a", "b"], 0),
        (["c", "b", "a", "a", "b"], 1),
        ([None, None, "a"], 2),  # no answer is no vote, however often it is given
        ([None, None], None),
        ([], None),
    ],
)
def test_the_majority_is_the_most_frequent_answer_and_ties_go_to_the_first(votes, winner):
    assert majority(votes) == winner


def test_maj_at_k_averages_over_disjoint_runs_of_k():
    votes = [["x", "y", "y", "x", "x", "x", "y"], [None] * 7]
    correct = np.array([[v == "y" for v in votes[0]], [False] * 7])
    # Runs of 3: "x y y" is right, "x x x" is wrong, the seventh is left over.
    np.testing.assert_array_equal(maj_at_k(votes, correct, 3), [0.5, 0.0])
    np.testing.assert_array_equal(maj_at_k(votes, correct, 7), [0.0, 0.0])
    np.testing.assert_array_equal(maj_at_k(votes, correct, 1), correct.mean(1))


def test_maj_at_k_is_unbiased():
    rng = np.random.default_rng(1)
    answers = rng.choice(3, p=[0.5, 0.3, 0.2], size=(20_000, 6))  # 0 is correct
    found = maj_at_k(answers.tolist(), answers == 0, 3).mean()
    # Of three independent draws the majority (or, all different, the first) is 0:
    wanted = 0.5**3 + 3 * 0.5**2 * 0.5 + 0.5 * 2 * 0.3 * 0.2
    assert found == pytest.approx(wanted, abs=5e-3)


@pytest.mark.parametrize(("n", "ks"), [(1, (1,)), (2, (1, 2)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))])
def test_default_ks_are_powers_of_two_and_all(n, ks):
    assert default_ks(n) == ks


# ---- intervals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "prompts"), [(0, 1), (1, 1), (2, 2), (0, 40), (3, 10), (128, 128), (60, 128)])
def test_the_interval_of_zeros_and_ones_is_wilson_s(right, prompts):
    wanted = stats.binomtest(right, prompts).proportion_ci(0.95, method="wilson")
    found = interval(np.array([1.0] * right + [0.0] * (prompts - right)), prompts, 1)
    assert found == pytest.approx((wanted.low, wanted.high), abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.5, 1.0, -3.0, 7.0])
def test_no_interval_has_a_width_of_zero(value):
    for prompts, samples in ((1, 1), (1, 64), (30, 4)):
        low, high = interval(np.full(prompts, value), prompts, samples)
        assert low <= value <= high
        assert high - low > 0.05


def test_prompts_that_repeat_count_once():
    values = np.array([1.0, 0.0] * 20)
    assert interval(values, 10, 1) == pytest.approx(interval(values[:10], 10, 1))


@pytest.mark.parametrize(("spread", "samples"), [(0.0, 4), (0.15, 4), (0.4, 4), (0.4, 1)])
def test_intervals_cover_the_mean_of_prompts_that_differ_in_difficulty(spread, samples):
    rng, prompts, tries = np.random.default_rng(0), 60, 2000
    chance = np.clip(0.6 + spread * rng.standard_normal((tries, prompts)), 0, 1)
    truth = np.clip(0.6 + spread * rng.standard_normal(1_000_000), 0, 1).mean()
    values = rng.binomial(samples, chance) / samples
    ends = np.array([interval(row, prompts, samples) for row in values])
    covered = np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
    assert covered > 0.935  # of 0.95; 2,000 tries: a standard error of 0.005
    errors = 2 * 1.96 * values.std(1, ddof=1) / np.sqrt(prompts)
    assert np.median(ends[:, 1] - ends[:, 0]) < 1.1 * np.median(errors)  # and no wider than need be


def test_the_standard_error_is_clustered_by_question():
    rng = np.random.default_rng(0)
    values = rng.random(50)
    assert standard_error(values, range(50)) == pytest.approx(values.std(ddof=1) / 50**0.5)
    # Every question asked four times says no more than asked once.
    again = np.repeat(values, 4)
    assert standard_error(again, np.repeat(np.arange(50), 4).tolist()) == pytest.approx(values.std(ddof=1) / 50**0.5)
    assert standard_error(values[:3], ["one"] * 3) is None


def test_the_clustered_error_is_the_spread_of_means():
    rng, questions, times = np.random.default_rng(1), 40, 3
    means, errors = [], []
    for _ in range(2000):
        solved = np.repeat(rng.random(questions), times)  # a question has one difficulty
        drawn = (rng.random(questions * times) < solved).astype(float)
        means.append(drawn.mean())
        errors.append(standard_error(drawn, np.repeat(np.arange(questions), times).tolist()))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)
