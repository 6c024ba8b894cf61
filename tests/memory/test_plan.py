# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of a GPU: a run that does not fit is refused before anything is loaded, with settings that fit."""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest
from qarl_bridge.protocol import adapters, formats

from benchmarks import memory_adapters, memory_one_base, random_folder
from benchmarks.shapes import Setting
from benchmarks.shapes import planned as planned_shapes
from qarl_jax import train
from qarl_jax.memory import choose, engine, learner, plan
from qarl_jax.memory.costs import Cost
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.run import config
from qarl_jax.types import UserError
from tests.reference.qwen3 import qwen3

GIB = 2**30
H200, H100 = int(140.4 * GIB), int(79.6 * GIB)
QWEN3_4B = qwen3(
    vocab=151936, hidden=2560, intermediate=9728, layers=36, heads=32, kv_heads=8, head_dim=128, attention_bias=False
) | {"tie_word_embeddings": True}


@pytest.fixture(scope="module")
def shapes_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shapes")


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("4b")
    (folder / "config.json").write_text(json.dumps(QWEN3_4B | {"max_position_embeddings": 40960}))
    return [
        f"model.path={folder}", "model.remat=mixer", "quant.forward=w8a8", "data.max_prompt_len=64",
        "rollout.max_response_len=512", "rollout.engine.max_model_len=1024", "train.prompts_per_step=16",
        "train.prompts_per_update=16", "train.micro_batch_rows=2", "train.row_len=4608", "train.max_segments=16",
        "optimizer.offload=false", "rollout.engine.transport=auto", "rollout.engine.gpu_memory_utilization=0.3",
        "rollout.engine.kv_cache_gb=20",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    """Nothing is set, and what a test or the plan sets is gone after it."""
    for name in (plan.FRACTION, plan.PREALLOCATE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def run(overrides):
    def load(*more):
        return config.load("configs/one_h200_8b.yaml", [*overrides, *more])

    return load


def test_a_4b_run_with_muon_on_a_large_card_fits_and_keeps_its_settings(run):
    cfg = run()
    settled, made = choose.settle(cfg, H200)
    assert settled == cfg
    assert made.missing == 0
    held = sum(made.learner.values()) + made.staging + made.reserved + plan.JAX_CONTEXT
    assert held <= H200
    assert made.learner == learner.parts(dataclasses.replace(cfg, quant=dataclasses.replace(cfg.quant, engine="cuda")))
    assert made.fraction * H200 <= H200 - made.staging - made.reserved - plan.JAX_CONTEXT


def test_on_a_smaller_card_it_is_refused_with_settings_that_fit(run):
    with pytest.raises(UserError, match=r"does not fit the device: it needs .* It fits with: ") as caught:
        choose.settle(run(), H100)
    assert "\n" not in str(caught.value)
    advised = str(caught.value).split("It fits with: ")[1].split()
    taken = float(re.search(r"Smaller settings take (\d+\.\d) GiB of it\. It fits", str(caught.value))[1])
    assert taken == pytest.approx(choose.settle(run(*advised), H100)[1].taken / GIB, abs=0.05)
    assert taken <= H100 / GIB + 0.05  # of a number with one decimal
    assert advised, caught.value
    _, made = choose.settle(run(*advised), H100)
    assert made.missing == 0
    for left_out in advised:  # nothing of it could be left out
        with pytest.raises(UserError):
            choose.settle(run(*(word for word in advised if word != left_out)), H100)


def test_auto_takes_the_fastest_settings_that_fit(run):
    auto = ("optimizer.offload=auto", "rollout.engine.memory=auto", "model.remat=auto")
    large, _ = choose.settle(run(*auto), H200)
    small, made = choose.settle(run(*auto, "rollout.engine.transport=host"), int(70 * GIB))
    assert (large.model.remat, large.optimizer.offload) == ("dots", False)
    assert (small.optimizer.offload, made.missing) == (True, 0)
    chosen = large.rollout.engine
    assert chosen.kv_cache_gb * GIB >= engine.kv_bytes(large, 128) > engine.kv_bytes(large, 64)
    parts = plan.make(large, H200).engine
    asked = sum(parts.values()) - parts["context (estimate)"]  # vLLM's context is there before it asks what is free
    assert asked <= chosen.gpu_memory_utilization * H200 < asked + 0.002 * H200


def test_a_step_of_more_sequences_gets_a_larger_cache_up_to_what_is_left(run):
    auto = ("rollout.engine.memory=auto", "rollout.engine.transport=host", "optimizer.offload=true")
    caches = [
        choose.settle(run(*auto, f"rollout.engine.max_num_seqs={n}"), H200)[0].rollout.engine.kv_cache_gb
        for n in (16, 32, 256)
    ]
    assert caches == sorted(set(caches))
    tight = choose.settle(run(*auto, "rollout.engine.max_num_seqs=256"), int(62 * GIB))[0].rollout.engine
    assert 0 < tight.kv_cache_gb < caches[-1]


def test_graphs_come_on_top_of_a_cache_that_fills_the_engines_share(run):
    filling = plan.make(run("rollout.engine.kv_cache_gb=0", "rollout.engine.gpu_memory_utilization=0.15"), H200)
    graphs = filling.engine["CUDA graphs (estimate)"]
    assert graphs > 0
    assert filling.reserved == int(0.15 * H200) + graphs
    # One H200, 4B fp8, two versions staged: the second found 3.1 GiB where it needed 4.1, before graphs were counted.
    sized = plan.make(run("rollout.engine.kv_cache_gb=1", "rollout.engine.gpu_memory_utilization=0.15"), H200)
    assert filling.available == sized.available - graphs


def test_moments_leave_the_card_before_sequences_wait_for_a_place_in_the_cache(run):
    autos = "rollout.engine.memory=auto", "optimizer.offload=auto", "model.remat=auto", "train.micro_batch_rows=1"
    settled, made = choose.settle(run("quant.forward=w4a16", *autos), int(73 * GIB))
    assert settled.optimizer.offload is True
    assert settled.rollout.engine.kv_cache_gb * GIB >= engine.kv_bytes(settled, engine.at_once(settled))
    assert made.missing == 0


def test_an_engine_on_a_card_of_its_own_is_planned_there(run):
    apart = ("rollout.engine.visible_gpus=1", "rollout.engine.gpu_memory_utilization=0.9")
    _, made = choose.settle(run(*apart), H200)
    assert made.engine == {}
    assert made.reserved == 0
    assert made.apart[1]["KV cache"] == 20 * GIB
    with pytest.raises(UserError, match=r"on a GPU of its own, of which it may use 14\.0"):
        choose.settle(run("rollout.engine.visible_gpus=1", "rollout.engine.gpu_memory_utilization=0.1"), H200)


def test_a_learner_on_two_cards_with_an_engine_on_each_has_half_of_its_weights_on_either(run):
    alone = plan.make(run(), H200)
    both = plan.make(
        run("mesh.fsdp=2", "rollout.engine.replicas=2", "rollout.engine.visible_gpus=0;1",
            "rollout.engine.shares_gpus=true", "rollout.engine.staging_buffers=1"),
        H200,
    )  # fmt: skip
    for part in ("masters", "gradients", "QTensors"):
        assert both.learner[part] == pytest.approx(alone.learner[part] / 2, rel=0.001)
    assert (both.devices, both.engines) == (2, 2)
    assert both.engine == alone.engine
    assert 2 * both.staging == alone.staging
    assert both.context == int(plan.JAX_CONTEXT + plan.COLLECTIVES)
    assert "2 such devices, an engine on each" in both.lines()[0]


def test_a_frozen_base_takes_one_buffer_and_none_where_the_plan_may_choose(run):
    lora = "lora={rank: 8, alpha: 8}"
    given = plan.make(run(lora), H200)
    assert given.staging == engine.published_bytes(run(lora))
    settled, made = choose.settle(run(lora, "rollout.engine.memory=auto", "rollout.engine.kv_cache_gb=0"), H200)
    assert (settled.rollout.engine.transport, made.staging) == ("host", 0)
    assert any("the base goes through host memory" in line for line in made.lines())


@pytest.mark.parametrize(
    ("sections", "advised"),
    [(("lora={rank: 8, alpha: 8}",), "rollout.engine.transport=host"), ((), "train.micro_batch_rows=1")],
    ids=["adapters", "all learns"],
)
def test_a_transport_that_is_given_is_kept_or_the_run_is_refused(run, sections, advised):
    left = (*sections, "rollout.engine.memory=auto", "rollout.engine.kv_cache_gb=0", "optimizer.offload=true")
    cfg, through_host = (run(*left, f"rollout.engine.transport={way}") for way in ("cuda_ipc", "host"))
    settled, made = choose.settle(cfg, H200)
    assert settled.rollout.engine.transport == "cuda_ipc"
    assert made.staging == engine.staging_bytes(cfg) >= engine.published_bytes(cfg)
    sizes = range(20 * GIB, H200, GIB // 2)  # the smallest GPU on which versions fit only through host memory
    size = next(size for size in sizes if choose.fits(through_host, size))
    with pytest.raises(UserError, match=re.escape(f"It fits with: {advised}")):
        choose.settle(cfg, size)
    given = run(*sections, "optimizer.offload=true", "rollout.engine.transport=cuda_ipc")  # memory, too
    with pytest.raises(UserError, match=re.escape(advised)):
        choose.settle(given, size)


def test_an_engine_s_adapters_are_planned_as_it_allocates_them(run):
    """Live and staged, of fused layers; `engine.published_bytes` has the published ones."""
    torch = pytest.importorskip("torch")
    live = pytest.importorskip("qarl_bridge.engine.adapters")
    cfg = run("lora={rank: 8, alpha: 8}")
    made = learner.shapes(cfg)
    places = gpu_staging.layout(PolicyWeights(graphdef=made.served, params=made.params, qweights=made.published))
    shapes = {place.name: list(place.shape) for place in places if adapters.is_adapter(place.name)}
    modules = {}
    for name in shapes:
        module = formats.live_module(f"{adapters.module_of(name)}.weight")
        parent, _, leaf = module.rpartition(".")
        parts = [f"{parent}.{part}" for part in formats.FUSED.get(leaf, (leaf,))]
        sizes = [shapes[part + adapters.B][0] for part in parts]
        layer = types.SimpleNamespace(quant_method=None, output_partition_sizes=sizes, output_size=sum(sizes))
        layer.input_size, layer.forward = shapes[parts[0] + adapters.A][1], len
        modules[module] = layer
    held = live.Adapters(modules, shapes, product=max, dtype=torch.bfloat16, device="meta")
    published = 2 * sum(math.prod(shape) for shape in shapes.values())
    assert engine.adapter_copies(cfg) == held._live.nbytes + held._staged.nbytes - published + live._CHECKED_BYTES
    assert engine.adapter_copies(run()) == 0


def test_an_nvfp4_base_that_learner_and_engine_hold_once_is_counted_once(run):
    adapters = ("lora={rank: 8, alpha: 8}", "quant.forward=nvfp4")
    once, twice = (plan.make(run(*adapters, f"rollout.engine.transport={way}"), H200) for way in ("auto", "host"))
    assert "QTensors" in once.learner
    assert once.learner["QTensors"] == 0
    assert once.one_base == twice.learner["QTensors"] > GIB
    assert once.one_base == pytest.approx(twice.engine["weights"] - once.engine["weights"], rel=1e-3)
    assert once.staging == twice.staging == twice.one_base == 0
    decoded = 2 * 9728 * 2560  # of a layer, in bfloat16: gate and up in the engine's layout, else one more
    activations = [made.learner["activations (estimate)"] for made in (once, twice)]
    assert activations[1] - activations[0] == decoded
    free = [made.size - made.one_base - sum(made.learner.values()) - made.engine["weights"] for made in (once, twice)]
    assert free[0] - free[1] == pytest.approx(once.one_base + decoded, rel=1e-3)
    assert any("base, of learner and engine" in line for line in once.lines())
    assert "held once by learner and engine" in plan.describe(run(*adapters, "rollout.engine.transport=auto"))


def test_adapters_under_a_learner_of_another_scheme_hold_the_samplers_codes(run):
    lora = "lora={rank: 8, alpha: 8}"
    aligned = learner.parts(run(lora, "quant={forward: w4a16}"))
    apart = learner.parts(run(lora, "quant={forward: bf16, rollout: w4a16}"))
    assert apart["QTensors of the sampler"] == aligned["QTensors"] > 0
    assert "QTensors of the sampler" not in aligned


PPO = ("loss={name: ppo}", "advantage={name: gae}", "lora={rank: 8, alpha: 8}", "optimizer.name=adamw")


def test_a_critic_that_decodes_the_shared_base_is_planned_in_its_own_dtype(run):
    critic = "critic={lora: {rank: 8, alpha: 8}, dtype: float32}"
    coded, plain = (learner.parts(run(*PPO, critic, f"quant.forward={scheme}")) for scheme in ("w4a16", "bf16"))
    name = "activations (estimate)"
    assert coded[name] - plain[name] == 3 * 4 * 9728 * 2560
    assert "reading the critic's base (estimate)" not in coded


def test_the_base_of_a_critics_adapters_is_planned_while_it_is_read(run, tmp_path):
    """21 of 36 layers of a weight are read at once, beside the policy's base and what is read of the critic's."""
    small = QWEN3_4B | {"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(small))
    few = ("train.micro_batch_rows=1", "train.row_len=576", "train.max_segments=1", "train.logprob_chunk=128")
    critic = f"critic={{lora: {{rank: 8, alpha: 8}}, path: {run().model.path}}}"
    parts = learner.parts(run(*PPO, *few, critic, f"model.path={tmp_path}"))
    assert parts["critic's frozen weights"] == 2 * learner.parameters(run())
    there = ("masters", "QTensors", "frozen weights", "critic's masters", "critic's frozen weights")
    beside = sum(size for name, size in parts.items() if name not in there)
    assert beside == 3 * 21 * 2 * 9728 * 2560
    assert parts["reading the critic's base (estimate)"] > 0


def test_frozen_experts_of_a_critic_are_planned_without_their_gradients(run, shapes_folder):
    folder = shapes_folder / "critic of experts"
    random_folder.make(folder, made := random_folder.config_of("30b-a3b", 0), weights=False)
    sections = ("{lora: {rank: 8, alpha: 8}, path: %s, dtype: float32}", "{path: %s, dtype: float32}")
    frozen, learned = (learner.parts(run(*PPO, f"critic={section % folder}")) for section in sections)
    experts = 4 * made.moe.num_experts * made.moe.intermediate_size * made.hidden_size
    name = "activations (estimate)"
    assert learned[name] - frozen[name] == 2 * experts


@pytest.mark.parametrize("number", range(2))
def test_a_learner_beside_one_base_is_planned_as_it_is_compiled(number, tmp_path):
    """Qwen2.5-32B on an H200 (benchmarks/memory_one_base.py), its rows recomputed wholly or but for attention."""
    record = json.loads(pathlib.Path("benchmarks/results/memory_one_base_h200.json").read_text())["results"][number]
    parts = learner.parts(memory_one_base.run_of(str(tmp_path / "32b"), record["remat"]), per_device=True)
    held = sum(record[name] for name in ("arguments", "results", "temporaries")) + parts["optimizer"]
    assert 1 <= sum(parts.values()) / held <= 1.1


ADAPTERS = json.loads(pathlib.Path("benchmarks/results/memory_adapters_h200.json").read_text())["results"]


@pytest.mark.parametrize("case", ADAPTERS, ids=lambda case: "-".join([case["shapes"], *case["overrides"]]))
def test_adapters_on_an_int4_base_are_planned_as_they_are_compiled(case, shapes_folder):
    """Recipes for one GPU, compiled for an H200 (benchmarks/memory_adapters.py)."""
    folder = shapes_folder / case["shapes"]
    cfg = memory_adapters.run_of(folder, case["shapes"], case["arm"], case["overrides"])
    parts = learner.parts(cfg, per_device=True)
    held = sum(case[name] for name in ("arguments", "results", "temporaries")) + parts["optimizer"]
    assert 1 <= sum(parts.values()) / held <= 1.1


@pytest.mark.parametrize(
    ("setting", "temporaries"),
    [
        (Setting(model="0.6b", scheme="w4a16", chunk=8192), 10.015),
        (Setting(model="0.6b", scheme="w4a16"), 4.830),
        (Setting(model="1.7b", scheme="bf16", master="float32", grad="float32", rows=2, seq=2560), 9.624),
    ],
    ids=str,
)
def test_log_probs_in_float64_are_planned_with_their_chunk(setting, temporaries):
    """GiB of temporaries that XLA allocates for an H200 (`benchmarks.memory.compiled_bytes`), gradients among them."""
    parts = planned_shapes(dataclasses.replace(setting, engine="cuda"))
    ours = sum(parts[name] for name in ("gradients", "activations (estimate)", "log-prob chunk"))
    assert ours / GIB == pytest.approx(temporaries, rel=0.01)


def test_a_chunked_version_takes_one_buffer_of_the_gpu(run):
    chunked = "rollout.engine.staging_buffers=0"
    whole, parts = plan.make(run("rollout.engine.staging_buffers=1"), H200), plan.make(run(chunked), H200)
    assert 0 < parts.staging <= max(gpu_staging.CHUNK_BYTES, whole.staging / 10)
    assert parts.learner == whole.learner
    assert parts.available - whole.available == whole.staging - parts.staging
    assert plan.make(run(chunked, "rollout.engine.transport=host"), H200).staging == 0
    # It is chosen where it is enough, before the host's memory is.
    small = (
        "model.remat=full", "train.micro_batch_rows=1", "train.grad_dtype=bfloat16", "optimizer.offload=true",
        "rollout.engine.memory=auto", "rollout.engine.kv_cache_gb=0",
    )  # fmt: skip
    sizes = (51, 58, 66, 76)
    engines = [choose.settle(run(*small), size * GIB)[0].rollout.engine for size in sizes]
    assert [(engine.transport, engine.staging_buffers) for engine in engines] == [
        ("host", 2), ("auto", 0), ("auto", 1), ("auto", 2)
    ]  # fmt: skip


def test_what_a_run_lacks_is_what_it_lacks_as_it_is_and_not_what_its_largest_choice_does(run):
    autos = ("model.remat=auto", "optimizer.offload=auto", "rollout.engine.memory=auto")
    small, cfg = 20 * GIB, run(*autos)
    least = min(made.missing for _, made in choose._plans(cfg, small, choose.automatic(cfg, small)))
    with pytest.raises(UserError, match=rf"it needs {least / GIB:.1f} GiB more than the 20\.0 there are"):
        choose.settle(cfg, small)


def test_bfloat16_masters_are_advised_with_the_rounding_that_moves_them(run):
    words = ("train.micro_batch_rows=1", "model.remat=full", "train.grad_dtype=bfloat16", "rollout.engine.memory=auto")
    words += ("optimizer.moment_dtype=int8", "optimizer.second_moment_dtype=int8", "quant.code_flips=false")
    smallest = next(
        size for size in range(60, 20, -1) if not choose.fits(run(*words, "optimizer.offload=true"), size * GIB)
    )
    advised = choose.words(choose.smaller(run(*words, "optimizer.offload=true"), smallest * GIB))
    assert {"model.param_dtype=bfloat16", "optimizer.master_rounding=stochastic"} <= set(advised)
    rounded = run(*words, "model.param_dtype=bfloat16", "optimizer.master_rounding=stochastic")
    smallest = next(size for size in range(60, 20, -1) if not choose.fits(rounded, size * GIB))
    assert choose.words(choose.smaller(rounded, smallest * GIB)) == ["optimizer.offload=true"]
    with pytest.raises(UserError, match=r"is for bfloat16 masters: set model\.param_dtype=bfloat16"):
        run("optimizer.master_rounding=stochastic")


def test_what_makes_it_worse_is_not_advised(run):
    # Half of the rows would be two micro-batches, whose gradients are added up beside the new ones.
    words = ("train.max_segments=1", "train.row_len=576", "train.micro_batch_rows=128", "model.remat=full")
    advised = choose.words(choose.smaller(run(*words), int(75 * GIB)))
    assert choose.fits(run(*words, *advised), int(75 * GIB))
    for word in advised:
        rest = [other for other in advised if other != word]
        assert not choose.fits(run(*words, *rest), int(75 * GIB))


def test_without_a_gpu_nothing_is_planned_and_auto_does_not_offload(run, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert plan.capacity() is None
    cfg, made = choose.settle(run("optimizer.offload=auto"), None)
    assert (cfg.optimizer.offload, made) == (False, None)


def test_the_plan_sets_jaxs_allocator_unless_the_user_has(run, monkeypatch):
    _, made = choose.settle(run(), H200)
    made.keep()
    assert float(os.environ[plan.FRACTION]) == pytest.approx(made.fraction)
    assert os.environ[plan.PREALLOCATE] == "true"
    monkeypatch.setenv(plan.PREALLOCATE, "false")
    monkeypatch.delenv(plan.FRACTION)
    made.keep()
    assert plan.FRACTION not in os.environ


def test_a_learner_fits_what_the_user_lets_jax_take_or_is_refused(run, monkeypatch):
    needed = choose.settle(run(), H200)[1].needed / H200
    monkeypatch.setenv(plan.FRACTION, f"{needed + 0.002:.3f}")
    assert f"JAX takes {needed + 0.002:.1%}" in choose.settle(run(), H200)[1].lines()[0]
    monkeypatch.setenv(plan.FRACTION, f"{needed - 0.002:.3f}")
    with pytest.raises(
        UserError, match=rf"more than the \d+\.\d that {plan.FRACTION}=0\.\d+ lets JAX take .*It fits with"
    ):
        choose.settle(run(), H200)


def test_a_dry_run_takes_the_name_of_a_published_model(capsys):
    command = ["--config", "configs/papers/qwen3_8b_base.yaml", "--dry-run", "--gpus", "8", "--gpu-gb", "79"]
    assert train.main(command) == 0
    out = capsys.readouterr().out
    assert "8 such devices, an engine on each" in out
    assert "path: models/Qwen3-8B-Base" in out
    assert train.main([*command, "model.path=Qwen/Qwen3-8B"]) == 0
    assert "8,190.7 M parameters" in capsys.readouterr().out
    assert train.main([*command, "model.path=Qwen/Qwen9-8B"]) == 2
    assert "A dry run also takes a name: DeepSeek-R1-Distill-Qwen-1.5B, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dry-run", "--gpu-gb", "0"], "--gpu-gb 0: give the GiB"),
        (["--dry-run", "--gpu-gb", "-5"], "--gpu-gb -5: give the GiB"),
        (["--dry-run", "--gpu-gb", "nan"], "--gpu-gb nan: give the GiB"),
        (["--dry-run", "--gpu-gb", "inf"], "--gpu-gb inf: give the GiB"),
        (["--dry-run", "--gpu-gb", "0.1", "--gpus", "1"], "more than the 0.1 there are"),
        (["--dry-run", "--gpu-gb", "80", "--gpus", "0"], "--gpus 0: plan for at least one GPU"),
        (
            ["--dry-run", "--gpu-gb", "80", "--gpus", "3", "train.micro_batch_rows=8"],
            "mesh.fsdp = 3, over which the rows are split; set it to 9, or to auto.",
        ),
        (["--gpus", "8"], "--gpus and --gpu-gb are for --dry-run"),
    ],
)
def test_gpus_that_cannot_be_are_refused_in_a_sentence(words, said, capsys):
    assert train.main(["--config", "configs/gpu/recipes.yaml", "arm=8x80", *words]) == 2
    assert said in capsys.readouterr().err


def test_of_gpus_over_which_few_weights_divide_the_plan_advises_as_many_as_they_do(capsys):
    command = ["--config", "configs/gpu/recipes.yaml", "arm=4x80", "--dry-run", "--gpu-gb", "79.1"]
    assert train.main([*command, "--gpus", "6", "train.micro_batch_rows=6"]) == 2
    said = capsys.readouterr().err
    assert "Weights divide over 4 devices (mesh.fsdp=4), and few over 6. It fits with: mesh.fsdp=4 train.micro" in said
    assert train.main([*command, "--gpus", "6", *said.split("It fits with: ")[1].split()]) == 0
    assert "and few over" not in capsys.readouterr().out
    small = ["model.path=Qwen3-0.6B", "train.micro_batch_rows=3"]
    assert train.main([*command, "--gpus", "3", *small]) == 0
    assert "weights divide over 2 devices (mesh.fsdp=2), and few over 3" in capsys.readouterr().out
    assert train.main([*command[:-1], "24", "--gpus", "6", "train.micro_batch_rows=6"]) == 2
    assert "No settings fit" in capsys.readouterr().err


def test_a_cache_for_few_sequences_is_not_one_for_a_single_sequence(capsys):
    """Qwen3-30B-A3B at 18,432 tokens on eight GPUs of 80 GB: an engine holds five, at bfloat16's gradients."""
    command = ["--config", "configs/papers/qwen3_30b_a3b_base.yaml", "arm=tbpo", "--dry-run", "--gpus", "8"]
    assert train.main([*command, "--gpu-gb", "80"]) == 0
    assert "5 of 256 sequences of full length at once" in capsys.readouterr().out


def test_hours_a_step_are_dearer_than_rounding():
    second, hours, rounded = Cost(seconds=1), Cost(seconds=9000), Cost(bits=1)
    assert sorted([hours, rounded, second]) == [second, rounded, hours]
    assert sorted([Cost(bits=8), Cost(bits=2), Cost(bits=1)]) == [Cost(bits=n) for n in (1, 2, 8)]


def test_a_dry_run_says_for_any_card_whether_the_run_fits(overrides, capsys):
    command = ["--config", "configs/one_h200_8b.yaml", "--dry-run", *overrides]
    assert train.main([*command, "--gpu-gb", "140.4"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"device +140.4 GiB: fits; JAX takes \d+\.\d% of it at once", out)
    assert "engine: KV cache                    20.00 GiB" in out
    assert plan.FRACTION not in out  # nothing else says what JAX takes
    spread = [*command, "--gpu-gb", "140.4", "mesh.fsdp=-1", "rollout.engine.memory=auto"]
    assert train.main([*spread, "--gpus", "2"]) == 0
    assert "2 such devices, an engine on each" in capsys.readouterr().out
    assert train.main([*command, "--gpu-gb", "140.4", "--gpus", "1", "mesh.fsdp=2"]) == 2
    assert "set mesh.fsdp=-1" in capsys.readouterr().err
    assert train.main([*command, "--gpu-gb", "79.6"]) == 2
    assert "It fits with: " in capsys.readouterr().err


def test_a_mesh_of_all_gpus_is_laid_out_with_an_engine_on_each(run, monkeypatch):
    monkeypatch.setattr(plan, "on_gpu", lambda: True)
    monkeypatch.setattr(plan.sender, "gpu_count", lambda: 2)
    settled, made = choose.settle(run("mesh.fsdp=-1", "rollout.engine.memory=auto"), H200)
    assert (settled.mesh.fsdp, made.devices, made.engines) == (2, 2, 2)
    assert settled.rollout.engine.visible_gpus == "0;1"
    monkeypatch.setattr(plan.sender, "gpu_count", lambda: 3)
    with pytest.raises(UserError, match=r"micro_batch_rows=2 is not a multiple of .* = 3"):
        choose.settle(run("mesh.fsdp=-1"), H200)


def test_an_engine_of_two_shards_takes_a_pair_of_the_learners_gpus(run, monkeypatch):
    monkeypatch.setattr(plan, "on_gpu", lambda: True)
    monkeypatch.setattr(plan.sender, "gpu_count", lambda: 4)
    words = ("mesh.fsdp=-1", "rollout.engine.memory=auto", "train.micro_batch_rows=4")
    alone, whole = choose.settle(run(*words), H200)
    settled, made = choose.settle(run(*words, "rollout.engine.tensor_parallel_size=2"), H200)
    assert (settled.rollout.engine.replicas, settled.rollout.engine.visible_gpus) == (2, "0,1;2,3")
    assert (alone.rollout.engine.replicas, whole.engines, made.engines) == (4, 4, 4)
    assert made.engine["weights"] == whole.engine["weights"] // 2
    assert made.engine["shards meet (estimate)"] > 2**30
    with pytest.raises(UserError, match=r"tensor_parallel_size=4 does not divide the learner's 2 GPU"):
        choose.with_engines(run("mesh.fsdp=2", *words[1:], "rollout.engine.tensor_parallel_size=4"))


@pytest.mark.slow
def test_an_engine_that_one_gpu_does_not_hold_is_spread_over_several(tmp_path):
    """Qwen3-32B in bf16 takes 61 GiB: over four GPUs it lies beside an eighth of the learner."""
    shapes = qwen3(
        vocab=151936, hidden=5120, intermediate=25600, layers=64, heads=64, kv_heads=8, head_dim=128,
        attention_bias=False,
    ) | {"max_position_embeddings": 40960}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    words = [f"model.path={tmp_path}", "mesh.fsdp=8", "train.micro_batch_rows=8", "quant.forward=bf16"]
    with pytest.raises(UserError, match=r"It fits with: .*rollout.engine.tensor_parallel_size=4"):
        choose.settle(config.load("configs/one_h200_8b.yaml", [*words, "rollout.engine.memory=auto"]), H100)


def test_every_choice_says_what_it_costs(run):
    auto = ("model.remat=auto", "optimizer.offload=auto", "train.grad_dtype=auto", "rollout.engine.memory=auto")
    _, made = choose.settle(run(*auto, "rollout.engine.max_num_seqs=256"), int(66 * GIB))
    cost = {line.split("=")[0]: line.partition(": ")[2] for line in made.chosen}
    assert set(cost) == {"model.remat", "optimizer.offload", "train.grad_dtype", "rollout.engine.kv_cache_gb",
                         "rollout.engine.staging_buffers"}  # fmt: skip
    assert re.fullmatch(r"\+\d+\.\d s a step over its fastest value \(estimate\)", cost["optimizer.offload"])
    assert cost["train.grad_dtype"] in ("costs no time", "rounds otherwise; gradients add up in bfloat16")
    assert "sequences of full length at once" in cost["rollout.engine.kv_cache_gb"]


@pytest.mark.slow
def test_planning_asks_jax_for_no_device(overrides):
    # Asked once, JAX's allocator is what it is: the plan must come first.
    code = f"""
from jax._src import xla_bridge
from qarl_jax.memory import choose
from qarl_jax.run import config
from qarl_jax.memory import plan
plan.on_gpu, plan.sender.gpu_count = lambda: True, lambda: 2
cfg = config.load("configs/one_h200_8b.yaml", {[*overrides, "mesh.fsdp=-1", "rollout.engine.memory=auto"]!r})
choose.settle(cfg, {H200})
raise SystemExit(xla_bridge.backends_are_initialized())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_int4_layers_are_counted_as_multiplied(run):
    w4a16 = ("quant.forward=w4a16", "rollout.engine.memory=auto")

    def held(*overrides):
        return plan.make(run(*overrides), H200).engine["layers as multiplied"]

    # q, k, v, o; gate, up, down: half a byte and a bfloat16 scale of 128; gate and up of one layer once more.
    numbers = 36 * 2560 * (2 * 32 * 128 + 2 * 8 * 128 + 3 * 9728)
    assert held(*w4a16) == numbers // 2 + numbers // 128 * 2 + 2 * (2 * 9728) * 2560
    assert held(*w4a16, "rollout.engine.arithmetic=vllm") == 0
    assert held("rollout.engine.memory=auto") == 0  # w8a8


def test_the_default_engine_is_not_chosen_for():
    assert vllm.Config().memory == "given"
