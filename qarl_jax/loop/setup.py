# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds all parts of a run from its config, up to an engine that serves the initial or resumed policy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

import jax

from qarl_jax import data, models
from qarl_jax.learning.state import TrainState
from qarl_jax.loop import first_mismatch, first_step, resume
from qarl_jax.loop.ahead import Ahead
from qarl_jax.loop.collector import Collector
from qarl_jax.loop.interrupt import Interrupt
from qarl_jax.loop.publisher import Publisher
from qarl_jax.loop.updates import Updates
from qarl_jax.observe import phases, recorder, terminal
from qarl_jax.rollout import partial_rollouts
from qarl_jax.rollout.asynchronous import Schedule
from qarl_jax.run import build, config, evaluation, reference, stamp
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.run.config import RunConfig
from qarl_jax.run.prompts import Prompts
from qarl_jax.runtime import compilation, processes, progress, startup
from qarl_jax.types import command
from qarl_jax.verify import alignment


class Run:
    """All parts of a training run. Cheap parts that can refuse the config are made before those that take minutes.

    Args:
      cfg: the run's config. prompts: the prompts of `cfg`.
      stack: gets the callbacks that close the parts.

    Attributes:
      state: the policy's masters and optimizer state; the loop replaces it.
      start: the first step to train: 0, or the resumed one.
      begun: seconds of each part of the start, for the first step's record.
    """

    def __init__(self, cfg: RunConfig, prompts: Prompts, stack: contextlib.ExitStack):
        self.cfg = cfg
        processes.start(cfg.distributed)
        self.interrupt = stack.enter_context(Interrupt())
        same_config(cfg)
        reference.check(cfg)
        self.observer: recorder.Observer | recorder.Silent = recorder.Silent()
        with processes.together():
            if processes.is_first():
                self.observer = recorder.Observer(cfg.run_dir, cfg.log, total_steps=cfg.train.steps)
        stack.enter_context(self.observer)
        self.grader = stack.enter_context(contextlib.closing(build.make_grader(cfg)))
        # Entered, so that leaving by an interrupt waits for a save in the background and tells if it failed.
        self.checkpoints = stack.enter_context(Checkpoints(os.path.join(cfg.run_dir, "checkpoints"), cfg.checkpoint))
        self.mesh = build.make_mesh(cfg)  # first: before it, nothing may ask JAX for its devices
        compilation.enable_cache(cfg.train.compile_cache)
        self.tokenizer, self._held_out = prompts.tokenizer, prompts.held_out
        self._stop = data.stop_token_ids(self.tokenizer, cfg.model.path)
        self.stream = prompts.stream

        # ---- policy, learner, engine ---------------------------------------------------------------------------------
        saved = processes.from_first(lambda: stamp.of(self.checkpoints.directory))
        if saved is not None:
            self.stream.check_state(saved["data"])
        self._starting = startup.SideBySide()
        graphdef = build.policy_graphdef(cfg, stamp.learner_numerics(cfg, saved))
        self._graphdef = graphdef
        self._stamp = stamp.make(cfg, models.config_of(graphdef).numerics.profile)  # of the base as it is read
        self.learner = build.make_learner(cfg, graphdef, self.mesh)
        # The engine's process starts, and the programs of a step are compiled, while the weights are read.
        schedule = build.make_schedule(cfg)
        log_file = os.path.join(cfg.run_dir, "engine.log")
        made = build.make_engine(cfg, self.observer.say, schedule, log_file)
        self.engine = stack.enter_context(contextlib.closing(made))
        if build.holds_base_once(cfg, self.mesh.size):
            self.learner.keeper = self.engine.hold_once(graphdef, self.mesh)
        self.engine.prepare(build.rollout_graphdef(cfg, graphdef))
        if processes.count() == 1:
            stack.callback(self._starting.wait)
            first = saved["step"] if saved else 0
            self._starting.background("programs", functools.partial(build.compile_ahead, cfg, self.learner, first))
        with self._starting.span("weights"):
            params, frozen = jax.block_until_ready(build.load_policy(cfg, self.learner))
        self.critic = build.make_critic(cfg, graphdef, params, frozen, self.mesh)
        self.state = self.learner.init(params, frozen)
        del params  # donated with the state from here on
        # Made of the policy the run starts from, whatever checkpoint it resumes from.
        scores = reference.make(cfg, self.learner, self.state.params)
        self.start, self._saved, self._changed = 0, -1, list[str]()
        extra = self._resume(saved)
        buffer = partial_rollouts.restore(
            cfg.rollout.partial, extra.get("partial"), self.stream, self.start, cfg.rollout.num_samples_per_prompt
        )

        # ---- the loop's verbs ----------------------------------------------------------------------------------------
        self.timer = phases.PhaseTimer()
        self.publisher = Publisher(cfg, self.learner, self.engine)
        say = self.observer.say
        self.updates = Updates(
            cfg, self.learner, self.publisher, self.timer, reference=scores, critic=self.critic, say=say, saved=extra
        )
        self.collector = self._make_collector(schedule, buffer, extra.get("ahead"), stack)
        with self._starting.span("publish"):
            published = self.publisher.publish(self.state, self.start)
        self.begun = self._starting.seconds() | {k: v for k, v in published.items() if k.startswith("time/start_")}
        self.observer.say(startup.words(self.begun))
        self.observer.say(f"to follow it in a browser: {command('watch')} {shlex.quote(cfg.run_dir)}")
        if (facts := self.engine.facts) is not None:
            self.observer.say(f"{alignment.of_run(cfg, facts)} (execution {facts.execution})")
        self._at_start = self._measured(0) if cfg.eval.at_start and self.start == 0 else None
        if self._at_start is not None:
            self._tell(0, self._at_start)

    def _make_collector(
        self, schedule: Schedule | None, buffer: partial_rollouts.Buffer, state: Any, stack: contextlib.ExitStack
    ) -> Collector | Ahead:
        """Makes the collector; with a schedule it samples ahead, in a thread. state: a checkpoint's, or None."""
        behind = self.timer if schedule is None else phases.PhaseTimer(beside=self.timer)  # each thread has its own
        collector = Collector(
            self.cfg, self.engine, self.grader, self.tokenizer, self._stop, self.stream, buffer, behind
        )
        if schedule is None:
            return collector
        ahead = Ahead(collector, schedule, self.stream, timer=self.timer, behind=behind, first=self.start, state=state)
        return stack.enter_context(contextlib.closing(ahead))

    def _resume(self, saved: dict[str, Any] | None) -> dict[str, Any]:
        """Restores the newest checkpoint, and returns its JSON; empty: there is none. saved: its stamp."""
        restored = resume.restore(self.cfg, self.checkpoints, self.observer, self._entries())
        if restored is None:
            return {}
        names = self.state.entries()
        self.state, self.start = TrainState(**{name: restored.state[name] for name in names}), restored.step
        if self.critic is not None:
            self.critic.restore(restored.state)
        if self.stream.curriculum is not None and "curriculum" in restored.extra:
            self.stream.curriculum.restore(restored.extra["curriculum"])
        self.observer.say(f"resuming {self.cfg.run_dir} after step {self.start}")
        self._changed = stamp.changes(self.cfg, (saved or {}) | restored.extra)
        if self._changed:
            self.observer.say(f"with settings other than those of step {self.start}: {'; '.join(self._changed)}")
        return restored.extra

    def begin_record(self) -> None:
        """Writes this start to the run's files, and drops records of steps that will be trained again.

        Called after the first step of this start, so that a start that trains nothing leaves the files unchanged.
        """
        cfg = self.cfg
        with processes.together():
            facts = policy_facts(cfg, self._graphdef, self.learner.abstract_params)
            facts |= {"step": self.start, "changed": self._changed}
            self.observer.start(config=config.to_dict(cfg), facts=facts)
            self.observer.write("config.yaml", config.to_yaml(cfg))
            self.observer.truncate_to(self.start - 1)
            if processes.is_first():
                evaluation.history(cfg.run_dir, up_to=self.start or -1)
                if self._at_start is not None:
                    evaluation.record(cfg.run_dir, 0, self._at_start)

    def programs_are_ready(self) -> None:
        """Waits for the compilation that runs in the background since the start.

        A program that failed to compile is compiled again at its first call, where an error ends the run. On a busy
        host XLA at times cannot start its assembler ("Failed to launch ptxas").
        """
        with self.timer("compile"):
            try:
                self._starting.join()
            except Exception as error:
                self.observer.say(f"not compiled ahead, but when needed: {str(error)[:200]}")
        self.begun = self._starting.seconds() | self.begun

    def remark(self, step: int, record: Mapping[str, Any], found: first_mismatch.FirstMismatch | None) -> None:
        """Warns if learner and sampler differ more than known for their schemes; logs the first mismatch (`found`)."""
        verdict = alignment.of_run(self.cfg, self.engine.facts, step)
        if step == self.start:
            for said in (first_step.remark(self.cfg, record, verdict), first_step.padding(self.cfg, record)):
                if said is not None:
                    self.observer.say(said)
        if found is not None and verdict.is_aligned:
            self.observer.first_mismatch(step, dataclasses.asdict(found))
            self.observer.say(f"step {step}: {found}")

    def evaluate(self, version: int) -> dict[str, float]:
        """Samples and grades the held-out prompts under the served version; prints and records the scores."""
        result = self._measured(version)
        self._tell(version, result)
        processes.from_first(lambda: evaluation.record(self.cfg.run_dir, version, result))
        return result.metrics

    def _measured(self, version: int) -> evaluation.Evaluation:
        """Evaluates a version, then its slices in `eval.widths`, whose metrics begin with eval_w8/ and so on."""
        with self.publisher.without_noise(self.state, version):
            result = self._sampled()
        at_width = functools.partial(self.publisher.at_width, self.state, version)
        return evaluation.over_widths(self.cfg.other_widths["eval"], result, self._sampled, at_width)

    def _sampled(self) -> evaluation.Evaluation:
        """Evaluates the served policy."""
        cfg = self.cfg
        return evaluation.evaluate(
            self.engine,
            self._held_out,
            self.grader,
            self.tokenizer,
            sampling=build.eval_sampling(cfg, self._stop),
            num_samples=cfg.eval.num_samples,
            key=build.seed_of(cfg.seed, 0, "eval"),
        )

    def _tell(self, version: int, result: evaluation.Evaluation) -> None:
        when = f"of version {version}" if version else "before training"
        self.observer.say(f"held-out reward {when}: {terminal.held_out_score(result.metrics)}")
        for bits in self.cfg.other_widths["eval"]:
            score = terminal.held_out_score(evaluation.of_width(bits, result.metrics))
            self.observer.say(f"held-out reward {when}, at {bits} bits: {score}")

    def save(self, step: int) -> None:
        """Saves a checkpoint after `step` steps, once: the run's whole state, and the settings it was made with."""
        if step == self._saved:
            return
        extra = {"data": self.stream.state(step), "policy_version": step, "seed": self.cfg.seed}
        extra |= self._stamp | self.updates.saved() | self.collector.state()
        with progress.task("saving a checkpoint"):
            self.checkpoints.save(step, self._entries(), extra)
        self._saved = step

    def end_interrupted(self, step: int) -> None:
        """Waits for the last checkpoint, and prints where an interrupted run ended and how to resume it."""
        self.checkpoints.wait()
        where = f"saved after step {step}; the same command resumes" if step else "the same command begins again"
        self.observer.end(f"interrupted: {where}")

    def _entries(self) -> dict[str, Any]:
        return self.state.entries() | (self.critic.entries() if self.critic is not None else {})


def same_config(cfg: RunConfig) -> None:
    """Refuses processes that were started with different configs; the section `distributed` may differ."""
    values = config.to_dict(cfg)
    del values["distributed"]
    processes.check_same(json.dumps(values, sort_keys=True, default=str).encode(), "the config's values")


def policy_facts(cfg: RunConfig, graphdef: Any, params: Any) -> dict[str, Any]:
    """Describes the policy for run.json: parameters, arithmetic profile, devices, schemes."""
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "numerics": {"profile": models.config_of(graphdef).numerics.profile},  # the rest is a layer's own
        "devices": [str(device) for device in jax.devices()],
        "forward": cfg.quant.forward,
        "rollout": cfg.quant.rollout_scheme,
    }
