# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory plan counts the bytes that a run really holds, without making an array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import build, models, optimizer, plan, rollout, sharding
from qarl_jax.types import UserError
from tests.reference import tiny


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("world"))


def really(tree):
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("forward", ["w4a16:g32", "w8a8", "bf16"])
def test_planned_bytes_are_those_of_the_arrays(world, forward):
    cfg = world.changed(quant={"forward": forward}).config
    sizes = plan.parts(cfg)
    _, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme=forward))
    assert sizes["masters"] == really(params)
    assert sizes["gradients"] == really(params)
    assert sizes["QTensors"] == really(qweights)
    transformation = optimizer.make_optimizer(cfg.optimizer, cfg.train.total_updates)
    assert sizes["optimizer"] == really(transformation.init(params))


@pytest.mark.parametrize("hidden", [None, 128])
def test_a_critic_and_a_reference_are_counted_as_they_are_held(world, tmp_path, hidden):
    """The critic from the policy's masters, or from a larger model: then gradients and activations are the critic's."""
    plain = world.changed(quant={"forward": "w4a16:g32"})
    path = None if hidden is None else str(tiny.model_folder(tmp_path / "critic", hidden))
    cfg = plain.changed(
        loss={"name": "ppo"}, advantage={"name": "gae"}, critic={"path": path, "warmup_steps": 1}, kl={"coef": 1e-3}
    ).config
    without, sizes = plan.parts(plain.config), plan.parts(cfg)
    mesh = build.make_mesh(cfg)
    graphdef, params = build.load_model(cfg, mesh)
    critic = build.make_critic(cfg, graphdef, params, mesh)
    assert sizes["critic's masters"] == really(critic.state.params)
    assert sizes["critic's optimizer"] == really(critic.state.opt_state)
    assert sizes["reference policy"] == really(build.make_learner(cfg, graphdef, mesh).reference(params))
    assert sizes["gradients"] == max(really(params), really(critic.state.params))
    assert (sizes["activations (estimate)"] > without["activations (estimate)"]) == (hidden == 128)
    assert {key for key in sizes if sizes[key] != without.get(key)} == (
        {"critic's masters", "critic's optimizer", "reference policy"}
        | ({"gradients", "activations (estimate)"} if hidden else set())
    )
    assert "critic's masters" in plan.describe(cfg)


def test_low_bit_tensors_take_their_bits_and_their_scales(world):
    count = sum(x.size for x in jax.tree.leaves(models.split(tiny.random_model())[1]) if x.ndim == 3)
    sizes = {
        name: plan.parts(world.changed(quant={"forward": name}).config)["QTensors"] for name in ("w8a8", "w4a16:g32")
    }
    assert sizes["w4a16:g32"] == count // 2 + count // 32 * 2  # half a byte each, a bfloat16 for 32
    assert count < sizes["w8a8"] < 1.1 * count  # a byte each, a float32 for a row


def test_a_bfloat16_master_halves_the_masters_and_no_gradient(world):
    full, half = (plan.parts(world.changed(model={"param_dtype": name}).config) for name in ("float32", "bfloat16"))
    assert half["masters"] * 2 == full["masters"]
    assert half["gradients"] == full["gradients"]


def test_recomputation_and_shorter_chunks_plan_for_less(world):
    def parts(remat, chunk):
        return plan.parts(world.changed(model={"remat": remat}, train={"logprob_chunk": chunk}).config)

    activations = [parts(remat, 2048)["activations (estimate)"] for remat in ("none", "dots", "full")]
    assert activations == sorted(activations, reverse=True)
    assert parts("full", 16)["log-prob chunk"] == 16 * 30 * 4 * 2 < parts("full", 2048)["log-prob chunk"]


def test_the_plan_makes_no_array_and_reads_no_weights(world, monkeypatch):
    (world.model / "model.safetensors").rename(world.folder / "elsewhere")
    try:
        before = len(jax.live_arrays())
        text = plan.describe(world.config)
        assert len(jax.live_arrays()) == before
    finally:
        (world.folder / "elsewhere").rename(world.model / "model.safetensors")
    total = sum(plan.parts(world.config).values()) / plan.GIB
    assert f"{total:.3f} GiB" in text
    for part in ("masters", "optimizer", "gradients", "QTensors", "activations", "log-prob chunk"):
        assert part in text


def test_one_device_of_a_mesh_holds_its_shards(world):
    mesh = sharding.make_mesh(fsdp=2, tensor=4)
    cfg = world.changed(mesh={"fsdp": 2, "tensor": 4}, train={"micro_batch_rows": 4}).config
    sizes = plan.parts(cfg, per_device=True)
    _, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme="w4a16:g32", mesh=mesh))
    qweights = jax.device_put(qweights, sharding.param_shardings(qweights, mesh))
    for name, tree in {"masters": params, "QTensors": qweights}.items():
        assert sizes[name] == sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert sizes["activations (estimate)"] * 2 == plan.parts(cfg)["activations (estimate)"]


def test_devices_that_are_not_here_can_be_planned_for(world):
    cfg = world.changed(mesh={"fsdp": 64}, train={"micro_batch_rows": 64}).config
    assert "on 64 device(s)" in plan.describe(cfg)


def test_the_plan_lists_every_quantized_weight_with_its_scheme(world):
    cfg = world.changed(quant={"forward": "w4a16:g32", "rules": [{"match": "down_proj", "scheme": "w8a8"}]}).config
    lines = plan.quantized(cfg)
    assert len(lines) == 7
    assert "w8a8            2 x model.layers.{0..1}.mlp.down_proj.weight [64, 128]" in lines
    assert "w4a16:g32       2 x model.layers.{0..1}.self_attn.k_proj.weight [64, 64]" in lines
    assert all(line in plan.describe(cfg) for line in lines)
    assert "no stacks" in plan.describe(world.changed(quant={"forward": "bf16"}).config)


def test_two_schemes_are_listed_apart(world):
    text = plan.describe(world.changed(quant={"forward": "bf16", "rollout": "w8a8"}).config)
    learner, sampler = text.split("quantized ")[1:]
    assert "no stacks of weights in the learner's forward" in learner
    assert sampler.count("w8a8") == 7


def test_the_embedded_sampler_holds_what_is_planned(world):
    cfg = world.config
    sizes = plan.parts(cfg)
    engine = rollout.make_engine("jax", cfg.rollout.engine)
    graphdef, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme="w4a16:g32"))
    engine.publish(rollout.PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), 0)
    assert sizes["sampler's policy"] == really(engine._weights)
    model = models.config_of(graphdef)
    rows, length = 16, 8 + 12  # of the config: 4 prompts x 4 samples, buckets of 8 and 12
    keys = model.num_layers * rows * length * model.num_kv_heads * model.head_dim * 4
    assert sizes["sampler's KV cache"] == 2 * keys + rows * 4
    vllm = world.changed(rollout=world.tree["rollout"] | {"engine": {"name": "vllm"}}).config
    assert not any("sampler" in name for name in plan.parts(vllm))


def test_partial_rollouts_are_planned_with_a_response_for_a_prompt(world):
    cfg = world.changed(rollout={"partial": {"over_provision": 1.5, "chunk": 4}}).config
    model = models.config_of(plan.abstract_policy(cfg)[0])
    rows, length = 16, 32 + 12  # 8 + 12 - 1 tokens in buckets of 8, 16, 32; a chunk in a bucket of 12
    keys = model.num_layers * rows * length * model.num_kv_heads * model.head_dim * 4
    assert plan.parts(cfg)["sampler's KV cache"] == 2 * keys + rows * 4


def test_a_group_that_does_not_divide_is_refused_by_the_plan(world):
    with pytest.raises(UserError, match=r"model\.layers\.\{0\.\.1\}\..*48"):
        plan.describe(world.changed(quant={"forward": "w4a16:g48"}).config)


def test_nbytes_counts_shapes_as_it_counts_arrays():
    tree = {"a": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), "b": jnp.zeros((7,), jnp.int8)}
    assert plan.nbytes(tree) == 2 * 15 + 7
