# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Every objective trains the quickstart's policy for a few steps, each under the settings it is usually run with.

    python benchmarks/objectives.py [--steps 20] [--only tbpo grpo ...] [section.field=value ...]

Where configs/papers/quickstart.yaml has an arm of that objective, it is that run; the others are the quickstart with
the objective's defaults. A run has diverged if it stopped, if a number of it is not finite, or if reward/mean over its
last five steps lies more than 0.05 below that over its first five. Writes benchmarks/results/objectives_cpu.json; exit
code 1 if any diverged.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys

import numpy as np

from qarl_jax.loss import LOSSES
from qarl_jax.run.config import RunConfig
from qarl_jax.typed_config.load import arms_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNS = ROOT / "configs" / "papers" / "quickstart.yaml"
# What an objective comes with, where no run of the papers says it.
EXTRA = {
    "drgrpo": ["loss={name: drgrpo, mismatch: tis}", "advantage.name=drgrpo"],
    "dapo": ["loss={name: dapo, mismatch: tis}"],
    "cispo": ["loss={name: cispo}"],
}
SLACK = 0.05


def run(name: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """One run in a process of its own; its rewards, and whether it diverged."""
    folder = ROOT / "runs" / "objectives" / name
    arm = [f"arm={name}"] if name in arms_of(RunConfig, RUNS) else []
    settings = [f"run_dir={folder}", f"train.steps={steps}", "log.view=off", "eval.at_start=false", "eval.at_end=false"]
    command = [
        sys.executable,
        "-m",
        "qarl_jax.train",
        "--config",
        str(RUNS),
        *arm,
        *EXTRA.get(name, ()),
        *settings,
        *overrides,
    ]
    code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines]
    first, last = float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))
    finite = all(math.isfinite(v) for line in lines for v in line.values() if isinstance(v, float))
    return {
        "steps": len(lines),
        "reward_first5": first,
        "reward_last5": last,
        "entropy_last": lines[-1]["entropy/mean"],
        "grad_norm_max": max(line.get("optim/grad_norm", 0.0) for line in lines),
        "mismatch_k3_max": max(line.get("mismatch/k3", 0.0) for line in lines),
        "diverged": bool(code) or len(lines) < steps or not finite or last < first - SLACK,
    }


def main() -> int:
    names = [loss.name for loss in LOSSES]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "objectives_cpu.json")
    parser.add_argument("overrides", nargs="*", help="section.field=value, for every run")
    args = parser.parse_args()
    results = {}
    for name in args.only:
        results[name] = result = run(name, args.steps, args.overrides)
        print(f"{name:8s}", "  ".join(f"{key} {value:.4g}" for key, value in result.items()), flush=True)
        record = {"command": " ".join(["python", *sys.argv]), "steps": args.steps, "results": results}
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(result["diverged"] for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
