# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.train --config FILE [section.field=value ...]`: quantization-aware RL, top to bottom.

     prompts -> rollout engine -> completions + rollout_logprobs -> rewards -> advantages -> packed rows
                  ^                                                                             |
             publish(v + 1) <- quantize <- optimizer <- STE gradient <- loss <- low-bit forward <-+

Step n consumes completions drawn under version n and publishes version n + 1. Everything random is a function of
(seed, step), and the whole state is in the checkpoint, so that a killed run started again with the same command goes
on as if nothing had happened. Ctrl-C and SIGTERM finish or drop the step in hand, save, and exit with 0.

Over several hosts the same command is started once per process (`hosts`): all go through this file in step, and what
leaves the program (files, rewards, the view) is the first one's.

Exit codes: 0 done or interrupted after saving; 1 an error of ours or a diverged run; 2 a mistake in the input, told in
one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from qarl_jax import data, metrics, quant
from qarl_jax.data import packing
from qarl_jax.learning.critic import Critic, Targets
from qarl_jax.learning.learner import Learner, TrainState, code_flips
from qarl_jax.loss.advantages import finite, group_advantages
from qarl_jax.loss.common import diagnostics
from qarl_jax.metrics import Metric
from qarl_jax.models import invariant_scaling
from qarl_jax.observe import error_tokens, flops, recorder, terminal, token_trace
from qarl_jax.rollout import PolicyWeights, Request, RolloutEngine, dynamic_sampling, partial_rollouts
from qarl_jax.run import build, card, config, memory_plan
from qarl_jax.run import evaluation as evaluations
from qarl_jax.run.checkpoint import Checkpoints, DamagedCheckpointError, Restored
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import compilation, processes, startup
from qarl_jax.types import Completion, DivergedError, Parser, Prompt, RolloutGroup, UserError, entry_point

# Reported once more over the updates after a step's first, where alone the ratio bands can act (the first has ratio 1).
LATER = ("clip/", "loss/ratio", "loss/seq_ratio", "proximal/")
# Of these only the updates after the first count, where there are any.
MOVED = ("hist/ratio", "hist/seq_ratio")
# Of the first update alone: nothing has moved, so this is the noise between the scoring and the gradient program.
NOISE = ("proximal/noise",)


class Interrupt:
    """Turns the first SIGINT/SIGTERM into a flag that the loop looks at; a second one acts at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interrupt:
        self._previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not in the main thread (a notebook's executor, a test)
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def agreed(self) -> bool:
        """Whether any process was asked to stop; all come to the same."""
        return processes.any_of(self.requested)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print(f"\n{signal.Signals(number).name}: saving at the next safe point (again: stop at once)", file=sys.stderr)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def run(cfg: RunConfig) -> None:
    """One run, from its last checkpoint or from the start, to `train.steps`, an interrupt or an error."""
    with contextlib.ExitStack() as stack:
        # ---- what is cheap and can refuse, before what takes minutes -------------------------------------------------
        processes.start(cfg.distributed)
        interrupt = stack.enter_context(Interrupt())
        same_config(cfg)
        observer: recorder.Observer | recorder.Silent = recorder.Silent()
        with processes.together():
            if processes.is_first():
                observer = recorder.Observer(cfg.run_dir, cfg.log, total_steps=cfg.train.steps)
        stack.enter_context(observer)
        grader = stack.enter_context(contextlib.closing(build.make_grader(cfg)))
        # Entered, so that leaving by an interrupt waits for a save in the background and tells if it failed.
        checkpoints = stack.enter_context(Checkpoints(os.path.join(cfg.run_dir, "checkpoints"), cfg.checkpoint))
        mesh = build.make_mesh(cfg)  # first: before it, nothing may ask JAX for its devices
        compilation.enable_cache(cfg.train.compile_cache)
        tokenizer = data.load_tokenizer(cfg.model.path)
        stop = data.stop_token_ids(tokenizer, cfg.model.path)
        source = data.make_source(cfg.data, tokenizer, "train")
        stream = data.PromptStream(source, cfg.seed, cfg.train.prompts_per_step)
        if source.skipped.total:
            observer.say(f"prompts left out: {source.skipped}")
        evaluates = cfg.eval.every or cfg.eval.at_start or cfg.eval.at_end
        held_out = build.eval_prompts(cfg, tokenizer) if evaluates else []

        # ---- policy, learner, engine ---------------------------------------------------------------------------------
        resumed = processes.from_first(lambda: checkpoints.latest_step() is not None)
        profile = processes.from_first(lambda: build.numerics_of_run(cfg, cfg.run_dir).profile) if resumed else None
        starting = startup.SideBySide()
        graphdef = build.policy_graphdef(cfg, quant.resolve(profile) if profile else None)
        learner = build.make_learner(cfg, graphdef, mesh)
        # The engine's process starts, and the programs of a step are compiled, while the weights are read.
        engine = stack.enter_context(contextlib.closing(build.make_engine(cfg, observer.say)))
        engine.prepare(build.rollout_graphdef(cfg, graphdef))
        if processes.count() == 1:
            stack.callback(starting.wait)
            first = (checkpoints.latest_step() or 0) if resumed else 0
            starting.background("programs", functools.partial(build.compile_ahead, cfg, learner, first))
        with starting.span("weights"):
            params = jax.block_until_ready(build.load_masters(cfg, graphdef, mesh))
        # The reference is the policy the run starts from, whatever checkpoint it resumes from.
        reference = learner.reference(params) if cfg.kl.coef else None
        critic = build.make_critic(cfg, graphdef, params, mesh)
        state = learner.init(params)
        del params  # donated with the state from here on

        def entries() -> dict[str, Any]:
            return state.entries() | (critic.entries() if critic is not None else {})

        start, unfinished = 0, None
        restored = restore(cfg, checkpoints, observer, entries())
        if restored is not None:
            stream.check_state(restored.extra["data"])
            state, start = TrainState(**{name: restored.state[name] for name in state.entries()}), restored.step
            if critic is not None:
                critic.restore(restored.state)
            unfinished = restored.extra.get("partial")
            changed = processes.from_first(lambda: build.changed_settings(cfg))
            observer.say(f"resuming {cfg.run_dir} after step {start}")
            if changed:
                observer.say(f"with other settings than it was last started with: {'; '.join(changed)}")
        # Responses that were interrupted, where `rollout.partial` is on: state of the run as much as the weights are.
        buffer = partial_rollouts.restore(
            cfg.rollout.partial, unfinished, stream, start, cfg.rollout.num_samples_per_prompt
        )
        with processes.together():
            observer.start(config=config.to_dict(cfg), facts=memory_plan.facts(cfg, graphdef))
            observer.write("config.yaml", config.to_yaml(cfg))
            observer.truncate_to(start - 1)
        evaluated = bool(processes.from_first(lambda: evaluations.history(cfg.run_dir, up_to=start)))
        publisher = Publisher(cfg, learner, engine)

        def save(step: int) -> None:
            extra = {"data": stream.state(step), "policy_version": step, "seed": cfg.seed}
            if cfg.rollout.partial.is_on:
                extra["partial"] = buffer.state()
            checkpoints.save(step, entries(), extra)

        def evaluate(version: int) -> dict[str, float]:
            result = evaluations.evaluate(
                engine,
                held_out,
                grader,
                tokenizer,
                sampling=build.eval_sampling(cfg, stop),
                num_samples=cfg.eval.num_samples,
                key=build.seed_of(cfg.seed, 0, "eval"),
                ks=cfg.eval.ks,
            ).metrics
            processes.from_first(lambda: evaluations.record(cfg.run_dir, version, result))
            return result

        # ---- the loop ------------------------------------------------------------------------------------------------
        with starting.span("publish"):
            first_publish = publisher.publish(state, start)
        begun = starting.seconds() | {k: v for k, v in first_publish.items() if k.startswith("time/start_")}
        observer.say(startup.words(begun))
        if cfg.eval.at_start and start == 0 and not evaluated:
            observer.say(f"held-out reward before training: {evaluate(0)['eval/reward/mean']:.3f}")

        timer, recompiles = recorder.PhaseTimer(), compilation.Recompiles()
        peak_flops = flops.of_devices(mesh.devices.flat)

        def sample(step: int, prompts: list[Prompt], batch: int) -> tuple[list[RolloutGroup], dict[str, np.ndarray]]:
            with timer("rollout"):
                completions = engine.generate(
                    prompts,
                    num_samples=cfg.rollout.num_samples_per_prompt,
                    sampling=cfg.rollout.sampling(stop, step),
                    key=build.seed_of(cfg.seed, step, f"rollout/{batch}" if batch else "rollout"),
                )
            return grade(step, prompts, completions)

        def grade(
            step: int, prompts: list[Prompt], completions: Sequence[Sequence[Completion]]
        ) -> tuple[list[RolloutGroup], dict[str, np.ndarray]]:
            with timer("reward"):
                return grader.grade(tokenizer, prompts, completions, cfg.rollout.max_response_len_at(step))

        def extend(step: int, requests: list[Request]) -> list[Completion]:
            sampling = cfg.rollout.sampling(stop, step)
            chunk = cfg.rollout.partial.tokens(sampling.max_response_len)
            with timer("rollout"):
                return engine.extend(requests, sampling=dataclasses.replace(sampling, max_response_len=chunk))

        for step in range(start, cfg.train.steps):
            checkpoints.check()
            timer.take()
            if step == start + 1:
                recompiles.take()  # a process's first step warms up
            profiled = step in cfg.train.profile_steps and processes.is_first()
            folder = os.path.join(cfg.run_dir, "profile")
            with jax.profiler.trace(folder) if profiled else contextlib.nullcontext():
                # ---- sample and grade: nothing has changed yet, so an interrupt drops the step -----------------------
                if cfg.rollout.partial.is_on:
                    collected, left = partial_rollouts.collect(
                        cfg.rollout.partial,
                        cfg.rollout.dynamic,
                        stream,
                        step,
                        buffer,
                        num_samples=cfg.rollout.num_samples_per_prompt,
                        max_response_len=cfg.rollout.max_response_len_at(step),
                        key=lambda begun: build.seed_of(cfg.seed, begun, "rollout"),
                        extend=functools.partial(extend, step),
                        grade=functools.partial(grade, step),
                    )
                else:
                    sample_step = functools.partial(sample, step)
                    collected, left = dynamic_sampling.collect(cfg.rollout.dynamic, stream, step, sample_step), buffer
                groups = collected.groups
                if interrupt.agreed():
                    save(step)
                    checkpoints.wait()
                    observer.end(f"interrupted: saved after step {step}; the same command resumes")
                    return
                buffer = left

                # ---- learn -------------------------------------------------------------------------------------------
                if step == start:
                    with timer("compile"):  # what is left of it
                        starting.join()
                    begun = starting.seconds() | begun
                advantages = finite(np.stack([group.rewards for group in groups]))
                if critic is None:  # else the reward itself, of which the critic makes an advantage per token
                    advantages = group_advantages(advantages, cfg.advantage.name)
                if cfg.train.shuffle_advantages:
                    rng = np.random.default_rng(build.seed_of(cfg.seed, step, "shuffle"))
                    advantages = rng.permutation(advantages.reshape(-1)).reshape(advantages.shape)
                if cfg.train.mask_truncated:
                    groups = dynamic_sampling.without_truncated(groups)
                picks = recorder.picks(groups, cfg.log.samples_per_step)
                follow = token_trace.Follower(
                    picks, learner.loss_fn, most=cfg.log.sample_tokens, rows=cfg.log.samples_per_step
                )
                state, learned, histograms = learn(
                    cfg, learner, publisher, state, groups, advantages, step, timer, reference, critic, follow
                )
                with timer("publish"):
                    published = publisher.publish(state, step + 1)

            # ---- report and save -------------------------------------------------------------------------------------
            done = step + 1
            last = done == cfg.train.steps
            relative = advantages if critic is None else None
            record = rollout_metrics(collected.sampled, collected.parts, relative) | collected.metrics
            record |= learned | published | (begun if step == start else {})
            if (cfg.eval.every and done % cfg.eval.every == 0 and not last) or (last and cfg.eval.at_end):
                with timer("eval"), recompiles.paused():
                    record |= evaluate(done)
            with timer("trace"):
                traces = follow.records(groups, tokenizer)
            record |= {"perf/recompiles": float(recompiles.take()) if step > start else 0.0}
            with processes.together():
                observer.log(step, record | speed(record, timer.take(), mesh.devices.size, peak_flops))
                observer.samples(step, collected.groups, traces)
                observer.histograms(step, histograms)
            stopping = interrupt.agreed()
            if checkpoints.should_save(done) or last or stopping:
                with recompiles.paused():
                    save(done)
            if stopping and not last:
                checkpoints.wait()
                observer.end(f"interrupted: saved after step {done}; the same command resumes")
                return
        checkpoints.wait()
        processes.from_first(lambda: observer.end(summary(cfg)))


def restore(
    cfg: RunConfig, checkpoints: Checkpoints, observer: recorder.Observer | recorder.Silent, state: dict[str, Any]
) -> Restored | None:
    """The run's newest whole checkpoint, read into `state`; None: it begins at step 0.

    Raises:
      UserError: there were checkpoints and none is whole, unless `checkpoint.start_over` says to begin anew.
    """
    latest = processes.from_first(observer.latest)
    if processes.from_first(checkpoints.steps):
        try:
            return checkpoints.restore(state)
        except DamagedCheckpointError as damage:
            lost = str(damage)
    elif latest is None:
        return None
    elif checkpoints.must_have_saved(latest + 1):
        lost = f"{cfg.run_dir} has records up to step {latest}, but its checkpoints are gone."
    else:
        observer.say(f"no checkpoint had been saved when this run ended at step {latest}: it begins at step 0 again")
        return None
    if not cfg.checkpoint.start_over:
        raise UserError(
            f"{lost} Put one back, or name another run_dir; checkpoint.start_over=true begins at step 0 and keeps the"
            " old records aside."
        )
    with processes.together():
        observer.set_aside()
    observer.say(f"{lost} The run begins at step 0; its old records are kept as *.jsonl.old-*")
    return None


class Publisher:
    """Makes QTensors of the masters and hands them to the engine: quantize once per update, publish once per step.

    Where learner and sampler share a scheme (QaRL), what is published are the learner's own tensors, those its forward
    reads in the next update; else (quantized rollout under a bf16 learner) the sampler's are made here.
    """

    def __init__(self, cfg: RunConfig, learner: Learner, engine: RolloutEngine):
        self.learner, self.engine = learner, engine
        self.graphdef = build.rollout_graphdef(cfg, learner.graphdef)
        self._quantize = None if self.graphdef == learner.graphdef else learner.quantizer(self.graphdef)
        self._qweights: Any = None
        self._published: Any = None

    def qweights(self, state: TrainState) -> Any:
        """The learner's QTensors for `state`: those just published, where they are its own."""
        if self._qweights is None:
            self._qweights = self.learner.quantize(state.params)
        return self._qweights

    def updated(self) -> None:
        """The masters moved: the tensors at hand are old."""
        self._qweights = None

    def publish(self, state: TrainState, version: int) -> dict[str, float]:
        """Publishes `state` as `version`; returns the engine's timings and the share of codes that changed."""
        qweights = self.qweights(state) if self._quantize is None else self._quantize(state.params)
        weights = PolicyWeights(graphdef=self.graphdef, params=state.params, qweights=qweights)
        report = timed(self.engine.publish(weights, version))
        if jax.tree.leaves(qweights):
            report["quant/error"] = float(jax.device_get(invariant_scaling.quantization_error(state.params, qweights)))
        if self._published is not None and jax.tree.leaves(qweights):
            # QuRL's "frozen actor" alarm: a policy whose codes do not change samples the same way for ever.
            report["quant/code_flips"] = float(jax.device_get(code_flips(self._published, qweights).value))
        self._published = qweights
        return report


def same_config(cfg: RunConfig) -> None:
    """Refuses processes that were started with other configs, `distributed.process_id` and the rest of it apart."""
    values = config.to_dict(cfg)
    del values["distributed"]
    processes.check_same(json.dumps(values, sort_keys=True, default=str).encode(), "the config's values")


def learn(
    cfg: RunConfig,
    learner: Learner,
    publisher: Publisher,
    state: TrainState,
    groups: list[RolloutGroup],
    advantages: np.ndarray,
    step: int,
    timer: recorder.PhaseTimer,
    reference: tuple[Any, Any] | None = None,
    critic: Critic | None = None,
    follow: token_trace.Follower | None = None,
) -> tuple[TrainState, dict[str, float], dict[str, list[int]]]:
    """All optimizer updates of a step. Returns the new state, the step's reduced metrics and its histograms.

    `reference`: masters and QTensors of the reference policy (`Learner.reference`), where the run has a KL term.
    `critic`: where the run has one; `advantages` are then the rewards, and its own state moves on with the policy's.
    `follow`: is told what happens to the responses it follows.

    The proximal policy is scored once, before the first update, on the very rows the updates use. A step with a single
    update needs no scoring: there the proximal policy is the current one.

    Raises:
      DivergedError: a gradient is not finite; names the step and the update, and leaves the last checkpoint untouched.
    """
    with timer("pack"):
        packs = []
        for epoch in range(cfg.train.update_epochs):
            for chosen in packing.mini_batches(
                len(groups), cfg.train.mini_batch_prompts, seed=cfg.seed, step=step, epoch=epoch
            ):
                packed = packing.pack(
                    [groups[i] for i in chosen],
                    advantages[chosen],
                    row_len=cfg.row_len_at(step),
                    rows_multiple=cfg.train.micro_batch_rows,
                    max_segments=cfg.train.max_segments,
                    unpacked=cfg.train.packing == "unpacked",
                )
                micros = [learner.put(micro) for micro in packed.micro_batches(cfg.train.micro_batch_rows)]
                packs.append((packed, micros))
                if follow is not None:
                    follow.packed(chosen, packed)
    judged: dict[str, float] = {}
    targets: list[list[Targets]] = []
    waiting = critic is not None and cfg.critic is not None and step < cfg.critic.warmup_steps
    if critic is not None:
        with timer("values"):
            judgement = critic.judge([micros for _, micros in packs], len(packs) // cfg.train.update_epochs)
            packs = [(packed, micros) for (packed, _), micros in zip(packs, judgement.updates, strict=True)]
            targets, judged = judgement.targets, judgement.metrics
    old: list[list[Any]] = [[None] * len(micros) for _, micros in packs]
    if len(packs) > 1 and not waiting:
        with timer("old_logprobs"):
            qweights = publisher.qweights(state)
            old = [[learner.score(state.params, qweights, micro)[0] for micro in micros] for _, micros in packs]
            jax.block_until_ready(old)
    refs: list[list[Any] | None] = [None] * len(packs)
    if reference is not None and not waiting:
        with timer("ref_logprobs"):
            refs = [[learner.score(*reference, micro)[0] for micro in micros] for _, micros in packs]
            jax.block_until_ready(refs)
    total: dict[str, Metric] = {}
    moved: dict[str, Metric] = {}
    first: dict[str, Metric] = {}
    later: dict[str, Metric] = {}
    for number, (packed, micros) in enumerate(packs):
        place = f"step {step}, update {number + 1} of {len(packs)}"
        if critic is not None:
            with timer("critic"):
                fitted = critic.update(micros, targets[number], packed.num_tokens, packed.num_sequences)
                if float(jax.device_get(fitted["critic/nonfinite"].value)):
                    raise DivergedError(
                        f"{place}: the critic's gradient is not finite. The run stops here; its last checkpoint is"
                        " intact. Lower critic.optimizer.lr, or inspect samples.jsonl."
                    )
            total = metrics.merge(total, fitted)
        if waiting:
            continue
        with timer("update"):
            qweights = publisher.qweights(state)
            counts = packed.num_tokens, packed.num_sequences
            state, inner = learner.update(state, qweights, micros, old[number], *counts, refs[number])
            logprobs = inner.pop(token_trace.LOGPROBS, None)
            if follow is not None:
                follow.updated(number, micros, old[number], logprobs)
            publisher.updated()
            if float(jax.device_get(inner["optim/nonfinite"].value)):
                raise DivergedError(
                    f"{place}: the gradient is not finite. The run stops here;"
                    " its last checkpoint is intact. Lower optimizer.lr, or inspect samples.jsonl."
                )
        total = metrics.merge(total, inner)
        ratios = {key: value for key, value in inner.items() if key.startswith(MOVED)}
        moved = ratios if number <= 1 else metrics.merge(moved, ratios)
        if number == 0:
            # Nothing has moved yet: what differs from the scored log-probs is the noise between the two programs.
            first = {key: inner[key] for key in NOISE if key in inner}
        else:
            later = metrics.merge(later, {f"later/{k}": v for k, v in inner.items() if k.startswith(LATER)})
    histograms = metrics.histograms(total | moved)
    numbers = metrics.values(total | first | later) | {
        "train/padding_share": float(np.mean([packed.padding_share for packed, _ in packs])),
        "train/tokens": float(sum(packed.num_tokens for packed, _ in packs)),
        "train/updates": 0.0 if waiting else float(len(packs)),
        "train/flops": 0.0 if waiting else sum(model_flops(learner, state.params, packed) for packed, _ in packs),
    }
    return state, numbers | judged | quantiles(histograms), histograms


def model_flops(learner: Learner, params: Any, packed: packing.Packed) -> float:
    """Model FLOPs of one update on these rows."""
    lengths = (segment.prompt_len + segment.response_len for segment in packed.segments)
    return flops.training(learner.config, flops.active_parameters(learner.config, params), lengths)


def quantiles(histograms: dict[str, list[int]]) -> dict[str, float]:
    """Log-ratios at the 1st, 50th and 99th percentile of every histogram that is not empty."""
    out: dict[str, float] = {}
    for key, counts in histograms.items():
        if any(counts):
            found = diagnostics.quantiles(counts, (0.01, 0.5, 0.99))
            name = key.removeprefix("hist/")
            out |= {f"quantile/{name}/p{level}": value for level, value in zip(("01", "50", "99"), found, strict=True)}
    return out


def rollout_metrics(
    groups: list[RolloutGroup], parts: dict[str, np.ndarray], advantages: np.ndarray | None
) -> dict[str, float]:
    """What was sampled and how it was graded. `advantages`: where they are relative to a group."""
    rewards = np.stack([group.rewards for group in groups]).astype(np.float64)
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([len(completion.tokens) for completion in completions])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/best": float(rewards.max(1).mean()),
        **({} if advantages is None else {"reward/zero_advantage_groups": float((advantages == 0).all(1).mean())}),
        **{f"reward/{name}": float(values.mean()) for name, values in parts.items() if len(parts) > 1},
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": float(np.mean([c.finish_reason != "stop" for c in completions])),
        "rollout/version": float(min(c.policy_version for c in completions)),
        "response/tokens": float(lengths.sum()),
        **error_tokens.text_metrics([c.tokens for c in completions], [t for group in groups for t in group.texts]),
    }


def speed(
    record: dict[str, float], times: dict[str, float], devices: int = 1, peak_flops: float | None = None
) -> dict[str, float]:
    """Seconds per phase; tokens per second of the sampler and of the whole step; model FLOP/s of the updates.

    Args:
      devices: devices of the mesh; FLOP/s are those of one of them.
      peak_flops: what all of them could do, where it is known: then MFU is reported too.
    """
    tokens = record["response/tokens"]
    drawn = record.get("rollout/partial_tokens", tokens)
    out = times | {
        "time/rollout_tok_per_s": drawn / max(times.get("time/rollout_s", 0.0), 1e-9),
        "time/tok_per_s": tokens / max(times["time/step_s"], 1e-9),
    }
    if times.get("time/update_s", 0.0) > 0 and "train/flops" in record:
        achieved = record["train/flops"] / times["time/update_s"]
        out["perf/model_tflops"] = achieved / devices / 1e12
        if peak_flops is not None:
            out["perf/mfu"] = achieved / peak_flops
    return out


def summary(cfg: RunConfig) -> str:
    """The run in a few lines: reward of the first and last five steps, held-out evaluations, the curve."""
    records = recorder.read_lines(os.path.join(cfg.run_dir, "metrics.jsonl"))
    rewards = [record["reward/mean"] for record in records]
    lines = [
        f"done: {cfg.run_dir}",
        f"reward/mean       {np.mean(rewards[:5]):.3f} (first five steps) -> {np.mean(rewards[-5:]):.3f} (last five)",
        f"                  {terminal.sparkline(rewards)}",
    ]
    held_out = evaluations.history(cfg.run_dir)
    if len(held_out) > 1:
        first, last = held_out[0], held_out[-1]
        lines.append(
            f"held-out reward   {first['eval/reward/mean']:.3f} (+-{first['eval/reward/stderr']:.3f}, version"
            f" {first['version']}) -> {last['eval/reward/mean']:.3f} (+-{last['eval/reward/stderr']:.3f}, version"
            f" {last['version']})"
        )
    dropped = [record["later/clip/seq_dropped"] for record in records if "later/clip/seq_dropped" in record]
    if dropped:
        lines.append(f"sequences dropped {np.mean(dropped):.1%} (after each step's first update)")
    return "\n".join(lines)


def timed(published: dict[str, float]) -> dict[str, float]:
    """An engine's timings under `time/`, where wall-clock numbers live (they differ between equal runs)."""
    return {f"time/{key.removeprefix('time/')}": value for key, value in published.items()}


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m qarl_jax.train", description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True, help="YAML file (see configs/)")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plans, then stop")
    parser.add_argument("--card-gb", type=float, help="with --dry-run: plan for a card of that many GiB")
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    args = parser.parse_args(argv)
    cfg = config.load(args.config, args.overrides)
    if not args.dry_run:
        processes.start(cfg.distributed)  # before anything asks JAX for its devices
    found = card.card_bytes() if args.card_gb is None else int(args.card_gb * 2**30)
    cfg, shared = card.settle(cfg, found)  # a run that does not fit ends here
    if shared is not None and not args.dry_run:
        shared.keep()
    if cfg.model.remat == "auto":  # only then: a dry run of any other config leaves the device alone
        cfg = memory_plan.with_remat(cfg, memory_plan.device_bytes(cfg))
    if args.dry_run:
        print(config.to_yaml(cfg))
    if args.dry_run or processes.is_first():
        print(config.describe(cfg))
        print("\n".join(shared.lines() if shared is not None else ()), end="\n" * (shared is not None))
    if args.dry_run:
        print(memory_plan.describe(cfg))
        return 0
    run(cfg)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
