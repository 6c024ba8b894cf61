# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A tiny aligned run, step by step: the embedded sampler in float64 has the learner's log-probs, in another program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax.loop.publisher import Publisher
from qarl_jax.loop.session import Session
from qarl_jax.loop.updates import Updates
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.run import config
from tests.reference import tiny

STEPS = 5
SECTIONS = {
    "model": {"dtype": "bfloat16"},
    "quant": {"forward": "w8a8", "engine": "cpu", "code_flips": False},
    "optimizer": {"name": "adamw", "lr": 0.004},
    "loss": {"name": "tbpo", "clip_high": 1.0, "neg_clip_low": 1.0, "neg_clip_high": 1.0, "mismatch": "tis"},
}


class Run:
    """Five steps of two updates each, under any `train.proximal`, of one learner and one engine: one set of programs.

    Args:
      rows: `train.micro_batch_rows`; 8: an update is one program, 4: several gradients, then the optimizer.
      sections: of the config, as `tiny.World.changed` takes them.
    """

    def __init__(self, folder, rows, **sections):
        self.cfg = tiny.World(folder).changed(**SECTIONS, train={"micro_batch_rows": rows}).changed(**sections).config
        self.session = Session(self.cfg)
        self.masters = jax.device_get(self.session.state.params)
        self.draw, self.score, self.passes = self.session.engine.draw, self.session.learner.score, 0
        self.session.learner.score = self.scoring

    def scoring(self, *args):
        self.passes += 1
        return self.score(*args)

    def steps(self, setting, tampered=None):
        """(state, record per step, sentences, calls of the scoring program) from the first masters on.

        Args:
          setting: train.proximal.
          tampered: (step, response, by how much): its middle token is reported lower, by an ulp at least.
        """
        session, said, self.passes = self.session, [], 0
        session.step, session.state = (
            0,
            session.learner.init(jax.tree.map(lambda x: jnp.array(x, copy=True), self.masters)),
        )
        session._publisher = Publisher(self.cfg, session.learner, session.engine)
        cfg = config.replaced(self.cfg, {"train.proximal": setting})
        session._updates = Updates(cfg, session.learner, session._publisher, PhaseTimer(), say=said.append)
        session.engine.draw = self.draw if tampered is None else functools.partial(self.drawing, *tampered)
        session.publish()
        records = [session.train_step() for _ in range(STEPS)]
        return jax.device_get(session.state.entries()), [steady(record) for record in records], said, self.passes

    def drawing(self, step, response, amount, requests, *, sampling):
        for index, drawn in self.draw(requests, sampling=sampling):
            if (self.session.step, index) == (step, response):
                logprobs = drawn.logprobs.copy()
                middle = len(logprobs) // 2
                logprobs[middle] = np.nextafter(logprobs[middle] - np.float32(amount), np.float32(-100))
                drawn = dataclasses.replace(drawn, logprobs=logprobs)
            yield index, drawn


def steady(record):
    """A record without what depends on the clock."""
    return {key: value for key, value in record.items() if not key.startswith("time/")}


def assert_same_bits(found, wanted):
    leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in leaves:
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
