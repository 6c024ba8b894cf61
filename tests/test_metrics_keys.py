# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What every step of every run reports, by objective, and the resolved config beside it."""

import math

import pytest

from qarl_jax import train
from qarl_jax.observe import recorder
from qarl_jax.run import config
from tests.reference import tiny

# What is promised -> the keys that keep the promise.
PROMISED = {
    "reward": ("reward/mean", "reward/std"),
    "response length": ("response/length_mean", "response/length_max"),
    "truncation rate": ("response/truncated",),
    "mismatch of sampler and learner": tuple(f"mismatch/{name}" for name in ("k1", "k3", "max_abs", "mean_abs")),
    "noise at the first inner update": ("proximal/noise", "proximal/exact"),
    "how much of the mismatch was measured": ("mismatch/checked",),
    "dropped sequences": ("mismatch/seq_rejected",),
    "gradient": ("optim/grad_norm", "optim/lr", "optim/skipped"),
    "entropy": ("entropy/mean",),
    "codes changed since the last publish": ("quant/code_flips",),
    "policy version": ("rollout/version",),
    "seconds per phase": tuple(
        f"time/{phase}_s" for phase in ("rollout", "reward", "pack", "old_logprobs", "update", "publish", "step")
    ),
    "tokens per second": ("time/tok_per_s", "time/rollout_tok_per_s"),
    "the learner's speed": ("train/flops", "perf/model_tflops", "perf/recompiles", "train/padding_share"),
}
BY_LOSS = {
    "tbpo": ("clip/seq_dropped", "clip/seq_pos_high", "clip/seq_neg_low", "clip/seq_neg_high"),
    "grpo": ("clip/frac", "clip/pos_high", "clip/neg_low"),
}
RATIOS = tuple(
    f"quantile/{ratio}_{sign}/{level}"
    for ratio in ("ratio", "seq_ratio")
    for sign in ("pos", "neg")
    for level in ("p01", "p50", "p99")
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny.World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def tbpo(world):
    """Two steps of two updates each."""
    assert train.main(world.command()) == 0
    return world


def check(lines, loss):
    assert [line["step"] for line in lines] == [0, 1]
    wanted = {key for keys in PROMISED.values() for key in keys} | {*BY_LOSS[loss], *RATIOS}
    wanted |= {f"later/{key}" for key in BY_LOSS[loss]}  # the updates after the first, where the bands act
    for line in lines:
        assert wanted <= line.keys(), wanted - line.keys()
        assert all(math.isfinite(line[key]) for key in wanted)
        for ratio in ("ratio_pos", "ratio_neg", "seq_ratio_pos", "seq_ratio_neg"):
            low, middle, high = (line[f"quantile/{ratio}/{level}"] for level in ("p01", "p50", "p99"))
            assert low <= middle <= high
            assert low < high  # the second update's ratios, which have moved


@pytest.mark.slow
def test_every_step_reports_what_is_promised(tbpo):
    check(recorder.read_lines(tbpo.run_dir / "metrics.jsonl"), "tbpo")


@pytest.mark.slow
def test_a_token_level_objective_reports_it_too(world):
    changed = world.changed(run_dir=str(world.folder / "grpo"), loss={"name": "grpo", "mismatch": "tis"})
    assert train.main(changed.command()) == 0
    check(recorder.read_lines(changed.run_dir / "metrics.jsonl"), "grpo")


@pytest.mark.slow
def test_rollouts_of_other_lengths_compile_nothing_after_the_first_step(tbpo):
    lines = recorder.read_lines(tbpo.run_dir / "metrics.jsonl")
    assert lines[0]["response/tokens"] != lines[1]["response/tokens"]
    assert [line["perf/recompiles"] for line in lines] == [0, 0]
    assert "perf/mfu" not in lines[0]  # no peak is known of a CPU


@pytest.mark.slow
def test_the_resolved_config_lies_beside_the_metrics_and_starts_the_same_run(tbpo):
    assert config.load(tbpo.run_dir / "config.yaml") == tbpo.config


@pytest.mark.slow
def test_a_start_prints_every_derived_number(tbpo, capsys, monkeypatch):
    capsys.readouterr()
    monkeypatch.setattr(train, "run", lambda cfg, prompts: None)
    assert train.main(tbpo.command(f"run_dir={tbpo.folder}/fresh")) == 0
    said = capsys.readouterr().out
    for part in (
        "4 prompts x 4 samples = 16 responses",
        "2 prompts x 4 samples = 8 responses; 2 updates per step",
        "4 rows of 24 tokens, several responses each; 1 to 2 per update",
        "2 steps = 4 updates = 32 responses",
        "one device",
        "4 prompts x 1 samples, before, after",
        "every 1 steps, 2 kept",
    ):
        assert part in said, part


def test_a_dry_run_prints_the_resolved_config_and_the_plan_and_leaves_nothing(world, capsys):
    fresh = world.changed(run_dir=str(world.folder / "dry"))
    capsys.readouterr()
    assert train.main(fresh.command("--dry-run", "train.steps=7")) == 0
    said = capsys.readouterr().out
    resolved = said[: said.index("scheme  ")]
    path = world.folder / "resolved.yaml"
    path.write_text(resolved)
    assert config.load(path) == fresh.changed(train={"steps": 7}).config
    assert "7 steps = 14 updates" in said
    assert "GiB" in said
    assert "2 x model.layers.{0..1}.mlp.up_proj.weight" in said
    assert not fresh.run_dir.exists()
