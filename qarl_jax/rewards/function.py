# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward function of your own, named by import path.

    reward: {name: python, path: "my_rewards.py:graded", options: {bonus: 0.1}}

    def graded(text: str, answer: str, meta: dict, **options) -> float: ...

`path` is "package.module:function" or "file.py:function". The function runs in a process of its own, without an
accelerator. A function fails if it raises, returns no finite number, ends its process, or takes more than `timeout_s`
seconds for a response. A failure stops the run with an error that names function and prompt (a reward that silently
became 0 would be worse). What the function prints goes to standard error.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.pool import PoolConfig, WorkerPool
from qarl_jax.rewards.sample import BaseReward, Sample
from qarl_jax.typed_config.annotations import internal
from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PoolConfig):
    """A Python function of the user's that scores responses.

    Attributes:
      path: "package.module:function" or "file.py:function".
      options: keyword arguments for the function.
      workers: processes that it runs in, each with the function's state to itself; 0: one per core, at most 8.
      timeout_s: seconds a single response may take; then the run ends.
      memory_mb: address space of a process; 0: not limited.
    """

    path: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    workers: int = 1
    timeout_s: float = 60.0
    recycle_after: int = internal(0)
    memory_mb: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        module, colon, function = self.path.rpartition(":")
        if not (colon and module and function.isidentifier()):
            raise UserError(f"path: expected package.module:function or file.py:function, got {self.path!r}.")


class Reward(BaseReward):
    """Calls the user's function for each response. Raises `UserError` at once if the function cannot be imported."""

    pool: WorkerPool

    def __init__(self, cfg: Config, max_response_len: int):
        self.cfg = cfg
        search = [entry or os.getcwd() for entry in sys.path]
        setup = base64.b64encode(pickle.dumps((search, cfg.path, cfg.options))).decode()
        self.pool = WorkerPool("function", cfg, setup=setup, name=f"reward function {cfg.path}")
        self.pool.start()

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        """Grades samples. Raises `UserError`, which names function and prompt, if the function fails."""
        calls = [(sample.text, sample.prompt.answer, dict(sample.prompt.meta)) for sample in samples]
        tasks = [{"call": base64.b64encode(pickle.dumps(call)).decode()} for call in calls]
        names = [f"prompt {sample.prompt.uid}" for sample in samples]
        out = np.zeros(len(samples), np.float32)
        for i, answer in enumerate(self.pool.answers(tasks, names=names, strict=True)):
            if answer is None:
                continue  # not begun, because of one that went wrong, which is told here
            if answer.error:
                raise UserError(f"reward function {self.cfg.path} failed on {names[i]}: {answer.error}")
            score = answer.score
            if score is None or not abs(score) <= float(np.finfo(np.float32).max):
                raise UserError(
                    f"reward function {self.cfg.path} returned {score} on {names[i]}: a reward is a finite float32."
                )
            out[i] = score
        return out
