# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward from reasoning-gym's own scorer of a prompt's task: many tasks have more than one right answer.

Scorers give partial credit (a right answer inside a longer text, a near miss). By default only a full score counts, so
that the reward is accuracy; `threshold: null` passes partial credit on. They run in worker processes, with a deadline,
because some scorers evaluate model output (see `pool.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards import extract
from qarl_jax.rewards.pool import PoolConfig, WorkerPool
from qarl_jax.rewards.sample import BaseReward, Sample
from qarl_jax.types import UserError

# No task's answer is longer (the largest are grids); longer ones score 0 without being looked at.
MAX_CHARS = 20_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PoolConfig):
    """Settings of the reasoning-gym reward, besides those of `PoolConfig`.

    Attributes:
      threshold: scores of at least this give 1, lower ones 0; null: the score itself is the reward.
      extract: where the answer is looked for (see `extract.extract`).
      truncated: what an unfinished response gets: "zero", or "score" to grade its text all the same.
    """

    threshold: float | None = 1.0
    extract: extract.Extraction = "auto"
    truncated: Literal["zero", "score"] = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise UserError(f"threshold must be above 0 and at most 1, got {self.threshold}.")


class Reward(BaseReward):
    """Scores answers with the scorer of the prompt's reasoning-gym task."""

    pool: WorkerPool

    def __init__(self, cfg: Config, max_response_len: int):
        self.cfg = cfg
        self.pool = WorkerPool("gym", cfg)

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        """Grades samples. Raises `UserError` for a prompt that is not from the source reasoning_gym."""
        out = np.zeros(len(samples), np.float32)
        asked: list[int] = []
        tasks = []
        for i, sample in enumerate(samples):
            origin = sample.prompt.meta.get("origin")
            if not isinstance(origin, dict):
                raise UserError(
                    f"reward reasoning_gym: prompt {sample.prompt.uid} is not from data.source.name=reasoning_gym; use"
                    " reward.name=exact or math_verify."
                )
            if not sample.finished and self.cfg.truncated == "zero":
                continue
            answer = extract.extract(sample.text, self.cfg.extract)
            if answer is not None and len(answer) <= MAX_CHARS:
                asked.append(i)
                tasks.append({"answer": answer, "origin": origin})
        for i, value in zip(asked, self.pool.map(tasks), strict=True):
            score = value or 0.0
            if not np.isfinite(score):
                score = 0.0
            out[i] = score if self.cfg.threshold is None else float(score >= self.cfg.threshold)
        return out
