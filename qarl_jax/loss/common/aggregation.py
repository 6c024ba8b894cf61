# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Aggregation of terms per token (or per response) into one `Mean`, in four modes from the literature.

| mode | value |
|---|---|
| `token-mean` | sum of all terms / M |
| `seq-mean-token-mean` | sum over responses of their mean term / N |
| `seq-mean-token-sum` | sum of all terms / N |
| `seq-mean-token-sum-norm` | sum of all terms / (N * max_response_len) |

M counts masked tokens and N non-empty responses of the whole optimizer mini-batch. The returned `Mean` holds the
numerator and the count (M or N) of this micro-batch, so that Means of micro-batches can be added;
`qarl_jax.loss.normalized` divides by the mini-batch's count.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from qarl_jax.loss.common.options import AGGREGATIONS, nearest
from qarl_jax.loss.common.responses import Responses
from qarl_jax.metrics import Mean
from qarl_jax.types import UserError


def denominator(mode: str) -> str:
    """Names the divisor of an aggregation mode, "tokens" (M) or "sequences" (N); UserError for an unknown mode."""
    if mode not in AGGREGATIONS:
        raise UserError(f"aggregation {mode!r}: {nearest(mode, AGGREGATIONS)}")
    return "tokens" if mode == "token-mean" else "sequences"


def aggregate(terms: Float[Array, "B T"], r: Responses, mode: str, *, max_response_len: float | None = None) -> Mean:
    """Aggregates terms per token to Mean(numerator, count). Terms outside the mask must be finite; they are ignored.

    Args:
      mode: one of `AGGREGATIONS`.
      max_response_len: the divisor of `seq-mean-token-sum-norm`, in tokens; None: 1.

    Raises:
      UserError: as `denominator`.
    """
    count = r.num_tokens if denominator(mode) == "tokens" else r.num_sequences
    each = r.mean(terms) if mode == "seq-mean-token-mean" else jnp.where(r.mask, terms, 0.0)
    total = (each * r.valid).sum()
    if mode == "seq-mean-token-sum-norm":
        total = total / (1.0 if max_response_len is None else float(max_response_len))
    return Mean(total, count)


def aggregate_sequences(terms: Float[Array, "B S"], r: Responses, mode: str) -> Mean:
    """Aggregates terms per response to a Mean; `seq-mean-token-mean` weighs responses equally, `token-mean` by length.

    Raises UserError for other modes.
    """
    if denominator(mode) == "tokens":
        each, count = r.length * terms, r.num_tokens
    elif mode == "seq-mean-token-mean":
        each, count = jnp.where(r.present, terms, 0.0), r.num_sequences
    else:
        raise UserError(f"aggregation {mode!r} does not apply to a sequence-level objective: use seq-mean-token-mean")
    return Mean((each * r.valid).sum(), count)
