# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of PLAN_lora.md: runs with adapters, one a row, and beside the full-parameter runs of their seeds.

    python -m experiments.qwen25_coder.report_lora experiments/qwen25_coder/results_lora.tar.xz
    python -m experiments.qwen25_coder.report_lora WORK/results.tar.xz...

The archives are those of stretch.sh, or one that `report_1p5b --merge` made of them (results_lora.tar.xz). Runs are
judged as those of PLAN_1p5b.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np
import yaml

from experiments.qwen25_coder import report
from experiments.qwen25_coder.report import BF16, QARL, ROLLOUT, Run
from experiments.qwen25_coder.report_1p5b import QUESTIONS, differences, right, sets

FULL = pathlib.Path(__file__).with_name("results_1p5b_plan.tar.xz")
VERSION = 20
"""The version that adapters and all parameters are compared at."""
ALL = ", all parameters"
COMPARED = (
    (QARL, ROLLOUT),
    (QARL, QARL + ALL),
    (ROLLOUT, ROLLOUT + ALL),
    (BF16, QARL),
    (BF16, ROLLOUT),
    ("qarl_w8a8", QARL),
)
LATE = slice(15, 20)
"""The steps whose samples' reward is compared, of runs that have no evaluation too."""


def adapters(runs: dict[str, Run]) -> dict[str, Run]:
    """Selects the untrained models and the runs with adapters, named without the `lora_` of stretch.sh."""
    found = {}
    for name, run in runs.items():
        config = yaml.safe_load(run.files.get("config.yaml", b"")) or {}
        if name.startswith(report.UNTRAINED) or config.get("lora"):
            arm = name.removeprefix("lora_")
            found[arm] = dataclasses.replace(run, name=arm)
    return found


def percent(x: np.ndarray | None) -> str:
    return "-" if x is None else f"{100 * x.mean():.1f}"


def before(run: Run, runs: dict[str, Run], asked: Sequence[Sequence[str]]) -> np.ndarray | None:
    """Returns the share of right responses of the untrained model under a run's sampler; None: it was not judged."""
    quant = yaml.safe_load(run.files["config.yaml"])["quant"]
    untrained = runs.get(f"{report.UNTRAINED}{quant['rollout'] or quant['forward']}")
    answers = [] if untrained is None else untrained.lines("suite.jsonl")  # `evaluate` on the config's data alone
    found = {one["uid"]: one["num_correct"] / len(one["responses"]) for one in answers}
    return np.array([np.mean([found[uid] for uid in uids]) for uids in asked]) if found else None


def each(runs: dict[str, Run], tests: dict[str, list[list[str]]]) -> str:
    """Makes the table of runs; after: the last version that was evaluated."""
    rows = []
    for arm, seeds in report.arms(runs).items():
        for seed, run in seeds.items():
            steps, evaluated = run.steps, run.lines("eval_correct.jsonl")
            version = evaluated[-1]["version"] if evaluated else 0
            cells = [f"`{arm}`", str(seed), str(len(steps)), str(version) if version else "-"]
            for asked in tests.values():
                cells += [percent(before(run, runs, asked)), percent(right(run, version, asked))]
            for key, digits in (("reward/mean", ".3f"), ("mismatch/k3", ".3g")):
                ends = run.ends(key)
                cells.append("-" if ends is None else f"{ends[0]:{digits}}, {ends[1]:{digits}}")
            seconds = [step["time/step_s"] - step.get("time/eval_s", 0) for step in steps[1:]]
            cells.append(f"{np.median(seconds):.1f}" if seconds else "-")
            rows.append(cells)
    judged = (f"{test}, {when}" for test in tests for when in ("before", "after"))
    return report.table(["arm", "seed", "steps", "version", *judged, "reward", "k3", "step, s"], rows)


def rewards(found: dict[str, dict[int, Run]]) -> str:
    """Makes the table of the same comparisons in the reward of the samples of steps LATE."""
    rows = []
    for names in COMPARED:
        left, other = (
            {seed: run for seed, run in found.get(name, {}).items() if len(run.steps) >= LATE.stop} for name in names
        )
        gained = {
            seed: np.mean(
                [
                    a["reward/mean"] - b["reward/mean"]
                    for a, b in zip(left[seed].steps[LATE], other[seed].steps[LATE], strict=True)
                ]
            )
            for seed in sorted(left.keys() & other.keys())
        }
        if gained:
            by_seed = report.listed(f"{100 * points:+.1f}" for points in gained.values())
            rows.append([f"{names[0]} less {names[1]}", report.listed(gained), by_seed])
    return report.table(["difference", "seeds", "points, by seed"], rows)


def page(runs: dict[str, Run], full: dict[str, Run]) -> str:
    """Returns the text of all tables."""
    tests = sets(full[QUESTIONS])
    found = report.arms(runs) | {f"{arm}{ALL}": seeds for arm, seeds in report.arms(full).items()}
    compared = {names: " less ".join(names) for names in COMPARED}
    parts = ["## Runs", each(runs, tests)]
    for test, asked in tests.items():
        parts += [f"## {test}, version {VERSION}", differences(found, VERSION, asked, compared)]
    parts += [f"## Reward of the samples, steps {LATE.start} to {LATE.stop - 1}", rewards(found)]
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="archives of the runs with adapters")
    parser.add_argument("--full", type=pathlib.Path, default=FULL, help="archive of the full-parameter runs")
    args = parser.parse_args(argv)
    print(page(adapters(report.read(args.files)), report.read([args.full])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
