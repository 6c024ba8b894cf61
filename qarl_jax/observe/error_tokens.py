# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Error tokens: sampled tokens to which the learner gives almost no probability (QaRL, arXiv 2604.07853, sec. 3.2).

A quantized sampler sometimes draws such a token, and long responses then drift into repetition or garbage. The paper
shows the effect and gives no definition; this is ours:

  * a *low* token has probability below p (1e-3), under the learner at the start of the update or under the sampler;
  * a *cluster* is 3 low tokens within 8 positions of one response; one low token alone is ordinary sampling;
  * a token is *hidden* when it is low under the learner although the sampler was not surprised. Those alone come from
    the mismatch; the rest is the temperature;
  * the *onset* is where in a response its first cluster begins.

`token_metrics` counts them inside the learner's step, split by the sign of the advantage A: low tokens in responses
with A < 0 push a ratio out of its band. `repeated_share` and `zlib_ratio` measure repetition in a response.

Windows count positions, not response tokens; the two differ only if the response mask has holes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from qarl_jax.loss.common.responses import Responses, prepare
from qarl_jax.loss.common.sampler_correction import smallest
from qarl_jax.metrics import Mean, Metric, masked_mean
from qarl_jax.types import LossInputs

PROBABILITY = 1e-3
"""Tokens below this are low. At vocabulary 1.5e5 a uniform draw has 7e-6."""

WINDOW = 8
"""Positions of a response in which a cluster's low tokens lie."""

LEAST = 3
"""Low tokens of a cluster at least."""

NGRAM = 4
"""Tokens of what is looked for again in a response."""

SEEN = 3
"""Occurrences before, from which on an n-gram counts as repeated: four equal lines are a loop, two are a quotation."""


def clustered(
    low: Bool[Array, "B T"], segment_ids: Int[Array, "B T"], *, window: int = WINDOW, least: int = LEAST
) -> Bool[Array, "B T"]:
    """Marks low tokens in clusters: inside `window` positions of their segment with at least `least` low tokens.

    Args:
      low: [B, T] bool.
      segment_ids: [B, T] int32; a window never reaches into another segment of the row.
      window: length of a window in positions. least: low tokens of a cluster.

    Returns:
      [B, T] bool, a subset of `low`.
    """
    ids = jnp.pad(segment_ids, ((0, 0), (0, window)))
    padded = jnp.pad(low, ((0, 0), (0, window)))
    length = low.shape[1]

    def ahead(x: jax.Array, by: int) -> jax.Array:
        return x[:, by : by + length]

    # inside[t]: the window that starts at t is full enough. A cluster's first token starts such a window.
    same = [ahead(ids, by) == segment_ids for by in range(window)]
    number = sum((ahead(padded, by) & same[by]).astype(jnp.int32) for by in range(window))
    full = jnp.asarray(number) >= least
    ids = jnp.pad(segment_ids, ((0, 0), (window, 0)), constant_values=-1)
    starts = jnp.pad(full, ((0, 0), (window, 0)))
    found = jnp.zeros_like(low)
    for by in range(window):
        found |= ahead(starts, window - by) & (ahead(ids, window - by) == segment_ids)
    return low & found


def token_metrics(x: LossInputs) -> dict[str, Metric]:
    """Computes rates of low tokens and of their clusters, as `error/*` metrics that merge exactly over micro-batches.

    Each rate exists over all tokens (or non-empty responses) and, with `_pos` and `_neg`, over those of one sign of A:
    `tok_learner`, `tok_sampler` (low), `tok_hidden`, `cluster_tok_learner`, `cluster_tok_sampler` (low and clustered),
    `seq_learner`, `seq_sampler` (responses with a cluster). `onset` and `onset_share` are means over the responses
    with a cluster under the learner: tokens before it, and their share of the response.

    Args:
      x: the batch; `old_logprobs` are the learner's log-probs, `rollout_logprobs` the sampler's.
    """
    r = prepare(x)
    sampler = jnp.where(r.mask, jnp.asarray(x.rollout_logprobs).astype(jnp.float32), 0.0)
    learner = sampler + r.log_weight
    limit = jnp.float32(math.log(PROBABILITY))
    low = {"learner": r.mask & (learner < limit), "sampler": r.mask & (sampler < limit)}
    clusters = {who: clustered(mask, r.segment_ids) for who, mask in low.items()}
    advantage = r.mean(r.advantages)
    signs = {
        "": (r.mask, r.present),
        "_pos": (r.mask & (r.advantages > 0), r.present & (advantage > 0)),
        "_neg": (r.mask & (r.advantages < 0), r.present & (advantage < 0)),
    }
    out: dict[str, Metric] = {}
    for sign, (tokens, responses) in signs.items():
        for who in low:
            has = r.sum(clusters[who].astype(jnp.float32)) > 0
            out[f"error/tok_{who}{sign}"] = _share(low[who], tokens)
            out[f"error/cluster_tok_{who}{sign}"] = _share(clusters[who], tokens)
            out[f"error/seq_{who}{sign}"] = _share(has, responses)
        out[f"error/tok_hidden{sign}"] = _share(low["learner"] & ~low["sampler"], tokens)
    return out | _onset(r, clusters["learner"])


def _share(x: Bool[Array, ...], where: Bool[Array, ...]) -> Mean:
    return masked_mean(x.astype(jnp.float32), where)


def _onset(r: Responses, cluster: Bool[Array, "B T"]) -> dict[str, Metric]:
    number = jnp.cumsum(r.mask.astype(jnp.int32), axis=1).astype(jnp.float32)  # counts tokens of the row, from 1
    first = smallest(number, r)
    begin = smallest(jnp.where(cluster, number, jnp.inf), r)
    has = r.present & jnp.isfinite(begin)
    before = jnp.where(has, begin - first, 0.0)
    return {
        "error/onset": masked_mean(before, has),
        "error/onset_share": masked_mean(before / jnp.maximum(r.length, 1.0), has),
    }


# ---- the response itself, on the host -------------------------------------------------------------------------------


def repeated(tokens: Sequence[int]) -> Bool[np.ndarray, " n"]:
    """Tells for each n-gram of a response, in order, whether it has occurred at least `SEEN` times before.

    Args:
      tokens: L token ids.

    Returns:
      [max(0, L - NGRAM + 1)] bool.
    """
    count = len(tokens) - NGRAM + 1
    if count < 1:
        return np.zeros(0, bool)
    # Ranks are below L, so that two of them fit in 64 bits: of a token, of a pair, and a pair of pairs.
    _, ranks = np.unique(np.asarray(tokens), return_inverse=True)
    _, pairs = np.unique(ranks[:-1] * len(tokens) + ranks[1:], return_inverse=True)
    codes = pairs[:count] * len(tokens) + pairs[NGRAM // 2 :]
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    # How often before: distance to the first of the equal run, in order of position.
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    at = np.arange(count)
    earlier = np.empty(count, np.int64)
    earlier[order] = at - np.maximum.accumulate(np.where(new, at, 0))
    return earlier >= SEEN


def repeated_share(tokens: Sequence[int]) -> float:
    """Returns the share of a response's 4-grams that have occurred 3 times before; 0 below 4 tokens."""
    marks = repeated(tokens)
    return float(marks.mean()) if marks.size else 0.0


def zlib_ratio(text: str) -> float:
    """Returns compressed over plain bytes of a text; 0 for an empty text.

    The ratio is about 0.4 for prose, below 0.1 for a loop. It is 1 or more for noise or a few characters.
    """
    plain = text.encode("utf-8", "surrogatepass")
    return len(zlib.compress(plain, 6)) / len(plain) if plain else 0.0


def text_metrics(responses: Sequence[Sequence[int]], texts: Sequence[str]) -> dict[str, float]:
    """Computes `text/repeated` (mean share of repeated 4-grams), `text/loops` (share of responses that repeat more than
    half) and `text/zlib_ratio` (mean over non-empty texts); each is 0 without data.

    Args:
      responses: token ids of each response. texts: their text. Both are what the policy drew, without observations.
    """
    shares = np.array([repeated_share(tokens) for tokens in responses])
    ratios = [zlib_ratio(text) for text in texts if text]
    return {
        "text/repeated": float(shares.mean()) if shares.size else 0.0,
        "text/loops": float((shares > 0.5).mean()) if shares.size else 0.0,
        "text/zlib_ratio": float(np.mean(ratios)) if ratios else 0.0,
    }
