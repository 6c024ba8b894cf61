# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the first token of a step whose log-prob differs between learner and sampler.

If the two are aligned (`verify/alignment.py`) no token differs, and `mismatch/exact` is 1. A mismatched token is then a
defect; its report names the prompt, the response, the position and the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from qarl_jax.data.packing import Packed
from qarl_jax.runtime import processes
from qarl_jax.types import RolloutGroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstMismatch:
    """The first mismatch of a step.

    Attributes:
      tokens, mismatched: counts of response tokens drawn under the current version, and of those that differ.
      uid: the prompt's. sample: number of the response. position: index of the first mismatch in the response.
      token: its id. sampler, learner: its two log-probs.
      sequence: the prompt and the response up to this token, which `python -m qarl_jax.parity --at` computes again.
    """

    tokens: int
    mismatched: int
    uid: str
    sample: int
    position: int
    token: int
    sampler: float
    learner: float
    sequence: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.mismatched} of {self.tokens:,} tokens have another log-prob in the learner than in the sampler;"
            f" the first is token {self.token} at position {self.position} of response {self.sample} to prompt"
            f" {self.uid}: sampler {self.sampler:.9g}, learner {self.learner:.9g}"
            f" (difference {self.learner - self.sampler:.1e})"
        )


def first(parts: Iterable[tuple[Packed, Sequence[RolloutGroup], Sequence[Any]]], version: int) -> FirstMismatch | None:
    """Finds the first mismatch of a step, in the order of updates, groups and samples. None: there is none.

    Args:
      parts: per update its packed rows, their groups, and per micro-batch the proximal policy's log-probs, float32
        [rows, T].
      version: version of the weights that computed these log-probs. Tokens of other versions are skipped.
    """
    found: dict[str, Any] | None = None
    tokens = count = 0
    for packed, groups, learner in parts:
        batch = packed.batch
        scored = np.concatenate(processes.fetch(list(learner)))
        wrong = np.asarray(batch.loss_mask) & (scored != batch.rollout_logprobs)
        for segment in packed.segments:
            if segment.version != version:
                continue
            tokens += int(batch.loss_mask[segment.row, segment.response].sum())
            at = np.flatnonzero(wrong[segment.row, segment.response])
            count += len(at)
            if len(at) and found is None:
                place = segment.row, segment.response.start + int(at[0])
                drawn = groups[segment.group].completions[segment.sample]
                found = {
                    "uid": groups[segment.group].prompt.uid,
                    "sample": segment.sample,
                    "position": int(at[0]),
                    "token": int(batch.tokens[place]),
                    "sampler": float(batch.rollout_logprobs[place]),
                    "learner": float(scored[place]),
                    "sequence": (*drawn.prompt_tokens, *drawn.tokens[: int(at[0]) + 1]),
                }
    return None if found is None else FirstMismatch(tokens=tokens, mismatched=count, **found)
