# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Decides whether a step takes the sampler's log-probs as those of its proximal policy, or lets the learner score them.

The proximal policy is the learner at the start of the step, which drew the step's tokens. Where the two sides are
aligned (`verify/alignment.py`) the sampler has reported what a pass of the learner would compute, to the bit, so under
`train.proximal=auto` no pass is made. What is taken is checked:

    first update     every token, in the update's own forward, before a weight changes (`Learner.update(guarded=True)`)
    later updates    every token, in a share `alignment.CHECKED` of the steps, by a pass before the first update

A check of all later tokens would be the pass itself: their updates' forwards have other weights. `mismatch/checked` is
the share of a step's tokens that were checked. The first token that differs discards the update, or comes before it.
The step is then scored as under `train.proximal=learner`, and so are all later steps of the process.
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
    """The decision of one process.

    Args:
      cfg: the run's.
      engine: the sampler; its facts are read.
      say: gets a sentence when the sampler's log-probs are not taken after all.
    """

    def __init__(self, cfg: RunConfig, engine: RolloutEngine, say: Callable[[str], None]):
        self._cfg, self._engine, self._say = cfg, engine, say
        self._distrusted = self._told = False

    def takes(self, groups: Sequence[RolloutGroup], step: int) -> bool:
        """Tells whether the log-probs of these responses are taken as the sampler reported them."""
        return self.wanted(step) and drawn_under(groups, step)

    def takes_step(self, groups: Sequence[RolloutGroup], step: int) -> bool:
        """`takes` of all of a step's responses; says so once if their versions alone are against it."""
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
        """Tells whether they would be taken if one version drew the step."""
        return not self._distrusted and alignment.takes_samplers(self._cfg, self._engine.facts, step)

    def checks(self, step: int) -> bool:
        """Tells whether the tokens of a step's later updates are checked; a function of the run's seed and step."""
        draws = np.random.default_rng(build.seed_of(self._cfg.seed, step, "proximal"))
        return bool(draws.random() < alignment.CHECKED)

    def distrust(self, said: str) -> None:
        """Ends the taking, and says why. said: a clause with the step."""
        self._distrusted = True
        self._say(f"{said}; the learner scores old log-probs from here on, as under train.proximal=learner.")


def drawn_under(groups: Sequence[RolloutGroup], version: int) -> bool:
    """Tells whether every token of some responses was drawn under this version."""
    spans = (span for group in groups for completion in group.completions for span in completion.versions)
    return all(span.version == version for span in spans)
