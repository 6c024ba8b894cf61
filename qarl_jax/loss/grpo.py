# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""GRPO's objective: PPO's clip on token ratios (https://arxiv.org/abs/2402.03300, eq. 3; https://arxiv.org/abs/1707.06347).

    r_t = exp(logprobs - old_logprobs)      J_t = w_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A)

The paper averages tokens within a response, then responses (`seq-mean-token-mean`); verl, which QaRL's runs
used, averages over all tokens. `dual_clip=3.0` is verl's default and a separate ablation in QaRL.
"""

from __future__ import annotations

import dataclasses

from qarl_jax.loss.common.clipped import Clipped, clipped_policy_loss
from qarl_jax.loss.common.options import option
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Clipped):
    """GRPO: token-level PPO clip on group-normalized advantages, no KL term."""

    name = "grpo"
    formula = "w_t min(r_t A, clip(r_t, 1-clip_low, 1+clip_high) A)"
    source = "GRPO, arXiv 2402.03300, eq. 3 without its KL"

    dual_clip: float | None = option(None, "A < 0: no gradient above it", "off; 3.0 in QaRL's ablation", above=1.0)
    off_policy_mask: float | None = option(
        None,
        "A < 0: a response is dropped where the sampler's log-probs exceed the learner's by more than this in the mean"
        " (off-policy sequence masking)",
        "off; DeepSeek-V3.2, arXiv 2512.02556, eq. 9",
        at_least=0.0,
    )


def loss(x: LossInputs, *, cfg: Config) -> tuple[Mean, dict[str, Metric]]:
    """Computes GRPO's loss of a batch by the formula above; `qarl_jax.loss` explains the returned Mean."""
    return clipped_policy_loss(x, cfg=cfg, off_policy_mask=cfg.off_policy_mask)
