# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Collects the groups that a step trains on: prompts with their sampled and graded responses.

`Collector.collect(step)` returns all groups of the step's prompts and streams graded groups while the engine decodes
the rest. With `rollout/dynamic_sampling.py` it returns groups of unequal rewards from several batches; with
`rollout/partial_rollouts.py`, the finished groups of more prompts than a step needs. These two do not stream.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from qarl_jax.data import PromptStream
from qarl_jax.data.tokenizer import Tokenizer
from qarl_jax.loop import pipeline, step_metrics
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.rewards import Grader
from qarl_jax.rollout import Request, RolloutEngine, dynamic_sampling, partial_rollouts, requests_for
from qarl_jax.rollout.dynamic_sampling import Collected, Parts
from qarl_jax.run import build
from qarl_jax.run.config import RunConfig
from qarl_jax.types import Completion, Prompt, RolloutGroup


class Collector:
    """Samples and grades the responses of each step.

    Args:
      grader: computes the run's rewards.
      stop: token ids that end a response.
      buffer: responses that an earlier step left unfinished (`rollout.partial`); part of every checkpoint.
      timer: measures seconds of sampling and grading.
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
        self._mean_reward = 0, 0.0  # of the step collected last

    def collect(self, step: int, add: pipeline.Add | None = None) -> Collected:
        """Returns the step's groups. Only `keep` changes the collector, so that a step can be repeated.

        Args:
          add: called with (number of the prompt in the step, graded group) as groups are complete. Not called under
            dynamic sampling or partial rollouts.
        """
        rollout = self._cfg.rollout
        if rollout.partial.is_on:
            collected = self._continued(step)
        elif rollout.dynamic.max_batches > 1:
            collected = dynamic_sampling.collect(
                rollout.dynamic,
                self._stream,
                step,
                functools.partial(self._sampled, step),
                by_turn=self._cfg.is_by_turn,
            )
        else:
            prompts = [self._stream.source.prompt(i) for i in self._stream.indices(step)]
            groups, parts = self._sampled(step, prompts, 0, add)
            collected = Collected(groups=groups, sampled=groups, parts=dict(parts), metrics={})
        self._mean_reward = step, float(step_metrics.graded(collected.sampled).mean())
        return collected

    def _continued(self, step: int) -> Collected:
        rollout = self._cfg.rollout
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
        """Commits the step just collected, after it was trained on: its unfinished responses become the buffer."""
        self._buffer = self._left
        if self._stream.curriculum is not None:
            begun = -(-self._buffer.begun // self._stream.prompts_per_step)
            self._stream.curriculum.tell(*self._mean_reward, begun)

    def state(self) -> dict[str, Any]:
        """Returns the collector's state for a checkpoint."""
        curriculum = self._stream.curriculum
        state = {} if curriculum is None else {"curriculum": curriculum.state()}
        return state | ({"partial": self._buffer.state()} if self._cfg.rollout.partial.is_on else {})

    def _sampled(
        self, step: int, prompts: Sequence[Prompt], batch: int, add: pipeline.Add | None = None
    ) -> pipeline.Graded:
        num_samples, sampling = self._cfg.rollout.num_samples_at(step), self._cfg.rollout.sampling(self._stop, step)
        key = build.seed_of(self._cfg.seed, step, f"rollout/{batch}" if batch else "rollout")
        requests = requests_for(prompts, num_samples=num_samples, sampling=sampling, key=key)
        completions = self._engine.draw(requests, sampling=sampling)
        grade = functools.partial(self._grade, step)
        return pipeline.graded(completions, prompts, num_samples, grade, self._timer, add)

    def _extend(self, step: int, requests: list[Request]) -> list[Completion]:
        sampling = self._cfg.rollout.sampling(self._stop, step)
        chunk = self._cfg.rollout.partial.tokens(sampling.max_response_len)
        with self._timer("rollout"):
            return self._engine.extend(requests, sampling=dataclasses.replace(sampling, max_response_len=chunk))

    def _grade(
        self, step: int, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> tuple[list[RolloutGroup], Parts]:
        with self._timer("reward"):
            limit = self._cfg.rollout.max_response_len_at(step)
            return self._grader.grade(self._tokenizer, prompts, completions, limit)
