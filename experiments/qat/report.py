# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m experiments.qat.report [FILE]`: accuracies of PLAN.md's runs, and QaRL less quantized rollout.

FILE (results/rl_h200.jsonl) has a line per run; `held_out` is a digit per question, 1 where the answer was right.
Intervals are of 95 %, by `stats.estimate`. With one seed they are over questions alone.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.qwen25_coder import stats

FILE = pathlib.Path(__file__).parent / "results/rl_h200.jsonl"
Arm = dict[int | None, list[int]]


def arms(file: pathlib.Path) -> dict[tuple[str, str], dict[str, Arm]]:
    """Reads the answers to held-out questions: (beginning, scheme) -> arm -> seed -> a number per question."""
    found: dict[tuple[str, str], dict[str, Arm]] = {}
    asked: dict[tuple[str, str], int] = {}
    for number, run in _lines(file):
        if "start" in run and "held_out" in run:
            key, digits = (run["start"], run["scheme"]), run["held_out"]
            seeds = found.setdefault(key, {}).setdefault(run["arm"], {})
            if run["seed"] in seeds:
                of = f"{run['arm']} from {run['start']} under {run['scheme']}, seed {run['seed']}"
                raise SystemExit(f"{file}: two runs of {of}; leave one out, or give one another start.")
            if not re.fullmatch("[01]{2,}", digits):
                raise SystemExit(f"{file}:{number}: held_out needs a digit, 0 or 1, for each of two questions or more.")
            if len(digits) != asked.setdefault(key, len(digits)):
                raise SystemExit(
                    f"{file}:{number}: {len(digits)} questions, and {asked[key]} of an earlier run from the same start"
                    " under the same scheme: score both on the same questions, or give one another start."
                )
            seeds[run["seed"]] = [int(digit) for digit in digits]
    return found


def _lines(file: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the file's records with the numbers of their lines."""
    try:
        text = file.read_text()
    except OSError as error:
        raise SystemExit(f"{file}: cannot be read ({error.strerror}); name a file of runs.") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield number, json.loads(line)
        except ValueError:
            raise SystemExit(f"{file}:{number}: not a whole line of JSON; complete the line, or remove it.") from None


def said(x: np.ndarray) -> str:
    """Returns mean and half of the interval of x [seeds, questions], in points."""
    size = stats.estimate(x)
    return f"{100 * size.mean:+.2f} +- {100 * size.half:.2f}"


def main() -> None:
    for (start, scheme), each in arms(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).items():
        print(f"{scheme} from {start}")
        for arm, seeds in each.items():
            x = np.array([*seeds.values()], np.float64)
            print(f"  {arm:<8} {said(x)}  by seed {', '.join(f'{100 * one:.2f}' for one in x.mean(1))}")
        qarl, rollout = each.get("qarl", {}), each.get("rollout", {})
        if both := sorted(qarl.keys() & rollout.keys(), key=str):
            x = np.array([np.subtract(qarl[seed], rollout[seed]) for seed in both])
            print(f"  qarl less rollout {said(x)}  of seeds {', '.join(map(str, both))}")


if __name__ == "__main__":
    main()
