# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A critic of adapters: its base is the policy's own, or a folder's, and nothing of a base is saved or updated."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import doctor, models, train
from qarl_jax.memory import learner as plan
from qarl_jax.quant import QTensor
from qarl_jax.run import build, description, export
from qarl_jax.run.checkpoint import Checkpoints
from tests.reference import tiny

LORA = {"rank": 8, "alpha": 12}
PPO = {
    "loss": {"name": "ppo", "mismatch": "tis"},
    "advantage": {"name": "gae", "lam": 0.95},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "critic": {"lora": LORA, "optimizer": {"name": "adamw", "lr": 3e-3}},
    "rollout": {"num_samples_per_prompt": 1},
}


def world(folder, **sections):
    """A run of adapters in policy and critic, on one w4a16 base."""
    return tiny.World(folder).changed(**PPO | {"lora": LORA} | sections)


def made(cfg):
    """(learner, the policy's start, its critic)."""
    mesh = build.make_mesh(cfg)
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), mesh)
    start = build.load_policy(cfg, learner)
    return learner, start, build.make_critic(cfg, learner.graphdef, *start, mesh)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.slow
def test_policy_and_critic_share_one_base(tmp_path):
    cfg = world(tmp_path).config
    _, (_, frozen), critic = made(cfg)
    own, base = models.by_path(critic.frozen), models.by_path(frozen)
    assert set(base) - set(own) == {"head.kernel"}
    assert all(a is b for path in own for a, b in zip(*map(jax.tree.leaves, (own[path], base[path])), strict=True))
    assert sum(isinstance(x, QTensor) for x in own.values()) == 7
    learned = models.by_path(critic.state.params["body"])
    assert len(learned) == 14
    assert all(re.search(r"\.lora_[ab]$", path) for path in learned)
    sizes = plan.parts(cfg)
    assert "critic's frozen weights" not in sizes
    assert sizes["critic's masters"] == nbytes(critic.state.params)
    assert sizes["critic's optimizer"] == nbytes(critic.state.opt_state)
    assert "adapters of rank 8, alpha 12, of all linear maps; the rest is frozen" in description.describe(cfg)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was released quantized:UserWarning")
@pytest.mark.parametrize("base", ["the policy's masters", "a folder", "a released folder"])
def test_a_base_of_its_own_is_held_in_the_compute_dtype_and_planned(base, tmp_path):
    path = None if "folder" not in base else str(tiny.model_folder(tmp_path / "critic", hidden=32, seed=1))
    if base == "a released folder":
        export.export_model(path, "w8a8", tmp_path / "low")
        path = str(tmp_path / "low")
    run = world(tmp_path, lora=None, critic=PPO["critic"] | {"path": path})
    cfg = run.config
    _, (masters, _), critic = made(cfg)
    wanted = models.by_path(models.split(models.load_hf(path))[1] if path else masters)
    for name, x in models.by_path(critic.frozen).items():
        assert np.array_equal(x, wanted[name].astype(cfg.model.dtype)), name
        assert x is not wanted[name]
    sizes = plan.parts(cfg)
    assert sizes["critic's frozen weights"] == nbytes(critic.frozen)
    assert sizes["critic's masters"] == nbytes(critic.state.params)


@pytest.mark.slow
def test_norm_gains_of_a_critic_learn_beside_those_of_its_policy(tmp_path):
    norms = {f"stacks.0.{x}_norm.weight" for x in ("attn", "mlp")}
    for policy, critic in ((True, True), (True, False), (False, True)):
        lora = {"lora": LORA | {"train_norms": policy}, "critic": {"lora": LORA | {"train_norms": critic}}}
        cfg = world(tmp_path, **lora).config
        _, _, it = made(cfg)
        learned = set(models.by_path(it.state.params["body"]))
        assert norms & learned == (norms if critic else set())
        assert len(learned | set(models.by_path(it.frozen))) == len(learned) + len(models.by_path(it.frozen))
        assert plan.parts(cfg).get("critic's frozen weights", 0) == (2 * 2 * 64 * 4 if policy and not critic else 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of three steps."""
    run = world(
        tmp_path_factory.mktemp("run"),
        train={"steps": 3, "prompts_per_step": 8, "prompts_per_update": 8},
        eval={"at_start": False, "at_end": False},
    )
    assert train.main(run.command()) == 0
    return run


@pytest.mark.nightly  # as adapters of a policy in test_lora.py, and a critic in test_critic.py
def test_a_critic_learns_adapters_and_goes_on_from_them_alone(trained):
    lines = trained.records()
    assert [line["critic/explained_variance"] != 0 for line in lines] == [False, True, True]
    assert all(line["critic/grad_norm"] > 0 for line in lines)
    last = trained.run_dir / "checkpoints" / "step_00000003"
    shutil.rmtree(last)
    assert train.main(trained.command()) == 0  # the last step again
    assert trained.records() == lines
    learner, start, critic = made(trained.config)
    state = Checkpoints(last.parent).restore(learner.init(*start).entries() | critic.entries()).state
    body = models.by_path(state["critic"].params["body"])
    assert set(body) == set(models.by_path(critic.state.params["body"]))
    assert all(jnp.any(x != 0) for path, x in body.items() if path.endswith("lora_b"))
    stored = sum(path.stat().st_size for path in last.rglob("*"))
    assert stored < 1.2 * nbytes(state) + 300_000


@pytest.mark.nightly
def test_a_critic_does_not_go_on_with_other_adapters_or_another_base(trained, tmp_path, capsys):
    other = str(tiny.model_folder(tmp_path / "other", seed=1))
    for section in ({"lora": LORA | {"rank": 16}}, {"path": other}):
        assert train.main(trained.changed(critic=section).command("train.steps=4")) == 2
        told = capsys.readouterr().err
        assert "critic.lora rank 8" in told
        assert "would make another critic of the one that step 3 saved" in told


def test_adapters_that_are_not_the_critics_are_named(tmp_path):
    cfg = world(tmp_path, critic=PPO["critic"] | {"lora": LORA | {"targets": ["q"]}}).config
    *_, found = doctor.adapters(cfg)
    assert (found.status, "no linear map 'q'" in found.found, "critic.lora.targets" in found.todo) == (
        "fail",
        True,
        True,
    )
