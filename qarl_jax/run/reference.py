# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reference policies of the KL term (`kl.reference`). They score the responses that the policy samples.

| reference | policy | the KL term is |
|---|---|---|
| start | the policy that the run starts from, under the learner's scheme | the usual anchor |
| masters | the masters as they are at the start of each step, in bf16 | self-distillation: rounding is learned away |
| a folder | another model with the same tokenizer, in bf16 | on-policy distillation from a teacher |

With d = logprobs - ref_logprobs the term lowers KL(policy || reference) on the policy's samples: k2 and k3+ have the
gradient E[d grad logprob] of the reverse KL. This equals REINFORCE with ref_logprobs - logprobs as the advantage of a
token, the usual form of on-policy distillation (https://arxiv.org/abs/2306.13649). The term has no importance weights,
although later updates of a step see a policy that has changed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax

from qarl_jax import data, models
from qarl_jax.learning.learner import Learner
from qarl_jax.quant.config import Config as QuantConfig
from qarl_jax.run import build, config
from qarl_jax.run.config import RunConfig
from qarl_jax.types import AbsentError, TrainBatch, UserError

Reference = Callable[[Any, TrainBatch], jax.Array]
"""(the policy's masters, a micro-batch) -> the reference's log-probs [B, T] float32 of its tokens."""


def of_teacher(cfg: RunConfig) -> RunConfig:
    """Makes a config whose initial policy is the reference: `cfg`, or `cfg` with the teacher's folder in bf16."""
    if not cfg.kl.is_folder:
        return cfg
    changes = {
        "kl.reference": "start",
        "lora": None,
        "model.path": cfg.kl.reference,
        "model.init": "pretrained",
        "quant": QuantConfig(forward="bf16", engine=cfg.quant.engine, kernels=cfg.quant.kernels),
        "rollout.router_replay": False,
    }
    return config.replaced(cfg, changes)


def check(cfg: RunConfig) -> None:
    """Refuses a teacher whose tokenizer differs from the policy's.

    Raises:
      UserError: the folder does not exist, or its tokenizer has another vocabulary.
    """
    if cfg.kl.coef and cfg.kl.is_folder:
        if not os.path.isdir(cfg.kl.reference):
            raise AbsentError(
                f"kl.reference={cfg.kl.reference}: no such folder; give start, masters, or a Hugging Face model folder."
            )
        ours, theirs = (data.load_tokenizer(path).get_vocab() for path in (cfg.model.path, cfg.kl.reference))
        if ours != theirs:
            raise UserError(
                f"kl.reference={cfg.kl.reference}: its tokenizer is not that of {cfg.model.path}, and a teacher scores"
                " the policy's tokens; take a model of the same family."
            )


def make(cfg: RunConfig, learner: Learner, params: Any) -> Reference | None:
    """Makes the function that scores with the reference policy; None if the run has no KL term.

    Args:
      learner: the run's learner. params: the trained masters of the initial policy.
    """
    if not cfg.kl.coef:
        return None
    if cfg.kl.reference == "masters":
        plain = build.make_learner(cfg, models.with_scheme(learner.graphdef, "bf16"), learner.mesh)
        return lambda params, micro: plain.score(params, plain.quantize(params), micro)[0]
    if cfg.kl.is_folder:
        theirs = of_teacher(cfg)
        learner = build.make_learner(theirs, build.policy_graphdef(theirs), learner.mesh)
        params, frozen = build.load_policy(theirs, learner)
        if frozen is not None:
            learner.hold(frozen)
    held = learner.reference(params)
    routed = not cfg.kl.is_folder  # another model's experts are others

    def score(params: Any, micro: TrainBatch) -> jax.Array:
        return learner.score(*held, micro if routed else dataclasses.replace(micro, routed_experts=None))[0]

    return score
