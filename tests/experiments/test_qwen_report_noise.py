# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of PLAN_noise.md: arms are paired by seed, the plan decides, and the page shows the archive's tables."""

import pathlib

import pytest

from experiments.qwen25_coder import report
from experiments.qwen25_coder import report_noise as plan
from tests.experiments.test_qwen_report_1p5b import lines

ROOT = pathlib.Path(__file__).parents[2]


def run(name, reward, right=(8, 0, 4, 0)):
    """A run whose reward is 9 in the stage without noise; the last evaluation has so many right samples of 8."""
    steps = [{"step": i, plan.REWARD: 9 if i < 4 else reward, plan.ENTROPY: 0.25} for i in range(40)]
    counts = [
        {"version": version, "num_correct": dict(enumerate(x))} for version, x in ((0, (1, 0, 0, 0)), (40, right))
    ]
    return report.Run(name, {"metrics.jsonl": lines(steps), "eval_correct.jsonl": lines(counts)})


def found(gains):
    runs = [run(f"{plan.NVFP4}_seed{seed}", 0.25) for seed, _ in enumerate(gains, 1)]
    runs += [run(f"{plan.AQN}_seed{seed}", 0.25 + gain, (8, 1, 4, 0)) for seed, gain in enumerate(gains, 1)]
    return report.arms({one.name: one for one in runs})


@pytest.mark.parametrize(
    ("gains", "words"),
    [((0.10, 0.11, 0.12), "**support**"), ((-0.1, -0.11, -0.12), "**dispute**"), ((0.1, -0.1, 0.05), "**not clear**")],
)
def test_the_plans_rule_decides(gains, words):
    said = plan.verdict(found(gains))
    assert words in said
    assert f"less `nvfp4`: {100 * sum(gains) / 3:.1f} ± " in said


def test_one_pair_of_seeds_decides_nothing():
    assert plan.verdict(found((0.1,))) == "The headline is not measured yet."
    assert plan.differences(found((0.1,))) == "Not run yet."


def test_arms_are_judged_by_steps_with_noise_and_by_both_evaluations():
    rows = plan.arms(found((0.1, 0.1))).splitlines()
    assert rows[2] == "| `nvfp4_aqn` | 1, 2 | 0.350 | 0.250 | 3.1, 40.6 | 25.0, 75.0 |"
    assert rows[3] == "| `nvfp4` | 1, 2 | 0.250 | 0.250 | 3.1, 37.5 | 25.0, 50.0 |"
    (difference,) = plan.differences(found((0.1, 0.1))).splitlines()[2:]
    assert difference.startswith(
        "| `nvfp4_aqn` less `nvfp4` | 1, 2 | 10.0 ± 0.0 | +10.0, +10.0 | 0.000 ± 0.000 | 3.1 ± "
    )


@pytest.mark.parametrize("file", ["metrics.jsonl", "eval_correct.jsonl"])
def test_a_run_that_was_cut_off_is_left_out_by_name(file):
    whole = [run(f"{arm}_seed{seed}", 0.25) for arm in (plan.AQN, plan.NVFP4) for seed in (1, 2)]
    torn = run(f"{plan.AQN}_seed3", 0.5)
    torn.files[file] = torn.files[file][:-9]
    runs = {one.name: one for one in [*whole, run(f"{plan.NVFP4}_seed3", 0.25)]}
    assert plan.page(runs | {torn.name: torn}) == (
        f"{plan.page(runs)}\n\nLeft out, because steps or evaluations are missing: {plan.AQN}_seed3."
    )


def test_the_page_shows_the_archives_tables(capsys):
    assert plan.main([str(ROOT / "experiments/qwen25_coder/results_noise.tar.xz")]) == 0
    page = (ROOT / "docs/appendix/qwen25_coder_lora.md").read_text()
    for part in capsys.readouterr().out.strip().split("\n\n")[1:]:
        assert part in page
