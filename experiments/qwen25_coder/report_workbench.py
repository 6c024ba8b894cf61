# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes the table of PLAN_WORKBENCH.md: each objective beside its neighbour, and what its bands or masks drop.

    python -m experiments.qwen25_coder.report_workbench WORK/questions.jsonl WORK/results.tar.xz...

The archives are those of stretch.sh. Runs are judged at the version that PLAN_1p5b.md judges, by the same questions.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.qwen25_coder import report, stats
from experiments.qwen25_coder.report import QARL, ROLLOUT, Run
from experiments.qwen25_coder.report_1p5b import ALIGNED, HELD_OUT, QUESTIONS, VERSIONS, pair, scores, sets

NEIGHBOURS = {
    "bands_spread": QARL,
    "bands_length": QARL,
    "dppo_tv": ALIGNED,
    "dppo_kl": ALIGNED,
    "ais": ROLLOUT,
    "self_distillation": QARL,
    "distillation": QARL,
}
TRAINING = {
    "reward": "reward/mean",
    "k3": "mismatch/k3",
    "responses dropped later": "later/clip/seq_dropped",
    "tokens of these": "later/clip/tok_dropped",
    "tokens masked": "clip/frac",
    "band": "loss/band_width",
    "gradient norm": "optim/grad_norm",
}


def page(runs: dict[str, Run], tests: dict[str, list[list[str]]]) -> str:
    """Returns both tables: accuracies with differences, then first and last steps."""
    found, judged, trained = report.arms(runs), [], []
    for arm in (*dict.fromkeys(NEIGHBOURS.values()), *NEIGHBOURS):
        if arm not in found:
            continue
        cells = [f"`{arm}`", report.listed(found[arm])]
        for test, asked in tests.items():
            own = list(scores(found[arm], VERSIONS[0], asked).values())
            cells.append(report.plus_minus(stats.estimate(np.array(own))) if own else "-")
            if test == HELD_OUT:
                _, x = pair(found, (arm, NEIGHBOURS.get(arm, "")), VERSIONS[0], asked)
                cells.append("" if x is None else f"{report.plus_minus(stats.estimate(x))} (`{NEIGHBOURS[arm]}`)")
        judged.append(cells)
        ends = [report.ends_of(found[arm], key) for key in TRAINING.values()]
        trained.append([f"`{arm}`", *("-" if x is None else f"{x[0]:.3g}, {x[1]:.3g}" for x in ends)])
    columns = ["arm", "seeds", HELD_OUT, "less its neighbour", *(test for test in tests if test != HELD_OUT)]
    return "\n\n".join([report.table(columns, judged), report.table(["arm", *TRAINING], trained)])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("questions", type=pathlib.Path, help="the file that the runs were judged by")
    parser.add_argument("files", nargs="+", type=pathlib.Path, help="archives of the runs")
    args = parser.parse_args(argv)
    asked = Run(QUESTIONS, {f"{QUESTIONS}.jsonl": args.questions.read_bytes()})
    print(page(report.read(args.files), sets(asked)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
