# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Nested-precision RL: one policy sampled at two bits, trained and evaluated at several widths of its 8-bit grid."""

import json
import re

import pytest

from qarl_jax import train
from qarl_jax.memory import learner as memory
from qarl_jax.run import build, evaluation
from qarl_jax.types import UserError
from tests.reference import tiny

LOW = {"forward": "w2a16_midpoint:g32"}


def test_the_kl_term_has_its_whole_coefficient_and_the_plan_counts_another_widths_codes(tmp_path):
    one, three = (
        tiny.World(tmp_path)
        .changed(
            quant={"forward": "w2a16_midpoint:g32"}, train={"widths": widths}, kl={"coef": 0.25, "reference": "start"}
        )
        .config
        for widths in ([], [8, 4, 2])
    )
    learner = build.make_learner(three, build.policy_graphdef(three), build.make_mesh(three))
    assert learner.options.share * learner.options.kl_coef == pytest.approx(0.25)
    assert [other.options.kl_coef for other in learner.beside.values()] == [0, 0]
    alone, beside = (memory.parts(cfg) for cfg in (one, three))
    assert beside["QTensors of another width"] > 1.5 * alone["QTensors"]
    assert "QTensors of another width" not in alone


@pytest.mark.slow
def test_a_run_trains_and_evaluates_several_widths_and_samples_at_its_own(tmp_path, capsys):
    world = tiny.World(tmp_path).changed(
        quant=LOW, train={"widths": [8, 2]}, eval={"widths": [8, 4], "every": 1, "at_start": True}
    )
    assert train.main(world.command()) == 0
    first, second = world.records()
    for line in (first, second):
        assert line["mismatch/k3"] < 1e-9  # the sampler is back at two bits after each evaluation
        assert line["w8/mismatch/k3"] > 1e-6  # which the slice of eight bits did not sample
        assert line["w8/loss/total"] != line["loss/total"]
        assert {f"{name}/reward/mean" for name in ("eval", "eval_w8", "eval_w4")} <= line.keys()
    starts, *later = world.records("eval")
    assert "eval_w8/reward/mean" in starts
    assert len(later) == 2
    own = {key: value for key, value in later[-1].items() if key.startswith("eval")}

    def said(*arguments):
        capsys.readouterr()
        assert evaluation.main(["--checkpoint", str(world.run_dir), *arguments]) == 0
        return capsys.readouterr().out

    twice = said("--json", "--view", "plain,plain")  # after the slices the run's own width is served again
    assert [json.loads(line) for line in twice.splitlines()] == [own, own]
    assert re.findall(r"at (\d) bits\n +mean.*\nreward +([\d.]+)", said()) == [
        (bits, f"{own[f'eval_w{bits}/reward/mean']:.4f}") for bits in "84"
    ]
    eight = json.loads(said("--json", "--scheme", "w8a16_asym:g32"))
    assert eight == {key.replace("_w8", ""): value for key, value in own.items() if key.startswith("eval_w8/")}


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["w2a16_midpoint:g32", "w8a16_asym:g32"])
def test_widths_beside_an_embedding_and_a_head_in_four_bits(forward, tmp_path):
    world = tiny.World(tmp_path).changed(
        quant={"forward": forward, "rules": [{"match": "embed|head", "scheme": "w4a16:g32"}]},
        train={"widths": [8, 2], "steps": 1},
        eval={"widths": [8, 2], "at_start": True, "at_end": False},
    )
    assert train.main(world.command()) == 0
    assert world.records()[0]["mismatch/k3"] < 1e-9
    assert {"eval/reward/mean", f"eval_w{10 - int(forward[1])}/reward/mean"} <= world.records("eval")[0].keys()


@pytest.mark.parametrize("engine", ["jax", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.nightly
def test_an_engine_that_serves_eight_bits_is_switched_to_what_an_engine_of_two_bits_serves(engine, tmp_path):
    """Sampled, so that another policy has other responses."""
    found = []
    for scheme, widths in (("w8a16_asym:g32", [8, 2]), ("w2a16_midpoint:g32", [])):
        sampler = {"max_model_len": 64, "kv_cache_gb": 0.1, "threads": 1} if engine == "vllm" else {}
        world = tiny.World(tmp_path / str(len(found)), hidden=128).changed(
            model={"dtype": "bfloat16"},
            quant={"forward": scheme, "engine": "cpu"},
            rollout={"engine": {"name": engine} | sampler},
            train={"steps": 1},
            eval={"widths": widths, "at_start": True, "at_end": False, "temperature": 1.0, "num_samples": 8},
        )
        assert train.main(world.command()) == 0
        found.append(world.records("eval")[0])
    eight, two = found
    own = {key: value for key, value in two.items() if key.startswith("eval/")}
    assert own == {key: eight[key.replace("eval/", "eval_w2/")] for key in own}
    assert own != {key: eight[key] for key in own}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant": {"forward": "w4a16:g32"}, "train": {"widths": [8, 4]}}, "w4a16:g32 has one width: train under"),
        (
            {"quant": LOW | {"rules": [{"match": "down", "scheme": "w4a16:g32"}]}, "eval": {"widths": [8]}},
            r"eval.widths=\[8\], quant.rules\[0\]: w4a16:g32 has one width",
        ),
        ({"quant": {"forward": "bf16"}, "eval": {"widths": [8]}}, "are of a low-bit policy: set quant.forward="),
        (
            {"quant": LOW, "train": {"widths": [8, 3]}},
            r"train.widths=\[8, 3\], quant.forward: .* has no slice of 3 bits: choose 8, 4, 2",
        ),
        ({"quant": LOW, "train": {"widths": [8, 4]}}, r"leaves out that of quant.forward=w2a16_midpoint:g32: add it"),
        ({"quant": LOW, "train": {"widths": [2, 2]}}, "named twice"),
        ({"quant": LOW | {"rollout": "w4a16_midpoint:g32"}, "eval": {"widths": [8]}}, "neither lora nor another"),
        (
            {"quant": LOW, "eval": {"widths": [8]}, "rollout": {"engine": {"name": "vllm"}}},
            "set quant.forward=w8a16_asym without quant.rules, sample with rollout.engine",
        ),
    ],
)
def test_widths_that_a_run_cannot_have_are_refused_in_one_sentence(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        _ = tiny.World(tmp_path).changed(**changes).config
