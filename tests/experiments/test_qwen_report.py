# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The report on the real policy: what runs left is read back, and the plan's rules decide what it says."""

import json
import pathlib
import re

import pytest

from experiments.qwen25_coder import report
from qarl_jax.data.suites import IN_GSM_SYMBOLIC

ROOT = pathlib.Path(__file__).parents[2]


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
        | {"time/rollout_s": 5.0, "time/update_s": 2.0}
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


def cells(text, begin):
    """Of the first row that begins so, what follows."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {begin} |"))
    return [cell.strip() for cell in row.removeprefix(f"| {begin} |").split("|")[:-1]]


def test_a_gap_and_what_is_recovered_are_judged_on_the_clean_questions(runs):
    found = report.arms(runs)
    (gap,) = report.verdict(found)
    assert gap.startswith("- `w4a16`, greedy, seeds 0, 1: a gap, 50.0 ±")  # (45 - 15) / 60, without what both know
    table = report.differences(found, "gsm8k")
    assert cells(table, "`rollout_w4a16_tbpo` less `rollout_w4a16_grpo`")[-1].startswith("0.0 ±")
    seeds, points, over_seeds, over_questions, share = cells(table, "`qarl_w4a16` less `rollout_w4a16_grpo`")
    assert (seeds, points[:10]) == ("0, 1", "**25.0 ± 1")
    assert over_seeds == "± 0.0"  # both seeds gain the same fifteen questions
    low, high = (float(x) for x in over_questions.strip("[]").split(","))
    assert (low, high) == pytest.approx((25 - 11, 25 + 11), abs=1.1)  # 1.96 sqrt(0.25 * 0.75 / 60)
    assert share.startswith("50.0 ±")


def test_without_a_gap_nothing_is_recovered(runs):
    none = report.arms({name: run(name, 30) for name in runs})
    assert ["no gap" in sentence for sentence in report.verdict(none)[:-1]] == [True]
    assert (
        report.verdict(none)[-1] == "- No format that was trained with has a gap beyond two standard errors: `w4a16`."
    )
    table = report.differences(none, "gsm8k")
    assert cells(table, "`qarl_w4a16` less `rollout_w4a16_grpo`")[1:] == ["0.0 ± 0.0", "± 0.0", "[0.0, 0.0]", "no gap"]


def test_arms_are_compared_on_the_seeds_that_both_have(runs):
    del runs[f"{report.ROLLOUT_TBPO}_seed0"].files["suite.gsm8k.jsonl"]  # trained, and not judged
    runs["seqmis_grpo_w4a16_seed0"] = run("seqmis_grpo_w4a16_seed0", 20)
    runs |= {name: run(name, right) for name, right in (("base_bf16", 40), ("base_w4a16", 10))}
    page = report.page(runs)
    assert cells(page, "`rollout_w4a16_tbpo` less `rollout_w4a16_grpo`")[0] == "1"
    assert cells(page, "`rollout_w4a16_tbpo`")[4].endswith("(of 1)")
    assert cells(page, "`qarl_w4a16` less `rollout_w4a16_grpo`")[0] == "0, 1"
    assert cells(page, "`qarl_w4a16` less `seqmis_grpo_w4a16`")[:3] == ["0", "**16.7 ± 9.7**", "-"]
    assert cells(page, "`bf16_grpo` less `base_bf16`")[0] == "0, 1"
    assert cells(page, "`bf16_grpo` less `qarl_w4a16`")[1].startswith("**25.0 ±")
    assert cells(page, "`qarl_w4a16` less `base_w4a16`")[1].startswith("**34.2 ±")  # (30 + 31 - 2 * 10) / 120


def test_another_format_has_a_gap_of_its_own(runs):
    """stretch.sh names a run under FORMAT after the config and the format."""
    for name, right in {"rollout_w4a16_grpo_w8a8": 40, "qarl_w4a16_w8a8": 45, "qarl_w4a16_w4a16_g-1": 5}.items():
        runs[f"{name}_seed0"] = run(f"{name}_seed0", right)
    runs["bf16_grpo_lr1e-5_seed0"] = run("bf16_grpo_lr1e-5_seed0", 1)
    found = report.arms(runs)
    assert list(found) == [*report.MAIN, "qarl_w4a16_g-1", "qarl_w8a8", "rollout_w8a8_grpo", "bf16_grpo_lr1e-5"]
    assert not report.is_compared("bf16_grpo_lr1e-5")
    assert [sentence.split(":")[0] for sentence in report.verdict(found)] == [
        "- `w4a16`, greedy, seeds 0, 1",
        "- `w8a8`, greedy, seeds 0",
    ]
    table = report.differences(found, "gsm8k")
    assert cells(table, "`bf16_grpo` less `rollout_w8a8_grpo`")[1].startswith("**8.3 ±")
    assert cells(table, "`qarl_w8a8` less `rollout_w8a8_grpo`")[-1].startswith("100.0 ± 0.0")
    assert cells(table, "`bf16_grpo` less `qarl_w4a16_g-1`")[1].startswith(
        "**66.7 ±"
    )  # though its rollout arm is not run


def test_what_a_run_does_after_its_judgement_counts_in_no_comparison(runs):
    longer = runs["qarl_w4a16_seed1"].files
    longer["eval.jsonl"] += lines([{"version": 50, "eval/reward/mean": 0.9, "eval/reward/stderr": 0.02}])
    assert cells(report.page(dict(runs)), "`qarl_w4a16`")[3] == "30.0 ± 2.8"


def test_a_run_that_ended_early_is_not_among_those_that_did_not(runs):
    shorter = runs["qarl_w4a16_seed0"].files
    shorter["eval.jsonl"] = shorter["eval.jsonl"].splitlines(True)[0]
    assert cells(report.page(runs), "`qarl_w4a16`")[2:4] == ["10.0 ± 2.8", "30.0 ± 3.9 (of 1)"]


def test_held_out_differences_are_paired_by_seed_with_an_interval_over_seeds(runs):
    for name, mean in {"qarl_w4a16_seed0": 0.4, "qarl_w4a16_seed1": 0.34, "bf16_grpo_seed0": 0.31}.items():
        after = {"version": 30, "eval/reward/mean": mean, "eval/reward/stderr": 0.02}
        runs[name].files["eval.jsonl"] = lines([after | {"version": 0}, after])
    found = report.held_out_differences(report.arms(runs))
    # 10 and 4 points: 7 +- t_1 3, with t_1 = tan(0.475 pi) = 12.7. By two standard errors that would be clear.
    assert "- `qarl_w4a16` less `rollout_w4a16_grpo`: 7.0 ± 38.1 (+10.0, +4.0)" in found.splitlines()
    del runs["rollout_w4a16_grpo_seed1"]
    assert "less `rollout_w4a16_grpo`" not in report.held_out_differences(report.arms(runs))  # one seed is no interval


def test_readmes_leads_of_the_half_billion_are_those_of_the_record():
    page = report.page(report.read([ROOT / "experiments/qwen25_coder/results.tar.xz"]))
    assert page == (ROOT / "docs/appendix/qwen25_coder.md").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    titles = ("Held-out questions", "GSM8K, greedy", "GSM8K, T = 1")
    held, greedy, sampled = (page.split(f"### {title}")[1].split("##")[0] for title in titles)
    for pair, places in {
        "`qarl_w4a16` less `rollout_w4a16_grpo`": (held, greedy, sampled),
        "`bf16_grpo` less `qarl_w4a16`": (held,),
        "`rollout_w4a16_tbpo` less `rollout_w4a16_grpo`": (held, sampled),
        "`qarl_w4a16` less `seqmis_grpo_w4a16`": (greedy, sampled),
    }.items():
        for place in places:
            (size,) = re.findall(rf"{pair}\W.*?(\d+\.\d ± \d+\.\d)", place)
            assert re.search(rf"\b{size}\b", readme), (pair, size)


def test_quotes_prefer_what_the_sampler_meant(runs):
    surprising = {"text": ["so ", "odd"], "old": [-0.1, -9.0], "rollout": [-0.1, -9.0]}
    hidden = {"text": ["so ", "wrong", "?"], "old": [-0.1, -8.0, None], "rollout": [-0.1, -0.7, None]}
    samples = [{"step": 5, "reward": 0.0, "tokens": tokens} for tokens in (hidden, surprising, surprising)]
    runs["qarl_w4a16_seed0"].files["samples.jsonl"] = lines(samples)
    (only,) = report.quoted({"qarl_w4a16": report.arms(runs)["qarl_w4a16"]})
    assert only == "- `qarl_w4a16`, step 5, sampler 0.5, learner 0.0003, reward 0: `...so [[wrong]]?...`"


def test_the_page_has_every_arm_and_leaves_the_compiling_steps_out(runs):
    page = report.page(runs)
    row = next(line for line in page.splitlines() if line.startswith("| `qarl_w4a16` |"))
    assert row.startswith("| `qarl_w4a16` | 0, 1 | 6, 6 | 10.0 ± 2.8 | 30.0 ± 2.8 |")
    assert "| `qarl_w4a16` | 5.00 | 0.00 | 0.00 | 0.00 | 2.00 | 0.00 | 0.00 | 1.00 | 8.00 |" in page
    assert "| `qarl_w4a16` | 0, 1 | 0.37, 0.00037 | 0.5000, 0.5000 |" in page
    assert "step 5, sampler 0.0001, learner 0.0001, reward 0: `...so [[wrong]] it is...`" in page


def test_another_policy_has_a_page_and_figures_of_its_own(runs):
    page, other = (report.page(runs, policy).splitlines() for policy in ("0.5B", "1.5B"))
    changed = [(a, b) for a, b in zip(page, other, strict=True) if a != b]
    assert changed[0] == ("# A real policy: Qwen2.5-Coder-0.5B", "# A real policy: Qwen2.5-Coder-1.5B")
    for size, line in zip(("0.5b", "1.5b"), changed[1], strict=True):
        assert f"MODEL=models/qwen25-coder-{size} bash " in line  # the command of a cell
    shown = [line.split("/")[-1] for _, line in changed[2:]]
    assert shown == ["qwen25_coder_1p5b.png)", "qwen25_coder_1p5b_probabilities.png)"]


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


def test_an_archive_that_is_not_whole_is_refused_in_one_sentence(runs, tmp_path):
    report.write(runs, tmp_path / "whole.tar.xz")
    (tmp_path / "half.tar.xz").write_bytes((tmp_path / "whole.tar.xz").read_bytes()[:-500])
    (tmp_path / "text.tar.xz").write_text("no archive")
    for name in ("half.tar.xz", "text.tar.xz", "missing.tar.xz"):
        with pytest.raises(SystemExit, match=f"{name}: cannot be read .* name a whole archive"):
            report.read([tmp_path / "whole.tar.xz", tmp_path / name])


def test_both_figures_are_drawn_from_an_archive(runs, tmp_path):
    for each in runs.values():
        (sample,) = each.lines("samples.jsonl")
        sample |= {"advantage": -1.0}
        sample["tokens"] |= {"now": [-0.2, -9.5, None]}
        each.files["samples.jsonl"] = lines([sample])
    report.write(runs, tmp_path / "results.tar.xz")
    for kind in ("figure", "probabilities"):
        png = tmp_path / f"{kind}.png"
        assert report.main([str(tmp_path / "results.tar.xz"), f"--{kind}", str(png)]) == 0
        assert png.read_bytes().startswith(b"\x89PNG")
