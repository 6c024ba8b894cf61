# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`import qarl_jax` is enough for a notebook: load, quantize, sample, score, train a step, publish."""

import subprocess
import sys

import numpy as np
import pytest

import qarl_jax
from tests.reference import tiny


def test_importing_the_package_alone_loads_no_jax():
    script = "import sys, qarl_jax; assert qarl_jax.__version__ and 'jax' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_every_public_name_is_there_and_documented():
    assert all(getattr(qarl_jax, name).__doc__ for name in qarl_jax.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        _ = qarl_jax.lode


@pytest.mark.slow
def test_a_session_samples_scores_and_trains(tmp_path):
    world = tiny.World(tmp_path)
    with qarl_jax.load(world.command()[1]) as session:
        groups = session.sample()
        ours, theirs = session.score(groups)
        assert ours.shape == theirs.shape == (sum(len(c.tokens) for group in groups for c in group.completions),)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)  # learner and sampler are one policy
        unaligned, _ = session.score(groups, "bf16")
        assert np.abs(unaligned - theirs).max() > 1e-3
        numbers = session.train_step()
        assert session.engine.version == session.step == 1
    assert numbers["train/updates"] == 2
    assert "mismatch/k3" in numbers
