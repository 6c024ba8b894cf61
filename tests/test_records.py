# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of README and of pages are those of their records."""

import json
import pathlib
import re
import statistics

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
STEPS = ("8b", "8b_1024", "8b_1024_int8", "8b_1024_moments", "8b_norms", "8b_proximal", "8b_rounded")
SIZE = re.compile(r"-?\d+\.\d ± \d+\.\d")
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


def test_readmes_differences_stand_in_the_pages_of_their_columns():
    root = RESULTS.parents[1]
    lines = (root / "README.md").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| difference |"))
    pages = [(root / path).read_text() for path in re.findall(r"\((docs/\S+?\.md)\)", lines[first])]
    rows = [line.strip("| ").split("|")[1:] for line in lines[first + 2 : first + 6]]
    sizes = [(size, page) for row in rows for cell, page in zip(row, pages, strict=True) for size in SIZE.findall(cell)]
    assert len(sizes) == 13
    assert [size for size, page in sizes if f" {size}" not in page.replace("*", " ")] == []


def table(page, title):
    """The cells of the rows under a table's title row."""
    lines = (RESULTS.parents[1] / "docs" / "operations" / page).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(title)) + 2
    end = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[first:end]]


def test_the_table_of_8b_steps_has_the_medians_of_three_steps_after_two():
    names = ("", "_moments", "_int8")
    first, second, third = (json.loads((RESULTS / f"step_8b_1024{x}_h200.json").read_text())["steps"] for x in names)
    runs = [(run, record[0]) for record in (first, second[:2], third) for run in record]  # one had wrong gradients
    rows = table(
        "steps.md", "| 8B, 128 responses | step | sampling | update | publish | model TFLOP/s of the update | speed"
    )
    assert len(rows) == len(runs) == 7
    for row, (run, plain) in zip(rows, runs, strict=True):
        median = lambda name, run=run: statistics.median(step[name] for step in run["steps"][2:])  # noqa: E731
        seconds = lambda name, run=run, of=median: of(f"time/{name}_s", run)  # noqa: E731
        assert row[1].strip("*") == f"{seconds('step'):.1f} s"
        assert row[2:5] == [f"{seconds(name):.1f}" for name in ("rollout", "update", "publish")]
        assert row[5] == f"{median('perf/model_tflops'):.0f}"
        assert float(row[6].strip("*")) == round(seconds("step", plain) / seconds("step"), 2)


def test_the_table_of_steps_with_adapters_has_the_records_means():
    rows = table("adapters.md", "| shapes, base | responses |")[-5:]
    record = json.loads((RESULTS / "step_adapters_h200.json").read_text())["rows"]
    for row, found in zip(rows, [record[4], *record[:4]], strict=True):
        assert row[1].startswith(f"64 of {found['response_tokens'] / 64:,.0f} tokens")
        assert row[2] == f"{found['seconds']['step']:.1f} s"
        assert row[3:6] == [f"{found['seconds'][name]:.1f}" for name in ("rollout", "update", "publish")]
        assert found["k3"] == 0.0


def test_the_table_of_tokens_with_adapters_has_the_records_numbers():
    record = json.loads((RESULTS / "rollout_adapters_h200.json").read_text())
    runs = [*record["rows"], *record["w4a16_14b"]["rows"], *record["again"]["rows"]]  # the last of a case counts
    found = {(row["shapes"], row["scheme"], row["sequences"]): row["batch_invariant_tok_per_s"] for row in runs}
    for row in table("adapters.md", "| sequences | 7B, `nvfp4` |"):
        count, cells = int(row[0]), iter(row[1:])
        for shapes in ("qwen2.5-7b", "qwen2.5-14b"):
            for scheme in ("nvfp4", "w4a16", "bf16"):
                assert int(next(cells).replace(",", "")) == round(found[shapes, scheme, count]), (shapes, scheme, count)
            assert float(next(cells)) == round(found[shapes, "nvfp4", count] / found[shapes, "bf16", count], 2)
