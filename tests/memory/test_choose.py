# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that a refused run is offered: they fit, and no others that fit are cheaper."""

import contextlib
import itertools
import json
import math
import pathlib
import random
import re

import pytest

from qarl_jax import train
from qarl_jax.advise import counts, forecast, machines
from qarl_jax.memory import choose, costs, engine, learner, plan
from qarl_jax.models import published
from qarl_jax.run import config
from qarl_jax.types import UserError
from tests.reference.qwen3 import qwen3

GIB = 2**30


def dry_run(name, arm, gpus, gb, *more):
    rows = f"train.micro_batch_rows={gpus}"
    size = ("--dry-run", "--gpus", str(gpus), "--gpu-gb", str(gb))
    return train.main(["--config", f"configs/{name}.yaml", f"arm={arm}", *size, rows, *more])


ROUNDED = ("papers/qurl_dapo_7b", "bf16", 6, 79.1)  # fits six with bfloat16 masters
FASTER = ("gpu/recipes", "1x48", 3)
FEW = ("papers/qwen25_math_1p5b", "tbpo", 8, 79.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "advised"),
    [
        (ROUNDED, "mesh.fsdp=4 train.micro_batch_rows=4"),
        ((*FASTER, 28, "model.remat=none"), "mesh.fsdp=2 train.micro_batch_rows=2 model.remat=attention"),
        ((*FASTER, 36, "model.remat=none"), "model.remat=mixer"),
    ],
    ids=["without rounding", "faster on two", "faster on three"],
)
def test_fewer_gpus_are_offered_where_settings_on_all_of_them_are_dearer(run, advised, capsys):
    assert dry_run(*run) == 2
    said = capsys.readouterr().err
    assert said.strip().endswith(f"It fits with: {advised}")
    assert ("Weights divide over" in said) == ("mesh.fsdp" in advised)
    assert dry_run(*run, *advised.split()) == 0


def test_a_run_whose_least_choices_do_not_fit_together_is_offered_what_fits(monkeypatch, capsys):
    """PPO: a critic's state takes more on its way from the host where activations leave less room that it can use."""
    monkeypatch.setattr(choose, "_on_fewer", lambda *_: None)
    advised = ["optimizer.moment_dtype=bfloat16", "optimizer.second_moment_dtype=bfloat16"]
    with published.folder("models/Qwen2.5-0.5B-Instruct") as folder:
        words = ["arm=bf16", f"model.path={folder}", "mesh.fsdp=3", "train.micro_batch_rows=3", *advised]
        assert choose.fits(config.load("configs/papers/qurl_ppo_gsm8k.yaml", words), 22 * 2**30)
    assert dry_run("papers/qurl_ppo_gsm8k", "bf16", 3, 22) == 2
    assert capsys.readouterr().err.split("It fits with: ")[1].split() == advised


@pytest.mark.slow
def test_fewer_rows_are_offered_on_gpus_that_are_no_power_of_two(monkeypatch, capsys):
    """Four of eight rows fit on each of three GPUs."""
    monkeypatch.setattr(choose, "_on_fewer", lambda *_: None)
    run = ("gpu/recipes", "1x24", 3, 16, "model.remat=full", "train.micro_batch_rows=24")
    assert dry_run(*run) == 2
    assert capsys.readouterr().err.strip().endswith("It fits with: train.micro_batch_rows=12")


def test_a_critic_s_shapes_are_made_once_for_all_settings_that_they_do_not_depend_on(monkeypatch):
    made, make = [], learner.critic.init_params
    monkeypatch.setattr(learner.critic, "init_params", lambda *args: made.append(args) or make(*args))
    monkeypatch.setattr(learner, "_CRITICS", {})
    with published.folder("models/Qwen2.5-0.5B-Instruct") as folder:
        for remat, offload, rate in itertools.product(("full", "dots"), ("true", "false"), ("1e-5", "2e-5")):
            words = [f"model.path={folder}", f"model.remat={remat}", "mesh.fsdp=1", f"optimizer.offload={offload}"]
            words += [f"critic.optimizer.offload={offload}", f"optimizer.lr={rate}"]
            cfg = config.load("configs/papers/qurl_ppo_gsm8k.yaml", ["arm=bf16", *words])
            assert learner.abstract_critic(cfg)[0].remat == remat
        assert len(made) == 1
        learner.abstract_critic(config.replaced(cfg, {"critic.optimizer.moment_dtype": "int8"}))
    assert len(made) == 2


def test_sequences_are_not_given_up_for_less_recomputation_beside_a_base_held_once():
    """Each token reads the base, so a KV cache of few sequences is dear: QeRL's 32B on a GPU of 80 GB."""
    with published.folder("models/Qwen2.5-32B-Instruct") as folder:
        words = ["arm=32b_nvfp4_aqn", f"model.path={folder}", "mesh.fsdp=1"]
        cfg = config.load("configs/papers/qerl_gsm8k.yaml", words)
        once, _ = choose.settle(cfg, int(79.1 * 2**30))
        twice = config.load("configs/papers/qerl_gsm8k.yaml", [*words, "rollout.engine.transport=host"])
        waits = [costs.waiting_seconds(one, 16) for one in (cfg, twice)]
    assert once.rollout.engine.max_num_seqs >= 64
    assert waits[0] == pytest.approx(waits[1], rel=0.01)


def test_a_round_of_sequences_is_not_given_up_for_the_layers_forward():
    """QeRL's 7B in bf16 on a GPU of 80 GB: the layers' forward takes less than two more rounds of 4,096 tokens."""
    with published.folder("models/Qwen2.5-7B-Instruct") as folder:
        words = ["arm=7b_bf16", f"model.path={folder}", "mesh.fsdp=1"]
        settled, _ = choose.settle(config.load("configs/papers/qerl_bigmath.yaml", words), int(79.1 * 2**30))
    assert settled.model.remat != "dots"
    assert settled.rollout.engine.max_num_seqs > 2 * 100


def test_fewer_rows_at_once_are_chosen_before_layers_are_recomputed():
    """128 responses of 576 tokens in rows of 2,304, 8B on an H200: four rows at once would repeat all but attention,
    and one would add gradients twice as often (step_8b_rows_h200.json)."""
    with published.folder("Qwen3-8B-Base") as folder:
        words = [f"model.path={folder}", "mesh.fsdp=1", "train.prompts_per_step=16", "train.prompts_per_update=8"]
        words += ["train.row_len=2304", "rollout.num_samples_per_prompt=8", "rollout.max_response_len=512"]
        words += ["data.max_prompt_len=64", "rollout.engine.max_model_len=576", "arm=tbpo", "model.remat=auto"]
        words += ["model.param_dtype=bfloat16", "optimizer.master_rounding=stochastic", "train.grad_dtype=bfloat16"]
        chosen = {}
        for rows in ("4", "auto"):
            cfg = config.load("configs/papers/qwen3_8b_base.yaml", [*words, f"train.micro_batch_rows={rows}"])
            settled, made = choose.settle(cfg, int(139.8 * 2**30))
            chosen[rows] = settled.train.micro_batch_rows, settled.model.remat
    assert chosen == {"4": (4, "mixer"), "auto": (2, "dots")}
    assert any(re.match(r"train.micro_batch_rows=2: \+0\.\d s a step", line) for line in made.chosen)


@pytest.mark.parametrize(("responses", "rows"), [(5, 1), (8, 8)])
def test_rows_of_padding_in_a_micro_batch_are_counted(responses, rows):
    """An update of five full rows: one micro-batch of eight would compute eight."""
    with published.folder("Qwen3-0.6B-Base") as folder:
        words = [f"model.path={folder}", "mesh.fsdp=1", "train.prompts_per_update=1", "train.max_segments=1"]
        cfg = config.load("configs/gpu/recipes.yaml", [*words, f"rollout.num_samples_per_prompt={responses}"])
        settled, made = choose.settle(cfg, int(139.8 * 2**30))
    assert settled.train.micro_batch_rows == rows
    assert f"train.micro_batch_rows={rows}: costs no time" in made.chosen


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arm", "gpus", "gb"), [("gpu/recipes", "8x80_moe", 8, 79.1), FEW])
def test_no_other_number_of_rows_makes_a_step_on_a_mesh_faster_by_its_forecast(name, arm, gpus, gb):
    """A micro-batch gathers weights and scatters gradients, so that few large ones are faster on several GPUs."""
    cfg = config.load(f"configs/{name}.yaml", [f"arm={arm}", f"mesh.fsdp={gpus}"])
    machine = machines.MACHINES["h100"]

    def seconds(rows):
        settled, _ = choose.settle(config.replaced(cfg, {"train.micro_batch_rows": rows}), int(gb * GIB))
        return sum(forecast.seconds(counts.of_step(config.on_a_gpu(settled), machine), forecast.RATES).values())

    with published.folder(cfg.model.path) as folder:
        cfg = config.replaced(cfg, {"model.path": folder})
        chosen = seconds("auto")
        for rows in (1, 2, 4, 8):
            with contextlib.suppress(UserError):  # it does not fit
                assert chosen < 1.02 * seconds(rows * gpus), rows


def test_without_a_plan_rows_are_a_multiple_of_the_devices(monkeypatch):
    cfg = config.load("configs/papers/qwen3_8b_base.yaml", ["arm=tbpo", "mesh.fsdp=3"])
    assert choose.settle(cfg, None)[0].train.micro_batch_rows == cfg.micro_batch_rows == 9

    monkeypatch.setattr(plan, "on_gpu", lambda: False)  # the eight devices of these tests
    words = ["arm=tbpo", "mesh.data=3", "mesh.fsdp=-1"]
    settled, _ = choose.settle(config.load("configs/papers/qwen3_8b_base.yaml", words), None)
    assert (settled.mesh.fsdp, settled.train.micro_batch_rows) == (2, 12)
    with pytest.raises(UserError, match=r"not a multiple of mesh\.data x mesh\.fsdp = 6"):
        choose.settle(config.load("configs/papers/qwen3_8b_base.yaml", [*words, "train.micro_batch_rows=8"]), None)
    apart = ["distributed.coordinator=auto", "distributed.num_processes=2"]  # with eight each
    settled, _ = choose.settle(config.load("configs/papers/qwen3_8b_base.yaml", [*words, *apart]), None)
    assert (settled.mesh.fsdp, settled.train.micro_batch_rows) == (5, 15)


def test_a_cache_a_quarter_larger_does_not_fit_beside_the_settings_chosen():
    """QeRL's 14B in bf16 on a GPU of 80 GB: caches halved in turn had room for two sequences where three fit."""
    with published.folder("models/Qwen2.5-14B-Instruct") as folder:
        words = ["arm=14b_bf16", f"model.path={folder}", "mesh.fsdp=1"]
        settled, made = choose.settle(config.load("configs/papers/qerl_bigmath.yaml", words), int(79.1 * GIB))
        room = int(settled.rollout.engine.kv_cache_gb * GIB / engine.kv_bytes(settled, 1))
        assert made.size - made.taken < engine.kv_bytes(settled, math.ceil(1.25 * room) - room)


# ---- no settings are overlooked -------------------------------------------------------------------------------------

AUTOS = ("optimizer.offload=auto", "rollout.engine.memory=auto", "model.remat=auto", "train.grad_dtype=auto")


def everything(cfg, size):
    """Every combination of what `AUTOS` leave to the plan, with its cost: written out, in no particular order."""
    knobs = choose.automatic(cfg, size)
    for choices in itertools.product(*knobs.learner, *knobs.engine):
        settings, cost = {}, costs.Cost()
        for choice in choices:
            settings |= choice.settings
            cost += choice.cost
        yield settings, cost


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 200), marks=pytest.mark.nightly)], ids=["three", "two hundred"]
)
def test_of_all_settings_the_cheapest_that_fit_are_found(tmp_path, seeds):
    for seed in seeds:
        rng = random.Random(seed)
        heads, width, layers = rng.choice([8, 16, 32]), rng.choice([1024, 2048, 4096]), rng.choice([8, 24, 36])
        shape = {"vocab": rng.choice([32000, 151936]), "hidden": width, "intermediate": rng.choice([2, 4]) * width}
        model = qwen3(
            layers=layers, heads=heads, kv_heads=rng.choice([2, 8]), head_dim=128, attention_bias=False, **shape
        )
        (tmp_path / f"{seed}").mkdir()
        (tmp_path / f"{seed}" / "config.json").write_text(json.dumps(model))
        gpus, prompts = rng.choice([1, 2, 4, 8]), rng.choice([64, 512])
        cfg = config.load(
            "configs/papers/qwen3_8b_base.yaml",
            [
                f"model.path={tmp_path}/{seed}", f"mesh.fsdp={gpus}", f"train.prompts_per_step={prompts}",
                f"quant.forward={rng.choice(['bf16', 'w8a8', 'fp8', 'w4a16'])}",
                f"rollout.max_response_len={rng.choice([1024, 8192, 16384])}", *AUTOS,
            ],
        )  # fmt: skip
        size = rng.randrange(16, 141) * GIB
        cfg = choose.with_engines(cfg)
        combinations = list(everything(cfg, size))
        drawn = [*rng.sample(combinations, 12), combinations[-1]]
        fitting = [cost for settings, cost in drawn if not plan.make(config.replaced(cfg, settings), size).missing]
        assert choose.fits(cfg, size) or not fitting, seed
        if not choose.fits(cfg, size):
            continue
        settled, made = choose.settle(cfg, size)
        assert plan.make(settled, size).missing == 0 == made.missing
        own = next(cost for settings, cost in combinations if config.replaced(cfg, settings) == settled)
        assert all(own <= cost for cost in fitting), seed


@pytest.mark.parametrize("name", ["qwen3_8b_base", "qwen3_30b_a3b_base"])
def test_the_papers_large_models_fit_eight_gpus_of_80_gb_with_an_engine_on_each(tmp_path, name):
    shapes = "Qwen3-30B-A3B-Base" if "30b" in name else "Qwen3-8B-Base"
    fixture = json.loads((pathlib.Path(__file__).parents[1] / f"fixtures/models/{shapes}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fixture["config"]))
    cfg = config.load(f"configs/papers/{name}.yaml", [f"model.path={tmp_path}", *AUTOS])
    settled, made = choose.settle(cfg, int(79.6 * GIB))
    assert (made.missing, made.engines, made.devices) == (0, 8, 8)
    assert settled.rollout.engine.visible_gpus == "0;1;2;3;4;5;6;7"
    # Rounding changes only where it must, or where it saves hours: four sequences at once, not two.
    assert settled.train.grad_dtype == ("bfloat16" if "30b" in name else "float32")
    assert any("sequences of full length at once" in line for line in made.lines())
