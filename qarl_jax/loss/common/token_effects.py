# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The effect of an objective on each token, computed from its gradient, so that this file repeats no clip or band.

    gain_t = - dL/dlogprob_t / (c_t A_t)        c_t: the token's share under the objective's aggregation

The gain is the factor by which the objective multiplies REINFORCE's gradient A_t: w_t r_t for a token inside the clip,
the gate for SAPO, the capped ratio for CISPO. It is exactly 0 for a token or response outside its band. The
`fate` of a token without gradient names the reason: its weight is 0, its advantage is 0, or its ratio left the band,
above or below 1, at the objective's level (`Config.level`).

Terms beside the objective (KL, entropy) are not included.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from qarl_jax.loss import Loss
from qarl_jax.loss.common.aggregation import aggregate
from qarl_jax.loss.common.sampler_correction import corrected
from qarl_jax.types import LossInputs

FATES = ("kept", "above", "below", "rejected", "no signal")
"""Fates of a token. Above, below: its ratio left the band at that edge; rejected: its weight is 0; no signal: its
advantage is 0 (or counts as 0). All but the first have no gradient."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Effects:
    """The effects of an objective on tokens: arrays [B, T], float32 (`fate` int32); 0 (or "kept") outside the mask.

    Attributes:
      log_ratio: learner now minus learner at the start of the step (or minus the sampler, with `ratio: sampler`).
      log_mismatch: learner at the start of the step minus sampler.
      seq_log_ratio, seq_log_mismatch: means of these over the response, copied to each of its tokens.
      weight: the sampler correction w.
      gain: the factor by which the objective multiplies REINFORCE's gradient; 0: no gradient.
      advantages: the advantages that the objective uses, for example without negative ones.
      fate: index into `FATES`.
    """

    log_ratio: Any
    log_mismatch: Any
    seq_log_ratio: Any
    seq_log_mismatch: Any
    weight: Any
    gain: Any
    advantages: Any
    fate: Any


def effects(x: LossInputs, loss: Loss) -> Effects:
    """Finds the effect of `loss` on each token of a batch, which may be any part of a mini-batch."""
    cfg = loss.config
    r, weights = corrected(x, cfg)
    push = -jax.grad(lambda logprobs: loss(dataclasses.replace(x, logprobs=logprobs))[0].total)(x.logprobs)
    share = jax.grad(lambda terms: aggregate(terms, r, cfg.aggregation, max_response_len=cfg.max_response_len).total)(
        jnp.zeros_like(r.logprobs)
    )
    signal = r.mask & (r.advantages != 0)
    gain = jnp.where(signal, push / jnp.where(signal, share * r.advantages, 1.0), 0.0)

    seq_log_ratio = r.spread(r.mean(r.log_ratio))
    at_level = seq_log_ratio if cfg.level == "response" else r.log_ratio
    fate = jnp.zeros(r.mask.shape, jnp.int32)
    fate = jnp.where(gain == 0, jnp.where(at_level > 0, FATES.index("above"), FATES.index("below")), fate)
    fate = jnp.where(weights.weight == 0, FATES.index("rejected"), fate)
    fate = jnp.where(~signal, FATES.index("no signal"), fate)
    return Effects(
        log_ratio=r.log_ratio,
        log_mismatch=r.log_weight,
        seq_log_ratio=seq_log_ratio,
        seq_log_mismatch=r.spread(r.mean(r.log_weight)),
        weight=weights.weight,
        gain=gain,
        advantages=r.advantages,
        fate=jnp.where(r.mask, fate, FATES.index("kept")),
    )


@functools.partial(jax.jit, static_argnames="loss")
def compiled(x: LossInputs, loss: Loss) -> Effects:
    """Computes `effects` under jit, compiled once per shape and objective."""
    return effects(x, loss)
