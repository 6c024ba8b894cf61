# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A weighted sum of rewards; and a reward for each source of a mix.

reward:
  name: sum
  terms:
    - {coef: 1.0, reward: {name: math_verify}}
    - {coef: 0.1, reward: {name: format}}
    - {coef: 0.5, reward: {name: overlong, buffer_len: 512}}

reward:
  name: by_source                      # data.source: {name: mix, parts: {math: ..., code: ...}}
  rewards:
    math: {name: math_verify}
    code: {name: code}
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

from qarl_jax.rewards import (
    code,
    environment,
    exact,
    format,
    function,
    judge,
    math_verify,
    overlong,
    reasoning_gym,
    reward_model,
)
from qarl_jax.typed_config.load import Variants
from qarl_jax.types import UserError

# The rewards that a sum can be made of: name in config files -> module with `Config` and `Reward`.
REWARDS: dict[str, Any] = {
    "exact": exact,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "code": code,
    "format": format,
    "overlong": overlong,
    "python": function,
    "judge": judge,
    "reward_model": reward_model,
    "environment": environment,
}
TERMS: dict[str, type] = {name: module.Config for name, module in REWARDS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """A summand of `reward.name=sum`.

    Attributes:
      reward: any reward but another sum.
      coef: the factor on its score.
    """

    reward: Annotated[Any, Variants(TERMS)]
    coef: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.coef):
            raise UserError(f"coef must be finite, got {self.coef}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A weighted sum of rewards.

    Attributes:
      terms: the summands, at least one.
    """

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise UserError("a sum of rewards needs at least one entry in `terms`.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BySource:
    """A reward for each part of `data.source.name=mix`.

    Attributes:
      rewards: the reward of each part of a mix, by the part's name.
    """

    rewards: dict[str, Annotated[Any, Variants(TERMS)]]

    def __post_init__(self) -> None:
        if not self.rewards:
            raise UserError("rewards by source need at least one entry in `rewards`.")
