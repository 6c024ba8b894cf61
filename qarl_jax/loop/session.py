# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A training run driven step by step from a notebook, without `train`'s loop.

    session = qarl_jax.load("configs/quickstart.yaml", "train.prompts_per_step=32")
    groups = session.sample()               # graded responses of the served policy
    learner, sampler = session.score(groups)    # log-probs of both
    numbers = session.train_step()          # collect, advantages, update, publish
    session.close()

Nothing is written to disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import numpy as np
from jaxtyping import Float

from qarl_jax import data, models
from qarl_jax.learning.state import TrainState
from qarl_jax.loop import step_metrics
from qarl_jax.loop.collector import Collector
from qarl_jax.loop.publisher import Publisher
from qarl_jax.loop.updates import Updates, advantages_of, packed_rows
from qarl_jax.memory.plan import spread
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.rollout import partial_rollouts
from qarl_jax.run import build, config
from qarl_jax.run.config import RunConfig
from qarl_jax.types import RolloutGroup, UserError


class Session:
    """A policy, its learner and the engine that serves it.

    Args:
      cfg: the run's config.

    Attributes:
      cfg: the config.
      tokenizer: the policy's tokenizer.
      learner: the compiled programs (`qarl_jax.learning.learner.Learner`).
      state: masters and optimizer state; `train_step` replaces it.
      engine: the sampler (`qarl_jax.rollout.RolloutEngine`).
      step: number of the next step, which is the served version of the policy.

    Raises:
      UserError: the config has a critic, a reference policy (`kl.coef`) or asynchronous training, or the device rounds
        the codes of `quant.backward` wrongly.
    """

    def __init__(self, cfg: RunConfig):
        if cfg.critic is not None or cfg.kl.coef:
            raise UserError(
                "a session has neither critic nor reference policy: use `python -m qarl_jax.train` for these"
            )
        if cfg.train.asynchronous.is_on:
            raise UserError("a session goes step by step: set train.asynchronous.max_staleness=0 for it.")
        cfg, self.step, self._stack = spread(cfg), 0, contextlib.ExitStack()
        mesh = build.make_mesh(cfg)
        build.check_backward(cfg)
        self.tokenizer = data.load_tokenizer(cfg.model.path)
        stop = data.stop_token_ids(self.tokenizer, cfg.model.path)
        self.cfg = cfg = dataclasses.replace(cfg, data=data.with_prompt_len(cfg.data, self.tokenizer))
        source = data.make_source(cfg.data, self.tokenizer, "train")
        stream = data.PromptStream(source, cfg.seed, cfg.train.prompts_per_step, cfg.data.stages)
        self.learner = build.make_learner(cfg, build.policy_graphdef(cfg), mesh)
        self.state: TrainState = self.learner.init(*build.load_policy(cfg, self.learner))
        self._others: dict[str, Any] = {}
        grader = self._stack.enter_context(contextlib.closing(build.make_grader(cfg)))
        self.engine = self._stack.enter_context(contextlib.closing(build.make_engine(cfg)))
        timer, self._mesh = PhaseTimer(), mesh
        self._publisher = Publisher(cfg, self.learner, self.engine)
        self._updates = Updates(cfg, self.learner, self._publisher, timer)
        buffer = partial_rollouts.restore(cfg.rollout.partial, None, stream, 0, cfg.rollout.num_samples_per_prompt)
        self._collector = Collector(cfg, self.engine, grader, self.tokenizer, stop, stream, buffer, timer)
        self.publish()

    def quantize(self) -> Any:
        """Returns the learner's QTensors of the current masters: those that `publish` hands to the engine."""
        return self._publisher.qweights(self.state)

    def publish(self) -> dict[str, float]:
        """Publishes the current masters as version `step`. Returns timings, and the share of codes that changed."""
        return self._publisher.publish(self.state, self.step)

    def sample(self) -> list[RolloutGroup]:
        """Samples and grades responses to the next step's prompts. Changes no state: calls give equal groups."""
        return self._collector.collect(self.step).groups

    def score(
        self, groups: list[RolloutGroup], scheme: str | None = None
    ) -> tuple[Float[np.ndarray, " t"], Float[np.ndarray, " t"]]:
        """Returns (learner's, sampler's) log-probs of all response tokens, each a flat float32 array in one order.

        Args:
          groups: as sampled.
          scheme: weight scheme of the scoring learner; None: the run's. "bf16" gives a learner that is not aligned.
        """
        learner = self.learner if scheme is None else self._learner_under(scheme)
        nothing = np.zeros((len(groups), len(groups[0].completions)), np.float32)
        packed = packed_rows(self.cfg, groups, nothing, self.step)
        qweights = self.quantize() if scheme is None else learner.quantize(self.state.params)
        ours, theirs = [], []
        for micro in packed.micro_batches(self.cfg.micro_batch_rows):
            logprobs, _ = learner.score(self.state.params, qweights, learner.put(micro))
            ours.append(np.asarray(logprobs)[micro.loss_mask])
            theirs.append(np.asarray(micro.rollout_logprobs)[micro.loss_mask])
        return np.concatenate(ours), np.concatenate(theirs)

    def train_step(self) -> dict[str, float]:
        """Trains one step as `train` does: collect, advantages, update, publish. Returns its metrics.

        No update begins before all groups are sampled: a notebook cell interrupted before then changes nothing.
        """
        collected = self._collector.collect(self.step)
        self._collector.keep()
        groups, advantages = advantages_of(self.cfg, collected.groups)
        self.state, learning = self._updates.run(self.state, groups, advantages, self.step)
        self.step += 1
        reward = float(step_metrics.graded(collected.sampled).mean())
        published = self.publish()
        return learning.result().metrics | published | {"reward/mean": reward}

    def close(self) -> None:
        """Stops the engine and the rewards' processes."""
        self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _learner_under(self, scheme: str) -> Any:
        if scheme not in self._others:
            graphdef = models.with_scheme(self.learner.graphdef, scheme)
            self._others[scheme] = other = build.make_learner(self.cfg, graphdef, self._mesh)
            if self.cfg.lora is not None:
                other.hold(build.load_policy(self.cfg, other)[1])
        return self._others[scheme]


def load(path: str | os.PathLike[str], *overrides: str) -> Session:
    """Starts a session of the run that a config file describes.

    Args:
      path: YAML file (see configs/).
      overrides: section.field=value, as on the command line.

    Raises:
      UserError: the config is wrong; the message says in one sentence what and how to mend it.
    """
    return Session(config.load(path, list(overrides)))
