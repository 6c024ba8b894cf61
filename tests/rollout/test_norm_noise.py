# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Noise on the sampler's norm gains: its schedule and arithmetic, who has it, and that a resumed run draws it again."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qarl_jax import models, train
from qarl_jax.loop.publisher import Publisher
from qarl_jax.rollout import norm_noise
from qarl_jax.rollout.embedded.engine import Config, JaxSampler
from qarl_jax.run import build
from qarl_jax.runtime.mesh import make_mesh
from tests.reference import tiny

pytestmark = pytest.mark.usefixtures("shared_learners")

BLOCKS = {"stacks.0.attn_norm.weight", "stacks.0.mlp_norm.weight"}
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def world(compiled_programs, tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("world"))


def test_a_stages_sigma_is_that_of_the_formula():
    code = norm_noise.Config(start=1e-2, end=1e-4, stages=4)
    assert [code.sigma(version, 8) for version in range(9)] == pytest.approx(
        [0, 0, 1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4, 0]
    )
    paper = dataclasses.replace(code, stages=3, schedule="paper")
    assert [paper.sigma(version, 6) for version in range(7)] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4, 0])
    assert norm_noise.Config().sigma(99, 100) == pytest.approx(1e-4)


@pytest.fixture(scope="module")
def params():
    """Masters of the tiny model, all gains 0.75."""
    return jax.tree.map(lambda x: jnp.full_like(x, 0.75), models.split(tiny.random_model(1024))[1])


def noisy(params, sigma, *, seed=5, dtype="bfloat16", **options):
    cfg = norm_noise.Config(**options)
    made, moved = norm_noise.add(cfg, params, sigma=sigma, seed=seed, dtype=dtype, mesh=make_mesh())
    return models.by_path(made), moved


def test_noise_is_added_in_bfloat16_to_the_gains_alone(params):
    before = models.by_path(params)
    for final in (False, True):
        made, moved = noisy(params, 1e-2, final=final)
        gains = BLOCKS | ({"norm.weight"} if final else set())
        assert {path for path, x in made.items() if x is not before[path]} == gains
        exact, _ = noisy(params, 1e-2, final=final, dtype="float32")
        for path in gains:
            assert made[path].dtype == before[path].dtype
            noise = np.asarray(exact[path]) - np.float32(0.75)
            assert abs(noise.mean()) < 1.5e-3
            assert noise.std() == pytest.approx(1e-2, rel=0.1)  # of 1,024 draws or more
            wanted = np.float32(BF16(0.75)) + noise.astype(BF16).astype(np.float32)
            difference = np.asarray(made[path]) - wanted.astype(BF16).astype(np.float32)
            assert (difference == 0).mean() > 0.99  # 0.75 + z - 0.75 is z but for its last bits
        shares = [(np.asarray(made[path]) != 0.75).mean() * made[path].size for path in gains]
        assert moved == pytest.approx(sum(shares) / sum(made[path].size for path in gains))


def test_bfloat16_swallows_small_noise(params):
    """QeRL's stages: how many gains near 0.75 move."""
    assert [noisy(params, sigma)[1] for sigma in (1e-2, 1e-3, 1e-4)] == pytest.approx([0.84, 0.05, 0.0], abs=0.02)


def test_noise_is_a_function_of_its_seed(params):
    one, again, other = (noisy(params, 1e-2, seed=seed)[0] for seed in (5, 5, 6))
    for path in BLOCKS:
        assert np.array_equal(one[path], again[path])
        assert not np.array_equal(one[path], other[path])
    assert not np.array_equal(one["stacks.0.attn_norm.weight"], one["stacks.0.mlp_norm.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 8}], ids=["full", "lora"])
def test_the_sampler_has_noise_and_neither_the_learner_nor_evaluation_has(world, lora):
    own = {"optimizer": {"name": "adamw", "lr": 0.01}, "lora": lora}
    cfg = world.changed(rollout={"norm_noise": {"stages": 4}}, train={"steps": 8}, **own).config
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), build.make_mesh(cfg))
    state = learner.init(*build.load_policy(cfg, learner))
    engine = JaxSampler(Config(batch_size=8))
    publisher = Publisher(cfg, learner, engine)

    def held():
        found = [models.by_path(part) for part in engine._weights]
        return {path: np.asarray(part[path]) for path in BLOCKS for part in found if path in part}

    assert "norm_noise/sigma" not in publisher.publish(state, 1)
    clean = held()
    assert set(clean) == BLOCKS
    assert publisher.publish(state, 2)["norm_noise/sigma"] == 0  # of the version before it
    explored = held()
    report = publisher.publish(state, 3)
    assert report["norm_noise/sigma"] == pytest.approx(1e-2)
    assert report["norm_noise/moved"] == pytest.approx(1.0, abs=0.2)
    for path in BLOCKS:
        assert (explored[path] != clean[path]).any()
        assert (held()[path] != explored[path]).any()
    last = held()
    with publisher.without_noise(state, 3):
        assert all(np.array_equal(held()[path], clean[path]) for path in BLOCKS)
    assert all(np.array_equal(held()[path], last[path]) for path in BLOCKS)
    masters = models.by_path(learner.frozen if lora else state.params)
    assert all((np.asarray(masters[path]) == 1).all() for path in BLOCKS)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("stale", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_run_with_noise_evaluates_the_policy_and_goes_on_to_the_same_bits(world, stale):
    noise = {"start": 0.5, "end": 0.3, "stages": 3}
    whole = world.changed(
        run_dir=str(world.folder / f"noisy{stale}"),
        rollout={"norm_noise": noise},
        optimizer={"lr": 0.0},
        train={"steps": 3, "asynchronous": {"max_staleness": stale}},
        eval={"every": 1},
    )
    assert train.main(whole.command()) == 0
    lines = whole.records()
    assert [line["norm_noise/sigma"] for line in lines] == pytest.approx([0, 0.5, 0.3])
    assert [line["mismatch/max_abs"] > 1e-2 for line in lines] == [False, stale == 0, True]
    scores = [{key: value for key, value in line.items() if key != "version"} for line in whole.records("eval")]
    assert len(scores) == 4
    assert all(score == scores[0] for score in scores)  # lr 0: one policy, however its sampler explored
    shutil.rmtree(whole.run_dir / "checkpoints" / "step_00000003")
    assert train.main(whole.command()) == 0
    assert whole.records() == lines
