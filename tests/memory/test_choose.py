# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings that a refused run is offered: they fit, and no others that fit are cheaper."""

import itertools

import pytest

from qarl_jax import train
from qarl_jax.memory import choose, costs, learner
from qarl_jax.models import published
from qarl_jax.run import config


def dry_run(name, arm, gpus, gb, *more):
    rows = f"train.micro_batch_rows={gpus}"
    size = ("--dry-run", "--gpus", str(gpus), "--gpu-gb", str(gb))
    return train.main(["--config", f"configs/{name}.yaml", f"arm={arm}", *size, rows, *more])


ROUNDED = ("papers/qurl_dapo_7b", "bf16", 6, 79.1)  # fits six with bfloat16 masters
FASTER = ("gpu/recipes", "1x48", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "advised"),
    [
        (ROUNDED, "mesh.fsdp=4 train.micro_batch_rows=4"),
        ((*FASTER, 28, "model.remat=none"), "mesh.fsdp=2 train.micro_batch_rows=2 model.remat=mixer"),
        ((*FASTER, 34, "model.remat=none"), "model.remat=mixer"),
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
    """Eight rows on three GPUs are refused; nine are what the message names, and one a GPU is what fits."""
    monkeypatch.setattr(choose, "_on_fewer", lambda *_: None)
    run = ("gpu/recipes", "1x24", 3, 30, "model.remat=none", "train.micro_batch_rows=9")
    assert dry_run(*run) == 2
    assert capsys.readouterr().err.strip().endswith("It fits with: train.micro_batch_rows=3")


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
