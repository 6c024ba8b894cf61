# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws one token per row from the sampling distribution: temperature, then top-p."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qarl_jax.models.logprobs import statistics, tempered
from qarl_jax.numerics.engine import PLAIN, Numerics
from qarl_jax.rollout import SamplingConfig

# Vocabulary entries per block of the two-level search for the drawn token.
_BLOCK = 128


def processed_logits(
    logits: Float[Array, "B V"], sampling: SamplingConfig, numerics: Numerics = PLAIN
) -> Float[Array, "B V"]:
    """Applies temperature, then top-p: returns the float32 logits that tokens are drawn from; masked entries are -inf.

    Order and meaning of both are vLLM's. Entries that tie with the smallest kept one are kept.

    Args:
      logits: [B, V] float32, raw.
      sampling: static; a temperature of 0 (greedy) leaves the logits undivided.
      numerics: static, as in `token_logprobs`.

    Returns:
      [B, V] float32, not normalized.
    """
    if sampling.temperature > 0:
        logits = tempered(logits, sampling.temperature, numerics)
    if sampling.top_p == 1:
        return logits
    descending = jax.lax.sort(logits, is_stable=False)[:, ::-1]
    probs = jax.nn.softmax(descending)
    before = jnp.cumsum(probs, axis=-1) - probs
    # An entry stays if the mass of the larger ones has not reached top_p; the largest always stays.
    keep = before < sampling.top_p
    smallest = jnp.where(keep, descending, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits >= smallest, logits, -jnp.inf)


def draw(
    logits: Float[Array, "B V"], uniform: Float[Array, " B"], sampling: SamplingConfig, numerics: Numerics = PLAIN
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token per row, and computes its log-probability under the distribution of `processed_logits`.

    Args:
      logits: [B, V] float32, raw.
      uniform: [B] float32 in [0, 1), one number per row; it selects the first token with a larger cumulative
        probability.
      sampling: static. numerics: as in `processed_logits`.

    Returns:
      (tokens [B] int32, logprobs [B] float32). Greedy (temperature 0) ignores `uniform`.
    """
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, statistics(logits, tokens, numerics=numerics)[0]
    z = processed_logits(logits, sampling, numerics)
    top = z.max(-1, keepdims=True)
    weights = jnp.exp(z - top)
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    total = blocks.sum(-1).sum(-1)

    def search(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First index whose inclusive sum passes `target`, and the sum before it. Never an entry of weight 0."""
        sums = jnp.cumsum(weights, axis=-1)
        index = (sums <= target[:, None]).sum(-1)
        # Rounding may leave the target at or beyond the last sum: take the last entry that has any weight.
        last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
        index = jnp.minimum(index, last)
        at = functools.partial(jnp.take_along_axis, indices=index[:, None], axis=-1)
        return index, (at(sums) - at(weights))[:, 0]

    target = uniform * total
    block, before = search(blocks.sum(-1), target)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    offset, _ = search(inside, jnp.maximum(target - before, 0.0))
    tokens = (block * _BLOCK + offset).astype(jnp.int32)
    return tokens, statistics(z, tokens, numerics=numerics)[0]
