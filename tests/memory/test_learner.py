# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory plan counts the bytes that a run really holds, without making an array."""

import dataclasses
import itertools
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import shapes
from qarl_jax import models, rollout
from qarl_jax.kernels import attention_vendor
from qarl_jax.memory import choose, engine, learner, plan
from qarl_jax.models.params import part_of
from qarl_jax.optim import leafwise
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.run import build
from qarl_jax.runtime.mesh import make_mesh, param_shardings
from qarl_jax.types import UserError
from tests.reference import tiny

NAMES = ("model", "scheme", "rows", "seq", "remat", "master", "grad", "optimizer", "chunk", "segments", "layers")
NAMES += ("moments", "offload")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("world"))


def really(tree):
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


def beside_sums(params):
    """Bytes of a micro-batch's gradient beside an accumulator: one layer's, and those outside of the layers."""
    stacks = really(part_of(params, lambda path: path.startswith("stacks.")))
    return really(params) - stacks + stacks // tiny.model_config().num_layers


@pytest.mark.parametrize("forward", ["w4a16:g32", "w8a8", "bf16"])
def test_planned_bytes_are_those_of_the_arrays(world, forward):
    cfg = world.changed(quant={"forward": forward}).config
    sizes = learner.parts(cfg)
    _, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme=forward))
    assert sizes["masters"] == really(params)
    assert sizes["gradients"] == really(params) + beside_sums(params)  # updates have up to two micro-batches
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
    assert learner.parts(cfg)["optimizer"] == really(state)
    ((name, (planned, on_host)),) = learner.optimizer_states(cfg).items()
    assert (name, learner.nbytes(planned), on_host) == ("optimizer", really(state), False)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_one_device_of_a_mesh_holds_its_share_of_eight_bit_states(world, name):
    chosen = {"name": name, "moment_dtype": "int8", "second_moment_dtype": "int8"}
    cfg = world.changed(optimizer=chosen, mesh={"fsdp": 8}, train={"micro_batch_rows": 8}).config
    params = models.split(tiny.random_model())[1]
    params = jax.device_put(params, param_shardings(params, make_mesh(fsdp=8)))
    state = leafwise.init(leafwise.Optimizer(cfg.optimizer), params)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert learner.parts(cfg, per_device=True)["optimizer"] == held < really(state)


def test_shapes_are_made_once_for_all_settings_that_they_do_not_depend_on(world, monkeypatch):
    made, model_config = [], build.model_config
    monkeypatch.setattr(build, "model_config", lambda *args: made.append(args) or model_config(*args))
    monkeypatch.setattr(learner, "_SHAPES", {})
    for offload, remat in itertools.product((False, True), ("full", "dots")):
        cfg = world.changed(optimizer={"offload": offload}, model={"remat": remat}).config
        assert learner.model_of(cfg).remat == remat
        plan.describe(cfg)
    assert len(made) == 1
    assert sum(learner.parts(world.changed(quant={"forward": "w8a8"}).config).values()) > 0
    assert len(made) == 2


def test_a_state_on_the_host_is_planned_there_and_on_the_device_for_what_its_visit_adds(world):
    here, there = (world.changed(optimizer={"name": "muon", "offload": on}).config for on in (False, True))
    sizes, less = learner.parts(here), learner.parts(there)
    assert {name for name in sizes if sizes[name] != less[name]} <= {"optimizer", "update (estimate)"}
    planned, on_host = learner.optimizer_states(there)["optimizer"]
    assert (learner.nbytes(planned), on_host) == (sizes["optimizer"], True)
    # Gradients are accumulated: when the state arrives, the last micro-batch's and all activations are gone.
    params = learner.shapes(there).params
    state = jax.eval_shape(leafwise.Optimizer(there.optimizer).init, params)
    scratch = learner.update_scratch(params, state)
    gone = less["activations (estimate)"] + less["log-prob chunk"] + beside_sums(params)
    assert sizes["update (estimate)"] == max(0, scratch - gone)
    assert less["update (estimate)"] == max(0, sizes["optimizer"] + scratch - gone)
    assert less["optimizer"] == 0
    text = plan.describe(there)
    assert "host         pinned memory" in text
    assert f"{sizes['optimizer'] / learner.GIB:.3f} GiB" in text.split("host  ")[1]
    assert "pinned" not in plan.describe(here)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [None, 128])
def test_a_critic_and_a_reference_are_counted_as_they_are_held(world, tmp_path, hidden):
    """The critic from the policy's masters, or from a larger model: then gradients and activations are the critic's."""
    plain = world.changed(quant={"forward": "w4a16:g32"})
    path = None if hidden is None else str(tiny.model_folder(tmp_path / "critic", hidden))
    cfg = plain.changed(
        loss={"name": "ppo"}, advantage={"name": "gae"}, critic={"path": path, "warmup_steps": 1}, kl={"coef": 1e-3}
    ).config
    without, sizes = learner.parts(plain.config), learner.parts(cfg)
    mesh = build.make_mesh(cfg)
    graphdef, params = tiny.load_model(cfg, mesh)
    critic = build.make_critic(cfg, graphdef, params, None, mesh)
    assert sizes["critic's masters"] == really(critic.state.params)
    assert sizes["critic's optimizer"] == really(critic.state.opt_state)
    assert sizes["reference policy"] == really(build.make_learner(cfg, graphdef, mesh).reference(params))
    own = really(params) + beside_sums(params)
    theirs = beside_sums(critic.state.params["body"]) + really(critic.state.params["head"])
    assert sizes["gradients"] == max(own, really(critic.state.params) + theirs)
    assert (sizes["activations (estimate)"] > without["activations (estimate)"]) == (hidden == 128)
    assert {key for key in sizes if sizes[key] != without.get(key)} == (
        {"critic's masters", "critic's optimizer", "reference policy"}
        | ({"gradients", "activations (estimate)"} if hidden else set())
    )
    assert "critic's masters" in plan.describe(cfg)


def test_low_bit_tensors_take_their_bits_and_their_scales(world):
    count = sum(x.size for x in jax.tree.leaves(models.split(tiny.random_model())[1]) if x.ndim == 3)
    sizes = {
        name: learner.parts(world.changed(quant={"forward": name}).config)["QTensors"] for name in ("w8a8", "w4a16:g32")
    }
    assert sizes["w4a16:g32"] == count // 2 + count // 32 * 2  # half a byte each, a bfloat16 for 32
    assert count < sizes["w8a8"] < 1.1 * count  # a byte each, a float32 for a row


def test_a_bfloat16_master_halves_the_masters_and_no_gradient(world):
    full, half = (learner.parts(world.changed(model={"param_dtype": name}).config) for name in ("float32", "bfloat16"))
    assert half["masters"] * 2 == full["masters"]
    assert half["gradients"] == full["gradients"]


def test_recomputation_and_shorter_chunks_plan_for_less(world):
    def parts(remat, chunk):
        return learner.parts(world.changed(model={"remat": remat}, train={"logprob_chunk": chunk}).config)

    activations = [parts(remat, 2048)["activations (estimate)"] for remat in models.REMAT]
    assert activations == sorted(activations)
    assert sum(parts("full", 16).values()) <= sum(parts("full", 2048).values())


def test_experts_whose_sums_two_engine_shards_round_are_planned_with_twice_their_outputs():
    one = shapes.model_config(shapes.Setting(model="tiny-moe", scheme="bf16", remat="dots"))
    two = dataclasses.replace(one, numerics=dataclasses.replace(one.numerics, shards=2))
    outputs = one.num_layers * 64 * one.moe.num_experts_per_tok * one.hidden_size * one.compute_dtype.itemsize
    assert learner.saved_activations(two, 64) - learner.saved_activations(one, 64) == outputs
    assert learner.layer_activations(two, 64) > learner.layer_activations(one, 64)


def test_a_single_micro_batch_needs_no_accumulator_and_bfloat16_gradients_half(world):
    def gradients(**options):
        changed = {"micro_batch_rows": 64, "logprob_chunk": 2048} | options
        return learner.parts(world.changed(model={"dtype": "bfloat16"}, train=changed).config)["gradients"]

    many, one, half = gradients(micro_batch_rows=2), gradients(), gradients(grad_dtype="bfloat16")
    assert one == 2 * half
    assert one < many < 2 * one


def test_auto_recomputes_as_little_as_fits(world, monkeypatch):
    monkeypatch.setattr(plan, "on_tpu", lambda: True)  # no CUDA context beside it
    auto = world.changed(model={"remat": "auto"}, train={"micro_batch_rows": 64}).config
    assert choose.settle(auto, None)[0].model.remat == "full"
    sizes = []
    for remat in ("full", "attention", "mixer", "dots"):
        fixed = world.changed(model={"remat": remat}, train={"micro_batch_rows": 64}).config
        sizes.append(sum(learner.parts(fixed, per_device=True).values()))
        enough = int(sizes[-1] / (1 - plan.FREE) / plan.MOST) + 2
        assert choose.settle(auto, enough)[0].model.remat == remat
        assert choose.settle(fixed, None)[0] == fixed
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


def test_the_workspace_of_attention_is_the_one_that_a_gpu_reported(monkeypatch):
    """Results, which the record counts too, do not depend on the number of segments."""
    rows = json.loads((RESULTS / "cudnn_workspace_h100.json").read_text())["results"]
    found = {row["M"]: row["temp_gib"] * 2**30 for row in rows if row["back"] and (row["T"], row["N"]) == (18432, 32)}
    model = models.ModelConfig(**(vars(tiny.model_config()) | {"num_heads": 32, "head_dim": 128, "attention": "auto"}))
    assert learner.attention_workspace(model, 18432, 16) == learner.attention_workspace(model, 18432, 64) <= 2**31
    monkeypatch.setattr(attention_vendor, "WORKSPACE_BYTES", 2**40)
    planned = {segments: learner.attention_workspace(model, 18432, segments) for segments in found}
    for few, many in ((4, 16), (16, 64)):
        assert planned[many] - planned[few] == pytest.approx(found[many] - found[few], rel=0.01)
    assert planned[4] == pytest.approx(found[4] - found[1], rel=0.3)  # one sequence has a slot too, in the other plan
    assert planned[1] == learner.attention_workspace(dataclasses.replace(model, attention="splash"), 18432, 16) == 0


def test_the_plan_makes_no_array_and_reads_no_weights(world, monkeypatch):
    (world.model / "model.safetensors").rename(world.folder / "elsewhere")
    try:
        before = jax.live_arrays()  # held, so that none of them is collected meanwhile and its address used again
        text = plan.describe(world.config)
        known = {id(array) for array in before}
        assert [array.shape for array in jax.live_arrays() if id(array) not in known] == []
    finally:
        (world.folder / "elsewhere").rename(world.model / "model.safetensors")
    total = sum(learner.parts(world.config).values()) / learner.GIB
    assert f"{total:.3f} GiB" in text
    for part in ("masters", "optimizer", "gradients", "QTensors", "activations", "log-prob chunk"):
        assert part in text


@pytest.mark.slow
def test_one_device_of_a_mesh_holds_its_shards(world):
    mesh = make_mesh(fsdp=2, tensor=4)
    cfg = world.changed(mesh={"fsdp": 2, "tensor": 4}, train={"micro_batch_rows": 4}).config
    sizes = learner.parts(cfg, per_device=True)
    _, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme="w4a16:g32", mesh=mesh))
    qweights = jax.device_put(qweights, param_shardings(qweights, mesh))
    for name, tree in {"masters": params, "QTensors": qweights}.items():
        assert sizes[name] == sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    assert sizes["activations (estimate)"] * 2 == learner.parts(cfg)["activations (estimate)"]


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
    sizes = learner.parts(cfg)
    engine = rollout.make_engine("jax", cfg.rollout.engine)
    graphdef, params, qweights = models.split(models.load_hf(cfg.model.path, dtype="float32", scheme="w4a16:g32"))
    engine.publish(rollout.PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), 0)
    assert sizes["sampler's policy"] == really(engine._weights)
    model = models.config_of(graphdef)
    rows, length = 16, 16 + 16  # 4 prompts x 4 samples; 8 and 12 tokens in buckets of 16
    keys = model.num_layers * rows * length * model.num_kv_heads * model.head_dim * 4
    assert sizes["sampler's KV cache"] == 2 * keys + rows * 4
    vllm = world.changed(rollout=world.tree["rollout"] | {"engine": {"name": "vllm"}}).config
    assert not any("sampler" in name for name in learner.parts(vllm))


def test_partial_rollouts_are_planned_with_a_response_for_a_prompt(world):
    cfg = world.changed(rollout={"partial": {"over_provision": 1.5, "chunk": 4}}).config
    model = models.config_of(learner.shapes(cfg).graphdef)
    rows, length = 16, 32 + 16  # 8 + 12 - 1 tokens in a bucket of 32, a chunk in one of 16
    keys = model.num_layers * rows * length * model.num_kv_heads * model.head_dim * 4
    assert learner.parts(cfg)["sampler's KV cache"] == 2 * keys + rows * 4


def test_a_group_that_does_not_divide_is_refused_by_the_plan(world):
    with pytest.raises(UserError, match=r"model\.layers\.\{0\.\.1\}\..*48"):
        plan.describe(world.changed(quant={"forward": "w4a16:g48"}).config)


def test_nbytes_counts_shapes_as_it_counts_arrays():
    tree = {"a": jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), "b": jnp.zeros((7,), jnp.int8)}
    assert learner.nbytes(tree) == 2 * 15 + 7


def with_vllm(world, **engine):
    return world.changed(rollout={"engine": {"name": "vllm", **engine}}).config


@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16:g32"])
def test_a_published_version_has_the_planned_bytes(world, scheme):
    cfg = world.changed(quant={"forward": scheme}).config
    model = models.load_hf(cfg.model.path, dtype="float32", scheme=scheme)
    graphdef, params, qweights = models.split(model)
    tensors = dict(vllm.engine_tensors(rollout.PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)))
    shapes = sum(array.nbytes for name, array in tensors.items() if not name.endswith("weight_shape"))
    assert engine.published_bytes(cfg) == shapes


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


def test_a_tpu_is_planned_by_what_jax_may_take_of_it(world, monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 75 * 2**30}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    monkeypatch.setattr(plan, "on_tpu", lambda: True)
    assert plan.capacity() == 75 * 2**30
    _, made = choose.settle(world.config, plan.capacity())
    assert (made.context, made.missing, made.engine) == (0, 0, {})
    with pytest.raises(UserError, match="does not fit the device"):
        choose.settle(world.config, sum(learner.parts(world.config).values()) // 2)
