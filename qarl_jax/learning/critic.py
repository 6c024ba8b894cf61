# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""PPO's critic: a second model of the policy's family that predicts the return before each response token.

    V(s_t) = w . h(s_t) + b        h(s_t): hidden state after the final norm at the position before token t

The body (the model without output head) starts as a copy of the policy's masters, or from another folder. The scalar
head w, b starts at zero: the first advantages are rewards to go, and the first update moves only the head. With `lora`
the body is frozen, and adapters on its linear maps are trained (learning/lora.py). If the policy has adapters too, both
share one frozen base, under the policy's scheme and arithmetic.

One step, as `train.py` runs it; micro-batches are the policy's, with rewards in the field `advantages`:

    judged = critic.judge(micro_batches_of_every_update, per_pass)      # V, GAE, whitening: once, before any update
    for each update:
        fitted = critic.update(micro_batches, judged.targets[i], num_tokens, num_sequences)
        ... the policy's own update, on judged.updates[i]

Decisions, and their reasons:

  * The critic has no low bits, except in a shared base. The policy's forward is quantized because its sampler's is. No
    engine samples the critic, so rounding would only add noise to a regression. It computes in the model's dtype under
    plain arithmetic, whatever engine the policy mirrors; masters, head, GAE and loss are float32.
  * All updates of a step use advantages from the critic at the start of the step. The clipped loss (`loss/value.py`)
    clips around the values of this critic too, as the actor's clip uses `old_logprobs`.
  * Values of a response are computed in the packed row that is trained on. GAE restarts at every segment; a response
    that reached the length limit ends there, with its reward.
  * With advantage.level=turn a step of GAE is a turn (ArCHer's utterance-level critic,
    https://arxiv.org/abs/2402.19446): values are computed and fitted at each turn's first token, from turns' rewards.
  * Sampler corrections weigh the actor's loss alone. No source reweighs the critic.
  * In the first `warmup_steps` the actor is not updated, because an untrained critic would only add noise to it.

Left out: layers shared with the policy, a KL in the reward (the KL term of the loss is independent of the critic), and
writing a critic as a model folder.

Sources: PPO (https://arxiv.org/abs/1707.06347), GAE (https://arxiv.org/abs/1506.02438), verl for the defaults.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from qarl_jax import models, quant
from qarl_jax.learning.lora import Config as LoraConfig
from qarl_jax.learning.state import TrainState, fresh_state
from qarl_jax.learning.trainable import ALL, Trainable, holder, joined
from qarl_jax.loss import Loss, normalized
from qarl_jax.loss.advantages import Gae, gae, moments, over_turns, token_rewards, turn_starts, whiten
from qarl_jax.loss.value import explained_variance
from qarl_jax.metrics import Max, Mean, Metric, merge
from qarl_jax.models import sums as accumulators
from qarl_jax.models.logprobs import preceding, scored_mask
from qarl_jax.models.params import part_of, united
from qarl_jax.optim import build
from qarl_jax.optim.by_stack import Update
from qarl_jax.optim.leafwise import Optimizer
from qarl_jax.runtime import compilation, processes
from qarl_jax.runtime.mesh import batch_sharding, launching, param_shardings
from qarl_jax.typed_config.load import Variants
from qarl_jax.types import LossInputs, TrainBatch, UserError, at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The critic of a run with advantage.name=gae.

    Attributes:
      path: Hugging Face folder of the critic's body, with the policy's vocabulary; null: the policy's masters or base.
      lora: adapters to train on a frozen body; null: the whole body is trained.
      dtype: compute dtype; null: model.dtype.
      clip: bound on a value's change within a step, beyond which its loss has no gradient; null: no clip. 0.5: verl.
      warmup_steps: number of first steps in which only the critic is trained.
      optimizer: the critic's optimizer, by default AdamW at 1e-5, as in verl; Muon updates the head by AdamW too.
    """

    path: str | None = None
    lora: LoraConfig | None = None
    dtype: Literal["bfloat16", "float32"] | None = None
    clip: float | None = 0.5
    warmup_steps: int = 0
    optimizer: Annotated[Any, Variants(build.OPTIMIZERS)] = dataclasses.field(
        default_factory=lambda: build.AdamW(lr=1e-5)
    )

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip must be positive, or null for no clip; got {self.clip}.")
        at_least(self, 0, "warmup_steps")

    @property
    def trainable(self) -> Trainable:
        """The trainable leaves of the body."""
        return ALL if self.lora is None else self.lora.trainable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Targets:
    """A micro-batch's old values and returns, [B, T] float32. The mask, [B, T] bool, marks the tokens that are fitted:
    sampled tokens, or the first token of each turn."""

    values: Any
    returns: Any
    mask: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """Advantages and value targets of a step, from the critic at the start of the step.

    Attributes:
      updates: the micro-batches of every update, with an advantage per token in place of the reward.
      targets: the critic's targets for each of these micro-batches.
      metrics: `critic/explained_variance`; mean and standard deviation of advantages (before whitening) and returns.
    """

    updates: list[list[TrainBatch]]
    targets: list[list[Targets]]
    metrics: dict[str, float]


def body_config(
    config: models.ModelConfig, dtype: Any = None, lora: models.Lora | None = None, *, shared: bool = False
) -> models.ModelConfig:
    """Makes the config of a critic's body: a model's layers and stacks without an output head.

    Args:
      config: config of the policy or of another model. dtype: compute dtype; None: the config's.
      lora: adapters. shared: keep scheme and arithmetic, for a base shared with the policy; else full precision.
    """
    return dataclasses.replace(
        config,
        quant=config.quant if shared else quant.Rules(),
        numerics=config.numerics if shared else quant.PLAIN,
        tie_embeddings=True,  # no head of its own: nothing is predicted over the vocabulary
        compute_dtype=config.compute_dtype if dtype is None else dtype,
        param_dtype="float32",
        splits=tuple(stack.start for stack in config.stacks),
        lora=lora,
    )


def of_policy(
    trainable: Trainable, config: models.ModelConfig, params: nnx.State, frozen: nnx.State | None, mesh: Mesh
) -> tuple[nnx.State, nnx.State]:
    """Makes (trainable masters, frozen entries) of a body that starts as a copy of the policy, without adapters.

    Args:
      config: the body's. params, frozen: the policy's, as `Learner.init` takes them. Leaves frozen in both are shared.
    """
    own, held = (
        part_of(state, lambda path: not re.search(r"^head\.|\.lora_[ab]$", path))
        for state in (params, nnx.State({}) if frozen is None else frozen)
    )
    graphdef = models.split(models.abstract_model(config))[0]
    with launching(mesh):
        copied = holder(trainable, graphdef)(trainable.frozen(own))
    return united(trainable.learned(own), trainable.learned(held)), united(copied, trainable.frozen(held))


def init_params(body: nnx.State, hidden_size: int) -> dict[str, Any]:
    """Makes the critic's params: float32 copies of the body's trainable masters, and a value head of zeros."""
    return {
        "body": jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), body),
        "head": {"weight": jnp.zeros((hidden_size,), jnp.float32), "bias": jnp.zeros((), jnp.float32)},
    }


class Critic:
    """Owns the critic's state and compiled functions.

    Args:
      config: config of the body (`body_config`).
      params: {"body": nnx.State of float32 masters, "head": {"weight": [D], "bias": []} float32} (`init_params`).
      frozen: the body's frozen entries, like `Learner.frozen`; None: the whole body is trainable.
      term: the value loss, from `loss.get_term("value", ...)`.
      advantage: discount, decay, whitening.
      optimizer: optimizer of `params`.
      mesh: device mesh; the body is sharded as the policy is, the head is replicated.
      max_segments: static bound on responses per row; 1: unpacked.
      offload: keep the optimizer state in the host's memory.
      schedule: learning rate as a function of the update count, for the metrics.
    """

    def __init__(
        self,
        config: models.ModelConfig,
        params: Any,
        frozen: Any = None,
        *,
        term: Loss,
        advantage: Gae,
        optimizer: Optimizer,
        mesh: Mesh,
        max_segments: int = 1,
        offload: bool = False,
        schedule: Callable[[Any], Any] | None = None,
    ):
        self.graphdef = models.split(models.abstract_model(config))[0]
        self.term, self.advantage, self.optimizer = term, advantage, optimizer
        self.frozen = nnx.State({}) if frozen is None else frozen
        self.mesh, self.max_segments, self.schedule = mesh, max_segments, schedule
        self._apply = Update(optimizer, self._described, offload=offload)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        rows = batch_sharding(mesh)
        self.places = places = param_shardings(params, mesh)
        self.state = self.init(params)
        self._judge = jax.jit(self._judge_fn, out_shardings=rows)
        self._whiten = jax.jit(whiten, out_shardings=rows)
        self._zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p), out_shardings=places)
        self._accumulate = jax.jit(
            self._accumulate_fn,
            donate_argnums=(0,),
            out_shardings=(places, self.replicated),
            compiler_options=compilation.backward_options(),
        )

    # ---- state ------------------------------------------------------------------------------------------------------

    def init(self, params: Any) -> TrainState:
        """Makes a state of `params` with zero moments, placed on the mesh."""
        return fresh_state(self._apply, params, self.places, self.replicated)

    def entries(self) -> dict[str, Any]:
        """Returns the state as a checkpoint's entry, named "critic"."""
        return {"critic": self.state}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Replaces the state by `entries` that were read from a checkpoint."""
        self.state = saved["critic"]

    # ---- values and advantages --------------------------------------------------------------------------------------

    def _values(self, params: Any, frozen: Any, batch: TrainBatch, sums: Any = None) -> Float[Array, "B T"]:
        model = models.merge(self.graphdef, *joined(params["body"], frozen))
        segment_ids = None if self.max_segments == 1 else batch.segment_ids
        hidden = model.hidden_states(batch.tokens, batch.positions, segment_ids, self.max_segments, sums=sums)
        with jax.named_scope("value_head"):
            # Masked before the product: no gradient of the head may meet what stands in padding.
            states = preceding(hidden, batch.segment_ids).astype(jnp.float32)
            head = params["head"]
            values = jnp.einsum("btd,d->bt", states, head["weight"], precision=jax.lax.Precision.HIGHEST)
            return jnp.where(scored_mask(batch.segment_ids), values + head["bias"], 0.0)

    def _judge_fn(
        self, params: Any, frozen: Any, batch: TrainBatch
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        mask, segment_ids = batch.loss_mask, batch.segment_ids
        by_turn = self.advantage.level == "turn"
        at = turn_starts(mask, segment_ids) if by_turn else mask
        values = jnp.where(at, self._values(params, frozen, batch), 0.0)
        # A turn's reward stands on all of its tokens; a step that is a turn has it where its value is.
        rewards = batch.advantages if by_turn else token_rewards(batch.advantages, mask, segment_ids)
        advantages, returns = gae(rewards, values, at, segment_ids, gamma=self.advantage.gamma, lam=self.advantage.lam)
        return values, over_turns(advantages, at, mask) if by_turn else advantages, returns, at

    def judge(self, updates: Sequence[Sequence[TrainBatch]], per_pass: int) -> Judgement:
        """Computes values, returns and advantages of a step's samples under the critic's present state.

        Args:
          updates: the micro-batches of every update; `advantages` holds each response's reward on its tokens.
          per_pass: number of first updates that hold every response once; metrics and the moments for whitening are
            computed from these.
        """
        with launching(self.mesh):
            judged = [[self._judge(self.state.params, self.frozen, micro) for micro in micros] for micros in updates]
        first = [
            (micro.loss_mask, *found)
            for micros, results in zip(updates[:per_pass], judged[:per_pass], strict=True)
            for micro, found in zip(micros, results, strict=True)
        ]
        host = processes.fetch(first)
        values, advantages, returns = (
            np.concatenate([part[i][part[where]] for part in host]).astype(np.float64)
            for i, where in ((1, 4), (2, 0), (3, 4))
        )
        mean, variance = (processes.put(np.float32(x), self.replicated) for x in moments(advantages))

        def trained_on(micro: TrainBatch, found: tuple[jax.Array, ...]) -> TrainBatch:
            advantage = found[1]
            if self.advantage.whiten:
                with launching(self.mesh):
                    advantage = self._whiten(advantage, micro.loss_mask, mean, variance)
            return dataclasses.replace(micro, advantages=advantage)

        pairs = [list(zip(micros, found, strict=True)) for micros, found in zip(updates, judged, strict=True)]
        return Judgement(
            updates=[[trained_on(*pair) for pair in some] for some in pairs],
            targets=[
                [Targets(values=found[0], returns=found[2], mask=found[3]) for _, found in some] for some in pairs
            ],
            metrics={
                "critic/explained_variance": explained_variance(values, returns),
                **{
                    f"{name}/{kind}": float(reduce(x)) if x.size else 0.0
                    for name, x in (("advantage", advantages), ("return", returns))
                    for kind, reduce in (("mean", np.mean), ("std", np.std))
                },
            },
        )

    # ---- update -----------------------------------------------------------------------------------------------------

    def _accumulate_fn(
        self,
        grads: Any,
        params: Any,
        frozen: Any,
        batch: TrainBatch,
        targets: Targets,
        num_tokens: jax.Array,
        num_sequences: jax.Array,
    ) -> tuple[Any, dict[str, Metric]]:
        sums = accumulators.carried(grads["body"], models.config_of(self.graphdef))
        unread = jnp.zeros_like(targets.values)  # the policy's fields: a value loss looks at none of them

        def objective(params: Any) -> tuple[jax.Array, dict[str, Metric]]:
            inputs = LossInputs(
                logprobs=unread,
                old_logprobs=unread,
                rollout_logprobs=unread,
                advantages=unread,
                loss_mask=batch.loss_mask & targets.mask,
                segment_ids=batch.segment_ids,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                values=self._values(params, frozen, batch, sums),
                old_values=targets.values,
                returns=targets.returns,
                max_segments=self.max_segments,
            )
            mean, metrics = self.term(inputs)
            return normalized(mean, inputs, self.term), metrics | {"critic/loss": mean}

        new, metrics = jax.grad(objective, has_aux=True)(params)
        body = accumulators.total(grads["body"], new["body"], inside=sums is not None)
        return {"body": body, "head": jax.tree.map(jnp.add, grads["head"], new["head"])}, metrics

    def _described(self, stats: dict[str, Any], updates: Any) -> dict[str, Metric]:
        one = jnp.ones((), jnp.float32)
        metrics: dict[str, Metric] = {
            "critic/grad_norm": Mean(stats["grad_norm"], one),
            "critic/nonfinite": Max(jnp.where(stats["finite"], 0.0, 1.0)),
        }
        if self.schedule is not None:
            metrics["critic/lr"] = Mean(jnp.asarray(self.schedule(updates), jnp.float32), one)
        return metrics

    def update(
        self, micros: Sequence[TrainBatch], targets: Sequence[Targets], num_tokens: float, num_sequences: float
    ) -> dict[str, Metric]:
        """Makes one optimizer update on the rows of a policy update. A gradient that is not finite changes nothing.

        Args:
          micros, targets: micro-batches and targets of the update, from `judge`.
          num_tokens, num_sequences: response tokens and non-empty responses in all micro-batches.
        """
        if self.advantage.level == "turn":  # the critic is fitted once a turn
            num_tokens = float(sum(processes.fetch([target.mask.sum() for target in targets])))
        counts = [processes.put(np.float32(x), self.replicated) for x in (num_tokens, num_sequences)]
        with launching(self.mesh):
            total: dict[str, Metric] = {}
            grads = self._zeros(self.state.params)
            for micro, target in zip(micros, targets, strict=True):
                grads, measured = self._accumulate(grads, self.state.params, self.frozen, micro, target, *counts)
                total = merge(total, measured)
            self.state, applied = self._apply(self.state, grads)
        return total | applied
