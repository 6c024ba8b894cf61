# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimators of an evaluation (avg@n, pass@k, maj@k), with standard errors and confidence intervals.

For n responses to a prompt, c of them correct:

    avg@n    c / n
    pass@k   1 - C(n-c, k) / C(n, k): whether one of k is correct, unbiased (arXiv 2107.03374, eq. 1)
    maj@k    whether the most frequent answer of k responses is correct: a mean over the n // k disjoint runs of k
             responses, unbiased too. Of equally frequent answers the one that came first is taken.

Each is a mean over prompts, with a standard error clustered by question (`standard_error`) and an interval
(`interval`). Responses to one question are not independent draws from the benchmark: more responses per question reduce
the error only through that question's own mean.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

FEW = 30
"""Prompts below which a score says little: its interval around a half is over a third wide."""


def pass_at_k(num_correct: Int[np.ndarray, " P"], num_samples: int, k: int) -> Float[np.ndarray, " P"]:
    """Estimates the probability that k of a prompt's responses, drawn without replacement, include a correct one.

    Raises:
      ValueError: k out of range.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples and k >= 1; there are {num_samples}.")
    missing = num_samples - np.asarray(num_correct, np.int64)
    # C(n-c, k) / C(n, k) as a product of k factors, which neither overflows nor cancels; a factor of 0 ends it.
    steps = np.arange(k)
    factors = np.maximum(missing[:, None] - steps, 0) / (num_samples - steps)
    return 1.0 - factors.prod(1)


def majority(votes: Sequence[Hashable | None]) -> int | None:
    """Returns the index of the first vote for the most frequent answer; of equally frequent answers, the earliest wins.

    A None in `votes` is no vote; without any vote the result is None. Example: majority(["7", None, "5", "5"]) = 2.
    """
    counts = collections.Counter(vote for vote in votes if vote is not None)
    return votes.index(counts.most_common(1)[0][0]) if counts else None  # of equals, Counter names the first


def maj_at_k(
    votes: Sequence[Sequence[Hashable | None]], correct: Bool[np.ndarray, "P n"], k: int
) -> Float[np.ndarray, " P"]:
    """Computes the share of the n // k disjoint runs of k responses with a correct majority answer; no vote is wrong.

    Args:
      votes: [P][n] answers as hashable values, equal for equal answers; None for a response without one.
      correct: whether each response was graded correct; an answer counts as correct if its first vote does.

    Raises:
      ValueError: k out of range.
    """
    num_samples = correct.shape[1]
    if not 1 <= k <= num_samples:
        raise ValueError(f"maj@{k} needs at least {k} samples and k >= 1; there are {num_samples}.")
    out = np.zeros(len(votes))
    starts = range(0, num_samples - k + 1, k)
    for prompt, answers in enumerate(votes):
        for start in starts:
            chosen = majority(answers[start : start + k])
            out[prompt] += 0.0 if chosen is None else float(correct[prompt, start + chosen])
    return out / len(starts)


def standard_error(per_prompt: Float[np.ndarray, " P"], questions: Sequence[Hashable]) -> float | None:
    """Computes the standard error of the mean over prompts, clustered by question; None for a single question.

    Deviations from the mean are summed within a question and squared (Liang and Zeger, Biometrika 73, 1986), times G /
    (G - 1) for G questions. If all questions differ, it is the usual standard error.

    Args:
      per_prompt: the values, each a mean over a prompt's responses.
      questions: one key per prompt, equal for prompts with one question.
    """
    sums: dict[Hashable, float] = collections.defaultdict(float)
    for value, question in zip(per_prompt - per_prompt.mean(), questions, strict=True):
        sums[question] += float(value)
    if len(sums) < 2:
        return None
    squares = sum(total**2 for total in sums.values())
    return float(np.sqrt(squares * len(sums) / (len(sums) - 1)) / len(per_prompt))


def default_ks(num_samples: int) -> tuple[int, ...]:
    """Returns the powers of two below n, and n. Example: default_ks(12) = (1, 2, 4, 8, 12)."""
    powers = [1 << i for i in range(num_samples.bit_length()) if 1 << i < num_samples]
    return (*powers, num_samples)


def effective(questions: Sequence[Hashable]) -> float:
    """Returns Kish's effective number of questions: P^2 over the sum of the squared times that each was asked."""
    times = np.array([*collections.Counter(questions).values()], np.float64)
    return float(times.sum() ** 2 / (times**2).sum())


def interval(per_prompt: Float[np.ndarray, " P"], different: float, num_samples: int) -> tuple[float, float]:
    """Computes the 95 % interval of the mean over prompts: Wilson's (J. Am. Stat. Assoc. 22, 1927) for zeros and ones.

    Other values are scaled by their range, at least [0, 1]. The sample size is Kish's effective one: the number of
    zeros and ones whose mean has the values' variance, at most the number of responses. The interval never has width 0,
    even for one prompt or equal values.

    Args:
      per_prompt: the values. num_samples: responses per prompt.
      different: number of different prompts (`effective`).
    """
    low, high = min(0.0, float(per_prompt.min())), max(1.0, float(per_prompt.max()))
    mean, variance = (per_prompt.mean() - low) / (high - low), per_prompt.var() / (high - low) ** 2
    count = min(different * mean * (1 - mean) / variance, different * num_samples) if variance > 1e-12 else different
    z = 1.959964  # of the normal distribution, at 97.5 %
    half = z * np.sqrt(mean * (1 - mean) / count + (z / count) ** 2 / 4)
    ends = (mean + z**2 / (2 * count) + np.array([-half, half])) / (1 + z**2 / count)
    return tuple(float(end) for end in low + (high - low) * np.clip(ends, 0, 1))  # type: ignore[return-value]
