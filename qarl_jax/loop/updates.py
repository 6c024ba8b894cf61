# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the optimizer updates of a step: packs groups into rows, scores them, and trains on mini-batches.

The proximal policy is the learner at the start of the step. Its log-probs are computed once, before the first update,
on the packed rows; or the sampler's are used, if they are known to be equal (`proximal.py`). A step with a single
update needs no scoring: its proximal policy is the current one. Updates begin while the step's last groups are decoded,
unless an option needs all groups first (`tail.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from qarl_jax.data import packing
from qarl_jax.learning.critic import Critic, Targets
from qarl_jax.learning.learner import Learner, is_exact
from qarl_jax.learning.state import TrainState
from qarl_jax.loop import first_mismatch, step_metrics
from qarl_jax.loop.pipeline import Add, Scoring
from qarl_jax.loop.proximal import Proximal
from qarl_jax.loop.publisher import Publisher
from qarl_jax.loop.step_metrics import UpdateMetrics
from qarl_jax.loop.tail import Tail, waits
from qarl_jax.loss.advantages import Nothing, finite, group_advantages, padded, turn_advantages
from qarl_jax.metrics import Metric, Rows
from qarl_jax.observe import flops
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.observe.token_trace import LOGPROBS, Follower
from qarl_jax.rollout import dynamic_sampling
from qarl_jax.rollout.dynamic_sampling import Collected
from qarl_jax.run.config import RunConfig
from qarl_jax.run.reference import Reference
from qarl_jax.runtime import processes, progress
from qarl_jax.types import DivergedError, RolloutGroup, TrainBatch


@dataclasses.dataclass(frozen=True)
class Learned:
    """The outcome of a step's updates.

    Attributes:
      metrics: reduced values, by name.
      histograms: counts, by name.
      first_mismatch: the first token whose log-prob differs between learner and sampler; None: no token does.
    """

    metrics: dict[str, float]
    histograms: dict[str, list[int]]
    first_mismatch: first_mismatch.FirstMismatch | None


def advantages_of(
    cfg: RunConfig, groups: list[RolloutGroup]
) -> tuple[list[RolloutGroup], Float[np.ndarray, "g n *turns"]]:
    """Returns the groups to train on, and advantages [groups, responses] (and [.., turns] under
    `advantage.level=turn`). With a critic these are rewards, from which it computes an advantage per token.
    """
    advantages = finite(np.stack([group.rewards for group in groups]))
    rewards = [[[turn.reward for turn in c.turns] for c in group.completions] for group in groups]
    if cfg.critic is not None and cfg.advantage.level == "turn":
        advantages = padded(rewards).astype(np.float32)
    if isinstance(cfg.advantage, Nothing):
        advantages = np.zeros(advantages.shape, np.float32)
    elif cfg.critic is None:
        valid = np.array([group.valid for group in groups])
        if cfg.advantage.level == "turn":
            advantages = turn_advantages(rewards, cfg.advantage.name, valid=valid)
        else:
            advantages = group_advantages(advantages, cfg.advantage.name, valid=valid)
    if cfg.train.mask_truncated:
        groups = dynamic_sampling.without_truncated(groups)
    return groups, advantages


def packed_rows(cfg: RunConfig, groups: list[RolloutGroup], advantages: np.ndarray, step: int) -> packing.Packed:
    """Packs a step's groups into rows with the run's settings; arguments as of `packing.pack`."""
    return packing.pack(
        groups,
        advantages,
        row_len=cfg.row_len_at(step),
        rows_multiple=cfg.micro_batch_rows,
        max_segments=cfg.train.max_segments,
    )


@dataclasses.dataclass
class MiniBatch:
    """The responses and arrays of one optimizer update.

    Attributes:
      packed: its rows, on the host. groups: the groups they were packed from.
      micros: the rows on the devices, by micro-batch.
      old: per micro-batch the proximal policy's log-probs [rows, T]; None if the proximal policy is the current one.
      beside: like `old`, for the learners at other bit widths (`train.widths`), by name; empty if not scored.
      scored: the proximal policy's log-probs after the update, from `old` or the update's forward; empty: not kept.
      reference: per micro-batch the reference policy's log-probs, if the run has a KL term.
      targets: the critic's regression targets, if the run has a critic.
      logprobs: log-probs in the update's forward, if the learner returns them.
    """

    packed: packing.Packed
    groups: list[RolloutGroup]
    micros: list[TrainBatch]
    old: list[Any]
    reference: list[Any] | None = None
    targets: list[Targets] = dataclasses.field(default_factory=list)
    beside: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    scored: Sequence[Any] = ()
    logprobs: Metric | None = None


def samplers(batch: MiniBatch) -> list[Any]:
    """Returns the log-probs that the sampler reported, per micro-batch."""
    return [micro.rollout_logprobs for micro in batch.micros]


class Updates:
    """Makes all updates of each step.

    Args:
      learner: the compiled programs that score and update.
      publisher: gives the QTensors of the masters.
      timer: gets the seconds of each phase.
      reference: scores of the reference policy, where the run has a KL term.
      critic: the run's critic, if any; updated with the policy.
      say: called with a sentence when the sampler's log-probs are rejected (`proximal.py`).
      saved: the `saved()` of the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        cfg: RunConfig,
        learner: Learner,
        publisher: Publisher,
        timer: PhaseTimer,
        *,
        reference: Reference | None = None,
        critic: Critic | None = None,
        say: Callable[[str], None] = print,
        saved: Mapping[str, Any] | None = None,
    ):
        self._cfg, self._learner, self._publisher, self._timer = cfg, learner, publisher, timer
        self._proximal = Proximal(cfg, publisher.engine, say, distrusted=(saved or {}).get("distrusted", False))
        self._reference, self._critic = reference, critic
        self._scoring: Scoring | None = None  # of the step that is being sampled
        self._tail: Tail | None = None  # the same step's
        self._has_run = False
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="metrics")

    def saved(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: whether the sampler's log-probs wait for an equal step."""
        return {"distrusted": True} if self._proximal.distrusted else {}

    @property
    def has_begun(self) -> bool:
        """Tells whether the sampled step has changed the masters already, so that it cannot be dropped."""
        return self._tail is not None and self._tail.has_begun

    def run(
        self,
        state: TrainState,
        groups: list[RolloutGroup],
        advantages: Float[np.ndarray, "g n *turns"],
        step: int,
        follow: Follower | None = None,
    ) -> tuple[TrainState, Future[Learned]]:
        """Makes the step's updates. Returns the new state, and a future of the outcome, which a thread computes during
        the publish.

        Args:
          state: the learner's state at the step's start, as passed to `arriving`.
          groups, advantages: results of `advantages_of`.
          follow: records what happens to single responses.

        Raises:
          DivergedError: a gradient is not finite; names the step and the update, and leaves the last checkpoint
            untouched.
        """
        critic, settings = self._critic, self._cfg.critic
        warming = critic is not None and settings is not None and step < settings.warmup_steps  # only the critic learns
        tail, self._tail, self._has_run = self._tail, None, True
        if tail is not None:
            state = tail.state
        batches = self.prepare(groups, advantages, step, follow)
        done = [] if tail is None else tail.done
        assert all(batch is before for batch, (before, _) in zip(batches, done, strict=False))
        judged = self.judge(batches)
        taken = not warming and self.score(state, batches, step)
        if done and not taken:
            raise RuntimeError(f"step {step}: a response has tokens of another version, and an update is made already")
        gathered = UpdateMetrics()
        with progress.task("updating", len(batches), "updates") as task:
            for number, batch in enumerate(task.count(batches)):
                place = f"step {step}, update {number + 1} of {len(batches)}"
                if critic is not None:
                    gathered.add_critic(self.fit_critic(critic, batch, place))
                if not warming:
                    if number < len(done):
                        inner = done[number][1]
                    else:
                        state, inner = self.update_once(state, batch, place, guarded=taken and not number)
                    if taken and not number and not is_exact(inner):
                        taken = False
                        self._score_again(state, batches, place)
                        state, inner = self.update_once(state, batch, place)
                    gathered.add(number, inner)
                    if follow is not None:
                        follow.updated(number, batch.micros, batch.old, batch.logprobs)

        def read() -> Learned:
            with self._timer("metrics"):
                numbers, histograms = gathered.reduced()
                once = [b for b in batches[: self._first_pass(batches)] if len(b.scored)]
                parts = ((b.packed, b.groups, b.scored) for b in once)
                found = first_mismatch.first(parts, step) if numbers.get("mismatch/exact", 1.0) < 1.0 else None
                numbers |= {
                    "train/padding_share": float(np.mean([batch.packed.padding_share for batch in batches])),
                    "train/tokens": float(sum(batch.packed.num_tokens for batch in batches)),
                    "train/updates": 0.0 if warming else float(len(batches)),
                    "train/flops": 0.0 if warming else sum(self._flops(batch.packed) for batch in batches),
                    "mismatch/checked": self._checked_share(batches) if taken else 1.0,
                }
                return Learned(numbers | judged | step_metrics.quantiles(histograms), histograms, found)

        learned = self._reading.submit(read)
        if processes.count() > 1:  # all of them ask their devices for the same in the same order
            wait([learned])
        # The learner's pass and its first update's forward against the sampler: either may be the one that differs.
        exact = "mismatch/exact", "proximal/exact"
        self._proximal.compared(lambda: all(learned.result().metrics.get(name, 0.0) == 1.0 for name in exact))
        return state, learned

    def prepare(
        self,
        groups: list[RolloutGroup],
        advantages: Float[np.ndarray, "g n *turns"],
        step: int,
        follow: Follower | None = None,
    ) -> list[MiniBatch]:
        """Packs the step's mini-batches, over all its epochs."""
        train, batches = self._cfg.train, []
        scoring, self._scoring = self._scoring, None
        with self._timer("pack"):
            for epoch in range(train.update_epochs):
                for chosen in self._mini_batches(len(groups), step, epoch):
                    own = [groups[i] for i in chosen]
                    made = None
                    if scoring is not None and not epoch:
                        with self._timer(scoring.phase):
                            made = scoring.take(own, advantages[chosen])
                    batches.append(made or self._packed(own, advantages[chosen], step))
                    if follow is not None:
                        follow.packed(chosen, batches[-1].packed)
        if scoring is not None:
            scoring.close()
        return batches

    def arriving(self, collect: Callable[[int, Add | None], Collected], state: TrainState, step: int) -> Collected:
        """Collects a step's groups. Complete mini-batches are packed and scored, or trained on, while other groups are
        sampled; the next `run` uses the results.

        Args:
          collect: `Collector.collect`.
          state: the learner's state, to be passed to `run`; donated if `has_begun` afterwards.
        """
        if self._scoring is not None:  # of a step that was dropped
            self._scoring.close()
        self._scoring = scoring = self._scoring_of(state, step)
        if scoring is None:
            return collect(step, None)
        collected = collect(step, scoring.add)
        seconds = scoring.idle()
        if self._tail is not None:
            with self._timer("update"):
                seconds["time/update/hidden_s"] = self._tail.end()
        return dataclasses.replace(collected, metrics=collected.metrics | seconds)

    def _scoring_of(self, state: TrainState, step: int) -> Scoring | None:
        """None: the run does not know a step's mini-batches before all of its groups are there."""
        cfg = self._cfg
        once = cfg.rollout.dynamic.max_batches == 1 and not cfg.rollout.partial.is_on
        if processes.count() > 1 or self._critic is not None or not once:
            return None
        chosen = self._mini_batches(cfg.train.prompts_per_step, step, 0)
        several = len(chosen) * cfg.train.update_epochs > 1
        scores = several and not self._proximal.wanted(step)
        self._tail = tail = Tail(state, functools.partial(self._early, step)) if self._overlaps(step) else None

        def make(number: int, groups: list[RolloutGroup]) -> tuple[list[RolloutGroup], np.ndarray, MiniBatch]:
            groups, advantages = advantages_of(cfg, groups)
            with self._timer("pack"):
                batch = self._packed(groups, advantages, step)
            if tail is not None:
                tail.add(number, batch)
            elif several and not self._proximal.takes(groups, step):
                with self._timer("old_logprobs"):
                    self._score_old(state, batch)
                    jax.block_until_ready(batch.old)
            return groups, advantages, batch

        return Scoring(chosen, make, "old_logprobs" if scores else "pack")

    def _overlaps(self, step: int) -> bool:
        """Tells whether updates of a step may begin before all of its groups are there."""
        free = self._has_run and not waits(self._cfg, self._publisher.engine.facts)
        return free and self._proximal.wanted(step) and not self._proximal.checks(step)

    def _early(
        self, step: int, state: TrainState, batch: MiniBatch, number: int
    ) -> tuple[TrainState, dict[str, Metric] | None]:
        """An update while the step's last groups are decoded (`tail.Update`)."""
        place = f"step {step}, update {number + 1} of {self._cfg.train.updates_per_step}"
        if not self._proximal.takes(batch.groups, step):
            return state, None
        batch.old = samplers(batch)
        self._score_reference(state, [batch])
        state, inner = self.update_once(state, batch, place, guarded=not number)
        if not number and not is_exact(inner):
            batch.old = [None] * len(batch.micros)
            self._distrust(place)
            return state, None
        return state, inner

    def _mini_batches(self, prompts: int, step: int, epoch: int) -> list[np.ndarray]:
        size, seed = self._cfg.train.mini_batch_prompts, self._cfg.seed
        return packing.mini_batches(prompts, size, seed=seed, step=step, epoch=epoch)

    def _packed(self, groups: list[RolloutGroup], advantages: np.ndarray, step: int) -> MiniBatch:
        packed = packed_rows(self._cfg, groups, advantages, step)
        micros = [self._learner.put(micro) for micro in packed.micro_batches(self._cfg.micro_batch_rows)]
        return MiniBatch(packed, groups, micros, [None] * len(micros))

    def _score_old(self, state: TrainState, batch: MiniBatch) -> None:
        qweights = self._publisher.qweights(state)
        batch.old = [self._learner.score(state.params, qweights, micro)[0] for micro in batch.micros]

    def judge(self, batches: list[MiniBatch]) -> dict[str, float]:
        """Writes the critic's advantages and targets per token into `batches`. Returns metrics; without critic, {}."""
        if self._critic is None:
            return {}
        with self._timer("values"):
            judgement = self._critic.judge(
                [batch.micros for batch in batches], len(batches) // self._cfg.train.update_epochs
            )
            for batch, micros, targets in zip(batches, judgement.updates, judgement.targets, strict=True):
                batch.micros, batch.targets = micros, targets
        return judgement.metrics

    def score(self, state: TrainState, batches: list[MiniBatch], step: int) -> bool:
        """Computes log-probs of the proximal policy, if the step has several updates, and of the reference, if there is
        one. Returns True if the proximal policy's are the sampler's, to be checked by `update_once`.
        """
        taken = False
        if len(batches) > 1:
            with self._timer("old_logprobs"):
                groups = [group for batch in batches for group in batch.groups]
                taken = self._proximal.takes_step(groups, step) and self._take_samplers(state, batches, step)
                for batch in batches:
                    if any(old is None for old in batch.old):
                        self._score_old(state, batch)
                for name, other in self._learner.beside.items():
                    qweights = other.quantize(state.params)
                    for batch in batches:
                        batch.beside[name] = [other.score(state.params, qweights, m)[0] for m in batch.micros]
                jax.block_until_ready([(batch.old, batch.beside) for batch in batches])
        self._score_reference(state, batches)
        return taken

    def _score_reference(self, state: TrainState, batches: Sequence[MiniBatch]) -> None:
        if self._reference is not None:
            with self._timer("ref_logprobs"):
                for batch in batches:
                    if batch.reference is None:
                        batch.reference = [self._reference(state.params, micro) for micro in batch.micros]
                jax.block_until_ready([batch.reference for batch in batches])

    def _take_samplers(self, state: TrainState, batches: list[MiniBatch], step: int) -> bool:
        """Makes the sampler's log-probs the proximal policy's. In a step that is checked all later ones are
        scored, too; if one of these differs, none is taken."""
        later = batches[1 : self._first_pass(batches)] if self._proximal.checks(step) else []
        for batch in batches:
            batch.old = samplers(batch)
        for batch in later:
            self._score_old(state, batch)
        found = first_mismatch.first(((b.packed, b.groups, b.old) for b in later), step)
        if found is not None:
            self._proximal.distrust(f"step {step}: of the tokens checked, {found}")
            for batch in batches:
                batch.old = [None] * len(batch.micros)
        return found is None

    def _first_pass(self, batches: Sequence[MiniBatch]) -> int:
        """Number of the mini-batches that see a response for the first time."""
        return len(batches) // self._cfg.train.update_epochs

    def _checked_share(self, batches: Sequence[MiniBatch]) -> float:
        """Share of the response tokens whose log-prob in the sampler was compared with the learner's."""
        rows, once = self._cfg.micro_batch_rows, batches[: self._first_pass(batches)]
        checked = once[0].packed.num_tokens
        for batch in once[1:]:
            each = zip(batch.old, batch.micros, batch.packed.micro_batches(rows), strict=True)
            checked += sum(int(host.loss_mask.sum()) for old, micro, host in each if old is not micro.rollout_logprobs)
        return checked / max(1, sum(batch.packed.num_tokens for batch in once))

    def _score_again(self, state: TrainState, batches: Sequence[MiniBatch], place: str) -> None:
        self._distrust(place)
        with self._timer("old_logprobs"):
            for batch in batches:
                self._score_old(state, batch)

    def _distrust(self, place: str) -> None:
        self._proximal.distrust(
            f"{place} is discarded: a token has another log-prob in its forward than in the sampler"
        )

    def fit_critic(self, critic: Critic, batch: MiniBatch, place: str) -> dict[str, Metric]:
        """Makes one update of the critic and returns its metrics. `place` names the step and update in errors.

        Raises:
          DivergedError: the critic's gradient is not finite.
        """
        with self._timer("critic"):
            fitted = critic.update(batch.micros, batch.targets, batch.packed.num_tokens, batch.packed.num_sequences)
            if float(jax.device_get(fitted["critic/nonfinite"].value)):
                raise DivergedError(
                    f"{place}: the critic's gradient is not finite. The run stops here; its last checkpoint is"
                    " intact. Lower critic.optimizer.lr, or inspect samples.jsonl."
                )
        return fitted

    def update_once(
        self,
        state: TrainState,
        batch: MiniBatch,
        place: str,
        *,
        guarded: bool = False,
    ) -> tuple[TrainState, dict[str, Metric]]:
        """Makes one update of the policy. `guarded`: discards it unless learner and sampler agree (`is_exact`)."""
        with self._timer("update"):
            qweights = self._publisher.qweights(state)
            counts = batch.packed.num_tokens, batch.packed.num_sequences
            state, inner = self._learner.update(
                state,
                qweights,
                batch.micros,
                batch.old,
                *counts,
                batch.reference,
                guarded=guarded,
                beside=batch.beside,
            )
            logprobs = inner.pop(LOGPROBS, None)
            if guarded and not is_exact(inner):
                return state, inner
            if all(old is not None for old in batch.old):
                batch.scored = batch.old
            elif isinstance(logprobs, Rows):
                batch.scored = logprobs.parts
            batch.logprobs = logprobs
            self._publisher.updated()
            if float(jax.device_get(inner["optim/nonfinite"].value)):
                raise DivergedError(
                    f"{place}: the gradient is not finite. The run stops here;"
                    " its last checkpoint is intact. Lower optimizer.lr, or inspect samples.jsonl."
                )
        return state, inner

    def _flops(self, packed: packing.Packed) -> float:
        """Model FLOPs of one update on these rows."""
        lengths = (segment.prompt_len + segment.response_len for segment in packed.segments)
        learner, config = self._learner, self._learner.config
        whole, frozen = learner.abstract_params, learner.trainable.frozen(learner.abstract_params)
        active, held = (flops.active_parameters(config, params) for params in (whole, frozen))
        return flops.training(config, active, lengths, held) * (1 + len(learner.beside))
