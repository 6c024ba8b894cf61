# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of PLAN.md from what cells have recorded: `python -m experiments.when_to_quantize.table WORK`.

Accuracy per arm and grid with its 95 % interval, and each arm less `rtn` and less `gptq`, paired by seed and question
(`experiments/qwen25_coder/stats.py`); of `stock` its k3. An arm that was measured twice counts with its last line. A
line that a kill tore is left out.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.qwen25_coder.stats import Estimate, estimate
from qarl_jax.types import UserError, entry_point

Cells = dict[tuple[str, str, int], dict[str, object]]


def read(work: pathlib.Path) -> Cells:
    """Reads what cells have recorded. Raises `UserError` where no cell has."""
    if not (work / "cells.jsonl").is_file():
        raise UserError(
            f"{work}: no cells.jsonl here; make a cell first: python -m experiments.when_to_quantize.cell {work} ARM"
            " GRID SEED."
        )
    lines = _whole(work / "cells.jsonl")
    return {(cell["arm"], cell["grid"], cell["seed"]): cell for cell in lines}


def _whole(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file; warns of torn lines."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError:
            print(f"{file}:{number}: torn, and left out; remove it and make its cell again.", file=sys.stderr)


def answers(work: pathlib.Path, cell: dict[str, object]) -> dict[str, float]:
    """Reads question -> share of right responses of a cell. Raises `UserError` where they are missing or torn."""
    file = work / str(cell["responses"])
    try:
        records = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError):
        raise UserError(
            f"{file}: missing or torn; make its cell again: python -m experiments.when_to_quantize.cell {work}"
            f" {cell['arm']} {cell['grid']} {cell['seed']}."
        ) from None
    return {record["uid"]: record["num_correct"] / len(record["responses"]) for record in records}


def less(work: pathlib.Path, cells: Cells, arm: str, other: str, grid: str) -> Estimate | None:
    """Estimates an arm's accuracy less another's, on seeds and questions of both; None: there are none."""
    rows = []
    for seed in sorted({seed for _, _, seed in cells}):
        pair = [cells.get((each, grid, seed)) for each in (arm, other)]
        if all(pair):
            ours, theirs = (answers(work, cell) for cell in pair if cell)
            rows.append({uid: ours[uid] - theirs[uid] for uid in ours.keys() & theirs.keys()})
    return over(rows)


def over(rows: list[dict[str, float]]) -> Estimate | None:
    """Estimates the mean of each seed's question -> number, on questions of all; None: there are not two of them."""
    shared = sorted(set.intersection(*map(set, rows))) if rows else []
    return estimate(np.array([[row[uid] for uid in shared] for row in rows])) if len(shared) > 1 else None


def table(work: pathlib.Path) -> str:
    cells = read(work)
    head = "grid", "arm", "seeds", "accuracy", "less rtn", "less gptq", "tokens", "error tokens", "k3"
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for grid, arm in sorted({(grid, arm) for arm, grid, _ in cells}):
        own = [cell for (a, g, _), cell in cells.items() if (a, g) == (arm, grid)]
        score = next(key for key in own[0] if key.startswith("eval/avg_at_") and key.count("/") == 1)
        mean = {
            key: np.mean([cell.get(key, np.nan) for cell in own])
            for key in (score, "eval/response_len/mean", "eval/error_tokens", "stock/k3")
        }
        size = over([answers(work, cell) for cell in own])
        interval = "" if size is None else f" ± {100 * size.half:.1f}"
        row = [grid, arm, str(len(own)), f"{100 * mean[score]:.1f}{interval}"]
        for other in ("rtn", "gptq"):
            found = None if arm == other else less(work, cells, arm, other, grid)
            partly = f" ({found.seeds} of {len(own)} seeds)" if found and found.seeds < len(own) else ""
            row.append("" if found is None else f"{100 * found.mean:+.1f} ± {100 * found.half:.1f}{partly}")
        row += [f"{mean['eval/response_len/mean']:.0f}", f"{mean['eval/error_tokens']:.2e}"]
        lines.append("| " + " | ".join([*row, f"{mean['stock/k3']:.2e}" if arm == "stock" else ""]) + " |")
    return "\n".join(lines)


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=pathlib.Path, help="the folder that cells were made in")
    print(table(parser.parse_args(argv).work))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
