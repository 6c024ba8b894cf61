# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory plan counts the bytes that a run really holds, without making an array."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import shapes
from qarl_jax import models, rollout
from qarl_jax.optim import leafwise
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.run import build, memory_plan
from qarl_jax.runtime import mesh as sharding
from qarl_jax.types import UserError
from tests.reference import tiny

NAMES = ("model", "scheme", "rows", "seq", "remat", "master", "grad", "optimizer", "chunk", "segments", "layers")
NAMES += ("moments", "offload")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("world"))


def really(tree):
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["w4a16:g32", "w8a8", "bf16"])
def test_planned_bytes_are_those_of_the_arrays(world, forward):
    cfg = world.changed(quant={"forward": forward}).config
    sizes = memory_plan.parts(cfg)
    _, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme=forward))
    assert sizes["masters"] == really(params)
    assert sizes["gradients"] == 2 * really(params)  # one micro-batch's and the accumulator: updates have up to two
    assert sizes["QTensors"] == really(qweights)
    transformation = leafwise.Optimizer(cfg.optimizer, cfg.train.total_updates)
    assert sizes["optimizer"] == really(transformation.init(params))


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize(("first", "second"), [("int8", "int8"), ("bfloat16", "int8"), ("int8", "float32")])
def test_planned_optimizer_bytes_are_those_of_the_states_arrays(world, name, first, second):
    chosen = {"name": name, "moment_dtype": first, "second_moment_dtype": second}
    cfg = world.changed(optimizer=chosen).config
    params = models.split(tiny.random_model())[1]
    state = leafwise.init(leafwise.Optimizer(cfg.optimizer), params)
    assert memory_plan.parts(cfg)["optimizer"] == really(state)
    ((name, (planned, on_host)),) = memory_plan.optimizer_states(cfg).items()
    assert (name, memory_plan.nbytes(planned), on_host) == ("optimizer", really(state), False)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_one_device_of_a_mesh_holds_its_share_of_eight_bit_states(world, name):
    chosen = {"name": name, "moment_dtype": "int8", "second_moment_dtype": "int8"}
    cfg = world.changed(optimizer=chosen, mesh={"fsdp": 8}, train={"micro_batch_rows": 8}).config
    params = models.split(tiny.random_model())[1]
    params = jax.device_put(params, sharding.param_shardings(params, sharding.make_mesh(fsdp=8)))
    state = leafwise.init(leafwise.Optimizer(cfg.optimizer), params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert memory_plan.parts(cfg, per_device=True)["optimizer"] == held < really(state)


def test_a_state_on_the_host_is_described_from_one_abstract_model(world, monkeypatch):
    there = world.changed(optimizer={"offload": True}).config
    made, own = [], memory_plan.abstract_policy
    monkeypatch.setattr(memory_plan, "parts", lambda cfg, **_: {"optimizer": 0})
    monkeypatch.setattr(memory_plan, "quantized", lambda cfg, **_: [])
    monkeypatch.setattr(memory_plan, "abstract_policy", lambda cfg: made.append(cfg) or own(cfg))
    assert "host  " in memory_plan.describe(there)
    assert len(made) == 2  # one to count parameters, one for the state over the mesh and on one device


def test_a_state_on_the_host_is_planned_there_and_on_the_device_for_what_its_visit_adds(world):
    here, there = (world.changed(optimizer={"name": "muon", "offload": on}).config for on in (False, True))
    sizes, less = memory_plan.parts(here), memory_plan.parts(there)
    assert {name for name in sizes if sizes[name] != less[name]} <= {"optimizer", "update (estimate)"}
    planned, on_host = memory_plan.optimizer_states(there)["optimizer"]
    assert (memory_plan.nbytes(planned), on_host) == (sizes["optimizer"], True)
    # Gradients are accumulated: when the state arrives, the last micro-batch's and all activations are gone.
    params = memory_plan.abstract_policy(there)[1]
    state = jax.eval_shape(leafwise.Optimizer(there.optimizer).init, params)
    scratch = memory_plan.update_scratch(params, state)
    gone = less["activations (estimate)"] + less["log-prob chunk"] + less["gradients"] // 2
    assert sizes["update (estimate)"] == max(0, scratch - gone)
    assert less["update (estimate)"] == max(0, sizes["optimizer"] + scratch - gone)
    assert less["optimizer"] == 0
    text = memory_plan.describe(there)
    assert "host         pinned memory" in text
    assert f"{sizes['optimizer'] / memory_plan.GIB:.3f} GiB" in text.split("host  ")[1]
    assert "pinned" not in memory_plan.describe(here)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [None, 128])
def test_a_critic_and_a_reference_are_counted_as_they_are_held(world, tmp_path, hidden):
    """The critic from the policy's masters, or from a larger model: then gradients and activations are the critic's."""
    plain = world.changed(quant={"forward": "w4a16:g32"})
    path = None if hidden is None else str(tiny.model_folder(tmp_path / "critic", hidden))
    cfg = plain.changed(
        loss={"name": "ppo"}, advantage={"name": "gae"}, critic={"path": path, "warmup_steps": 1}, kl={"coef": 1e-3}
    ).config
    without, sizes = memory_plan.parts(plain.config), memory_plan.parts(cfg)
    mesh = build.make_mesh(cfg)
    graphdef, params = build.load_model(cfg, mesh)
    critic = build.make_critic(cfg, graphdef, params, mesh)
    assert sizes["critic's masters"] == really(critic.state.params)
    assert sizes["critic's optimizer"] == really(critic.state.opt_state)
    assert sizes["reference policy"] == really(build.make_learner(cfg, graphdef, mesh).reference(params))
    assert sizes["gradients"] == 2 * max(really(params), really(critic.state.params))
    assert (sizes["activations (estimate)"] > without["activations (estimate)"]) == (hidden == 128)
    assert {key for key in sizes if sizes[key] != without.get(key)} == (
        {"critic's masters", "critic's optimizer", "reference policy"}
        | ({"gradients", "activations (estimate)"} if hidden else set())
    )
    assert "critic's masters" in memory_plan.describe(cfg)


def test_low_bit_tensors_take_their_bits_and_their_scales(world):
    count = sum(x.size for x in jax.tree.leaves(models.split(tiny.random_model())[1]) if x.ndim == 3)
    sizes = {
        name: memory_plan.parts(world.changed(quant={"forward": name}).config)["QTensors"]
        for name in ("w8a8", "w4a16:g32")
    }
    assert sizes["w4a16:g32"] == count // 2 + count // 32 * 2  # half a byte each, a bfloat16 for 32
    assert count < sizes["w8a8"] < 1.1 * count  # a byte each, a float32 for a row


def test_a_bfloat16_master_halves_the_masters_and_no_gradient(world):
    full, half = (
        memory_plan.parts(world.changed(model={"param_dtype": name}).config) for name in ("float32", "bfloat16")
    )
    assert half["masters"] * 2 == full["masters"]
    assert half["gradients"] == full["gradients"]


def test_recomputation_and_shorter_chunks_plan_for_less(world):
    def parts(remat, chunk):
        return memory_plan.parts(world.changed(model={"remat": remat}, train={"logprob_chunk": chunk}).config)

    activations = [parts(remat, 2048)["activations (estimate)"] for remat in models.REMAT]
    assert activations == sorted(activations)
    assert sum(parts("full", 16).values()) <= sum(parts("full", 2048).values())


def test_a_single_micro_batch_needs_no_accumulator_and_bfloat16_gradients_half(world):
    def gradients(**options):
        changed = {"micro_batch_rows": 64, "logprob_chunk": 2048} | options
        return memory_plan.parts(world.changed(model={"dtype": "bfloat16"}, train=changed).config)["gradients"]

    many, one, half = gradients(micro_batch_rows=2), gradients(), gradients(grad_dtype="bfloat16")
    assert many == 2 * one == 4 * half


def test_auto_recomputes_as_little_as_fits(world):
    auto = world.changed(model={"remat": "auto"}, train={"micro_batch_rows": 64}).config
    assert memory_plan.with_remat(auto, None).model.remat == "full"
    sizes = []
    for remat in ("full", "attention", "mixer", "dots"):
        fixed = world.changed(model={"remat": remat}, train={"micro_batch_rows": 64}).config
        sizes.append(sum(memory_plan.parts(fixed, per_device=True).values()))
        assert memory_plan.with_remat(auto, int(sizes[-1] / 0.9) + 1).model.remat == remat
        assert memory_plan.with_remat(fixed, None) == fixed
    assert sizes == sorted(set(sizes))


RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results"
RECORDED = [
    case
    for name in ("memory_h200", "memory_two_h200")
    for case in json.loads((RESULTS / f"{name}.json").read_text())["results"]
]


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED, ids=lambda case: "-".join(str(case[key]) for key in NAMES))
def test_the_plan_is_within_six_per_cent_of_what_the_compiler_allocates(case):
    """For one or two H200, compiled ahead of time by `python -m benchmarks.memory`; the plan is made here and now."""
    names = {field.name for field in dataclasses.fields(shapes.Setting)}
    assert len(names & set(case)) >= 15  # a field that is newer has its default
    setting = shapes.Setting(**{name: case[name] for name in names & set(case)})
    compiled = case["arguments"] + case["results"] + case["temporaries"]
    assert sum(shapes.planned(setting).values()) == pytest.approx(compiled, rel=0.06)


def test_the_plan_makes_no_array_and_reads_no_weights(world, monkeypatch):
    (world.model / "model.safetensors").rename(world.folder / "elsewhere")
    try:
        before = jax.live_arrays()  # held, so that none of them is collected meanwhile and its address used again
        text = memory_plan.describe(world.config)
        known = {id(array) for array in before}
        assert [array.shape for array in jax.live_arrays() if id(array) not in known] == []
    finally:
        (world.folder / "elsewhere").rename(world.model / "model.safetensors")
    total = sum(memory_plan.parts(world.config).values()) / memory_plan.GIB
    assert f"{total:.3f} GiB" in text
    for part in ("masters", "optimizer", "gradients", "QTensors", "activations", "log-prob chunk"):
        assert part in text


@pytest.mark.slow
def test_one_device_of_a_mesh_holds_its_shards(world):
    mesh = sharding.make_mesh(fsdp=2, tensor=4)
    cfg = world.changed(mesh={"fsdp": 2, "tensor": 4}, train={"micro_batch_rows": 4}).config
    sizes = memory_plan.parts(cfg, per_device=True)
    _, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme="w4a16:g32", mesh=mesh))
    qweights = jax.device_put(qweights, sharding.param_shardings(qweights, mesh))
    for name, tree in {"masters": params, "QTensors": qweights}.items():
        assert sizes[name] == sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert sizes["activations (estimate)"] * 2 == memory_plan.parts(cfg)["activations (estimate)"]


def test_devices_that_are_not_here_can_be_planned_for(world):
    cfg = world.changed(mesh={"fsdp": 64}, train={"micro_batch_rows": 64}).config
    assert "on 64 device(s)" in memory_plan.describe(cfg)


def test_the_plan_lists_every_quantized_weight_with_its_scheme(world):
    cfg = world.changed(quant={"forward": "w4a16:g32", "rules": [{"match": "down_proj", "scheme": "w8a8"}]}).config
    lines = memory_plan.quantized(cfg)
    assert len(lines) == 7
    assert "w8a8            2 x model.layers.{0..1}.mlp.down_proj.weight [64, 128]" in lines
    assert "w4a16:g32       2 x model.layers.{0..1}.self_attn.k_proj.weight [64, 64]" in lines
    assert all(line in memory_plan.describe(cfg) for line in lines)
    assert "no stacks" in memory_plan.describe(world.changed(quant={"forward": "bf16"}).config)


def test_two_schemes_are_listed_apart(world):
    text = memory_plan.describe(world.changed(quant={"forward": "bf16", "rollout": "w8a8"}).config)
    learner, sampler = text.split("quantized ")[1:]
    assert "no stacks of weights in the learner's forward" in learner
    assert sampler.count("w8a8") == 7


def test_the_embedded_sampler_holds_what_is_planned(world):
    cfg = world.config
    sizes = memory_plan.parts(cfg)
    engine = rollout.make_engine("jax", cfg.rollout.engine)
    graphdef, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme="w4a16:g32"))
    engine.publish(rollout.PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), 0)
    assert sizes["sampler's policy"] == really(engine._weights)
    model = models.config_of(graphdef)
    rows, length = 16, 16 + 16  # 4 prompts x 4 samples; 8 and 12 tokens in buckets of 16
    keys = model.num_layers * rows * length * model.num_kv_heads * model.head_dim * 4
    assert sizes["sampler's KV cache"] == 2 * keys + rows * 4
    vllm = world.changed(rollout=world.tree["rollout"] | {"engine": {"name": "vllm"}}).config
    assert not any("sampler" in name for name in memory_plan.parts(vllm))


def test_partial_rollouts_are_planned_with_a_response_for_a_prompt(world):
    cfg = world.changed(rollout={"partial": {"over_provision": 1.5, "chunk": 4}}).config
    model = models.config_of(memory_plan.abstract_policy(cfg)[0])
    rows, length = 16, 32 + 16  # 8 + 12 - 1 tokens in a bucket of 32, a chunk in one of 16
    keys = model.num_layers * rows * length * model.num_kv_heads * model.head_dim * 4
    assert memory_plan.parts(cfg)["sampler's KV cache"] == 2 * keys + rows * 4


def test_a_group_that_does_not_divide_is_refused_by_the_plan(world):
    with pytest.raises(UserError, match=r"model\.layers\.\{0\.\.1\}\..*48"):
        memory_plan.describe(world.changed(quant={"forward": "w4a16:g48"}).config)


def test_nbytes_counts_shapes_as_it_counts_arrays():
    tree = {"a": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), "b": jnp.zeros((7,), jnp.int8)}
    assert memory_plan.nbytes(tree) == 2 * 15 + 7


def with_vllm(world, **engine):
    return world.changed(rollout={"engine": {"name": "vllm", **engine}}).config


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16:g32"])
def test_a_published_version_has_the_planned_bytes(world, scheme):
    cfg = world.changed(quant={"forward": scheme}).config
    model = models.load_hf(cfg.model.path, dtype="float32", scheme=scheme)
    graphdef, params, qweights = models.split(model)
    tensors = dict(vllm.engine_tensors(rollout.PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)))
    shapes = sum(array.nbytes for name, array in tensors.items() if not name.endswith("weight_shape"))
    assert memory_plan.published_bytes(cfg) == shapes


def test_the_plan_says_how_a_card_is_shared(world, monkeypatch):
    assert memory_plan.colocation(world.config) == []
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    lines = "\n".join(memory_plan.colocation(with_vllm(world, gpu_memory_utilization=0.4, kv_cache_gb=2)))
    assert "40% of the card" in lines
    assert "KV cache 2 GiB" in lines
    assert "up to 75% of the card" in lines
    assert "limits add up to 115%" in lines
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    lines = "\n".join(memory_plan.colocation(with_vllm(world, gpu_memory_utilization=0.4, transport="host")))
    assert "up to 50% of the card" in lines
    assert "0.000 GiB for versions" in lines
    assert "add up" not in lines
    assert lines in memory_plan.describe(with_vllm(world, gpu_memory_utilization=0.4, transport="host"))
    far = with_vllm(world, endpoints=("tcp://h:1",), key_file="k")
    assert memory_plan.colocation(far) == ["vLLM         on another host: weights go over the socket"]
    for apart in ({"visible_gpus": "1"}, {"transport": "nccl", "endpoints": ("tcp://h:1",), "key_file": "k"}):
        first, second = memory_plan.colocation(with_vllm(world, gpu_memory_utilization=0.9, **apart))
        assert ("on GPU 1: 90% of it" if "visible_gpus" in apart else "of the bridge at tcp://h:1: 90%") in first
        assert "over NCCL" in second
        assert f"{memory_plan.published_bytes(far) / memory_plan.GIB:.3f} GiB" in second
    assert "host memory" in memory_plan.colocation(with_vllm(world, visible_gpus="1", transport="host"))[1]


def test_jax_leaves_memory_to_vllm_unless_told_otherwise(world, monkeypatch):
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name, raising=False)
    build.make_mesh(world.config)
    assert name not in os.environ
    build.make_mesh(with_vllm(world))
    assert os.environ[name] == "false"
    monkeypatch.setenv(name, "true")
    build.make_mesh(with_vllm(world))
    assert os.environ[name] == "true"


def test_what_the_learner_may_take_of_a_card_leaves_vllm_and_staging_theirs(world, monkeypatch):
    class Card:
        def memory_stats(self):
            return {"bytes_limit": 75 * 2**30}

    monkeypatch.setattr(jax, "local_devices", lambda: [Card()])
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    assert memory_plan.device_bytes(world.config) == 75 * 2**30
    assert memory_plan.device_bytes(with_vllm(world, gpu_memory_utilization=0.2, transport="host")) == 75 * 2**30
    # A card of 100 GiB, of which vLLM takes 40.
    assert memory_plan.device_bytes(with_vllm(world, gpu_memory_utilization=0.4, transport="host")) == 60 * 2**30
    shared = with_vllm(world, gpu_memory_utilization=0.4)
    assert memory_plan.device_bytes(shared) == 60 * 2**30 - 2 * memory_plan.published_bytes(shared)
    apart = with_vllm(world, gpu_memory_utilization=0.9, visible_gpus="1")
    assert (
        memory_plan.device_bytes(apart) == 75 * 2**30
    )  # vLLM's share is of another card, and staging fits beside JAX's
    Card.memory_stats = lambda self: None
    assert memory_plan.device_bytes(shared) is None
