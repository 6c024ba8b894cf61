# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""SAPO, soft adaptive policy optimization (Gao et al. 2025, https://arxiv.org/abs/2511.20347).

    J_t = w_t (4 / tau) sigmoid(tau (r_t - 1)) A        tau = tau_pos for A > 0, tau_neg for A < 0

SAPO has a smooth gate instead of a clip: dJ/dlogprob = 4 s (1 - s) r A with s the sigmoid. It is A at r = 1 and fades
on both sides, faster for A < 0. J at r = 1 is 2 A / tau, so do not compare its value with other objectives'.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qarl_jax.loss.common import diagnostics
from qarl_jax.loss.common.aggregation import aggregate
from qarl_jax.loss.common.options import AGGREGATIONS, Shared, option
from qarl_jax.loss.common.sampler_correction import corrected
from qarl_jax.metrics import Mean, Metric, masked_mean
from qarl_jax.types import LossInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Shared):
    """SAPO: sigmoid gate on the token ratio, sharper for A < 0."""

    name = "sapo"
    formula = "w_t (4/tau) sigmoid(tau (r_t - 1)) A, tau by the sign of A"
    source = "SAPO, arXiv 2511.20347"

    aggregation: str = option(
        "seq-mean-token-mean", "mean within a response, then over responses", "SAPO; verl; TRL", choices=AGGREGATIONS
    )
    tau_pos: float = option(1.0, "temperature of the gate for A > 0", "SAPO; verl; TRL", above=0.0)
    tau_neg: float = option(1.05, "temperature of the gate for A < 0", "SAPO; verl; TRL", above=0.0)


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """Computes SAPO's loss of a batch by the formula above; `qarl_jax.loss` explains the returned Mean."""
    r, weights = corrected(x, cfg)
    ratio = r.ratio
    tau = jnp.where(r.advantages > 0, cfg.tau_pos, cfg.tau_neg).astype(jnp.float32)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0))
    objective = 4.0 / tau * gate * r.advantages
    mean = aggregate(-weights.weight * objective, r, cfg.aggregation, max_response_len=cfg.max_response_len)

    passed = jax.lax.stop_gradient(4.0 * gate * (1.0 - gate))
    gates: dict[str, Metric] = {
        "loss/gate_pos": masked_mean(passed, r.mask & (r.advantages > 0)),
        "loss/gate_neg": masked_mean(passed, r.mask & (r.advantages < 0)),
    }
    return mean, diagnostics.batch_metrics(r) | weights.metrics | gates
