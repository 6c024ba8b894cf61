# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of PLAN_noise.md: its arms, and their differences paired by seed, judged by its rule.

    python -m experiments.qwen25_coder.report_noise experiments/qwen25_coder/results_noise.tar.xz

The archives are those of stretch.sh, or one that `report --merge` made of them.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.qwen25_coder import report, stats
from experiments.qwen25_coder.report import Run

AQN, NVFP4, INT4, BF16 = "nvfp4_aqn", "nvfp4", "w4a16", "bf16"
ARMS = (AQN, NVFP4, INT4, BF16)
COMPARED = ((AQN, NVFP4), (NVFP4, BF16), (NVFP4, INT4))
STEPS = slice(4, 40)
"""The steps over which reward and entropy are averaged: those after the schedule's stage without noise."""
EVALUATED = (0, 40)
"""The versions whose evaluations are judged."""
REWARD, ENTROPY = "reward/mean", "entropy/mean"
PASSES, SAMPLES = ("pass@1", "pass@8"), 8


def mean_of(run: Run, key: str) -> float:
    """Averages a metric over STEPS."""
    return float(np.mean([step[key] for step in run.steps[STEPS]]))


def is_complete(run: Run) -> bool:
    """Tells whether a run has all steps and both evaluations; one that was cut off would be averaged over fewer."""
    versions = {one["version"] for one in run.lines("eval_correct.jsonl")}
    return {step["step"] for step in run.steps} >= {*range(STEPS.stop)} and versions >= {*EVALUATED}


def passed(run: Run, k: str, *, number: int = -1) -> np.ndarray:
    """Returns each question's share of right samples (pass@1) or whether one is right (pass@8): [P], float."""
    right = np.array(list(run.lines("eval_correct.jsonl")[number]["num_correct"].values()))
    return right / SAMPLES if k == "pass@1" else (right > 0).astype(float)


def gained(found: dict[str, dict[int, Run]], left: str, right: str, key: str) -> dict[int, float]:
    """Returns seed -> the first arm's mean of a metric less the second's, for the seeds that both ran with."""
    seeds = sorted(found.get(left, {}).keys() & found.get(right, {}).keys())
    return {seed: mean_of(found[left][seed], key) - mean_of(found[right][seed], key) for seed in seeds}


def over(means: dict[int, float]) -> stats.Estimate:
    """Estimates by Student's t over the seeds alone."""
    return stats.of_means(np.array(list(means.values())), np.zeros(len(means)))


def arms(found: dict[str, dict[int, Run]]) -> str:
    """Makes the table of arms: means over the seeds that ran."""
    rows = []
    for arm in (arm for arm in ARMS if arm in found):
        runs = found[arm].values()
        cells = [f"`{arm}`", report.listed(found[arm])]
        cells += [f"{np.mean([mean_of(run, key) for run in runs]):.3f}" for key in (REWARD, ENTROPY)]
        for k in PASSES:
            ends = (100 * np.mean([passed(run, k, number=number) for run in runs]) for number in (0, -1))
            cells.append(report.listed(f"{x:.1f}" for x in ends))
        rows.append(cells)
    return report.table(["arm", "seeds", "reward", "entropy", *(f"{k}: before, after" for k in PASSES)], rows)


def differences(found: dict[str, dict[int, Run]]) -> str:
    """Makes the table of the plan's differences, each with its 95 % interval."""
    rows = []
    for names in COMPARED:
        reward, entropy = (gained(found, *names, key) for key in (REWARD, ENTROPY))
        if len(reward) < 2:
            continue
        size = over(entropy)
        cells = [f"`{names[0]}` less `{names[1]}`", report.listed(reward), report.plus_minus(over(reward))]
        cells += [report.listed(f"{100 * x:+.1f}" for x in reward.values()), f"{size.mean:.3f} ± {size.half:.3f}"]
        gains = {k: [passed(found[names[0]][s], k) - passed(found[names[1]][s], k) for s in reward] for k in PASSES}
        one, eight = (np.array(gains[k]) for k in PASSES)
        rows.append([*cells, *(report.plus_minus(stats.estimate(x)) for x in (one, eight, eight - one))])
    return report.table(["difference", "seeds", "reward", "by seed", "entropy", *PASSES, "pass@8 less pass@1"], rows)


def verdict(found: dict[str, dict[int, Run]]) -> str:
    """States the plan's headline by the plan's rule."""
    means = gained(found, *COMPARED[0], REWARD)
    if len(means) < 2:
        return "The headline is not measured yet."
    size = over(means)
    words = f"The runs **{'support' if size.mean > 0 else 'dispute'}** that noise makes the reward grow faster."
    if abs(size.mean) <= size.half:
        words = "Whether noise makes the reward grow faster is **not clear**: the interval holds 0."
    return f"`{AQN}` less `{NVFP4}`: {report.plus_minus(size)} points of reward, {len(means)} pairs of seeds. {words}"


def page(runs: dict[str, Run]) -> str:
    """Returns the text of all tables."""
    found = report.arms({name: run for name, run in runs.items() if is_complete(run)})
    parts = [verdict(found), arms(found), differences(found)]
    if short := [name for name, run in runs.items() if report.NAME.fullmatch(name) and not is_complete(run)]:
        parts.append(f"Left out, because steps or evaluations are missing: {report.listed(short)}.")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="archives of the runs")
    print(page(report.read(parser.parse_args(argv).files)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
