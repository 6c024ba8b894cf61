# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The `rollout` section of a run's configuration: engine, number and length of responses, and stages."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from qarl_jax.rollout import SamplingConfig, dynamic_sampling, norm_noise
from qarl_jax.rollout.embedded.engine import Config as SamplerConfig
from qarl_jax.rollout.environments import ENVIRONMENTS
from qarl_jax.rollout.environments import Config as Environment
from qarl_jax.rollout.partial_rollouts import Config as PartialConfig
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.typed_config.load import Variants
from qarl_jax.types import UserError, at_least

ENGINE_CONFIGS: dict[str, type] = {"jax": SamplerConfig, "vllm": VllmConfig}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """An entry of `rollout.stages`: in steps before `until`, responses have at most `max_response_len` tokens, and
    prompts `num_samples_per_prompt` responses; 0 keeps the run's value.
    """

    until: int
    max_response_len: int = 0
    num_samples_per_prompt: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "until")
        at_least(self, 0, "max_response_len", "num_samples_per_prompt")
        if not self.max_response_len and not self.num_samples_per_prompt:
            raise UserError("a stage sets max_response_len or num_samples_per_prompt, and this one sets neither.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling of responses: engine, number, length, and optional strategies.

    Attributes:
      engine: jax (embedded, in the trainer's process) or vllm (behind the bridge), with its settings.
      num_samples_per_prompt: responses per prompt: the group that advantages compare.
      max_response_len: most tokens of a response.
      stages: shorter limits or fewer responses for the first steps, in order (DeepScaleR: 8k, then 16k, then 24k).
        After the last stage max_response_len and num_samples_per_prompt apply. Evaluation, and a loss that divides by
        the limit, always use max_response_len.
      temperature: 1 samples the policy itself; the learner divides its logits by it, too. Training has no top-p, whose
        log-probs would differ from the learner's softmax.
      dynamic: DAPO's dynamic sampling; off by default (see `dynamic_sampling.py`).
      partial: APRIL's partial rollouts; off by default (see `partial_rollouts.py`).
      environment: a tool or simulation that answers between the policy's turns; null: a response is one turn.
      norm_noise: noise on the sampler's norm gains (QeRL's AQN); null: none (see `norm_noise.py`).
      router_replay: the learner routes each token to the experts that the engine chose (R3, arXiv 2510.11370); for MoE
        models with vLLM.
    """

    engine: Annotated[Any, Variants(ENGINE_CONFIGS)] = dataclasses.field(default_factory=SamplerConfig)
    num_samples_per_prompt: int = 8
    max_response_len: int = 1024
    stages: tuple[Stage, ...] = ()
    temperature: float = 1.0
    dynamic: dynamic_sampling.Config = dataclasses.field(default_factory=dynamic_sampling.Config)
    partial: PartialConfig = dataclasses.field(default_factory=PartialConfig)
    environment: Annotated[Any, Variants(ENVIRONMENTS)] | None = None
    norm_noise: norm_noise.Config | None = None
    router_replay: bool = False

    def __post_init__(self) -> None:
        if self.environment is not None:
            self._check_environment(self.environment)
        if self.router_replay and self.engine_name != "vllm":
            raise UserError(
                "router_replay=true needs rollout.engine.name=vllm: the embedded sampler routes with the learner's own"
                " arithmetic, and records nothing."
            )
        if self.router_replay and self.partial.is_on:
            raise UserError(
                "router_replay=true and partial rollouts do not go together: a response gone on with is routed anew."
                " Switch one of them off."
            )
        at_least(self, 1, "num_samples_per_prompt")
        self.sampling()
        if not self.temperature > 0:
            raise UserError(
                f"temperature must be positive for training, got {self.temperature}; eval.temperature=0 is greedy."
            )
        last = 0
        for number, stage in enumerate(self.stages):
            if stage.until <= last:
                raise UserError(
                    f"stages.{number}: until={stage.until} does not come after the stage before it, which lasts until"
                    f" step {last}; list the stages in order."
                )
            if stage.max_response_len > self.max_response_len:
                raise UserError(
                    f"stages.{number}: max_response_len={stage.max_response_len} exceeds rollout.max_response_len="
                    f"{self.max_response_len}, for which rows and memory are planned; raise that, or lower the stage's."
                )
            if stage.num_samples_per_prompt > self.num_samples_per_prompt or stage.num_samples_per_prompt == 1:
                raise UserError(
                    f"stages.{number}: num_samples_per_prompt={stage.num_samples_per_prompt} must lie between 2 and"
                    f" rollout.num_samples_per_prompt={self.num_samples_per_prompt}, for which memory is planned."
                )
            if stage.num_samples_per_prompt and self.partial.is_on:
                raise UserError(
                    f"stages.{number}: num_samples_per_prompt and partial rollouts do not go together: groups of"
                    " another size would be in hand when it changes. Switch one of them off."
                )
            last = stage.until
        if self.partial.chunk >= self.max_response_len:
            raise UserError(
                f"partial.chunk={self.partial.chunk} is not below max_response_len={self.max_response_len}: every"
                " response would be finished in its step. Lower it."
            )

    def _check_environment(self, environment: Environment) -> None:
        for other, is_on in (("partial rollouts", self.partial.is_on), ("router_replay=true", self.router_replay)):
            if is_on:
                raise UserError(f"environment and {other} do not go together: switch one of them off.")
        if environment.max_turn_len > self.max_response_len:
            raise UserError(
                f"environment.max_turn_len={environment.max_turn_len} exceeds max_response_len="
                f"{self.max_response_len}, which holds all turns of a response and what is observed between them."
            )

    @property
    def engine_name(self) -> str:
        """Returns the engine's key in `rollout.ENGINES`."""
        return next(name for name, cls in ENGINE_CONFIGS.items() if type(self.engine) is cls)

    def max_response_len_at(self, step: int) -> int:
        """Returns the most tokens of a response at a step, by `stages`."""
        stage = self._stage(step)
        return (stage and stage.max_response_len) or self.max_response_len

    def num_samples_at(self, step: int) -> int:
        """Returns the responses per prompt at a step, by `stages`."""
        stage = self._stage(step)
        return (stage and stage.num_samples_per_prompt) or self.num_samples_per_prompt

    def _stage(self, step: int) -> Stage | None:
        return next((stage for stage in self.stages if step < stage.until), None)

    def sampling(self, stop_token_ids: tuple[int, ...] = (), step: int | None = None) -> SamplingConfig:
        """Makes the sampling settings of a step (None: after the last stage)."""
        return SamplingConfig(
            max_response_len=self.max_response_len if step is None else self.max_response_len_at(step),
            temperature=self.temperature,
            stop_token_ids=stop_token_ids,
        )
