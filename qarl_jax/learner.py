# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The learner: high-precision masters, a low-bit forward, one optimizer update at a time. No input or output here.

One update, as `train.py` drives it:

    qweights = learner.quantize(state.params)                   # once per update, shared by everything below
    grads = learner.zero_grads(state)
    for micro in micro_batches:
        grads, metrics = learner.accumulate_grads(grads, state.params, qweights, micro, old, num_tokens, num_sequences)
    state, metrics = learner.apply_update(state, grads)

The forward reads only the QTensors (and the masters of what is not quantized: norms, embeddings, lm_head); the
gradient reaches the masters through the straight-through estimator in `quant.dot` (QaRL, arXiv 2604.07853, sec. 3.1).
Denominators are those of the whole optimizer mini-batch, so micro-batches, packing and devices sum to the full batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qarl_jax import error_tokens, models, sharding, trace, uaq
from qarl_jax import optimizer as optimizers
from qarl_jax.logprobs import token_logprobs
from qarl_jax.loss import Loss, Objective, diagnostics, normalized
from qarl_jax.metrics import Counts, Max, Mean, Metric, Rows, masked_mean
from qarl_jax.quant import QTensor
from qarl_jax.types import LossInputs, TrainBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything an optimizer update reads and writes.

    Attributes:
      params: nnx.State of master weights (float32 by default).
      opt_state: optax state.
      updates: int32 scalar, optimizer updates applied so far.
    """

    params: Any
    opt_state: Any
    updates: Any

    def entries(self) -> dict[str, Any]:
        """The state as a checkpoint's named entries, so that the params can be read alone."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What of the run's configuration changes the compiled step.

    Attributes:
      temperature: sampling temperature; the learner divides its logits by the same number (algorithms: ls, lo and lp
        are log-probabilities of one distribution).
      logprob_chunk: tokens per chunk of the fused head (see `logprobs.py`).
      max_segments: static bound on responses per packed row.
      entropy_coef: weight of the entropy bonus (0: entropy is only a metric).
      kl_coef: weight of the KL to the reference policy (0: none, and no reference is needed).
      kl: that term, from `loss.get_term`.
      error_prob: response tokens below this probability are counted as error tokens (0: none are).
      histograms: count log-ratios per bin, by the sign of the advantage.
      token_logprobs: return the log-probs a gradient was taken at, as `trace.LOGPROBS` among the metrics.
    """

    temperature: float = 1.0
    logprob_chunk: int = 2048
    max_segments: int = 1
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl: Loss | None = None
    error_prob: float = 0.0
    histograms: bool = False
    token_logprobs: bool = False


@jax.jit
def code_flips(before: Any, after: Any) -> Mean:
    """Share of integer (or fp8) codes that differ between two trees of QTensors of one scheme.

    QuRL's alarm for a policy that learns too little to change a quantized weight.
    """

    def is_qtensor(x: Any) -> bool:
        return isinstance(x, QTensor)

    changed, count = jnp.zeros((), jnp.float32), 0
    pairs = zip(jax.tree.leaves(before, is_leaf=is_qtensor), jax.tree.leaves(after, is_leaf=is_qtensor), strict=True)
    for old, new in pairs:
        if old.qvalue.dtype == jnp.int32:  # eight 4-bit codes to a word
            bits = jax.lax.bitwise_xor(old.qvalue, new.qvalue)
            nibbles = [jax.lax.shift_right_logical(bits, jnp.full_like(bits, 4 * i)) & 15 for i in range(8)]
            changed += sum((nibble != 0).astype(jnp.float32).sum() for nibble in nibbles)
            count += 8 * old.qvalue.size
        else:
            codes = [jax.lax.bitcast_convert_type(x.qvalue, jnp.uint8) for x in (old, new)]
            changed += (codes[0] != codes[1]).astype(jnp.float32).sum()
            count += old.qvalue.size
    return Mean(changed, jnp.float32(count))


class Learner:
    """Owns the compiled functions of one run; every array stays an argument.

    Args:
      graphdef: structure of the model (`models.split`); its config names the forward scheme.
      loss_fn: `LossInputs -> (Mean, metrics)`, from `qarl_jax.loss.get_loss`.
      optimizer: optax transformation over the `params` state.
      mesh: device mesh (`sharding.make_mesh()`: one device).
      options: static settings of the step.
      schedule: learning rate as a function of the update count, for the metrics.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        *,
        loss_fn: Objective,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        options: Options = Options(),
        schedule: Callable[[Any], Any] | None = None,
    ):
        self.graphdef, self.config = graphdef, models.config_of(graphdef)
        self.loss_fn, self.optimizer, self.options = loss_fn, optimizer, options
        self.mesh, self.schedule = mesh, schedule
        abstract = models.split(models.abstract_model(self.config))[1]
        self.param_shardings = sharding.param_shardings(abstract, mesh)
        self.batch_sharding = sharding.batch_sharding(mesh)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self._quantize = self.quantizer(graphdef)
        self._zero_grads = jax.jit(self._zeros, out_shardings=self.param_shardings)
        self._score = jax.jit(self._logprobs)
        self._accumulate = jax.jit(
            self._accumulate_fn, donate_argnums=(0,), out_shardings=(self.param_shardings, self.replicated)
        )
        self._apply = jax.jit(self._apply_fn, donate_argnums=(0,))

    # ---- state ------------------------------------------------------------------------------------------------------

    def init(self, params: Any) -> TrainState:
        """A fresh state around `params`, placed on the mesh; the moments lie where their parameters do."""
        params = jax.device_put(params, self.param_shardings)
        return TrainState(
            params=params,
            opt_state=optimizers.init(self.optimizer, params),
            updates=jax.device_put(jnp.zeros((), jnp.int32), self.replicated),
        )

    def model(self, params: Any) -> models.Transformer:
        """The model itself, for export and inspection."""
        return models.merge(self.graphdef, params, self.quantize(params))

    def reference(self, params: Any) -> tuple[Any, Any]:
        """Masters and QTensors of a policy that stays: copies of `params`, for `score`.

        It computes under the learner's own scheme, so that its KL to the policy is 0 where a run starts. In a bfloat16
        forward every master is rounded to bfloat16 before use, so the copy is kept in that dtype and scores the same.
        """
        dtype = self.config.compute_dtype
        copy = jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), jax.device_put(params, self.param_shardings))
        return copy, self.quantize(copy)

    def quantize(self, params: Any) -> Any:
        """Masters -> QTensors of the forward scheme: once per optimizer update. Empty under bf16."""
        return self._quantize(params)

    def quantizer(self, graphdef: nnx.GraphDef) -> Callable[[Any], Any]:
        """`quantize` for the same masters under another graph definition's scheme (a sampler's of its own)."""
        compiled = jax.jit(functools.partial(models.quantize_params, graphdef))

        def quantize(params: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return compiled(params)

        return quantize

    def put(self, batch: TrainBatch) -> TrainBatch:
        """Host rows [B, T] onto the devices, rows split over the data axes."""
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), self.batch_sharding), batch)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _logprobs(self, params: Any, qweights: Any, batch: TrainBatch) -> tuple[jax.Array, jax.Array]:
        model = models.merge(self.graphdef, params, qweights)
        # One response to a row, padding behind it: causality alone keeps them apart, and attention needs no mask.
        segment_ids = None if self.options.max_segments == 1 else batch.segment_ids
        hidden = model.hidden_states(batch.tokens, batch.positions, segment_ids)
        with jax.named_scope("logprobs"):
            return token_logprobs(
                hidden,
                model.head_weight(),
                batch.tokens,
                batch.segment_ids,
                temperature=self.options.temperature,
                chunk=self.options.logprob_chunk,
            )

    def score(self, params: Any, qweights: Any, batch: TrainBatch) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities and entropies [B, T] float32 of the current policy: the proximal policy of an update."""
        with jax.set_mesh(self.mesh):
            return self._score(params, qweights, batch)

    # ---- gradient ---------------------------------------------------------------------------------------------------

    def zero_grads(self, state: TrainState) -> Any:
        """Float32 zeros shaped like the masters."""
        return self._zero_grads(state.params)

    @staticmethod
    def _zeros(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    def _accumulate_fn(
        self,
        grads: Any,
        params: Any,
        qweights: Any,
        batch: TrainBatch,
        old_logprobs: jax.Array | None,
        num_tokens: jax.Array,
        num_sequences: jax.Array,
        ref_logprobs: jax.Array | None = None,
    ) -> tuple[Any, dict[str, Metric]]:
        mask = batch.loss_mask

        def objective(params: Any) -> tuple[jax.Array, dict[str, Metric]]:
            logprobs, entropy = self._logprobs(params, qweights, batch)
            old = jax.lax.stop_gradient(logprobs) if old_logprobs is None else old_logprobs
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=old,
                rollout_logprobs=batch.rollout_logprobs,
                advantages=batch.advantages,
                loss_mask=mask,
                segment_ids=batch.segment_ids,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                ref_logprobs=ref_logprobs,
                max_segments=self.options.max_segments,
            )
            mean, metrics = self.loss_fn(inputs)
            total = normalized(mean, inputs, self.loss_fn)
            mean_entropy = masked_mean(entropy, mask)
            if self.options.entropy_coef:
                total = total - self.options.entropy_coef * mean_entropy.total / jnp.maximum(num_tokens, 1.0)
            metrics = metrics | {"loss/total": mean, "entropy/mean": mean_entropy}
            if self.options.kl is not None and self.options.kl_coef:
                kl_mean, kl_metrics = self.options.kl(inputs)
                total = total + self.options.kl_coef * normalized(kl_mean, inputs, self.options.kl)
                metrics |= kl_metrics
            if self.options.error_prob:
                metrics |= error_tokens.token_metrics(inputs, self.options.error_prob)
            if self.options.histograms:
                metrics |= {f"hist/{key}": Counts(n) for key, n in diagnostics.histograms(inputs).items()}
            if self.options.token_logprobs:
                metrics[trace.LOGPROBS] = Rows((jax.lax.stop_gradient(logprobs),))
            return total, metrics

        new, metrics = jax.grad(objective, has_aux=True)(params)
        return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), grads, new), metrics

    def accumulate_grads(
        self,
        grads: Any,
        params: Any,
        qweights: Any,
        batch: TrainBatch,
        old_logprobs: jax.Array | None,
        num_tokens: float,
        num_sequences: float,
        ref_logprobs: jax.Array | None = None,
    ) -> tuple[Any, dict[str, Metric]]:
        """Adds one micro-batch's gradient to `grads` (donated).

        Args:
          old_logprobs: [B, T] float32 from `score` on the same rows, or None when the whole rollout batch is one
            update: the proximal policy is then the current one (stop-gradient).
          num_tokens, num_sequences: response tokens and non-empty responses of the whole optimizer mini-batch.
          ref_logprobs: [B, T] float32, the reference policy's scores of the same rows, where there is a KL term.

        Returns:
          The new accumulator and this micro-batch's metrics (merge them with `metrics.merge`).
        """
        counts = jax.device_put((np.float32(num_tokens), np.float32(num_sequences)), self.replicated)
        with jax.set_mesh(self.mesh):
            return self._accumulate(grads, params, qweights, batch, old_logprobs, *counts, ref_logprobs)

    # ---- update -----------------------------------------------------------------------------------------------------

    def _apply_fn(self, state: TrainState, grads: Any) -> tuple[TrainState, dict[str, Metric]]:
        grad_norm = optimizers.global_norm(grads)
        finite = jnp.isfinite(grad_norm)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optimizers.apply_updates(state.params, updates)
        # Every source of signal gone (all sequences masked or dropped): momentum and weight decay must not move on.
        keep = finite & (grad_norm > 0)
        one = jnp.ones((), jnp.float32)
        metrics: dict[str, Metric] = {
            "optim/grad_norm": Mean(grad_norm, one),
            "optim/update_norm": Mean(jnp.where(keep, optimizers.global_norm(updates), 0.0), one),
            "quant/weight_change": Mean(jnp.where(keep, uaq.relative_norm(updates, state.params), 0.0), one),
            "optim/nonfinite": Max(jnp.where(finite, 0.0, 1.0)),
            "optim/skipped": Mean(jnp.where(keep, 0.0, 1.0), one),
        }
        if self.schedule is not None:
            metrics["optim/lr"] = Mean(jnp.asarray(self.schedule(state.updates), jnp.float32), one)
        new_state = TrainState(
            params=optimizers.select(keep, params, state.params),
            opt_state=optimizers.select(keep, opt_state, state.opt_state),
            updates=state.updates + keep.astype(jnp.int32),
        )
        return new_state, metrics

    def apply_update(self, state: TrainState, grads: Any) -> tuple[TrainState, dict[str, Metric]]:
        """One optimizer update; `state` is donated. A zero or non-finite gradient leaves the state as it is."""
        with jax.set_mesh(self.mesh):
            return self._apply(state, grads)
