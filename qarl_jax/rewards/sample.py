# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The input of a reward, and the interface of a reward."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.pool import WorkerPool
from qarl_jax.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One response to grade. Example: Sample(prompt=prompt, text="...42", num_tokens=31, finish_reason="stop").

    Attributes:
      prompt: the task; `prompt.answer` is the reference answer.
      text: the decoded response (of several turns: the last), tags that are special tokens included, without padding
        and the stop token at its end. It is model output: never trust it.
      num_tokens: its length in tokens, the end token included.
      finish_reason: "stop", "length" or "abort" (see `Completion`).
      max_tokens: the limit on its tokens; 0: the run's `rollout.max_response_len`.
      turn_rewards: the environment's reward of each turn; empty without an environment.
    """

    prompt: Prompt
    text: str
    num_tokens: int
    finish_reason: str = "stop"
    max_tokens: int = 0
    turn_rewards: tuple[float, ...] = ()

    @property
    def finished(self) -> bool:
        """Tells whether the response ended by itself, rather than at the length limit."""
        return self.finish_reason == "stop"


class BaseReward(abc.ABC):
    """Grades responses. Any text gets a finite number; a response that cannot be graded gets 0.

    Args:
      cfg: the reward's own Config.
      max_response_len: the run's limit on a response, in tokens.
    """

    pool: WorkerPool | None = None  # of a reward that grades in other processes

    def __init__(self, cfg: Any, max_response_len: int):
        self.cfg = cfg

    @abc.abstractmethod
    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        """Returns one finite reward per sample, float32 [n], in the order of samples."""

    def close(self) -> None:
        """Ends worker processes, where there are some. May be called twice."""
        if self.pool is not None:
            self.pool.close()
