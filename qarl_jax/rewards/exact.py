# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reward 1 for the reference answer, else 0: numbers are compared by value, other answers as normalized text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from qarl_jax.rewards import extract
from qarl_jax.rewards.sample import BaseReward, Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A comparison of the response's answer with the reference answer.

    Attributes:
      extract: the place in the response where its answer is looked for (see `extract.extract`).
      truncated: what an unfinished response gets: "zero", or "score" to grade its text all the same.
    """

    extract: extract.Extraction = "auto"
    truncated: Literal["zero", "score"] = "zero"


class Reward(BaseReward):
    """Compares the response's answer with the reference answer: 1 if they are equal, else 0."""

    def score(self, samples: Sequence[Sample]) -> Float[np.ndarray, " n"]:
        return np.array([self._one(sample) for sample in samples], np.float32)

    def _one(self, sample: Sample) -> float:
        if not sample.finished and self.cfg.truncated == "zero":
            return 0.0
        given = extract.extract(sample.text, self.cfg.extract)
        return float(given is not None and extract.same(given, sample.prompt.answer))
