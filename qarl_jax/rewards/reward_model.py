# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward from a reward model: a Hugging Face sequence-classification folder with one label.

    reward: {name: reward_model, path: models/Skywork-Reward-V2-Qwen3-8B, gpus: "1", dtype: bfloat16}

The model runs under transformers in a process of its own, in the bridge's interpreter (`python`), which has torch; the
learner never imports it. So any family works, and the learner's memory plan leaves it out. Give it a GPU that
neither learner nor engine uses, or the CPU. It reads the prompt's messages and the response through its own chat
template, and scores at the last token. The score is the model's logit as it is: scale it by `coef` in a sum. A response
that does not fit loses its beginning. Empty responses score `worst`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards.pool import PoolConfig, WorkerPool
from qarl_jax.rewards.sample import BaseReward, Sample
from qarl_jax.typed_config.annotations import internal
from qarl_jax.types import UserError, at_least

START_S = 1800.0  # seconds that weights may take to load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PoolConfig):
    """A reward model: a folder, and the processes that score with it.

    Attributes:
      path: the model's folder.
      dtype: dtype of the model's weights and matrix products.
      gpus: CUDA_VISIBLE_DEVICES of its process; empty: the CPU.
      batch: responses that are scored together.
      max_len: most tokens of a prompt with its response.
      python: interpreter with torch and transformers; empty: the trainer's own.
      worst: what an empty response gets, and under truncated=zero an unfinished one.
      truncated: what an unfinished response gets: "zero" (`worst`), or "score" to have it scored all the same.
      workers: processes, each with the model.
      timeout_s: seconds that a batch may take; then the run ends.
      memory_mb: address space of a process; 0: not limited.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    gpus: str = ""
    batch: int = 16
    max_len: int = 8192
    python: str = ""
    worst: float = 0.0
    truncated: Literal["zero", "score"] = "score"
    workers: int = 1
    timeout_s: float = 300.0
    recycle_after: int = internal(0)
    memory_mb: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch", "max_len", "workers")


class Reward(BaseReward):
    """Scores responses with a reward model. Raises `UserError` at once if the folder is no reward model."""

    pool: WorkerPool

    def __init__(self, cfg: Config, max_response_len: int):
        self.cfg = cfg
        if not os.path.isfile(os.path.join(cfg.path, "config.json")):
            raise UserError(f"reward_model: {cfg.path} has no config.json: give a sequence-classification folder.")
        setup = json.dumps([os.path.abspath(cfg.path), cfg.dtype, cfg.max_len])
        python = cfg.python or sys.executable
        name = f"reward model {cfg.path}"
        self.pool = WorkerPool("model", cfg, setup=setup, name=name, python=python, gpus=cfg.gpus, start_s=START_S)
        self.pool.start()

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        """Scores samples. Raises `UserError` if the model fails, or gives no finite number."""
        out = np.full(len(samples), self.cfg.worst, np.float32)
        graded = [
            i
            for i, sample in enumerate(samples)
            if sample.text.strip() and (sample.finished or self.cfg.truncated == "score")
        ]
        graded.sort(key=lambda i: samples[i].num_tokens + len(samples[i].prompt.tokens))  # little padding
        batches = [graded[at : at + self.cfg.batch] for at in range(0, len(graded), self.cfg.batch)]
        tasks = [{"conversations": [_conversation(samples[i]) for i in batch]} for batch in batches]
        for batch, answer in zip(batches, self.pool.answers(tasks, strict=True), strict=True):
            if answer is None:
                continue  # not begun, because of one that went wrong, which is told here
            if answer.error or not np.isfinite(answer.scores).all():
                reason = answer.error or "it gave no finite score"
                raise UserError(f"reward model {self.cfg.path} failed on {len(batch)} responses: {reason}")
            out[batch] = answer.scores
        return out


def _conversation(sample: Sample) -> list[dict[str, str]]:
    asked = sample.prompt.messages or ({"role": "user", "content": sample.prompt.text},)
    return [*map(dict, asked), {"role": "assistant", "content": sample.text}]
