# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`Responses`: `LossInputs` with masked padding, log-ratios in float32, and sums and means per response.

A response is the set of masked tokens of one segment of a row. With at most `_DENSE` responses per row a sum per
response is a masked sum over time. XLA fuses it without materializing [B, T, S], and always adds in one order. With
more responses it is a scatter-add.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qarl_jax.metrics import Mean
from qarl_jax.types import LossInputs, UserError

_DENSE = 64  # responses per row up to which the masked sum is cheaper than a scatter

# Token log-ratios are clamped here before exp: e^20 = 4.9e8 keeps every product finite in float32, and beyond it the
# gradient is zero (verl's constant). Sequence means are clamped after the mean, never token by token.
MAX_LOG_RATIO = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Responses:
    """The inputs of every objective, made by `prepare`. Outside `mask` every array is 0 (float) or False.

    Attributes (B rows, T positions, S response slots per row):
      mask: [B, T] bool.
      segment_ids: [B, T] int32, 1..S on masked tokens and 0 elsewhere.
      logprobs: [B, T] float32, carries the gradient.
      log_ratio: [B, T] float32, learner now minus learner at the start of the update (or minus the sampler, with
        `ratio: sampler`); carries the gradient, unclamped.
      log_weight: [B, T] float32, learner at the start of the update minus sampler; not clamped, no gradient.
      drift: [B, T] float32, sampler minus learner now; carries the gradient.
      advantages: [B, T] float32, no gradient.
      length: [B, S] float32, masked tokens of each response.
      valid: [B, 1] float32, 1, or NaN when a segment id of the row exceeds S (a packing bug must not train silently).
        A flag of all rows would be a collective without an order among those of the forward's loop.
    """

    mask: Bool[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    logprobs: Float[Array, "B T"]
    log_ratio: Float[Array, "B T"]
    log_weight: Float[Array, "B T"]
    drift: Float[Array, "B T"]
    advantages: Float[Array, "B T"]
    length: Float[Array, "B S"]
    valid: Float[Array, "B 1"]

    @property
    def ratio(self) -> Float[Array, "B T"]:
        """The ratio exp(log_ratio), [B, T] float32, with log_ratio clamped to +-MAX_LOG_RATIO; 1 outside `mask`."""
        return jnp.exp(jnp.clip(self.log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))

    @property
    def present(self) -> Bool[Array, "B S"]:
        """The slots that hold a non-empty response, [B, S] bool."""
        return self.length > 0

    @property
    def num_tokens(self) -> Float[Array, ""]:
        """The number of masked tokens in this (micro-)batch."""
        return self.length.sum()

    @property
    def num_sequences(self) -> Float[Array, ""]:
        """The number of non-empty responses in this (micro-)batch."""
        return self.present.astype(jnp.float32).sum()

    def sum(self, x: Float[Array, "B T"]) -> Float[Array, "B S"]:
        """Sums over each response's masked tokens: [B, T] -> [B, S]."""
        return segment_sum(jnp.where(self.mask, x, 0.0), self.segment_ids, self.length.shape[1])

    def mean(self, x: Float[Array, "B T"]) -> Float[Array, "B S"]:
        """Averages over each response's masked tokens: [B, T] -> [B, S], 0 for an empty response."""
        return self.sum(x) / jnp.maximum(self.length, 1.0)

    def spread(self, y: Float[Array, "B S"]) -> Float[Array, "B T"]:
        """Copies each response's value to its masked tokens: [B, S] -> [B, T], 0 elsewhere."""
        slots = self.length.shape[1]
        if slots <= _DENSE:
            return jnp.where(_one_hot(self.segment_ids, slots), y[:, None, :], 0.0).sum(2)
        y = jnp.concatenate([jnp.zeros_like(y[:, :1]), y], axis=1)
        return jnp.take_along_axis(y, self.segment_ids, axis=1)

    def token_mean(self, x: Float[Array, "B T"] | Bool[Array, "B T"]) -> Mean:
        """Makes a metric: the mean of [B, T] over masked tokens."""
        return Mean(jnp.where(self.mask, x.astype(jnp.float32), 0.0).sum(), self.num_tokens)

    def sequence_mean(self, y: Float[Array, "B S"] | Bool[Array, "B S"]) -> Mean:
        """Makes a metric: the mean of [B, S] over non-empty responses."""
        return Mean(jnp.where(self.present, y.astype(jnp.float32), 0.0).sum(), self.num_sequences)


def _one_hot(segment_ids: jax.Array, slots: int) -> jax.Array:
    return segment_ids[:, :, None] == jnp.arange(1, slots + 1, dtype=jnp.int32)[None, None, :]


def segment_sum(x: Float[Array, "B T"], segment_ids: Int[Array, "B T"], slots: int) -> Float[Array, "B S"]:
    """Sums `x`, which must be finite, by segment id: [B, T] -> [B, slots], for ids 1 to slots."""
    if slots <= _DENSE:
        return jnp.where(_one_hot(segment_ids, slots), x[:, :, None], 0.0).sum(1)
    rows = jax.vmap(lambda x, ids: jax.ops.segment_sum(x, ids, num_segments=slots + 1))(x, segment_ids)
    return rows[:, 1:]


def response_mask(x: LossInputs) -> Bool[Array, "B T"]:
    """Marks the tokens that are in `loss_mask` and belong to a segment: bool [B, T]."""
    return jnp.asarray(x.loss_mask).astype(bool) & (jnp.asarray(x.segment_ids) > 0)


def require(x: LossInputs, *fields: str) -> None:
    """Checks that each of `fields` has the shape of `logprobs`.

    Raises UserError for a missing field or another shape: a [B, 1] advantage would broadcast silently.
    """
    expected = np.shape(x.logprobs)
    for field in fields:
        shape = np.shape(getattr(x, field))
        if shape != expected:
            what = "is missing" if getattr(x, field) is None else f"has shape {shape}"
            raise UserError(f"LossInputs.{field} {what}: expected logprobs' shape {expected}")


def prepare(
    x: LossInputs, *, on_policy: bool = False, positive_only: bool = False, ratio: str = "learner"
) -> Responses:
    """Computes masks, log-ratios and response lengths of one (micro-)batch.

    Args:
      x: the batch; entries outside `loss_mask` may hold NaN or infinities.
      on_policy: take the current policy as the proximal policy (the ratio is 1 and keeps its gradient).
      positive_only: set negative advantages to zero.
      ratio: the policy that ratios divide by: "learner" (the proximal policy) or "sampler".

    Raises:
      UserError: a field has another shape than `logprobs`, or (outside jit) a segment id exceeds `max_segments`.
    """
    shape = np.shape(x.logprobs)
    if len(shape) != 2:
        raise UserError(f"LossInputs.logprobs has shape {shape}: expected [B, T]")
    require(x, "old_logprobs", "rollout_logprobs", "advantages", "loss_mask", "segment_ids")
    slots = max(shape[1] if x.max_segments is None else x.max_segments, 1)
    mask = response_mask(x)
    segment_ids = jnp.where(mask, jnp.asarray(x.segment_ids).astype(jnp.int32), 0)
    overflow = (segment_ids > slots).any(1, keepdims=True)
    if not isinstance(overflow, jax.core.Tracer) and bool(overflow.any()):
        raise UserError(
            f"LossInputs.segment_ids reaches {int(segment_ids.max())}, but max_segments is {slots}: "
            "raise max_segments to the largest number of responses packed into a row"
        )

    def clean(value: jax.Array) -> jax.Array:
        return jnp.where(mask, jnp.asarray(value).astype(jnp.float32), 0.0)

    logprobs = clean(x.logprobs)
    old = jax.lax.stop_gradient(logprobs if on_policy else clean(x.old_logprobs))
    advantages = jax.lax.stop_gradient(clean(x.advantages))
    if positive_only:
        advantages = jnp.maximum(advantages, 0.0)
    return Responses(
        mask=mask,
        segment_ids=segment_ids,
        logprobs=logprobs,
        log_ratio=logprobs - (clean(x.rollout_logprobs) if ratio == "sampler" else old),
        log_weight=jax.lax.stop_gradient(old - clean(x.rollout_logprobs)),
        drift=clean(x.rollout_logprobs) - logprobs,
        advantages=advantages,
        length=segment_sum(mask.astype(jnp.float32), segment_ids, slots),
        valid=jnp.where(overflow, jnp.float32(jnp.nan), jnp.float32(1.0)),
    )
