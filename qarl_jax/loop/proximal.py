# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Decides whether the proximal policy's log-probs of a step come from the sampler or from a pass of the learner.

The proximal policy is the learner at the start of the step, whose published weights drew the step's tokens. If learner
and engine are aligned (`verify/alignment.py`), the sampler's log-probs equal those of a learner's pass, to the bit, and
`train.proximal=auto` skips the pass. The sampler's log-probs are checked:

    first update     every token, in the update's own forward, before a weight changes (`Learner.update(guarded=True)`)
    later updates    every token, in a share `alignment.CHECKED` of the steps, by a pass before the first update

Checking the later updates' tokens in every step would cost the pass that is skipped, because their forwards have
changed weights. `mismatch/checked` is the share of a step's tokens that were checked. A mismatched token discards the
update, or is found before it. The learner then scores this step and the next ones, as under `train.proximal=learner`,
until no token of a scored step is mismatched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qarl_jax.rollout import RolloutEngine
from qarl_jax.run import build
from qarl_jax.run.config import RunConfig
from qarl_jax.types import RolloutGroup
from qarl_jax.verify import alignment


class Proximal:
    """Decides for one process whether to take the sampler's log-probs; after a mismatch it waits for an equal step.

    Args:
      engine: the sampler; only its `facts` are read.
      say: called with a sentence when the sampler's log-probs are rejected, or taken again.
      distrusted: True if the run that is resumed waited for an equal step.
    """

    def __init__(self, cfg: RunConfig, engine: RolloutEngine, say: Callable[[str], None], *, distrusted: bool = False):
        self._cfg, self._engine, self._say = cfg, engine, say
        self._distrusted, self._told = distrusted, False
        self._equal: Callable[[], bool] | None = None  # of the last step that the learner scored

    @property
    def distrusted(self) -> bool:
        """Tells whether the next step waits for an equal one; the last step's outcome counts."""
        return self._distrusted and not (self._equal is not None and self._equal())

    def takes(self, groups: Sequence[RolloutGroup], step: int) -> bool:
        """Tells whether the sampler's log-probs of these responses are used as the proximal policy's."""
        return self.wanted(step) and drawn_under(groups, step)

    def takes_step(self, groups: Sequence[RolloutGroup], step: int) -> bool:
        """Tells `takes` for all of a step's responses; logs once if they are rejected for their versions alone."""
        if not self.wanted(step):
            return False
        taken = drawn_under(groups, step)
        if not taken and not self._told:
            self._told = True
            self._say(
                f"step {step}: the learner scores old log-probs, because a response has tokens of another version than"
                " the step's; so it does in every such step."
            )
        return taken

    def wanted(self, step: int) -> bool:
        """Tells whether the sampler's log-probs would be used if one version drew the whole step."""
        if self._distrusted and not self.distrusted:
            self._distrusted = False
            self._say(f"step {step}: the last step's log-probs are equal: old log-probs are the sampler's again.")
        return not self._distrusted and alignment.takes_samplers(self._cfg, self._engine.facts, step)

    def checks(self, step: int) -> bool:
        """Tells whether this step also checks the tokens of its later updates; drawn from run seed and step."""
        draws = np.random.default_rng(build.seed_of(self._cfg.seed, step, "proximal"))
        return bool(draws.random() < alignment.CHECKED)

    def distrust(self, said: str) -> None:
        """Stops using the sampler's log-probs, and logs why. said: a clause that names the step."""
        self._equal, self._distrusted = None, True
        self._say(f"{said}; the learner scores old log-probs, as under train.proximal=learner, until a step is equal.")

    def compared(self, equal: Callable[[], bool]) -> None:
        """Notes a step's outcome. equal: tells, once it is known, whether every log-prob was the sampler's."""
        self._equal = equal


def drawn_under(groups: Sequence[RolloutGroup], version: int) -> bool:
    """Tells whether every token of some responses was drawn under this version."""
    spans = (span for group in groups for completion in group.completions for span in completion.versions)
    return all(span.version == version for span in spans)
