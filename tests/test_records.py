# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""README's counts of tokens are the sums of their records."""

import json
import pathlib
import re

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
STEPS = ("8b", "8b_1024", "8b_norms", "8b_proximal", "8b_rounded")
OF_8B = (*(f"step_{name}_h200.json" for name in STEPS), "step_8b_two_h100.json", "exact_norms_h200.json")


def counted(record):
    """(mismatched, compared) of every aligned step of 8B in a record."""
    if isinstance(record, list):
        return [pair for each in record for pair in counted(each)]
    if not isinstance(record, dict):
        return []
    aligned = record.get("shapes", "8b") == "8b" and "rollout" not in str(record.get("case"))
    own = [tuple(record["unequal_tokens"])] if record.get("unequal_tokens") and aligned else []
    return own + counted(list(record.values()))


def test_readmes_tokens_of_8b_are_the_sum_of_the_records():
    pairs = [pair for name in OF_8B for pair in counted(json.loads((RESULTS / name).read_text()))]
    pairs += counted(json.loads((RESULTS / "step_8b_rows_h200.json").read_text())["mismatched_run"])  # others: peers
    row = next(
        line for line in (RESULTS.parents[1] / "README.md").read_text().splitlines() if "| Qwen3-8B*, four" in line
    )
    tokens, mismatched = re.search(r"\| ([\d,]+) \| \[(\d+)\]", row).groups()
    assert (sum(n for n, _ in pairs), sum(n for _, n in pairs)) == (int(mismatched), int(tokens.replace(",", "")))
