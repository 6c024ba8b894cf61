# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO's actor loss (https://arxiv.org/abs/1707.06347, eq. 7) on advantages from a critic.

Advantages are computed once per rollout batch, over packed rows, before its mini-batches:

    rewards    = token_rewards(scores, ...)          the score at the last token
    adv, ret   = gae(rewards, values, ...)           backward over each segment, skipping unmasked tokens
    advantages = whiten(adv, mask, ...)              over the rollout batch; the returns are not whitened

The token objective is then GRPO's. The critic (`qarl_jax.learning.critic`) has another loss (`value.py`) and another
optimizer. A sampler correction weighs the actor only; no source reweighs the critic. A config names all three:

    loss: {name: ppo}        advantage: {name: gae}        critic: {}
"""

from __future__ import annotations

import dataclasses

from qarl_jax.loss.common.clipped import Clipped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Clipped):
    """PPO actor: token-level clip on whitened advantages of a critic (GAE)."""

    name = "ppo"
    formula = "w_t min(r_t A_t, clip(r_t, 1-clip_low, 1+clip_high) A_t)"
    source = "PPO, arXiv 1707.06347, eq. 7"
