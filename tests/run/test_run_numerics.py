# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Whose arithmetic a run has under `quant.engine=auto`, and that what goes on with a run keeps it."""

import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.quant import resolve
from qarl_jax.run import build, evaluation, export, stamp
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.types import UserError
from tests.reference import tiny

pytestmark = pytest.mark.usefixtures("shared_learners")

VLLM = {"engine": {"name": "vllm"}}


@pytest.fixture(scope="module")
def world(compiled_programs, tmp_path_factory):
    world = tiny.World(tmp_path_factory.mktemp("world"))
    del world.tree["quant"]["engine"]
    return world


def saved(cfg, profile):
    """The stamp of a policy that a run of `cfg` saved after its first step."""
    with Checkpoints(f"{cfg.run_dir}/checkpoints") as checkpoints:
        checkpoints.save(1, {"params": np.zeros(3)}, stamp.make(cfg, profile))
    return stamp.of(cfg.run_dir)


def test_a_checkpoint_says_what_its_policy_was_computed_in(world, tmp_path):
    assert stamp.numerics_of(stamp.of(tmp_path)) is None
    there = world.changed(run_dir=str(tmp_path)).config
    assert stamp.numerics_of(saved(there, "cuda")) == resolve("cuda")
    assert stamp.numerics_of(stamp.of(tmp_path / "checkpoints" / "step_00000001")) == resolve("cuda")
    with pytest.raises(UserError, match="unknown numerics profile 'abacus'"):
        stamp.numerics_of(saved(there, "abacus"))


def test_a_checkpoint_without_a_config_is_no_run_s(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, {"params": np.zeros(3)}, {})
    with pytest.raises(UserError, match="step_00000001 holds no config"):
        stamp.of(tmp_path)


def test_auto_goes_on_in_what_was_saved_unless_vllm_samples(world, tmp_path):
    found = saved(world.changed(run_dir=str(tmp_path)).config, "cuda")
    assert stamp.learner_numerics(world.config, found) == resolve("cuda")
    assert stamp.learner_numerics(world.config, None) == resolve("plain")
    assert stamp.learner_numerics(world.changed(rollout=VLLM).config, found) == resolve("cpu")
    for engine in ("plain", "cpu"):
        named = world.changed(quant={"engine": engine}).config
        assert stamp.learner_numerics(named, found) == resolve(engine)


@pytest.mark.slow
def test_a_run_goes_on_and_is_evaluated_and_exported_in_what_it_saved(world, monkeypatch, tmp_path, capsys):
    begun = world.changed(train={"steps": 1}, eval={"at_start": False, "at_end": False})
    make, found = stamp.make, []
    # As if it had begun under another meaning of auto.
    monkeypatch.setattr(stamp, "make", lambda cfg, profile: found.append(profile) or make(cfg, "cuda"))
    assert train.main(begun.command()) == 0
    assert found == ["plain"]
    asked = []

    def policy_graphdef(cfg, numerics=None, scheme=None):
        asked.append((numerics or cfg.numerics).profile)
        raise UserError("enough")

    monkeypatch.setattr(build, "policy_graphdef", policy_graphdef)
    fresh = world.changed(run_dir=str(world.folder / "fresh"))
    out = ["--format", "compressed-tensors", "--out", str(tmp_path / "out")]
    checkpoint = ["--checkpoint", str(begun.run_dir)]
    assert train.main(world.command()) == train.main(world.command("quant.engine=plain")) == 2
    assert "quant.engine cuda -> plain would make another policy" in capsys.readouterr().err
    assert train.main(fresh.command()) == 2
    assert evaluation.main(checkpoint) == export.main([*checkpoint, *out]) == 2
    assert evaluation.main([*checkpoint, "quant.engine=plain"]) == 2
    assert asked == ["cuda", "plain", "cuda", "cuda", "plain"]
