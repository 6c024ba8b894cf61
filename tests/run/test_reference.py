# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies that the KL term compares with: the start, the masters in bf16, and a teacher's folder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import data, models, train
from qarl_jax.run import build, config, reference
from qarl_jax.types import TrainBatch, UserError
from tests.reference import tiny

pytestmark = pytest.mark.usefixtures("shared_learners")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    root = tmp_path_factory.mktemp("distillation")
    (root / "teacher").mkdir()
    return tiny.World(root), tiny.model_folder(root / "teacher", seed=5)


def batch(rows=4, length=16):
    shape = (rows, length)
    return TrainBatch(
        tokens=np.random.default_rng(0).integers(3, 30, shape).astype(np.int32),
        positions=np.broadcast_to(np.arange(length, dtype=np.int32), shape),
        segment_ids=np.ones(shape, np.int32),
        loss_mask=np.broadcast_to(np.arange(length) >= 4, shape),
        rollout_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
    )


def plain_scores(model, micro):
    """Log-probs by the model's own logits, in float32: [B, T], of the tokens after the first."""
    logits = model(jnp.asarray(micro.tokens), jnp.asarray(micro.positions), None)
    found = jax.nn.log_softmax(logits.astype(jnp.float32), -1)[:, :-1]
    return np.take_along_axis(np.asarray(found), micro.tokens[:, 1:, None], 2)[..., 0]


@pytest.mark.slow
def test_each_reference_scores_as_the_model_that_it_names(worlds):
    world, teacher = worlds
    micro = batch()
    found, moved = {}, {}
    for name in ("start", "masters", str(teacher)):
        cfg = world.changed(kl={"coef": 1.0, "reference": name}).config
        learner = build.make_learner(cfg, build.policy_graphdef(cfg), build.make_mesh(cfg))
        state = learner.init(*build.load_policy(cfg, learner))
        score, put = reference.make(cfg, learner, state.params), learner.put(micro)
        found[name] = np.asarray(score(state.params, put))[:, 1:]
        other = jax.tree.map(lambda p: p * 0.9, state.params)
        moved[name] = np.asarray(score(other, put))[:, 1:]
        if name == "start":
            own = np.asarray(learner.score(state.params, learner.quantize(state.params), put)[0])[:, 1:]
    np.testing.assert_array_equal(found["start"], own)
    np.testing.assert_allclose(found["masters"], plain_scores(models.load_hf(world.model), micro), atol=2e-5)
    np.testing.assert_allclose(found[str(teacher)], plain_scores(models.load_hf(teacher), micro), atol=2e-5)
    assert np.abs(found["masters"] - own).max() > 0.01  # rounding is what the two differ by
    assert np.abs(moved["masters"] - found["masters"]).max() > 0.01  # it moves with the policy; the others stay
    for name in ("start", str(teacher)):
        np.testing.assert_array_equal(moved[name], found[name])


@pytest.mark.slow
def test_a_run_without_advantages_comes_closer_to_its_teacher(worlds):
    world, teacher = worlds
    world = world.changed(
        run_dir=str(world.folder / "distilled"),
        advantage={"name": "none"},
        loss={"name": "grpo"},
        kl={"coef": 1.0, "kind": "k3+", "reference": str(teacher)},
        train={"steps": 8, "prompts_per_step": 8, "prompts_per_update": 8},
        checkpoint={"every": 0},
        eval={"at_start": False, "at_end": False},
    )
    assert train.main(world.command()) == 0
    far = [record["kl/k1"] for record in world.records()]
    assert far[-1] < 0.75 * far[0]  # 1.55 and 0.94 nats a token
    assert all(record["loss/seq_zero_adv"] == 1 for record in world.records())


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_is_loaded(worlds, tmp_path):
    world, _ = worlds
    data.make_char_tokenizer("xyz", tmp_path)
    with pytest.raises(UserError, match="its tokenizer is not that of"):
        reference.check(world.changed(kl={"coef": 1.0, "reference": str(tmp_path)}).config)
    with pytest.raises(UserError, match=r"kl\.reference=models/none: no such folder; give start, masters, or a"):
        reference.check(world.changed(kl={"coef": 1.0, "reference": "models/none"}).config)
    reference.check(world.config)  # without a KL term nothing is read


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"advantage": {"name": "none"}}, "leaves the KL term alone to learn from, and kl.coef is 0"),
        ({"kl": {"coef": 1.0, "reference": "masters"}, "quant": {"forward": "bf16"}}, "its KL is 0"),
        ({"kl": {"coef": 1.0, "reference": "masters"}, "lora": {}}, "the base under lora has none"),
        ({"kl": {"coef": 1.0, "reference": ""}}, "give start, masters, or a model folder"),
        ({"kl": {"reference": "masters"}}, "has no effect where coef is 0; set coef"),
    ],
)
def test_a_reference_that_says_nothing_is_refused(worlds, changes, said):
    with pytest.raises(UserError, match=said):
        _ = worlds[0].changed(**changes).config


def test_the_plan_counts_a_teacher_and_no_second_copy_of_the_masters(worlds):
    from qarl_jax.memory import learner as plan

    world, teacher = worlds
    parts = {
        name: plan.parts(world.changed(kl={"coef": 1.0, "reference": name}).config)
        for name in ("start", "masters", str(teacher))
    }
    size = sum(leaf.size for leaf in jax.tree.leaves(models.split(tiny.random_model())[1]))
    assert parts[str(teacher)]["reference policy"] == 4 * size  # float32, as model.dtype says
    assert 0 < parts["start"]["reference policy"] < 4 * size
    assert "reference policy" not in parts["masters"]


def test_the_teachers_config_has_the_runs_sampling_and_no_adapters(worlds):
    world, teacher = worlds
    cfg = world.changed(kl={"coef": 1.0, "reference": str(teacher)}, lora={}).config
    made = reference.of_teacher(cfg)
    assert (made.model.path, made.quant.forward, made.lora) == (str(teacher), "bf16", None)
    assert made.rollout == config.replaced(cfg.rollout, {"router_replay": False})
