# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The report on the 1.5B's plan: runs are judged at a fixed step, question by question, and the plan's rule decides."""

import json
import pathlib

import pytest

from experiments.qwen25_coder import report
from experiments.qwen25_coder import report_1p5b as plan
from qarl_jax.data.suites import IN_GSM_SYMBOLIC

ROOT = pathlib.Path(__file__).parents[2]
HELD_OUT = 100
ROWS = [{"id": f"heldout-{i:04d}"} for i in range(HELD_OUT)]
ROWS += [{"id": name} for name in ("gsm8k-test-0001", "gsm8k-test-0002", IN_GSM_SYMBOLIC[0])] * 2


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def run(name, right, versions=(20, 28), steps=28):
    """The first `right` held-out questions answered, GSM8K's first one in one of two samples, the template's always."""
    correct = [*(int(i < right) for i in range(HELD_OUT)), 1, 0, 1, 0, 0, 1]
    counts = {f"questions/{i}": n for i, n in enumerate(correct, start=1)}
    step = {"response/tokens": 100.0, "mismatch/k3": 0.0, "reward/mean": 0.5, "time/step_s": 8.0}
    files = {
        "eval_correct.jsonl": lines({"version": v, "num_correct": counts} for v in versions),
        "metrics.jsonl": lines({"step": i, **step} for i in range(steps)),
    }
    return report.Run(name, files)


@pytest.fixture
def runs():
    found = {name: run(name, 60 + seed) for seed in range(1, 7) for name in [f"{plan.QARL}_seed{seed}"]}
    found |= {name: run(name, 50 + seed) for seed in range(1, 7) for name in [f"{plan.ROLLOUT}_seed{seed}"]}
    return found | {plan.QUESTIONS: report.Run(plan.QUESTIONS, {"questions.jsonl": lines(ROWS)})}


def test_each_test_has_its_questions_and_gsm8k_no_template(runs):
    tests = plan.sets(runs[plan.QUESTIONS])
    assert [len(tests[name]) for name in (plan.HELD_OUT, plan.GSM8K)] == [HELD_OUT, 2]
    assert list(plan.right(runs[f"{plan.QARL}_seed1"], 28, tests[plan.GSM8K])) == [0.5, 0.0]


def test_the_headline_says_ahead_only_where_the_interval_leaves_zero_out(runs):
    tests = plan.sets(runs[plan.QUESTIONS])
    found = plan.planned_arms(runs)
    assert "is 10.0 ± " in plan.verdict(found, tests)
    assert plan.verdict(found, tests).endswith("6 pairs of seeds. QaRL is **ahead**.")
    scattered = {
        f"{plan.QARL}_seed{s}": run(f"{plan.QARL}_seed{s}", n) for s, n in enumerate((90, 30, 80, 40, 70, 51), 1)
    }
    assert "**not clear**" in plan.verdict(plan.planned_arms(runs | scattered), tests)


def test_a_run_that_time_cut_off_counts_where_it_was_evaluated_and_is_named(runs):
    short = run(f"{plan.QARL}_seed6", 90, versions=(20,), steps=24)
    found, tests = plan.planned_arms(runs | {short.name: short}), plan.sets(runs[plan.QUESTIONS])
    names = (plan.QARL, plan.ROLLOUT)
    assert [plan.pair(found, names, version, tests[plan.HELD_OUT])[0][-1] for version in (20, 28)] == [6, 5]
    assert plan.cut_off(found) == f"Cut off by time: `{plan.QARL}`, seed 6: 24 steps."


def test_archive_page_and_figure_are_made_of_what_the_runs_left(runs, tmp_path, capsys):
    questions, work, merged, png = (
        tmp_path / name for name in ("questions.jsonl", "work.tar.xz", "all.tar.xz", "x.png")
    )
    questions.write_bytes(runs.pop(plan.QUESTIONS).files["questions.jsonl"])
    report.write(runs, work)
    assert plan.main(["--merge", str(merged), str(questions), str(work)]) == 0
    assert plan.main([str(merged), str(work)]) == 0
    page = capsys.readouterr().out
    assert f"| `{plan.QARL}` | 6 of 6 | 28, 28, 28, 28, 28, 28 | 63.5 ± " in page
    assert "drew 16,800 tokens; k3 is above 0 in 0 of its steps." in page
    assert plan.main([str(merged), "--figure", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_an_archive_without_questions_is_refused(runs, tmp_path):
    archive = tmp_path / "runs.tar.xz"
    report.write({name: run for name, run in runs.items() if name != plan.QUESTIONS}, archive)
    with pytest.raises(SystemExit, match=r"runs.tar.xz: holds no questions; make an archive with them by --merge"):
        plan.main([str(archive), str(archive)])


@pytest.mark.parametrize("form", ["w3a16", "w4a16:g-1"])
def test_runs_under_another_format_are_reported_apart_from_those_under_w4a16(runs, tmp_path, capsys, form):
    suffix = form.replace(":", "_")  # as stretch.sh names folders
    for seed in (1, 2, 3):
        for arm, right in ((plan.QARL, 30), (plan.ROLLOUT, 10), (plan.ALIGNED, 25)):
            name = f"{arm}_{suffix}_seed{seed}"
            runs[name] = run(name, right + seed)
        runs[f"{plan.BF16}_seed{seed}"] = run(f"{plan.BF16}_seed{seed}", 70 + seed)
    report.write(runs, tmp_path / "all.tar.xz")
    assert plan.main(["--format", form, str(tmp_path / "all.tar.xz")]) == 0
    page = capsys.readouterr().out
    assert "is 20.0 ± " in page
    assert f"| `{plan.QARL}` less `{plan.ALIGNED}`: the bands alone | 1, 2, 3 |" in page
    assert f"| `{plan.BF16}` less `{plan.ROLLOUT}`: the gap | 1, 2, 3 | **60.0" in page
    assert f"| `{plan.QARL}` | 3 of 6 |" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "made_by", "archives"),
    [
        ("qwen25_coder", report, ["results"]),
        ("qwen25_coder_1p5b", plan, ["results_1p5b_plan", "results_1p5b"]),
    ],
)
def test_a_generated_page_is_what_its_archives_give(page, made_by, archives, capsys):
    assert made_by.main([str(ROOT / "experiments/qwen25_coder" / f"{name}.tar.xz") for name in archives]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/appendix" / f"{page}.md").read_text()
