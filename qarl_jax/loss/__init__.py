# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives of reinforcement learning: pure functions of `LossInputs`, minimized in float32; one file for each.

    loss = get_loss("tbpo", clip_high=4e-4)          # or loss_from_config(tbpo.Config(...))
    mean, metrics = loss(inputs)                     # mean.value is the loss of this batch taken alone
    scalar = normalized(mean, inputs, loss)          # what the learner differentiates

The convention, which makes micro-batches, packing and devices add up exactly:

  * `mean.total` is the numerator of this (micro-)batch, `mean.count` its denominator: the number of masked tokens or of
    non-empty responses, as `loss.denominator` ("tokens" or "sequences") says.
  * Adding the Means (and merging the metrics) of the micro-batches of a mini-batch gives those of the mini-batch.
  * The gradient is that of total / *global* count, the count of the whole optimizer mini-batch, which the learner puts
    into `LossInputs.num_tokens` and `num_sequences`; `normalized` picks the right one. Gradients of micro-batches are
    then summed, never averaged. With both None, the batch is the whole and `normalized` equals `mean.value`.
  * A batch without any masked token has loss 0 and gradient 0.

Terms that are not a policy objective (KL to a reference, a critic's value loss) have this interface too:
`get_term("kl")`, `get_term("value")`. The learner adds coef * normalized(term).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from qarl_jax.loss import cispo, dapo, dppo, drgrpo, grpo, gspo, kl, ppo, sapo, tbpo, value
from qarl_jax.loss.common.aggregation import denominator
from qarl_jax.loss.common.clipped import clipped_policy_loss
from qarl_jax.loss.common.options import nearest
from qarl_jax.loss.common.sampler_correction import MISMATCH
from qarl_jax.metrics import Mean, Metric
from qarl_jax.types import LossInputs, UserError

LOSSES: dict[Any, Callable[..., tuple[Mean, dict[str, Metric]]]] = {
    tbpo.Config: tbpo.loss,
    grpo.Config: grpo.loss,
    drgrpo.Config: clipped_policy_loss,
    dapo.Config: clipped_policy_loss,
    gspo.Config: gspo.loss,
    sapo.Config: sapo.loss,
    cispo.Config: cispo.loss,
    dppo.Config: dppo.loss,
    ppo.Config: clipped_policy_loss,
}

# Terms beside the objective, with the same interface; the learner adds coef * normalized(term).
TERMS: dict[Any, Callable[..., tuple[Mean, dict[str, Metric]]]] = {
    kl.Config: kl.loss,
    value.Config: value.loss,
}


@runtime_checkable
class Objective(Protocol):
    """The interface of an objective: a function of `LossInputs`, and the unit of its denominator."""

    @property
    def denominator(self) -> str:
        """The unit of `Mean.count`: "tokens" or "sequences" of the mini-batch."""

    def __call__(self, x: LossInputs, /) -> tuple[Mean, dict[str, Metric]]: ...


@dataclasses.dataclass(frozen=True)
class Loss:
    """An objective with its options bound: `LossInputs -> (Mean, metrics)`. Hashable, so it may be a static argument.

    Attributes:
      config: the objective's `Config`.
      function: `(x, *, cfg) -> (Mean, dict[str, Mean | Max])`.
    """

    config: Any
    function: Callable[..., tuple[Mean, dict[str, Metric]]]

    def __call__(self, x: LossInputs) -> tuple[Mean, dict[str, Metric]]:
        return self.function(x, cfg=self.config)

    @property
    def name(self) -> str:
        """The objective's name in configs, e.g. "tbpo"."""
        return self.config.name

    @property
    def denominator(self) -> str:
        """The unit of `Mean.count`: "tokens" or "sequences"."""
        return denominator(self.config.aggregation)


def normalized(mean: Mean, x: LossInputs, loss: Objective) -> jax.Array:
    """The scalar to differentiate: this batch's numerator over the mini-batch's denominator.

    Args:
      mean: what `loss(x)` returned.
      x: the same inputs; `num_tokens` / `num_sequences` are the mini-batch's counts, None where `x` is all of it.
      loss: tells which of the two counts applies.

    Returns:
      float32 scalar, 0 where nothing is counted. Summed over micro-batches it is the loss of the mini-batch.
    """
    count = x.num_tokens if loss.denominator == "tokens" else x.num_sequences
    count = jnp.asarray(mean.count if count is None else count, jnp.float32)
    return mean.total / jnp.maximum(count, 1.0)


def make_config(name: str, options: Mapping[str, Any], registry: Mapping[Any, Any] = LOSSES) -> Any:
    """The `Config` called `name` with `options` set.

    Raises:
      UserError: unknown name or option (names the nearest known one), or a value the option does not take.
    """
    configs = {config_type.name: config_type for config_type in registry}
    if name not in configs:
        raise UserError(f"loss {name!r} does not exist: {nearest(name, configs)}")
    fields = [field.name for field in dataclasses.fields(configs[name])]
    for key in options:
        if key not in fields:
            raise UserError(f"loss {name!r} has no option {key!r}: {nearest(key, fields)}")
    return configs[name](**options)


def loss_from_config(config: Any, *, max_response_len: float | None = None) -> Loss:
    """Makes the objective of a registered Config.

    Args:
      config: e.g. `tbpo.Config()`.
      max_response_len: the run's limit on response tokens, used if the config sets none.

    Raises:
      UserError: `config` is not the Config of an objective in `LOSSES`.
    """
    if type(config) not in LOSSES:
        known = ", ".join(f"{c.__module__}.{c.__name__}" for c in LOSSES)
        raise UserError(f"{config!r} is not the Config of an objective. Known: {known}")
    if max_response_len is not None and config.max_response_len is None:
        config = dataclasses.replace(config, max_response_len=float(max_response_len))
    return Loss(config, LOSSES[type(config)])


def get_loss(name: str, **options: Any) -> Loss:
    """The objective called `name`, e.g. get_loss("grpo", mismatch="tis", clip_high=0.28).

    Raises:
      UserError: unknown name or option (names the nearest known one), or a value the option does not take.
    """
    return loss_from_config(make_config(name, options))


def get_term(name: str, **options: Any) -> Loss:
    """Makes a term beside the objective, e.g. get_term("kl", kind="k3") or get_term("value", clip=0.5)."""
    config = make_config(name, options, TERMS)
    return Loss(config, TERMS[type(config)])
