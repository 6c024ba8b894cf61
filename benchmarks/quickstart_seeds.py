# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Does the quickstart learn, and does its control not? Three seeds, and one run with shuffled advantages.

    python benchmarks/quickstart_seeds.py [--config configs/quickstart.yaml] [--seeds 0 1 2] [section.field=value ...]

The gain of a run is reward/mean over its last five steps minus that over its first five (training prompts, temperature
1), beside the held-out greedy reward before and after. The interval over seeds is Student's t at 95 %. The control
permutes the advantages of each step over its responses, so that nothing but chance tells good from bad: its gain should
be about zero or below. Writes benchmarks/results/quickstart_seeds.json.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
from scipy import stats

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(config: str, name: str, overrides: list[str]) -> dict[str, float]:
    """One training run in a process of its own; its gains."""
    folder = ROOT / "runs" / "quickstart_seeds" / name
    command = [sys.executable, "-m", "qarl_jax.train", "--config", config, f"run_dir={folder}", *overrides]
    subprocess.run([*command, "log.view=off"], cwd=ROOT, check=True)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps]
    later = [step["later/clip/seq_dropped"] for step in steps if "later/clip/seq_dropped" in step]
    first, last = float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))
    return {
        "reward_first5": first,
        "reward_last5": last,
        "gain": last - first,
        "heldout_before": held_out[0]["eval/reward/mean"],
        "heldout_after": held_out[-1]["eval/reward/mean"],
        "heldout_gain": held_out[-1]["eval/reward/mean"] - held_out[0]["eval/reward/mean"],
        "dropped_after_first_update": float(np.mean(later)) if later else math.nan,
        "mismatch_k3_max": max(step["mismatch/k3"] for step in steps),
        "proximal_noise_max": max(step["proximal/noise"] for step in steps),
        "code_flips_mean": float(np.mean([step["quant/code_flips"] for step in steps if "quant/code_flips" in step])),
        "seconds": float(np.sum([step["time/step_s"] for step in steps])),
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % t interval."""
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    return float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "quickstart_seeds.json"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    runs = {f"seed{seed}": run(args.config, f"seed{seed}", [f"seed={seed}", *args.overrides]) for seed in args.seeds}
    control = run(args.config, "shuffled", [f"seed={args.seeds[0]}", "train.shuffle_advantages=true", *args.overrides])
    for name, result in (runs | {"shuffled": control}).items():
        print(f"{name:10s}", "  ".join(f"{key} {value:.4g}" for key, value in result.items()))
    gain, half = interval([result["gain"] for result in runs.values()])
    held, held_half = interval([result["heldout_gain"] for result in runs.values()])
    print(f"gain {gain:.3f} +- {half:.3f} (95 %, {len(runs)} seeds); held-out {held:.3f} +- {held_half:.3f}")
    print(f"control (shuffled advantages): gain {control['gain']:.3f}, held-out {control['heldout_gain']:.3f}")
    result = {
        "command": "python benchmarks/quickstart_seeds.py " + " ".join(sys.argv[1:]),
        "runs": runs,
        "shuffled": control,
        "gain_mean": gain,
        "gain_half_width_95": half,
        "heldout_gain_mean": held,
        "heldout_gain_half_width_95": held_half,
    }
    pathlib.Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
