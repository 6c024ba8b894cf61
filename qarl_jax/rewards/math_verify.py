# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""1 where math-verify (https://github.com/huggingface/Math-Verify) finds the answer equal to the reference, else 0.

Equality is symbolic (1/2 = 0.5 = \\frac{1}{2}), in worker processes with a deadline (see `pool.py`). Answers that are
already equal as text or as plain numbers do not go through a worker.
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

# The answer stands at the end; the parser's cost grows with the text.
MAX_CHARS = 8000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PoolConfig):
    """Attributes (beside those of `PoolConfig`):
    truncated: what an unfinished response gets: "zero", or "score" to grade its text all the same.
    """

    truncated: Literal["zero", "score"] = "zero"


class Reward(BaseReward):
    """See the module's text."""

    pool: WorkerPool

    def __init__(self, cfg: Config, max_response_len: int):
        self.cfg = cfg
        self.pool = WorkerPool("math", cfg)

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        out = np.zeros(len(samples), np.float32)
        hard: list[int] = []
        tasks = []
        for i, sample in enumerate(samples):
            if (not sample.finished and self.cfg.truncated == "zero") or not sample.text.strip():
                continue
            boxed = extract.extract(sample.text, "boxed")
            if boxed is not None and extract.same(boxed, sample.prompt.answer):
                out[i] = 1.0
            else:
                # math-verify reads several boxes as one set of answers; the last one is the answer.
                text = sample.text if boxed is None else f"\\boxed{{{boxed}}}"
                hard.append(i)
                tasks.append({"text": text[-MAX_CHARS:], "answer": sample.prompt.answer})
        for i, value in zip(hard, self.pool.map(tasks), strict=True):
            out[i] = value or 0.0
        return out
