# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a step trains on: prompts, their sampled responses, graded.

One interface, `Collector.collect(step)`, whatever stands behind it: every group of the step's prompts, those of several
batches that have a signal (`rollout/dynamic_sampling.py`), or what is finished of more prompts than a step needs
(`rollout/partial_rollouts.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qarl_jax.data import PromptStream
from qarl_jax.data.tokenizer import Tokenizer
from qarl_jax.loop.early_grades import EarlyGrades
from qarl_jax.observe.recorder import PhaseTimer
from qarl_jax.rewards import Grader
from qarl_jax.rollout import Request, RolloutEngine, dynamic_sampling, partial_rollouts
from qarl_jax.rollout.dynamic_sampling import Collected, Parts
from qarl_jax.run import build
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import processes
from qarl_jax.types import Completion, Prompt, RolloutGroup


class Collector:
    """Samples and grades, step by step.

    Args:
      cfg: the run's.
      engine: what samples.
      grader: the run's rewards.
      tokenizer: the policy's.
      stop: token ids that end a response.
      stream: the prompts.
      buffer: responses an earlier step left unfinished, where `rollout.partial` is on: state of the run as much as the
        weights are.
      timer: is told how long sampling and grading take.

    Attributes:
      on_graded: is told of groups (number in the step, and group) that are graded while others are drawn.
    """

    def __init__(
        self,
        cfg: RunConfig,
        engine: RolloutEngine,
        grader: Grader,
        tokenizer: Tokenizer,
        stop: tuple[int, ...],
        stream: PromptStream,
        buffer: partial_rollouts.Buffer,
        timer: PhaseTimer,
    ):
        self._cfg, self._engine, self._grader, self._tokenizer = cfg, engine, grader, tokenizer
        self._stop, self._stream, self._timer = stop, stream, timer
        self._buffer = self._left = buffer
        # Over several processes the first grades for all, which none may do by itself.
        self.on_graded: Callable[[int, RolloutGroup], None] | None = None
        self._grades_early = getattr(engine, "tells_groups", False) and processes.count() == 1
        self._told = 0, 0.0

    def collect(self, step: int) -> Collected:
        """The step's groups. Until `keep`, nothing of the run has changed: a step may be dropped."""
        collected = self._collected(step)
        self._told = step, float(np.mean([group.rewards.mean() for group in collected.sampled]))
        return collected

    def _collected(self, step: int) -> Collected:
        rollout = self._cfg.rollout
        if not rollout.partial.is_on:
            return dynamic_sampling.collect(rollout.dynamic, self._stream, step, functools.partial(self._sample, step))
        collected, self._left = partial_rollouts.collect(
            rollout.partial,
            rollout.dynamic,
            self._stream,
            step,
            self._buffer,
            num_samples=rollout.num_samples_per_prompt,
            max_response_len=rollout.max_response_len_at(step),
            key=lambda begun: build.seed_of(self._cfg.seed, begun, "rollout"),
            extend=functools.partial(self._extend, step),
            grade=functools.partial(self._grade, step),
        )
        return collected

    def keep(self) -> None:
        """The step just collected is trained on: what it left unfinished is the run's from here on."""
        self._buffer = self._left
        if self._stream.curriculum is not None:
            self._stream.curriculum.tell(*self._told)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        curriculum = self._stream.curriculum
        state = {} if curriculum is None else {"curriculum": curriculum.state()}
        return state | ({"partial": self._buffer.state()} if self._cfg.rollout.partial.is_on else {})

    def _sample(self, step: int, prompts: list[Prompt], batch: int) -> tuple[list[RolloutGroup], Parts]:
        limit = self._cfg.rollout.max_response_len_at(step)

        def grade(some: Sequence[Prompt], drawn: Sequence[Sequence[Completion]]) -> tuple[list[RolloutGroup], Parts]:
            with self._timer("reward"):
                return self._grader.grade(self._tokenizer, some, drawn, limit)

        early = EarlyGrades(prompts, grade, self.on_graded)
        told: dict[str, Any] = {"on_group": early.add} if self._grades_early else {}
        with contextlib.closing(early):
            with self._timer("rollout"):
                completions = self._engine.generate(
                    prompts,
                    num_samples=self._cfg.rollout.num_samples_at(step),
                    sampling=self._cfg.rollout.sampling(self._stop, step),
                    key=build.seed_of(self._cfg.seed, step, f"rollout/{batch}" if batch else "rollout"),
                    **told,
                )
            with self._timer("reward"):
                graded = early.finish(completions)
        return graded

    def _extend(self, step: int, requests: list[Request]) -> list[Completion]:
        sampling = self._cfg.rollout.sampling(self._stop, step)
        chunk = self._cfg.rollout.partial.tokens(sampling.max_response_len)
        with self._timer("rollout"):
            return self._engine.extend(requests, sampling=dataclasses.replace(sampling, max_response_len=chunk))

    def _grade(
        self, step: int, prompts: list[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> tuple[list[RolloutGroup], Parts]:
        with self._timer("reward"):
            limit = self._cfg.rollout.max_response_len_at(step)
            return self._grader.grade(self._tokenizer, prompts, completions, limit)
