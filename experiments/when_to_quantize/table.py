# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of PLAN.md from what cells have recorded: `python -m experiments.when_to_quantize.table WORK`.

Accuracy per arm and grid, and each arm less `rtn`, paired by seed and question (`experiments/qwen25_coder/stats.py`).
An arm that was measured twice counts with its last line.
"""

import json
import pathlib
import sys

import numpy as np

from experiments.qwen25_coder.stats import Estimate, estimate

Cells = dict[tuple[str, str, int], dict[str, object]]


def read(work: pathlib.Path) -> Cells:
    lines = (json.loads(line) for line in (work / "cells.jsonl").read_text().splitlines())
    return {(cell["arm"], cell["grid"], cell["seed"]): cell for cell in lines}


def answers(work: pathlib.Path, cell: dict[str, object]) -> dict[str, float]:
    """Reads question -> share of right responses of a cell."""
    records = map(json.loads, (work / str(cell["responses"])).read_text().splitlines())
    return {record["uid"]: record["num_correct"] / len(record["responses"]) for record in records}


def less_rtn(work: pathlib.Path, cells: Cells, arm: str, grid: str) -> Estimate | None:
    """Estimates an arm's accuracy less round-to-nearest's, on seeds and questions of both; None: there are none."""
    rows = []
    for seed in sorted({seed for _, _, seed in cells}):
        pair = [cells.get((each, grid, seed)) for each in (arm, "rtn")]
        if all(pair):
            ours, theirs = (answers(work, cell) for cell in pair if cell)
            rows.append({uid: ours[uid] - theirs[uid] for uid in ours.keys() & theirs.keys()})
    shared = sorted(set.intersection(*map(set, rows))) if rows else []
    return estimate(np.array([[row[uid] for uid in shared] for row in rows])) if len(shared) > 1 else None


def table(work: pathlib.Path) -> str:
    cells = read(work)
    head = "grid", "arm", "seeds", "accuracy", "less rtn", "tokens", "error tokens"
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for grid, arm in sorted({(grid, arm) for arm, grid, _ in cells}):
        own = [cell for (a, g, _), cell in cells.items() if (a, g) == (arm, grid)]
        score = next(key for key in own[0] if key.startswith("eval/avg_at_") and key.count("/") == 1)
        mean = {
            key: np.mean([cell[key] for cell in own]) for key in (score, "eval/response_len/mean", "eval/error_tokens")
        }
        found = None if arm == "rtn" else less_rtn(work, cells, arm, grid)
        said = "" if found is None else f"{100 * found.mean:+.1f} ± {100 * found.half:.1f}"
        numbers = f"{100 * mean[score]:.1f}", said, f"{mean['eval/response_len/mean']:.0f}"
        lines.append("| " + " | ".join([grid, arm, str(len(own)), *numbers, f"{mean['eval/error_tokens']:.2e}"]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(pathlib.Path(sys.argv[1])))
