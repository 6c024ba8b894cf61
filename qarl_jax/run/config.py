# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Loads the configuration of a run: a YAML file and dotted overrides become one frozen `RunConfig`.

    cfg = config.load("configs/quickstart.yaml", ["train.steps=10", "loss.clip_high=4e-3"])
    print(description.describe(cfg))

Each part defines its Config beside its code. This file combines them and checks options of different parts against each
other. `typed_config/load.py` parses types, variants and overrides, and reports errors.

Batches are counted in PROMPTS, everywhere:

    train.prompts_per_step       prompts sampled per step, each rollout.num_samples_per_prompt times
    train.prompts_per_update     prompts of one optimizer update (mini-batch); a step makes step/update updates
    train.micro_batch_rows       rows [row_len] of one forward/backward pass; only memory and speed depend on it

Everything else is derived, and `description.describe` prints it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from qarl_jax import quant
from qarl_jax.data import Config as DataConfig
from qarl_jax.data.sources import mix
from qarl_jax.data.sources import reasoning_gym as gym_source
from qarl_jax.data.sources.hints import Hint
from qarl_jax.learning.critic import Config as CriticConfig
from qarl_jax.learning.lora import Config as LoraConfig
from qarl_jax.learning.trainable import ALL, Trainable
from qarl_jax.loss import LOSSES, ppo, tbpo
from qarl_jax.loss.advantages import ADVANTAGES, Gae, Grpo, Nothing
from qarl_jax.observe.recorder import Config as LogConfig
from qarl_jax.optim.build import OPTIMIZERS, Muon
from qarl_jax.quant.config import Config as QuantConfig
from qarl_jax.rewards import RewardConfig, environment, exact, overlong, total
from qarl_jax.rewards import reasoning_gym as gym_reward
from qarl_jax.rollout.asynchronous import Config as AsynchronousConfig
from qarl_jax.rollout.embedded.engine import Config as SamplerConfig
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run import shipped
from qarl_jax.run.checkpoint import Config as CheckpointConfig
from qarl_jax.run.rollout_config import RolloutConfig
from qarl_jax.runtime.mesh import Config as MeshConfig
from qarl_jax.runtime.processes import Config as DistributedConfig
from qarl_jax.typed_config import load as schema
from qarl_jax.typed_config.load import Variants
from qarl_jax.types import UserError, at_least, check_seed

LOSS_NAMES: dict[str, type] = {loss.name: loss for loss in LOSSES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The policy's model: folder, dtypes, recomputation and attention kernel.

    Attributes:
      path: Hugging Face model folder (config.json, safetensors, tokenizer).
      init: pretrained (the folder's weights) or random (drawn on the devices from `seed`; the folder then needs none).
      dtype: compute dtype of the forward and backward.
      param_dtype: dtype of the master weights. At lr 1e-6 a bfloat16 master hardly ever moves, unless it is rounded
        stochastically (`optimizer.master_rounding`); keep float32 where it fits.
      remat: parts of a layer that the backward recomputes, from least memory to least work: full (every layer),
        attention (all but softmax attention), mixer (the MLPs alone), dots (all but matrix products and attention),
        none. auto takes the last one before none whose memory plan fits the device.
      attention: implementation: xla (anywhere), cudnn (GPU), splash (TPU), flash3 (Hopper, bfloat16: sums in the order
        of vLLM's kernel; elsewhere xla runs instead); auto picks by device and quant.engine.
    """

    path: str
    init: Literal["pretrained", "random"] = "pretrained"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["auto", "full", "attention", "mixer", "dots", "none"] = "full"
    attention: Literal["auto", "xla", "cudnn", "splash", "flash3"] = "auto"

    @property
    def remat_or_full(self) -> str:
        """Returns `remat`; full for auto, unless a memory plan has resolved it (`memory.choose.settle`)."""
        return "full" if self.remat == "auto" else self.remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLConfig:
    """A KL term against a reference policy (see `loss/kl.py`).

    Attributes:
      coef: weight of the KL term; 0: none, as in QaRL. QuRL's DeepScaleR runs: 1e-3.
      reference: start (the initial policy under the learner's scheme), masters (the policy's masters in bf16:
        self-distillation), or a model folder, in bf16 (on-policy distillation). See `run/reference.py`.
      kind: estimator: k2, k3, or k3+ (k3's value, k2's gradient).
      aggregation: token-mean, seq-mean-token-mean or seq-mean-token-sum.
    """

    coef: float = 0.0
    reference: str = "start"
    kind: Literal["k2", "k3", "k3+"] = "k3"
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise UserError(f"coef must not be negative, got {self.coef}; 0 turns the KL term off.")
        if not self.reference:
            raise UserError("reference is empty: give start, masters, or a model folder.")
        if self.reference != "start" and not self.coef:
            raise UserError(f"reference={self.reference} has no effect where coef is 0; set coef, for example 0.1.")

    @property
    def is_folder(self) -> bool:
        """Tells whether the reference is another model, named by its folder."""
        return self.reference not in ("start", "masters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop: batch sizes, packing, and settings of the updates.

    Attributes:
      steps: steps of the run; each samples, updates and publishes once.
      prompts_per_step: prompts sampled per step.
      prompts_per_update: prompts per optimizer update; 0: all of the step in one update.
      update_epochs: passes over a step's samples.
      micro_batch_rows: rows per forward/backward pass, over all devices; auto: as many as the memory plan finds
        cheapest, and without a plan 8, or the next multiple of mesh.data x mesh.fsdp.
      row_len: tokens per row; 0: data.max_prompt_len + rollout.max_response_len (in a rollout stage, the stage's
        limit).
      max_segments: most responses packed into a row; 1: no packing.
      logprob_chunk: tokens per chunk of the fused output head.
      grad_dtype: dtype of gradients and of their sum over micro-batches; bfloat16 halves them (see `learner.Options`);
        auto takes it where a run does not fit otherwise.
      entropy_coef: weight of an entropy bonus.
      proximal: source of the proximal policy's log-probs if a step has several updates: learner (a pass before the
        first update), sampler, or auto (sampler if it is aligned with the learner, else learner). The sampler's
        log-probs are checked, and after a mismatched token the learner makes its pass again (see `loop/proximal.py`).
      mask_truncated: leave unfinished responses out of the loss (DAPO's overlong filtering).
      widths: bit widths trained together, as slices of one 8-bit grid ([8, 4, 2]); they must include the width of
        `quant.forward`. The loss is the mean over the widths, and each has its own proximal policy. Samples, the KL
        term and diagnostics use `quant.forward`. Empty: the width of `quant.forward` alone.
      asynchronous: sampling of later steps while the learner updates; off by default.
      profile_steps: steps during which a JAX profile is written.
      compile_cache: folder for compiled programs; auto: ~/.cache/qarl_jax/xla on an accelerator; off: none.
    """

    steps: int = 100
    prompts_per_step: int = 32
    prompts_per_update: int = 0
    update_epochs: int = 1
    micro_batch_rows: int | Literal["auto"] = "auto"
    row_len: int = 0
    max_segments: int = 16
    logprob_chunk: int = 2048
    grad_dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    entropy_coef: float = 0.0
    proximal: Literal["learner", "sampler", "auto"] = "auto"
    mask_truncated: bool = False
    widths: tuple[int, ...] = ()
    asynchronous: AsynchronousConfig = dataclasses.field(default_factory=AsynchronousConfig)
    profile_steps: tuple[int, ...] = ()
    compile_cache: str = "auto"

    def __post_init__(self) -> None:
        if not self.compile_cache:
            raise UserError("compile_cache is empty: give auto, off, or a folder.")
        at_least(self, 1, "steps", "prompts_per_step", "update_epochs")
        at_least(self, 1, "max_segments", "logprob_chunk")
        if self.micro_batch_rows != "auto":
            at_least(self, 1, "micro_batch_rows")
        at_least(self, 0, "prompts_per_update", "row_len")
        if self.prompts_per_update > self.prompts_per_step:
            raise UserError(
                f"prompts_per_update={self.prompts_per_update} exceeds prompts_per_step={self.prompts_per_step}: an"
                " update cannot use more prompts than a step samples. Lower it, or set 0 for one update per step."
            )
        if self.prompts_per_step % self.mini_batch_prompts:
            raise UserError(
                f"prompts_per_step={self.prompts_per_step} is not a multiple of prompts_per_update="
                f"{self.prompts_per_update}; a step is split into equal updates."
            )

    @property
    def mini_batch_prompts(self) -> int:
        """Returns the prompts per optimizer update; resolves 0."""
        return self.prompts_per_update or self.prompts_per_step

    @property
    def grad_dtype_or_float32(self) -> Literal["float32", "bfloat16"]:
        """Returns `grad_dtype`; float32 for auto, unless a memory plan has resolved it."""
        return "float32" if self.grad_dtype == "auto" else self.grad_dtype

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates per step."""
        return self.prompts_per_step // self.mini_batch_prompts * self.update_epochs

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.updates_per_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation during training.

    Attributes:
      every: steps between evaluations; 0: none in between.
      at_start, at_end: evaluate before the first and after the last step.
      num_prompts: number of prompts, from the start of the held-out split; 0: all.
      num_samples: responses per prompt.
      temperature: 0 is greedy.
      top_p: tokens outside the smallest set of this probability are masked; 1: off.
      max_response_len: 0: rollout.max_response_len.
      data: another data set to evaluate on, all of it; null: the held-out split of `data`.
      hint: a hint added to each question, independent of `data.hint` (`evaluate --view`); null: none.
      widths: further bit widths to evaluate, as slices of the policy's 8-bit grid ([8, 4, 2]); vLLM needs
        quant.forward=w8a16_asym. Metrics of another width than the run's begin with eval_w8, eval_w4 or eval_w2.
    """

    every: int = 0
    at_start: bool = True
    at_end: bool = True
    num_prompts: int = 128
    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_response_len: int = 0
    data: DataConfig | None = None
    hint: Hint | None = None
    widths: tuple[int, ...] = ()

    def words(self, prompts: int | None = None) -> str:
        """Describes how much is evaluated, and when. prompts: the number of prompts that exist; None: unknown."""
        when = [f"every {self.every} steps"] * bool(self.every) + ["before"] * self.at_start + ["after"] * self.at_end
        if not when:
            return "none"
        count = f"{self.num_prompts or 'all'} prompts" if prompts is None else f"{prompts} prompt{'s' * (prompts > 1)}"
        fewer = f" (of {self.num_prompts} asked for)" if prompts is not None and prompts < self.num_prompts else ""
        return f"{count}{fewer} x {self.num_samples} samples, {', '.join(when)}"

    def __post_init__(self) -> None:
        at_least(self, 0, "every", "num_prompts", "max_response_len")
        at_least(self, 1, "num_samples")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}; 1 turns it off.")
        if self.temperature < 0:
            raise UserError(f"temperature must not be negative, got {self.temperature}; 0 is greedy.")
        if self.temperature == 0 and self.num_samples > 1:
            raise UserError(
                f"num_samples={self.num_samples}: greedy responses to a prompt are all the same; raise temperature."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run. `load` builds it; the run's folder gets a resolved copy.

    Attributes:
      run_dir: folder that the run writes to; empty: runs/<name of the config file>.
      seed: seed of all random numbers: order of prompts, sampling, shuffles.
      lora: adapters that learn on a frozen policy; null: all of the policy learns.
      advantage: how rewards become advantages: grpo, drgrpo (relative to the group), gae (with a critic), or none.
      critic: PPO's critic, which advantage.name=gae needs; null: none.
    """

    model: ModelOptions
    data: DataConfig
    run_dir: str = ""
    seed: int = 0
    quant: QuantConfig = dataclasses.field(default_factory=QuantConfig)
    lora: LoraConfig | None = None
    reward: RewardConfig = dataclasses.field(default_factory=exact.Config)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    advantage: Annotated[Any, Variants(ADVANTAGES)] = dataclasses.field(default_factory=Grpo)
    critic: CriticConfig | None = None
    loss: Annotated[Any, Variants(LOSS_NAMES)] = dataclasses.field(default_factory=tbpo.Config)
    kl: KLConfig = dataclasses.field(default_factory=KLConfig)
    optimizer: Annotated[Any, Variants(OPTIMIZERS)] = dataclasses.field(default_factory=Muon)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        longest = self.data.max_prompt_len + self.rollout.max_response_len
        if 0 < self.train.row_len < longest:
            raise UserError(
                f"train.row_len={self.train.row_len} is shorter than data.max_prompt_len={self.data.max_prompt_len} +"
                f" rollout.max_response_len={self.rollout.max_response_len} = {longest}, and a response is never split"
                " over rows. Raise row_len (0: exactly that) or lower one of the two."
            )
        self.optimizer.check_masters("optimizer", self.model.param_dtype, "model.param_dtype=bfloat16")
        if self.critic is not None:
            self.critic.optimizer.check_masters("critic.optimizer")
        self._check_widths()
        self._check_critic()
        self._check_reference()
        if self.lora is not None:
            self.lora.check(self.quant, self.critic, self.rollout.engine)
        if self.rollout.norm_noise is not None:
            self.rollout.norm_noise.check(self.loss)
        if self.loss.on_policy and self.train.updates_per_step > 1:
            raise UserError(
                f"loss.on_policy=true is for one update per step, and a step has {self.train.updates_per_step}: set"
                f" train.prompts_per_update={self.train.prompts_per_step} and train.update_epochs=1, or"
                " loss.on_policy=false."
            )
        if self.rollout.num_samples_per_prompt < 2:
            if self.critic is None and not isinstance(self.advantage, Nothing):
                raise UserError(
                    f"rollout.num_samples_per_prompt=1: advantage.name={self.advantage.name} compares the responses to"
                    " a prompt, and a single response always gets advantage 0. Use at least 2."
                )
            if self.rollout.dynamic.max_batches > 1:
                raise UserError(
                    f"rollout.dynamic.max_batches={self.rollout.dynamic.max_batches} keeps groups whose responses"
                    " differ, and with rollout.num_samples_per_prompt=1 there are none; set one of the two otherwise."
                )
        shards = self.mesh.data * self.mesh.fsdp
        if shards > 0 and self.micro_batch_rows % shards:
            raise UserError(
                f"train.micro_batch_rows={self.micro_batch_rows} is not a multiple of mesh.data x mesh.fsdp ="
                f" {shards}, over which the rows are split",
                f"set it to {-(-self.micro_batch_rows // shards) * shards}, or to auto.",
            )
        engine = self.rollout.engine
        if isinstance(engine, VllmConfig) and self.distributed.is_on:
            engine.check_hosts()
        if isinstance(engine, VllmConfig) and 0 < engine.max_model_len < longest:
            raise UserError(
                f"rollout.engine.max_model_len={engine.max_model_len} is below data.max_prompt_len +"
                f" rollout.max_response_len = {longest}; raise it (0: what the model allows)."
            )
        if self.train.asynchronous.is_on:
            self._check_asynchronous()
        if self.is_by_turn and self.rollout.environment is None:
            raise UserError(
                "advantage.level=turn tells turns apart, and without rollout.environment a response has one: name an"
                " environment, or leave advantage.level out."
            )
        if isinstance(self.reward, total.BySource):
            parts = self.data.source.parts if isinstance(self.data.source, mix.Config) else {}
            if set(parts) != set(self.reward.rewards):
                raise UserError(
                    f"reward.name=by_source has rewards for {', '.join(self.reward.rewards)}, and the parts of"
                    f" data.source are {', '.join(parts) or 'none (it is no mix)'}: name the same."
                )
        for term in self.reward_terms:
            self._check_reward(term)

    @property
    def numerics(self) -> quant.Numerics:
        """The learner's arithmetic: `quant.engine`, with auto resolved. With vLLM, auto asks JAX for its backend.

        With the embedded sampler, auto is "plain": the sampler runs the learner's functions, so both agree under any
        profile.
        """
        embedded = isinstance(self.rollout.engine, SamplerConfig)
        found = quant.resolve("plain" if embedded and self.quant.engine == "auto" else self.quant.engine)
        size = getattr(self.rollout.engine, "tensor_parallel_size", 1)
        return found if found.profile == "plain" else dataclasses.replace(found, shards=size)

    @property
    def trainable(self) -> Trainable:
        """The leaves of the policy that learn."""
        return ALL if self.lora is None else self.lora.trainable

    def _check_asynchronous(self) -> None:
        ahead = f"train.asynchronous.max_staleness={self.train.asynchronous.max_staleness}"
        if self.rollout.partial.is_on:
            raise UserError(
                f"{ahead} and rollout.partial do not go together: both sample ahead of the step that trains. Switch one"
                " of them off (train.asynchronous.chunk interrupts sequences for a new version)."
            )
        if self.distributed.is_on:
            raise UserError(f"{ahead}: a run of several processes samples in step with its learner; set it to 0.")
        if self.rollout.router_replay and self.train.asynchronous.chunk:
            raise UserError(f"{ahead}: with rollout.router_replay=true a sequence is not interrupted; set chunk=0.")

    @property
    def is_lockstep(self) -> bool:
        """Tells whether new versions come in after counted batches, so that the run does not depend on the clock."""
        wanted = self.train.asynchronous.lockstep
        embedded = isinstance(self.rollout.engine, SamplerConfig) and not self.train.asynchronous.chunk
        return wanted == "on" or (wanted == "auto" and embedded)

    @property
    def is_by_turn(self) -> bool:
        """Tells whether each turn of a response has an advantage of its own."""
        return getattr(self.advantage, "level", "response") == "turn"

    def _check_reference(self) -> None:
        if isinstance(self.advantage, Nothing) and not self.kl.coef:
            raise UserError(
                "advantage.name=none leaves the KL term alone to learn from, and kl.coef is 0; set kl.coef=1, and"
                " kl.reference."
            )
        if self.kl.coef and self.kl.reference == "masters":
            if self.lora is not None:
                raise UserError(
                    "kl.reference=masters compares with the masters in bf16, and the base under lora has none; set"
                    " lora=null, or kl.reference to a model folder."
                )
            if self.quant.forward == "bf16" and not self.quant.rules:
                raise UserError(
                    "kl.reference=masters is the learner itself under quant.forward=bf16: its KL is 0. Set a low-bit"
                    " quant.forward, or another reference."
                )

    @property
    def other_widths(self) -> dict[str, tuple[int, ...]]:
        """Returns `train.widths` and `eval.widths`, by section, without the width of `quant.forward`."""
        own = getattr(quant.parse_scheme(self.quant.forward, self.quant.group_size), "bits", 0)
        asked = {"train": self.train.widths, "eval": self.eval.widths}
        return {section: tuple(bits for bits in widths if bits != own) for section, widths in asked.items()}

    def _check_widths(self) -> None:
        asked, own = (
            (*self.train.widths, *self.eval.widths),
            quant.parse_scheme(self.quant.forward, self.quant.group_size),
        )
        if not asked:
            return
        if own is None:
            raise UserError("train.widths and eval.widths are of a low-bit policy: set quant.forward=w2a16_midpoint.")
        self._check_slices("train", self.train.widths)
        self._check_slices("eval", self.eval.widths)
        if self.train.widths and self.other_widths["train"] == self.train.widths:
            raise UserError(f"train.widths={list(self.train.widths)} leaves out that of quant.forward={own}: add it.")
        if len(set(self.train.widths)) < len(self.train.widths) or len(set(self.eval.widths)) < len(self.eval.widths):
            raise UserError("a width is named twice in train.widths or eval.widths: name it once.")
        if self.lora is not None or self.quant.rollout_scheme != self.quant.forward:
            raise UserError(
                "train.widths and eval.widths take neither lora nor another quant.rollout: leave those out."
            )
        in_vllm = self.eval.widths and isinstance(self.rollout.engine, VllmConfig)
        if in_vllm and (self.quant.rules or quant.at_width(own, 8) != own):
            raise UserError(
                "eval.widths publishes one policy at several widths, and a vLLM has no room for more bits than it was"
                " started with: set quant.forward=w8a16_asym without quant.rules, sample with rollout.engine.name=jax,"
                " or leave eval.widths out and `export --bits` a checkpoint."
            )

    def _check_slices(self, section: str, widths: Sequence[int]) -> None:
        """Refuses a scheme of `quant` that has no slice of one of the widths."""
        named = {"quant.forward": {"match": "", "scheme": self.quant.forward}}
        named |= {f"quant.rules[{i}]": dataclasses.asdict(rule) for i, rule in enumerate(self.quant.rules)}
        for (name, rule), bits in itertools.product(named.items(), widths):
            try:
                quant.Rules.parse([rule], self.quant.group_size).at_width(bits)
            except UserError as error:
                raise UserError(f"{section}.widths={list(widths)}, {name}: {error}") from None

    def _check_critic(self) -> None:
        wanted, name = isinstance(self.advantage, Gae), self.loss.name
        if wanted and self.critic is None:
            raise UserError("advantage.name=gae is relative to a critic, and the run has none: add `critic: {}`.")
        if self.critic is not None and not wanted:
            raise UserError(
                f"critic is set, but advantage.name={self.advantage.name} does not ask it; set advantage.name=gae, or"
                " critic=null."
            )
        if isinstance(self.loss, ppo.Config) and not wanted:
            raise UserError(
                "loss.name=ppo is the actor of a critic: set advantage.name=gae and `critic: {}`, or take"
                " loss.name=grpo, the same clip on advantages relative to a group."
            )
        if isinstance(self.loss, tbpo.Config) and (wanted or self.is_by_turn):
            given = (
                "advantage.name=gae gives one to every token" if wanted else "advantage.level=turn one to every turn"
            )
            raise UserError(
                f"loss.name={name} weighs a response by a single advantage, but {given}; use"
                f" loss.name={'ppo' if wanted else 'grpo'}."
            )
        if self.critic is not None and self.critic.warmup_steps >= self.train.steps:
            raise UserError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves none of train.steps={self.train.steps} to the"
                " policy; lower it."
            )

    def _check_reward(self, reward: Any) -> None:
        source = self.data.source
        if isinstance(source, mix.Config) and isinstance(self.reward, total.BySource):
            source = next(source.parts[name] for name, one in self.reward.rewards.items() if one is reward)
        if isinstance(reward, gym_reward.Config) and not isinstance(source, gym_source.Config):
            raise UserError(
                "reward.name=reasoning_gym asks the task's own scorer, but data.source is not reasoning_gym; use"
                " reward.name=exact or math_verify."
            )
        if isinstance(reward, environment.Config) and self.rollout.environment is None:
            raise UserError(
                "reward.name=environment adds up what an environment gives: name one in rollout.environment."
            )
        if isinstance(reward, overlong.Config):
            limits = (stage.max_response_len for stage in self.rollout.stages if stage.max_response_len)
            shortest = min(limits, default=None)
            limit = reward.max_len or shortest or self.rollout.max_response_len
            if reward.buffer_len > limit:
                place = "max_len" if reward.max_len else "rollout.stages" if shortest else "rollout.max_response_len"
                raise UserError(
                    f"reward overlong: buffer_len={reward.buffer_len} exceeds the limit of {limit} tokens ({place});"
                    " lower it."
                )

    @property
    def reward_terms(self) -> tuple[Any, ...]:
        """Lists the rewards: the terms of a sum, the parts of by_source, or the single one."""
        if isinstance(self.reward, total.Config):
            return tuple(term.reward for term in self.reward.terms)
        if isinstance(self.reward, total.BySource):
            return tuple(self.reward.rewards.values())
        return (self.reward,)

    @property
    def policy_updates(self) -> int:
        """Returns the number of the policy's optimizer updates in the run; the critic's warm-up steps have none."""
        waits = 0 if self.critic is None else self.critic.warmup_steps
        return (self.train.steps - waits) * self.train.updates_per_step

    @property
    def micro_batch_rows(self) -> int:
        """Returns `train.micro_batch_rows`; for auto, unless a memory plan has resolved it, 8 or the next multiple of
        the devices that share the rows."""
        if self.train.micro_batch_rows != "auto":
            return self.train.micro_batch_rows
        shards = max(1, self.mesh.data * self.mesh.fsdp)
        return -(-8 // shards) * shards

    @property
    def micro_batches_per_update(self) -> tuple[int, int]:
        """Returns the fewest and the most micro-batches of an update: with full rows, and with one response per row."""
        responses = self.train.mini_batch_prompts * self.rollout.num_samples_per_prompt
        most = -(-responses // self.micro_batch_rows)
        return -(-responses // (self.micro_batch_rows * self.train.max_segments)), most

    @property
    def one_program(self) -> bool:
        """Tells whether gradient and optimizer of every update are one compiled program."""
        return self.micro_batches_per_update[1] == 1 and not self.train.widths

    @property
    def row_len(self) -> int:
        """Returns the tokens per training row; the longest, if stages have rows of different lengths."""
        return self.train.row_len or self.data.prompt_limit + self.rollout.max_response_len

    def row_len_at(self, step: int) -> int:
        """Returns the tokens per training row at a step. The learner compiles once for each different value."""
        return self.train.row_len or self.data.prompt_limit + self.rollout.max_response_len_at(step)


def load(file: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the configuration of a run. A config without run_dir gets runs/STEM, with the stem of the file's name.

    Args:
      file: YAML file, a folder with a config.yaml, or a shipped config's name; None: defaults and overrides alone.
      overrides: "section.field=value" strings; "arm=NAME" selects a run from the file's tables. Its folder is
        run_dir/NAME, unless an override sets run_dir.

    Raises:
      UserError: a mistake in the configuration; the message names its place and what would be right.
    """
    cfg = schema.load(RunConfig, None if file is None else shipped.config_file(file), overrides)
    cfg = replaced(cfg, {"model.path": shipped.path(cfg.model.path)})
    if not cfg.run_dir:
        stem = os.path.splitext(os.path.basename(os.fspath(file)))[0] if file is not None else "default"
        cfg = dataclasses.replace(cfg, run_dir=os.path.join("runs", stem))
    if (arm := schema.arm_of(overrides)) and not any(o.startswith("run_dir=") for o in overrides):
        cfg = dataclasses.replace(cfg, run_dir=os.path.join(cfg.run_dir, arm))
    return cfg


def replaced(cfg: Any, changes: Mapping[str, Any]) -> Any:
    """Replaces dotted fields of a nested frozen dataclass: {"model.remat": "full"}."""
    if not changes:
        return cfg
    sections: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        sections.setdefault(head, {})[rest] = value  # all of a section at once: each replacement checks the values anew
    made = {head: inner.pop("") if "" in inner else getattr(cfg, head) for head, inner in sections.items()}
    return dataclasses.replace(cfg, **{head: replaced(made[head], inner) for head, inner in sections.items()})


def on_a_gpu(cfg: RunConfig) -> RunConfig:
    """Resolves `quant.engine=auto` as on a GPU, without asking JAX whether it runs on one."""
    if cfg.quant.engine != "auto" or not isinstance(cfg.rollout.engine, VllmConfig):
        return cfg
    return replaced(cfg, {"quant.engine": "cuda"})


def from_dict(tree: dict[str, Any], source: str = "config", overrides: Sequence[str] = ()) -> RunConfig:
    """Builds a RunConfig from plain values (a notebook's dict, a dumped config). Raises `UserError` as `load` does."""
    layer = schema.Layer(tree, {(): source}, source)
    return schema.build(RunConfig, schema.apply_overrides(RunConfig, layer, overrides))


to_dict = schema.to_dict
to_yaml = schema.to_yaml
