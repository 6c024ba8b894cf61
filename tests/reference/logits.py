# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits whose log-probs lie between two float32 numbers, so that the last digit of float64 arithmetic decides."""

import numpy as np

_LAST = 6  # logits of a row that bring its sum beside a midpoint


def logits_beside_a_midpoint(rows: int, vocab: int) -> np.ndarray:
    """Makes float32 logits [rows, vocab], in a random order, whose largest one's log-prob is near a midpoint.

    The exact sum of the others' exponentials is within 1e-18 of the value, relative to it, that gives the midpoint. The
    largest logit is 0, and its token 0.
    """
    rng = np.random.default_rng(vocab)
    z = np.full((rows, vocab), -100, np.float32)
    z[:, 0] = 0
    z[:, 1:-_LAST] = rng.normal(0, 1.5, (rows, vocab - 1 - _LAST)) - rng.uniform(8, 20, (rows, 1))
    have = np.exp(z[:, 1:].astype(np.longdouble)).sum(-1)
    lower = np.nextafter(-np.log1p(have).astype(np.float32), np.float32(-9))
    middle = (lower.astype(np.longdouble) + np.nextafter(lower, np.float32(-9))) / 2
    left = np.expm1(-middle) - have
    for column in range(vocab - _LAST, vocab):
        found = np.log(np.maximum(left, np.longdouble(1e-40))).astype(np.float32)
        found = np.where(np.exp(found.astype(np.longdouble)) > left, np.nextafter(found, np.float32(-200)), found)
        z[:, column] = np.maximum(found, np.float32(-100))
        left = left - np.exp(z[:, column].astype(np.longdouble))
    return np.ascontiguousarray(z[:, np.append(0, 1 + rng.permutation(vocab - 1))])
