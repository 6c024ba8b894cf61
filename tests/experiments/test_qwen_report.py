# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The report on the real policy: what runs left is read back, and the plan's rules decide what it says."""

import json

import pytest

from experiments.qwen25_coder import report
from qarl_jax.data.suites import IN_GSM_SYMBOLIC


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def answers(right, of):
    """`of` questions, the first `right` of them answered; then one of which training has the template, answered too."""
    ids = [*(f"gsm8k-test-{i}" for i in range(of)), IN_GSM_SYMBOLIC[0]]
    numbers = [*(int(i < right) for i in range(of)), 1]
    return lines(
        {"uid": f"cases/{i}", "id": each, "num_correct": n, "responses": [{}]}
        for i, (each, n) in enumerate(zip(ids, numbers, strict=True))
    )


def run(name, right, of=60):
    steps = [
        {"step": i, "mismatch/exact": 0.5, "mismatch/k3": 10.0**-i, "time/step_s": 100.0 if i < 2 else 8.0}
        for i in range(6)
    ]
    old = [-0.1, -9.0, -0.1]
    sample = {"step": 5, "reward": 0.0, "tokens": {"text": ["so ", "wrong", " it is"], "old": old}}
    files = {
        "suite.gsm8k.jsonl": answers(right, of),
        "metrics.jsonl": lines(steps) + b'{"step": 6, "torn',
        "eval.jsonl": lines({"version": v, "eval/reward/mean": v / 100, "eval/reward/stderr": 0.02} for v in (10, 30)),
        "samples.jsonl": lines([sample]),
    }
    return report.Run(name, files)


@pytest.fixture
def runs():
    scores = {report.BF16: 45, report.ROLLOUT: 15, report.ROLLOUT_TBPO: 15, report.QARL: 30}
    return {f"{arm}_seed{seed}": run(f"{arm}_seed{seed}", n + seed) for arm, n in scores.items() for seed in (0, 1)}


def test_a_gap_and_what_is_recovered_are_judged_on_the_clean_questions(runs):
    gap, tbpo, qarl = report.verdict(report.arms(runs))
    assert "seeds 0, 1: a gap, 50.0 ±" in gap  # (45 - 15) / 60, without the question that both know
    assert "it recovers 0.0 ±" in tbpo
    assert "25.0 ±" in qarl
    assert "it recovers 50.0 ±" in qarl


def test_without_a_gap_nothing_is_recovered(runs):
    none = {name: run(name, 30) for name in runs}
    gap, *others = report.verdict(report.arms(none))
    assert "no gap" in gap
    assert not any("recovers" in sentence for sentence in others)


def test_the_page_has_every_run_and_leaves_the_compiling_steps_out(runs):
    page = report.page(runs)
    row = next(line for line in page.splitlines() if line.startswith("| `qarl_w4a16` |"))
    assert row.startswith("| `qarl_w4a16` | 0, 1 | 6, 6 | 10.0 ± 2.8 | 30.0 ± 2.8 |")
    assert "| `qarl_w4a16_seed0` | 0.00 | 0.00 | 0.00 | 0.00 | 8.00 |" in page
    assert "| `qarl_w4a16_seed0` | 0.37, 0.00037 | 0.5000, 0.5000 |" in page
    assert "step 5, probability 0.0001, reward 0: `...so [[wrong]] it is...`" in page


def test_the_untrained_model_has_a_row_for_each_scheme(runs):
    runs["base_w4a16_g-1"] = run("base_w4a16_g-1", 29, of=59)
    row = next(line for line in report.page(runs).splitlines() if "`w4a16_g-1`" in line)
    assert row.startswith("| `w4a16_g-1` | - | 50.0 ±")  # 30 of 60: here all questions count


def test_archives_are_merged_and_the_last_one_wins(runs, tmp_path):
    first, second, both = (tmp_path / f"{name}.tar.xz" for name in ("first", "second", "both"))
    report.write(runs, first)
    changed = report.Run("qarl_w4a16_seed1", {"suite.gsm8k.jsonl": answers(0, 60)})
    report.write({changed.name: changed}, second)
    assert report.main([str(first), str(second), "--merge", str(both)]) == 0
    merged = report.read([both])
    assert merged["qarl_w4a16_seed1"] == changed
    assert {name: run for name, run in merged.items() if run != changed} == {
        name: run for name, run in runs.items() if name != changed.name
    }
