# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Everything a run is made of, from its config to an engine that serves the policy it starts or goes on with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import jax

from qarl_jax import data
from qarl_jax.learning.learner import TrainState
from qarl_jax.loop import first_step, resume, unequal
from qarl_jax.loop.ahead import Ahead
from qarl_jax.loop.collector import Collector
from qarl_jax.loop.interrupt import Interrupt
from qarl_jax.loop.publisher import Publisher
from qarl_jax.loop.updates import Updates
from qarl_jax.numerics.engine import of_profile
from qarl_jax.observe import recorder
from qarl_jax.rollout import partial_rollouts
from qarl_jax.run import build, config, evaluation, memory_plan
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import compilation, processes, startup


class Run:
    """A run's parts. What is cheap and can refuse is made first, before what takes minutes.

    Args:
      cfg: the run's.
      stack: ends what the parts have begun.

    Attributes:
      state: the policy's masters and optimizer; the loop moves it on.
      start: the step it begins or goes on with.
      begun: seconds that each part of the start took, for the first step's record.
    """

    def __init__(self, cfg: RunConfig, stack: contextlib.ExitStack):
        self.cfg = cfg
        processes.start(cfg.distributed)
        self.interrupt = stack.enter_context(Interrupt())
        same_config(cfg)
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
        self.tokenizer = data.load_tokenizer(cfg.model.path)
        self._stop = data.stop_token_ids(self.tokenizer, cfg.model.path)
        source = data.make_source(cfg.data, self.tokenizer, "train")
        self.stream = data.PromptStream(source, cfg.seed, cfg.train.prompts_per_step, cfg.data.stages)
        if source.skipped.total:
            self.observer.say(f"prompts left out: {source.skipped}")
        evaluates = cfg.eval.every or cfg.eval.at_start or cfg.eval.at_end
        self._held_out = build.eval_prompts(cfg, self.tokenizer) if evaluates else []

        # ---- policy, learner, engine ---------------------------------------------------------------------------------
        resumed = processes.from_first(lambda: self.checkpoints.latest_step() is not None)
        profile = processes.from_first(lambda: build.numerics_of_run(cfg, cfg.run_dir).profile) if resumed else None
        self._starting = startup.SideBySide()
        graphdef = build.policy_graphdef(cfg, of_profile(profile) if profile else None)
        self.learner = build.make_learner(cfg, graphdef, self.mesh)
        # The engine's process starts, and the programs of a step are compiled, while the weights are read.
        schedule = build.make_schedule(cfg)
        self.engine = stack.enter_context(contextlib.closing(build.make_engine(cfg, self.observer.say, schedule)))
        self.engine.prepare(build.rollout_graphdef(cfg, graphdef))
        if processes.count() == 1:
            stack.callback(self._starting.wait)
            first = (self.checkpoints.latest_step() or 0) if resumed else 0
            self._starting.background("programs", functools.partial(build.compile_ahead, cfg, self.learner, first))
        with self._starting.span("weights"):
            params = jax.block_until_ready(build.load_masters(cfg, graphdef, self.mesh))
        # The reference is the policy the run starts from, whatever checkpoint it resumes from.
        reference = self.learner.reference(params) if cfg.kl.coef else None
        self.critic = build.make_critic(cfg, graphdef, params, self.mesh)
        self.state = self.learner.init(params)
        del params  # donated with the state from here on
        self.start, unfinished, ready = 0, None, None
        restored = resume.restore(cfg, self.checkpoints, self.observer, self._entries())
        if restored is not None:
            self.stream.check_state(restored.extra["data"])
            names = self.state.entries()
            self.state, self.start = TrainState(**{name: restored.state[name] for name in names}), restored.step
            if self.critic is not None:
                self.critic.restore(restored.state)
            if self.stream.curriculum is not None and "curriculum" in restored.extra:
                self.stream.curriculum.restore(restored.extra["curriculum"])
            unfinished, ready = restored.extra.get("partial"), restored.extra.get("ahead")
            self.observer.say(f"resuming {cfg.run_dir} after step {self.start}")
            if changed := processes.from_first(lambda: build.changed_settings(cfg)):
                self.observer.say(f"with other settings than it was last started with: {'; '.join(changed)}")
        buffer = partial_rollouts.restore(
            cfg.rollout.partial, unfinished, self.stream, self.start, cfg.rollout.num_samples_per_prompt
        )
        with processes.together():
            self.observer.start(config=config.to_dict(cfg), facts=memory_plan.facts(cfg, graphdef))
            self.observer.write("config.yaml", config.to_yaml(cfg))
            self.observer.truncate_to(self.start - 1)
        evaluated = bool(processes.from_first(lambda: evaluation.history(cfg.run_dir, up_to=self.start)))

        # ---- the loop's verbs ----------------------------------------------------------------------------------------
        self.timer = recorder.PhaseTimer()
        self.publisher = Publisher(cfg, self.learner, self.engine)
        self.updates = Updates(cfg, self.learner, self.publisher, self.timer, reference=reference, critic=self.critic)
        behind = self.timer if schedule is None else recorder.PhaseTimer()  # each thread has its own
        self.collector: Collector | Ahead = Collector(
            cfg, self.engine, self.grader, self.tokenizer, self._stop, self.stream, buffer, behind
        )
        if schedule is not None:
            self.collector = Ahead(
                self.collector,
                schedule,
                self.stream,
                timer=self.timer,
                behind=behind,
                first=self.start,
                state=ready,
            )
            stack.enter_context(contextlib.closing(self.collector))
        with self._starting.span("publish"):
            published = self.publisher.publish(self.state, self.start)
        self.begun = self._starting.seconds() | {k: v for k, v in published.items() if k.startswith("time/start_")}
        self.observer.say(startup.words(self.begun))
        if (facts := getattr(self.engine, "facts", None)) is not None:
            self.observer.say(unequal.promise(cfg, facts.execution))
        if cfg.eval.at_start and self.start == 0 and not evaluated:
            self.observer.say(f"held-out reward before training: {self.evaluate(0)['eval/reward/mean']:.3f}")

    def programs_are_ready(self) -> None:
        """Waits for what is left of the compilation that began beside the start.

        What could not be compiled there is compiled where it is called first, which fails for good if it must. On a
        busy host XLA at times cannot start its assembler ("Failed to launch ptxas").
        """
        with self.timer("compile"):
            try:
                self._starting.join()
            except Exception as error:
                self.observer.say(f"not compiled ahead, but when needed: {str(error)[:200]}")
        self.begun = self._starting.seconds() | self.begun

    def score_early(self, step: int) -> None:
        """Before a step is collected: whole mini-batches of it are scored while others are drawn."""
        if isinstance(self.collector, Collector):  # others sample under older versions, too
            self.collector.on_graded = self.updates.ahead(self.state, step)

    def remark(self, step: int, record: Mapping[str, Any]) -> None:
        """Says so if sampler and learner differ more than they are known to, and where they do first."""
        facts = getattr(self.engine, "facts", None)
        execution = "" if facts is None else facts.execution
        if step == self.start and (said := first_step.remark(self.cfg, record, execution)) is not None:
            self.observer.say(said)
        found = self.updates.unequal
        if found is not None and not unequal.reason(self.cfg, execution):
            self.observer.unequal(step, dataclasses.asdict(found))
            self.observer.say(f"step {step}: {found}")

    def evaluate(self, version: int) -> dict[str, float]:
        """Samples and grades the held-out prompts under the version being served; recorded."""
        cfg = self.cfg
        result = evaluation.evaluate(
            self.engine,
            self._held_out,
            self.grader,
            self.tokenizer,
            sampling=build.eval_sampling(cfg, self._stop),
            num_samples=cfg.eval.num_samples,
            key=build.seed_of(cfg.seed, 0, "eval"),
        ).metrics
        processes.from_first(lambda: evaluation.record(cfg.run_dir, version, result))
        return result

    def save(self, step: int) -> None:
        """A checkpoint after so many steps: all of the run's state."""
        extra = {"data": self.stream.state(step), "policy_version": step, "seed": self.cfg.seed}
        self.checkpoints.save(step, self._entries(), extra | self.collector.state())

    def end_interrupted(self, step: int) -> None:
        """The last words of a run that was asked to stop and has been saved after so many steps."""
        self.checkpoints.wait()
        self.observer.end(f"interrupted: saved after step {step}; the same command resumes")

    def _entries(self) -> dict[str, Any]:
        return self.state.entries() | (self.critic.entries() if self.critic is not None else {})


def same_config(cfg: RunConfig) -> None:
    """Refuses processes that were started with other configs, `distributed.process_id` and the rest of it apart."""
    values = config.to_dict(cfg)
    del values["distributed"]
    processes.check_same(json.dumps(values, sort_keys=True, default=str).encode(), "the config's values")
