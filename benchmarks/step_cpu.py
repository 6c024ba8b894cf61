# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds per phase of a quickstart step, for several schemes, on this machine's CPU.

    python benchmarks/step_cpu.py [--schemes w4a16 w8a8 bf16] [--steps 8] [section.field=value ...]

Runs configs/quickstart.yaml for a few steps per scheme, leaves the first two out (compilation) and prints the median of
each phase. Writes benchmarks/results/step_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
PHASES = ("step_s", "rollout_s", "reward_s", "pack_s", "old_logprobs_s", "update_s", "publish_s")


def measure(config: str, scheme: str, steps: int, overrides: list[str]) -> dict[str, float]:
    """Median seconds per phase, and tokens per second, of one scheme."""
    folder = tempfile.mkdtemp(prefix="qarl-step-")
    try:
        command = [sys.executable, "-m", "qarl_jax.train", "--config", config, f"run_dir={folder}/run"]
        options = [f"quant.forward={scheme}", f"train.steps={steps}", "eval.at_start=false", "eval.at_end=false"]
        subprocess.run([*command, *options, "log.view=off", *overrides], cwd=ROOT, check=True)
        lines = pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    records = [json.loads(line) for line in lines][2:]
    keys = [*PHASES, "rollout_tok_per_s", "tok_per_s"]
    return {key: float(np.median([r.get(f"time/{key}", 0.0) for r in records])) for key in keys}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "w8a8", "bf16"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "step_cpu.json"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    table = {scheme: measure(args.config, scheme, args.steps, args.overrides) for scheme in args.schemes}
    print(f"{'':18s}" + "".join(f"{scheme:>12s}" for scheme in table))
    for key in next(iter(table.values())):
        print(f"{key:18s}" + "".join(f"{row[key]:12.3f}" for row in table.values()))
    result = {
        "command": "python benchmarks/step_cpu.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "median": table,
    }
    pathlib.Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
