# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO's actor (https://arxiv.org/abs/1707.06347, eq. 7) on advantages from a critic.

Before the mini-batches of an update, once per rollout batch, over packed rows:

    rewards    = token_rewards(scores, ...)          the score at the last token
    adv, ret   = gae(rewards, values, ...)           backward over each segment, holes carried through
    advantages = whiten(adv, mask, ...)              over the rollout batch; the returns are not whitened

The token objective is then GRPO's. The critic (`qarl_jax.learning.critic`) has a loss (`value.py`) and an optimizer
of its own. A sampler correction weighs the actor only; no source reweighs the critic. In a config all three are named:

    loss: {name: ppo}        advantage: {name: gae}        critic: {}
"""

from __future__ import annotations

import dataclasses

from qarl_jax.loss.common.clipped import clipped_policy_loss
from qarl_jax.loss.common.options import Shared, option
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Shared):
    """PPO actor: token-level clip on whitened advantages of a critic (GAE)."""

    name = "ppo"
    formula = "w_t min(r_t A_t, clip(r_t, 1-clip_low, 1+clip_high) A_t)"
    source = "PPO, arXiv 1707.06347, eq. 7"

    clip_low: float = option(0.2, "lower clip is 1 - clip_low", "PPO; verl", at_least=0.0)
    clip_high: float = option(0.2, "upper clip is 1 + clip_high", "PPO; verl", at_least=0.0)
    dual_clip: float | None = option(None, "A < 0: no gradient above it", "off; 3.0 in verl", above=1.0)


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """PPO's actor over this batch; see the module's docstring and `qarl_jax.loss` for the convention."""
    return clipped_policy_loss(x, cfg, clip_low=cfg.clip_low, clip_high=cfg.clip_high, dual_clip=cfg.dual_clip)
