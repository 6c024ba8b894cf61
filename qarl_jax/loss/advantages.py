# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Advantages from rewards: relative to the group (GRPO, Dr. GRPO) or to a critic (GAE).

Group advantages are computed on the host over whole groups, before any split into mini-batches. A critic's advantages
are computed on the packed rows (`qarl_jax.learning.critic`), and whitened over the rollout batch before its first
update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from qarl_jax.loss.common.options import check, nearest, option
from qarl_jax.types import UserError

LEVELS = ("response", "turn")
_LEVEL = "whose reward is compared: a response's, or what is to come from each of its turns on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo:
    """Options of GRPO's advantage: the reward relative to the group's mean, over its standard deviation."""

    name: ClassVar[str] = "grpo"
    formula: ClassVar[str] = "(R - mean) / (std + 1e-6), std with ddof = 1; 0 for a group of equal rewards"
    source: ClassVar[str] = "GRPO, arXiv 2402.03300, sec. 4.1.2; verl"

    level: str = option("response", _LEVEL, "GRPO", choices=LEVELS)

    def __post_init__(self) -> None:
        check(self, "advantage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGrpo:
    """Options of Dr. GRPO's advantage: the reward relative to the group's mean."""

    name: ClassVar[str] = "drgrpo"
    formula: ClassVar[str] = "R - mean"
    source: ClassVar[str] = "Dr. GRPO, arXiv 2503.20783, sec. 3.2"

    level: str = option("response", _LEVEL, "GRPO", choices=LEVELS)

    def __post_init__(self) -> None:
        check(self, "advantage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gae:
    """Options of generalized advantage estimation: advantages relative to a critic, per token or turn."""

    name: ClassVar[str] = "gae"
    formula: ClassVar[str] = "A_t = delta_t + gamma lam A_(t+1), delta_t = R_t + gamma V_(t+1) - V_t; return A_t + V_t"
    source: ClassVar[str] = "GAE, arXiv 1506.02438, eq. 16"

    gamma: float = option(1.0, "discount per token", "verl", at_least=0.0, at_most=1.0)
    lam: float = option(1.0, "decay of the trace; 1: A = reward to go - V", "verl", at_least=0.0, at_most=1.0)
    whiten: bool = option(True, "advantages to mean 0, variance 1 over the rollout batch; returns stay", "verl")
    level: str = option(
        "token",
        "what a step is: a token, or a turn (a value at its first token, one advantage for all of it)",
        "PPO; turn: ArCHer, arXiv 2402.19446",
        choices=("token", "turn"),
    )

    def __post_init__(self) -> None:
        check(self, "advantage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nothing:
    """Advantages of zero: only the KL term trains (distillation), and rewards are only reported."""

    name: ClassVar[str] = "none"
    formula: ClassVar[str] = "0; what is learned is the term `kl`"
    source: ClassVar[str] = "on-policy distillation, arXiv 2306.13649"


ADVANTAGES: dict[str, Any] = {
    "grpo": Grpo,
    "drgrpo": DrGrpo,
    "gae": Gae,
    "none": Nothing,
}
KINDS = ("grpo", "drgrpo")  # of `group_advantages`
# Eight rewards of 0.1 have a float32 mean one ulp off and std 0; divided by 1e-6 that is an advantage of 7e-3 from
# nothing. Sums of float32 rewards (terms, turns) differ by ulps, too: 0.4 + 0.55 and 0.95, by 6e-8. A group whose
# rewards differ by less than this has advantage exactly 0.
SAME = 1e-6
_EPS = 1e-6


def group_advantages(rewards: Any, kind: str = "grpo", *, valid: Any = None) -> Any:
    """Advantage of each response relative to its group.

    grpo: (R - mean) / (std + 1e-6), std with ddof = 1 (https://arxiv.org/abs/2402.03300, sec. 4.1.2; verl).
    drgrpo: R - mean (https://arxiv.org/abs/2503.20783, sec. 3.2).

    Args:
      rewards: [P, n] float, one row per prompt; numpy or jax.
      kind: "grpo" or "drgrpo".
      valid: [P, n] bool, responses that exist; None: all. Missing responses get 0 and enter no statistic.

    Returns:
      [P, n] float32, numpy for numpy input. Exactly 0 for a group of one and for a group of equal rewards.

    Raises:
      UserError: unknown kind, wrong rank, or (numpy) a reward that is not finite.
    """
    if kind not in KINDS:
        raise UserError(f"advantage kind {kind!r}: {nearest(kind, KINDS)}")
    if np.ndim(rewards) != 2:
        raise UserError(f"rewards have shape {np.shape(rewards)}: expected [prompts, responses per prompt]")
    on_device = isinstance(rewards, jax.Array)
    xp = jnp if on_device else np
    # float64 on the host costs nothing; on a device float32 is what there is.
    dtype = jnp.float32 if on_device else np.float64
    rewards = xp.asarray(rewards).astype(dtype)
    valid = xp.ones(rewards.shape, bool) if valid is None else xp.asarray(valid).astype(bool)
    rewards = xp.where(valid, rewards, 0.0)
    if not on_device:
        finite(rewards)
    count = valid.sum(1, keepdims=True).astype(dtype)
    mean = rewards.sum(1, keepdims=True) / xp.maximum(count, 1.0)
    centred = xp.where(valid, rewards - mean, 0.0)
    spread = xp.where(valid, rewards, -xp.inf).max(1, keepdims=True, initial=-xp.inf) - xp.where(
        valid, rewards, xp.inf
    ).min(1, keepdims=True, initial=xp.inf)
    if kind == "grpo":
        std = xp.sqrt((centred * centred).sum(1, keepdims=True) / xp.maximum(count - 1.0, 1.0))
        centred = centred / (std + _EPS)
    return xp.where((spread < SAME) | (count < 2), 0.0, centred).astype(jnp.float32 if on_device else np.float32)


def turn_advantages(
    rewards: Sequence[Sequence[Sequence[float]]], kind: str = "grpo", *, valid: Any = None
) -> np.ndarray:
    """Computes the advantage of each turn k: its reward to go relative to turn k of all responses of the group.

    The reward to go of turn k is the sum of the rewards of turns k, k+1, ... For the first turn it is the response's
    reward, so that turn 0 has the advantage of `group_advantages`. Only responses that have a turn k are compared.

    Args:
      rewards: rewards[p][i][k] of turn k of response i to prompt p; numbers of turns may differ.
      kind, valid: as in `group_advantages`.

    Returns:
      [P, n, turns] float32, 0 for turns that a response does not have.
    """
    to_go = np.flip(np.cumsum(np.flip(padded(rewards), 2), 2), 2)
    most = to_go.shape[2]
    there = np.array([[[k < len(turns) for k in range(most)] for turns in group] for group in rewards], bool)
    if valid is not None:
        there &= np.asarray(valid, bool)[:, :, None]
    return np.stack([group_advantages(to_go[:, :, k], kind, valid=there[:, :, k]) for k in range(most)], axis=2)


def padded(rewards: Sequence[Sequence[Sequence[float]]]) -> np.ndarray:
    """Pads rewards of turns with zeros to an array [P, n, turns], float64, of at least one turn."""
    most = max([1, *(len(turns) for group in rewards for turns in group)])
    return np.array([[[*turns, *[0.0] * (most - len(turns))] for turns in group] for group in rewards], np.float64)


def finite(rewards: np.ndarray) -> np.ndarray:
    """Checks that all rewards, of any shape, are finite, and returns them.

    Raises:
      UserError: a reward is not finite.
    """
    if not np.isfinite(rewards).all():
        raise UserError("a reward is not finite: every completion, broken ones included, needs a finite reward")
    return rewards


def token_rewards(
    scores: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T"]:
    """Computes the reward per token: each response's score at its last masked token, 0 elsewhere.

    Args:
      scores: [B, T] float32, each response's score broadcast over its tokens.
      mask: [B, T] bool, response tokens.
      segment_ids: [B, T] int32, 0 = padding.
    """
    mask = mask & (segment_ids > 0)
    ids = jnp.where(mask, segment_ids, 0)
    time = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32)[None], mask.shape)
    last = jax.vmap(lambda t, ids: jax.ops.segment_max(t, ids, num_segments=t.shape[0] + 1))(time, ids)
    is_last = mask & (time == jnp.take_along_axis(last, ids, axis=1))
    return jnp.where(is_last, scores.astype(jnp.float32), 0.0)


def turn_starts(mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Marks the first token of each turn, bool [B, T]; a turn is a run of masked tokens within a segment."""
    mask = mask & (segment_ids > 0)
    goes_on = mask[:, :-1] & (segment_ids[:, :-1] == segment_ids[:, 1:])
    return mask & ~jnp.pad(goes_on, ((0, 0), (1, 0)))


def over_turns(x: Float[Array, "B T"], starts: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Copies the value at the first token of each turn to all tokens of the turn; 0 elsewhere."""
    time = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32)[None], mask.shape)
    last = jax.lax.cummax(jnp.where(starts, time, 0), axis=1)
    return jnp.where(mask, jnp.take_along_axis(x, last, axis=1), 0.0)


def gae(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Computes generalized advantage estimation (https://arxiv.org/abs/1506.02438, eq. 16) over packed rows.

    Backward in time, from a = v' = 0 at the end of each segment: delta = R + gamma v' - V, a = delta + gamma lam a,
    v' = V on masked tokens. Unmasked tokens inside a response (tool output) leave a and v' unchanged.

    Args:
      rewards, values: [B, T] float32; entries outside the mask are ignored.
      mask: [B, T] bool. segment_ids: [B, T] int32, segments contiguous in time, 0 = padding.
      gamma, lam: discount and trace decay; 1 and 1 are verl's.

    Returns:
      (advantages, returns), [B, T] float32, 0 outside the mask, returns = advantages + values, no gradient.
    """
    mask = mask & (segment_ids > 0)
    rewards = jnp.where(mask, rewards.astype(jnp.float32), 0.0)
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)

    def step(carry: Any, now: Any) -> tuple[Any, jax.Array]:
        a, v_next, segment_next = carry
        reward, value, masked_in, segment = now
        inside = segment == segment_next
        a, v_next = jnp.where(inside, a, 0.0), jnp.where(inside, v_next, 0.0)
        a_new = reward + gamma * v_next - value + gamma * lam * a
        carry = jnp.where(masked_in, a_new, a), jnp.where(masked_in, value, v_next), segment
        return carry, carry[0]

    rows = rewards.shape[0]
    start = jnp.zeros(rows, jnp.float32), jnp.zeros(rows, jnp.float32), jnp.zeros(rows, segment_ids.dtype)
    _, advantages = jax.lax.scan(step, start, (rewards.T, values.T, mask.T, segment_ids.T), reverse=True)
    advantages = jnp.where(mask, advantages.T, 0.0)
    returns = jnp.where(mask, advantages + values, 0.0)
    return jax.lax.stop_gradient(advantages), jax.lax.stop_gradient(returns)


def moments(x: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Computes (mean, variance with ddof = 1) of advantages for `whiten`, in float64; (0, 1) for fewer than two."""
    x = np.asarray(x, np.float64)
    return (float(x.mean()), float(x.var(ddof=1))) if x.size > 1 else (0.0, 1.0)


def whiten(x: Float[Array, "B T"], mask: Bool[Array, "B T"], mean: Any, variance: Any) -> Float[Array, "B T"]:
    """Whitens advantages: (x - mean) / sqrt(variance + 1e-8) on the mask, 0 elsewhere.

    `x` may be a micro-batch; mean and variance are those of the whole rollout batch (`moments`).
    """
    return jnp.where(mask, (x.astype(jnp.float32) - mean) / jnp.sqrt(variance + 1e-8), 0.0)
