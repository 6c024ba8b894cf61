# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The learner: compiled programs that compute log-probs, gradients and optimizer updates of a low-bit policy.

One update, as `train.py` runs it:

    qweights = learner.quantize(state.params)                   # once per update, shared by everything below
    state, metrics = learner.update(state, qweights, micro_batches, old_logprobs, num_tokens, num_sequences)

Where every mini-batch is a single micro-batch, gradient and optimizer are one compiled program and no accumulator
exists. Otherwise `update` calls `zero_grads`, `accumulate_grads` per micro-batch, and `apply_update`; the numbers are
equal. `apply_update` updates large models stack by stack (`by_stack`). With `Options.offload` the optimizer state stays
in the host's memory between updates, and gradient and optimizer are separate programs.

The forward reads only the QTensors (and masters of unquantized weights: norms, embeddings, lm_head); the gradient
reaches the masters through the straight-through estimator in `quant.dot` (QaRL, arXiv 2604.07853, sec. 3.1). Losses are
divided by the counts of the whole optimizer mini-batch, so that micro-batches, packing and devices do not matter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qarl_jax import models, quant
from qarl_jax.learning import pieces
from qarl_jax.learning.state import TrainState, fresh_state
from qarl_jax.learning.trainable import ALL, NOTHING, Trainable, holder, joined
from qarl_jax.loss import Loss, Objective, normalized
from qarl_jax.loss.common import diagnostics
from qarl_jax.metrics import Counts, Max, Mean, Metric, Rows, counted, masked_mean, merge
from qarl_jax.models import invariant_scaling
from qarl_jax.models import sums as accumulators
from qarl_jax.models.logprobs import token_logprobs
from qarl_jax.models.params import part_of, united
from qarl_jax.models.transformer import quantizable
from qarl_jax.numerics.float32 import round_to
from qarl_jax.observe import error_tokens, token_trace
from qarl_jax.optim import by_stack, leafwise
from qarl_jax.quant.backward import root_seed
from qarl_jax.runtime import compilation, processes, progress
from qarl_jax.runtime.mesh import batch_sharding, launching, param_shardings
from qarl_jax.types import LossInputs, TrainBatch, UserError

_BESIDE = ("loss/total", "entropy/mean", "mismatch/k3")  # metrics that a learner beside another one adds
EXACT = "proximal/exact"  # the share of an update's tokens whose log-prob in its forward is the old one, to the bit


def is_exact(metrics: Mapping[str, Metric]) -> jax.Array:
    """Returns a bool scalar: every log-prob of the update's forward equals the old one, to the bit (metric `EXACT`)."""
    share = metrics[EXACT]
    assert isinstance(share, Mean)
    return jnp.asarray(share.total) == jnp.asarray(share.count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The part of the run's configuration that changes the compiled step.

    Attributes:
      temperature: the sampler's temperature, by which the learner divides its logits too, so that both compute
        log-probs of one distribution.
      logprob_chunk: tokens per chunk of the fused head (see `logprobs.py`).
      grad_dtype: dtype of gradients and their accumulator. "bfloat16" halves their memory and keeps eight bits of a
        sum, so use it with one or a few micro-batches.
      one_program: compute an update of a single micro-batch in one program. Off where other updates have several, so
        that a run does not compile both.
      offload: keep the optimizer state in the host's memory; `apply_update` moves it to the device and back, stack by
        stack.
      max_segments: static bound on responses per packed row.
      entropy_coef: weight of the entropy bonus (0: entropy is only a metric).
      kl_coef: weight of the KL to the reference policy (0: none, and no reference is needed).
      kl: the KL term, from `loss.get_term`.
      diagnostics: count error tokens, and log-ratios per bin by the sign of the advantage.
      backward: format of the gradient's products in linear layers (`quant.backward`); "bf16": the compute dtype.
      token_logprobs: return the log-probs of the gradient's forward as the metric `token_trace.LOGPROBS`.
      share: factor of the loss, for learners whose gradients are summed (`Learner.beside`).
    """

    temperature: float = 1.0
    logprob_chunk: int = 2048
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    one_program: bool = True
    offload: bool = False
    max_segments: int = 1
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl: Loss | None = None
    diagnostics: bool = False
    backward: Literal["bf16", "fp8", "int8"] = "bf16"
    token_logprobs: bool = False
    share: float = 1.0


def _at(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


class Learner:
    """Owns the compiled functions of one run, and the frozen weights; all other arrays are arguments and results.

    Args:
      graphdef: structure of the model (`models.split`); its config names the forward scheme.
      loss_fn: `LossInputs -> (Mean, metrics)`, from `qarl_jax.loss.get_loss`.
      optimizer: the optimizer of the masters.
      mesh: device mesh (`mesh.make_mesh()`: one device).
      options: static settings of the step.
      schedule: learning rate as a function of the update count, for the metrics.
      trainable: decides which leaves are trainable.
      beside: learners by name that have these masters under other schemes; `update` adds their gradients.

    Attributes:
      frozen: entries of `qweights` for the frozen leaves, set by `init`.
      keeper: a store outside of JAX for some frozen weights, or None. Set it before anything is read or compiled.

    Raises:
      UserError: a pattern of `trainable` is found in no weight's path, or no leaf is trainable.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        *,
        loss_fn: Objective,
        optimizer: leafwise.Optimizer,
        mesh: Mesh,
        options: Options = Options(),
        schedule: Callable[[Any], Any] | None = None,
        trainable: Trainable = ALL,
        beside: Mapping[str, Learner] | None = None,
    ):
        assert not beside or not options.one_program
        self.beside = dict(beside or {})
        self.graphdef, self.config = graphdef, models.config_of(graphdef)
        self.loss_fn, self.optimizer, self.options = loss_fn, optimizer, options
        if models.config_of(graphdef).splitting is not None:
            trainable = dataclasses.replace(trainable, freeze=(*trainable.freeze, r"\.index$"))  # models.is_fixed
        self.mesh, self.schedule, self.trainable = mesh, schedule, trainable
        self.abstract_params = models.split(models.abstract_model(self.config))[1]
        trainable.check(models.by_path(self.abstract_params))
        self._places = param_shardings(self.abstract_params, mesh)
        self.param_shardings = trainable.learned(self._places)
        self.frozen: Any = nnx.State({})
        self.keeper: pieces.Keeper | None = None
        self._fixed: dict[Any, Any] = {}  # frozen entries by graph definition
        self.batch_sharding = batch_sharding(mesh)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self._quantize = self.quantizer(graphdef)
        self._zero_grads = jax.jit(self._zeros, out_shardings=self.param_shardings)
        self._score = jax.jit(self._logprobs, out_shardings=(self.batch_sharding, self.batch_sharding))
        backward = functools.partial(jax.jit, compiler_options=compilation.backward_options())
        with_grads = (self.param_shardings, self.replicated)
        self._accumulate = backward(self._accumulate_fn, donate_argnums=(0,), out_shardings=with_grads)
        self._apply = by_stack.Update(optimizer, self._described, offload=options.offload)
        self._update = backward(self._update_fn, donate_argnums=(0,))
        self._grads = backward(self._grads_fn, out_shardings=with_grads)

    # ---- state ------------------------------------------------------------------------------------------------------

    def init(self, params: Any, frozen: Any = None) -> TrainState:
        """Makes a state of `params` with zero moments, placed on the mesh; moments are sharded as their parameters.

        Args:
          params: masters of all leaves, or, if `frozen` is given, of the trainable leaves.
          frozen: entries of `qweights` for the frozen leaves, placed on the mesh; None: they are made of `params`.

        Raises:
          UserError: a leaf has neither master nor entry.
        """
        params, whole = self.trainable.learned(params), params
        if self.trainable.freeze:
            self.hold(self.held(whole) if frozen is None else frozen)
        there = models.by_path(params) | models.by_path(self.frozen)
        if lost := sorted(set(models.by_path(self.abstract_params)) - set(there)):
            raise UserError(f"trainable: there is no value of {', '.join(lost)}; give it as a master or as frozen.")
        return fresh_state(self._apply, params, self.param_shardings, self.replicated)

    def read(self, read_leaves: Callable[..., Iterable[tuple[Any, Any]]], *source: Any) -> tuple[Any, Any]:
        """Reads (masters, frozen) for `init`, leaf by leaf.

        Each frozen leaf is quantized or cast as soon as it is read, some layers at a time (`pieces.cut`). So the
        devices hold one frozen master at a time, or those whose QTensors share a scale.

        Args:
          read_leaves: `models.read_masters` or a similar function. source: its arguments before the model's config.
        """
        return pieces.read(self.trainable, self.config, self.mesh, functools.partial(read_leaves, *source), self.keeper)

    def hold(self, frozen: Any) -> None:
        """Sets the entries of `qweights` for the frozen leaves. `init` calls it; for scoring alone it suffices."""
        self.frozen, self._fixed = frozen, {self.graphdef: frozen}

    def held(self, params: Any) -> Any:
        """Makes entries of `qweights` from the frozen masters in `params`, which need not have all of them."""
        return self._held(self.trainable, params)

    def _held(self, trainable: Trainable, params: Any) -> Any:
        own = trainable.frozen(params)
        places = part_of(self._places, models.by_path(own).__contains__)
        with launching(self.mesh):
            return holder(trainable, self.graphdef)(jax.device_put(own, places))

    def model(self, params: Any) -> models.Transformer:
        """Makes the model, for export and inspection; frozen kernels are dequantized from their QTensors."""
        params, qtensors = joined(params, self.quantize(params))
        model = models.merge(self.graphdef, params, qtensors)
        masters, codes = models.by_path(params), models.by_path(qtensors)
        for path, linear in quantizable(model).items():
            if path not in masters:
                linear.kernel.set_value(quant.dequantize(codes[path], self.config.compute_dtype))
        return model

    def reference(self, params: Any) -> tuple[Any, Any]:
        """Makes the arguments (params, qweights) of `score` for a reference policy with the weights `params`.

        Its `params` are empty: all its leaves are frozen, under the learner's scheme, so that the KL to the policy is 0
        when a run starts. It shares the learner's frozen leaves.
        """
        made = self._held(NOTHING, params)
        return nnx.State({}), united(made, self.frozen) if self.trainable.freeze else made

    def quantize(self, params: Any) -> Any:
        """Makes `qweights`, once per optimizer update: the QTensors of the forward's scheme (none under bf16), and all
        frozen entries."""
        return self._quantize(params)

    def quantizer(self, graphdef: nnx.GraphDef) -> Callable[[Any], Any]:
        """Returns a function like `quantize` under another graphdef's scheme, for a sampler that has another scheme."""
        compiled = models.quantizer(graphdef)

        def quantize(params: Any) -> Any:
            with launching(self.mesh):
                if not self.trainable.freeze:
                    return compiled(params)
                if graphdef not in self._fixed:  # it may cover frozen leaves that the learner's scheme does not
                    self._fixed[graphdef] = united(self.frozen, compiled(joined(nnx.State({}), self.frozen)[0]))
                return united(compiled(params), self._fixed[graphdef])

        return quantize

    # ---- compiling ahead of time ------------------------------------------------------------------------------------

    def abstract_state(self) -> TrainState:
        """Returns the state that `init` makes, with shapes, dtypes and shardings in place of arrays."""
        params = jax.tree.map(_at, self.trainable.learned(self.abstract_params), self.param_shardings)
        opt_state = jax.eval_shape(self.optimizer.init, params)
        state = TrainState(
            params=params,
            opt_state=jax.tree.map(_at, opt_state, leafwise.state_shardings(opt_state, params)),
            updates=jax.ShapeDtypeStruct((), np.int32, sharding=self.replicated),
        )
        return self._apply.resting(state)

    def abstract_batch(self, rows: int, row_len: int, routed: tuple[int, int] | None = None) -> TrainBatch:
        """Returns a micro-batch of shapes and shardings. routed: (layers, experts per token) if routing is replayed."""

        def row(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, row_len, *more), dtype, sharding=self.batch_sharding)

        return TrainBatch(
            tokens=row(np.int32),
            positions=row(np.int32),
            segment_ids=row(np.int32),
            loss_mask=row(np.bool_),
            rollout_logprobs=row(np.float32),
            advantages=row(np.float32),
            routed_experts=None if routed is None else row(np.int16, *routed),
        )

    def compile_ahead(
        self, rows: int, row_len: int, *, scored: bool, routed: tuple[int, int] | None = None, applies: bool = True
    ) -> list[jax.stages.Compiled]:
        """Compiles the programs of a step with micro-batches of this shape, those of `beside` too, and returns them.

        It needs no weights, and so can run in a thread while weights are read. A program that is not foreseen here is
        compiled at its first call.

        Args:
          rows, row_len: shape of a micro-batch.
          scored: whether old log-probs are scored, because the step has several updates.
          routed: (layers, experts per token) where routing is replayed.
          applies: whether this learner applies the gradients; one in `beside` does not.
        """
        batch = self.abstract_batch(rows, row_len, routed)
        row = batch.rollout_logprobs  # float32, like old and reference log-probs
        state = self.abstract_state()
        counts = [jax.ShapeDtypeStruct((), np.float32, sharding=self.replicated)] * 2
        ref = row if self.options.kl is not None and self.options.kl_coef else None
        summed = lambda p, place: jax.ShapeDtypeStruct(p.shape, self.grad_dtype, sharding=place)  # noqa: E731
        grads = jax.tree.map(summed, state.params, self.param_shardings)

        def compiled(name: str, program: Any, *arguments: Any) -> Any:
            with jax.set_mesh(self.mesh), progress.task(f"compiling {name}"):
                return program.lower(*arguments).compile()

        sources = [(models.quantizer(self.graphdef), state.params, state.params)]
        kept = nnx.State({}) if self.keeper is None else self.keeper.abstract()
        if self.trainable.freeze:  # as a policy is read (`build.load_policy`)
            frozen = jax.tree.map(_at, *map(self.trainable.frozen, (self.abstract_params, self._places)))
            own = part_of(frozen, lambda path: path not in models.by_path(kept))
            hold = holder(self.trainable, self.graphdef)
            sources += [(hold, *group) for group in pieces.groups(self.config, own)]
        programs = [compiled("quantization", program, piece) for program, piece, _ in sources]
        with jax.set_mesh(self.mesh):
            made = [jax.eval_shape(program, whole) for program, _, whole in sources]
        read = [jax.tree.map(_at, x, done.output_shardings) for x, done in zip(made, programs, strict=True)]
        qweights = united(*read, kept) if self.trainable.freeze else read[0]
        rest = qweights, batch, row if scored else None, *counts, ref
        calls: list[tuple[Any, ...]] = [("scoring", self._score, state.params, qweights, batch)] if scored else []
        place = None if self.options.backward == "bf16" else (state.updates, state.updates)
        if not self.options.one_program:
            calls.append(("gradients", self._accumulate, grads, state.params, *rest, place))
        elif self.options.offload:
            calls.append(("gradients", self._grads, state.params, *rest, place))
        else:
            guarded = jax.ShapeDtypeStruct((), np.bool_, sharding=self.replicated)
            calls.append(("an update", self._update, state, guarded, *rest))
        with ThreadPoolExecutor(len(calls) + 1, thread_name_prefix="compile") as threads:
            waiting = [threads.submit(compiled, *call) for call in calls]
            if applies and (not self.options.one_program or self.options.offload):
                with jax.set_mesh(self.mesh):
                    programs += self._apply.compile_ahead(state, grads)
            programs += [future.result() for future in waiting]
        for other in self.beside.values():  # one by one: side by side they took two busy cores a fifth longer
            programs += other.compile_ahead(rows, row_len, scored=scored, routed=routed, applies=False)
        return programs

    def put(self, batch: TrainBatch) -> TrainBatch:
        """Copies host rows [B, T] to the devices, with rows split over the data axes."""
        return jax.tree.map(lambda x: processes.put(x, self.batch_sharding), batch)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _logprobs(
        self, params: Any, qweights: Any, batch: TrainBatch, place: Any = None, sums: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        model = models.merge(self.graphdef, *joined(params, qweights))
        if place is not None:
            models.attach_backward(model, self.options.backward, root_seed(*place))
        # One response to a row, padding behind it: causality alone keeps them apart, and attention needs no mask.
        segment_ids = None if self.options.max_segments == 1 else batch.segment_ids
        hidden = model.hidden_states(
            batch.tokens, batch.positions, segment_ids, self.options.max_segments, batch.routed_experts, sums
        )
        with jax.named_scope("logprobs"):
            return token_logprobs(
                hidden,
                model.head_weight(),
                batch.tokens,
                batch.segment_ids,
                temperature=self.options.temperature,
                chunk=self.options.logprob_chunk,
                numerics=model.config.numerics,
                entropy_gradient=bool(self.options.entropy_coef),
            )

    def score(self, params: Any, qweights: Any, batch: TrainBatch) -> tuple[jax.Array, jax.Array]:
        """Computes log-probs and entropies [B, T] float32 under these weights, for example of the proximal policy."""
        with launching(self.mesh):
            return self._score(params, qweights, batch)

    # ---- gradient ---------------------------------------------------------------------------------------------------

    @property
    def grad_dtype(self) -> jnp.dtype:
        """Dtype of the accumulated gradient."""
        return jnp.dtype(self.options.grad_dtype)

    def zero_grads(self, state: TrainState) -> Any:
        """Makes an accumulator: zeros in `grad_dtype`, shaped and sharded like the masters."""
        return self._zero_grads(state.params)

    def _zeros(self, params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, self.grad_dtype), params)

    def _gradient(
        self,
        params: Any,
        qweights: Any,
        batch: TrainBatch,
        old_logprobs: jax.Array | None,
        num_tokens: jax.Array,
        num_sequences: jax.Array,
        ref_logprobs: jax.Array | None = None,
        place: tuple[jax.Array, jax.Array] | None = None,
        *,
        sums: Any = None,
    ) -> tuple[Any, dict[str, Metric]]:
        """The gradient of one micro-batch, in `grad_dtype` or its masters', and its metrics.

        Args:
          place: from `_place`.
          sums: accumulators. The gradients of stacks have theirs added (`models.sums`).
        """
        mask = batch.loss_mask

        def objective(params: Any) -> tuple[jax.Array, dict[str, Metric]]:
            logprobs, entropy = self._logprobs(params, qweights, batch, place, sums)
            old = jax.lax.stop_gradient(logprobs) if old_logprobs is None else old_logprobs
            equal = counted(masked_mean((jax.lax.stop_gradient(logprobs) == old).astype(jnp.float32), mask))
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
            metrics = metrics | {"loss/total": mean, "entropy/mean": mean_entropy, EXACT: equal}
            if self.options.kl is not None and self.options.kl_coef:
                kl_mean, kl_metrics = self.options.kl(inputs)
                total = total + self.options.kl_coef * normalized(kl_mean, inputs, self.options.kl)
                metrics |= kl_metrics
            if self.options.diagnostics:
                metrics |= error_tokens.token_metrics(inputs)
                metrics |= {f"hist/{key}": Counts(n) for key, n in diagnostics.histograms(inputs).items()}
            if self.options.token_logprobs:
                metrics[token_trace.LOGPROBS] = Rows((jax.lax.stop_gradient(logprobs),))
            return total if self.options.share == 1 else self.options.share * total, metrics

        if self.config.compute_dtype == self.grad_dtype:
            # A gradient has the dtype of what is differentiated. Every master is rounded to the compute dtype before it
            # is used, so rounding all of them first changes no number, and no float32 gradient is ever formed. A plain
            # cast would: XLA drops it where float32 follows at once, as in the last norm.
            params = jax.tree.map(lambda p: round_to(p, self.grad_dtype), params)
        return jax.grad(objective, has_aux=True)(params)

    def _accumulate_fn(self, grads: Any, params: Any, *rest: Any) -> tuple[Any, dict[str, Metric]]:
        sums = accumulators.carried(grads, self.config)
        new, metrics = self._gradient(params, *rest, sums=sums)
        return accumulators.total(grads, new, inside=sums is not None), metrics

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
        *,
        updates: Any = 0,
        number: int = 0,
    ) -> tuple[Any, dict[str, Metric]]:
        """Adds one micro-batch's gradient to `grads` (donated).

        Args:
          params, qweights: masters, and their QTensors from `quantize`.
          old_logprobs: [B, T] float32 from `score` on these rows, or None when the whole rollout batch is one update:
            the proximal policy is then the current one (stop-gradient).
          num_tokens, num_sequences: response tokens and non-empty responses of the whole optimizer mini-batch.
          ref_logprobs: [B, T] float32, the reference policy's log-probs of these rows, where there is a KL term.
          updates, number: updates before this one, and the micro-batch's number within it; they seed the rounding of a
            low-bit backward.

        Returns:
          The new accumulator and this micro-batch's metrics (merge them with `metrics.merge`).
        """
        counts = self._counts(num_tokens, num_sequences)
        with launching(self.mesh):
            place = self._place(updates, number)
            return self._accumulate(grads, params, qweights, batch, old_logprobs, *counts, ref_logprobs, place)

    def _place(self, updates: Any, number: int = 0) -> tuple[Any, Any] | None:
        """Counts that a low-bit backward's rounding depends on, on the mesh; None: nothing is rounded."""
        if self.options.backward == "bf16":
            return None
        put = lambda count: processes.put(np.int32(count), self.replicated)  # noqa: E731
        return updates if isinstance(updates, jax.Array) else put(updates), put(number)

    def _counts(self, *counts: float) -> tuple[jax.Array, ...]:
        return tuple(processes.put(np.float32(count), self.replicated) for count in counts)

    def _added(
        self,
        grads: Any,
        params: Any,
        qweights: Any,
        micros: Sequence[TrainBatch],
        old_logprobs: Sequence[jax.Array | None],
        ref_logprobs: Sequence[jax.Array | None],
        counts: tuple[float, float],
        updates: Any,
    ) -> tuple[Any, dict[str, Metric]]:
        """`accumulate_grads` of all micro-batches of a mini-batch; counts: its tokens and responses."""
        total: dict[str, Metric] = {}
        for number, (micro, old, ref) in enumerate(zip(micros, old_logprobs, ref_logprobs, strict=True)):
            grads, measured = self.accumulate_grads(
                grads, params, qweights, micro, old, *counts, ref, updates=updates, number=number
            )
            total = merge(total, measured)
        return grads, total

    # ---- update -----------------------------------------------------------------------------------------------------

    def _described(self, stats: dict[str, Any], updates: Any) -> dict[str, Metric]:
        """Makes an update's metrics from its `leafwise.statistics` and the count of earlier updates."""
        moved, one = stats["moved"], jnp.ones((), jnp.float32)
        change = jnp.where(moved, invariant_scaling.relative_norm(*stats["squares"]), 0.0)
        metrics: dict[str, Metric] = {
            "optim/grad_norm": Mean(stats["grad_norm"], one),
            "optim/update_norm": Mean(stats["update_norm"], one),
            "quant/weight_change": Mean(change, one),
            "optim/nonfinite": Max(jnp.where(stats["finite"], 0.0, 1.0)),
            "optim/skipped": Mean(jnp.where(moved, 0.0, 1.0), one),
        }
        if self.schedule is not None:
            metrics["optim/lr"] = Mean(jnp.asarray(self.schedule(updates), jnp.float32), one)
        return metrics

    def apply_update(self, state: TrainState, grads: Any) -> tuple[TrainState, dict[str, Metric]]:
        """Makes one optimizer update; `state` is donated. A zero or non-finite gradient leaves the state unchanged."""
        with launching(self.mesh):
            return self._apply(state, grads)

    def _grads_fn(self, params: Any, *rest: Any) -> tuple[Any, dict[str, Metric]]:
        grads, metrics = self._gradient(params, *rest)
        return jax.tree.map(lambda g: g.astype(self.grad_dtype), grads), metrics

    def _update_fn(self, state: TrainState, guarded: jax.Array, *rest: Any) -> tuple[TrainState, dict[str, Metric]]:
        place = None if self.options.backward == "bf16" else (state.updates, np.int32(0))
        grads, metrics = self._grads_fn(state.params, *rest, place)
        # Said once each, as the split programs say it at their borders: gradients and masters lie where masters do.
        grads = jax.lax.with_sharding_constraint(grads, self.param_shardings)
        new_state, applied = self._apply.whole(state, grads, ~guarded | is_exact(metrics))
        params = jax.lax.with_sharding_constraint(new_state.params, self.param_shardings)
        metrics = jax.lax.with_sharding_constraint(metrics | applied, self.replicated)
        return dataclasses.replace(new_state, params=params), metrics

    def update(
        self,
        state: TrainState,
        qweights: Any,
        micros: Sequence[TrainBatch],
        old_logprobs: Sequence[jax.Array | None],
        num_tokens: float,
        num_sequences: float,
        ref_logprobs: Sequence[jax.Array | None] | None = None,
        *,
        guarded: bool = False,
        beside: Mapping[str, Sequence[jax.Array | None]] | None = None,
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Makes one optimizer update from all micro-batches of a mini-batch; `state` is donated.

        Args:
          qweights: `quantize(state.params)`.
          micros: the micro-batches, on the devices (`put`).
          old_logprobs, ref_logprobs: per micro-batch, as in `accumulate_grads`.
          num_tokens, num_sequences: response tokens and non-empty responses in all micro-batches.
          guarded: discard the update, and leave the state unchanged, unless every token's log-prob in the forward
            equals its old log-prob, to the bit.
          beside: `old_logprobs` of the learners in `self.beside`, by name; None: the current policy's log-probs.

        Returns:
          The new state, and the metrics of loss and optimizer; a discarded update may lack the optimizer's.
        """
        refs = [None] * len(micros) if ref_logprobs is None else ref_logprobs
        if len(micros) == 1 and self.options.one_program:
            rest = qweights, micros[0], old_logprobs[0], *self._counts(num_tokens, num_sequences), refs[0]
            with launching(self.mesh):
                if not self.options.offload:
                    return self._update(state, processes.put(np.bool_(guarded), self.replicated), *rest)
                grads, total = self._grads(state.params, *rest, self._place(state.updates))
        else:
            counts = num_tokens, num_sequences
            grads, total = self._added(
                self.zero_grads(state), state.params, qweights, micros, old_logprobs, refs, counts, state.updates
            )
            if guarded and not is_exact(total):
                return state, total
            for name, other in self.beside.items():
                old, nothing = (beside or {}).get(name, [None] * len(micros)), [None] * len(micros)
                theirs = other.quantize(state.params)
                grads, found = other._added(grads, state.params, theirs, micros, old, nothing, counts, state.updates)
                total |= {f"{name}/{key}": metric for key, metric in found.items() if key in _BESIDE}
        if guarded and not is_exact(total):
            return state, total
        state, applied = self.apply_update(state, grads)
        return state, total | applied
