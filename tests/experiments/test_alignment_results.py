# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""From raw results to sentences: intervals with known answers, gaps and no gaps, archives that come back whole."""

import itertools
import json

import numpy as np
import pytest

from experiments.alignment import archive, arms, figures, report, results, stats
from experiments.alignment.arms import ARMS, SCALES, Run
from qarl_jax.types import UserError

CPU = SCALES["cpu"]
BINS = 82  # one more than the edges of the histograms


# ---- intervals -----------------------------------------------------------------------------------------------------


def test_one_seed_gives_the_textbook_interval_over_prompts():
    x = np.array([[0.0, 1.0, 1.0, 0.0, 1.0]])
    got = stats.estimate(x)
    # mean 3/5, sample variance 0.3, standard error sqrt(0.3 / 5), t(0.975, 4) = 2.776
    assert (got.mean, got.stderr, got.dof) == pytest.approx((0.6, 0.3**0.5 / 5**0.5, 4))
    assert got.half == pytest.approx(2.776 * got.stderr, rel=1e-3)


def test_seeds_and_prompts_both_count():
    x = np.array([[0.2, 0.4], [0.6, 0.8]])
    # seeds' means 0.3 and 0.7: variance 0.08 / 2; prompts' means 0.4 and 0.6: variance 0.02 / 2
    assert stats.estimate(x).stderr == pytest.approx((0.04 + 0.01) ** 0.5)
    # Welch and Satterthwaite with one degree of freedom each: 0.05^2 / (0.04^2 + 0.01^2)
    assert stats.estimate(x).dof == pytest.approx(0.0025 / 0.0017)


def test_intervals_over_seeds_alone_and_over_prompts_alone():
    x = np.array([[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
    over_seeds = stats.over_seeds(x)
    assert (over_seeds.mean, over_seeds.stderr, over_seeds.dof) == (0.625, pytest.approx(0.125), 1)
    assert stats.over_seeds(x[:1]) is None
    kept = stats.of_means(x.mean(1), np.array([0.3, 0.4]))
    assert kept.stderr == pytest.approx((0.125**2 + (0.09 + 0.16) / 4) ** 0.5)
    assert kept.dof == pytest.approx(kept.stderr**4 / 0.125**4)

    rng = np.random.default_rng(1)
    x = rng.binomial(1, 0.3, (1, 400)).astype(float)
    low, high = stats.bootstrap(lambda each: each.mean(0), x)
    assert (low, high) == pytest.approx(
        (x.mean() - stats.estimate(x).half, x.mean() + stats.estimate(x).half), abs=4e-3
    )
    # Both arguments are of the same draws: a difference of two that are equal has no spread.
    assert stats.bootstrap(lambda a, b: (a - b).mean(0), x, x) == (0, 0)


def test_a_known_share_of_the_gap_is_recovered():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.05, (3, 400))  # shared by the arms: pairing takes it out
    bf16, rollout, aligned = 0.9 + noise, 0.7 + noise, 0.85 + noise
    share = stats.recovered(bf16, rollout, aligned)
    assert share.mean == pytest.approx(0.75)
    assert share.half == pytest.approx(0.0, abs=1e-9)
    alone = stats.recovered(bf16, rollout + rng.normal(0, 0.05, (3, 400)), aligned)
    assert alone.mean == pytest.approx(0.75, abs=0.05)
    assert 0 < alone.half < 0.2


def test_within_two_standard_errors_there_is_no_gap():
    rng = np.random.default_rng(0)
    bf16, rollout = rng.normal(0.8, 0.3, (3, 100)), rng.normal(0.8, 0.3, (3, 100))
    assert stats.recovered(bf16, rollout, bf16) is None
    assert stats.recovered(rollout - 1, bf16, bf16) is None  # quantized rollout is clearly better: no gap either


def test_an_interval_needs_prompts():
    with pytest.raises(ValueError, match="at least 2"):
        stats.estimate(np.ones((3, 1)))


# ---- archives ------------------------------------------------------------------------------------------------------


def write_run(
    work, name, *, right=0.5, k3=1e-3, steps=4, done=True, tested=True, seconds=2.0, scheme="w4a16:g-1", base="abc"
):
    """A run as the trainer and the test leave it, with `right` of the test responses right."""
    folder = work / "runs" / name
    folder.mkdir(parents=True)
    rng = np.random.default_rng(int(1000 * right))
    sampler = "bf16" if name.startswith("bf16") else scheme
    times = {"time/rollout_s": seconds / 2, "time/old_logprobs_s": 0.1, "time/update_s": seconds / 4}
    lines = [
        {
            "step": step,
            "mismatch/k3": k3,
            "error/tok_learner": 2e-4,
            "error/tok_hidden": 1e-4,
            "entropy/mean": 0.1,
            "later/clip/seq_dropped": 0.15,
            **times,
            "time/publish_s": 0.05,
            "time/step_s": seconds,
        }
        for step in range(steps)
    ]
    histogram = {f"hist/{key}_{sign}": [1] * BINS for key in ("ratio", "weight") for sign in ("pos", "neg")}
    evals = [{"version": v, "eval/reward/mean": r} for v, r in ((0, 0.4), (steps, right))]
    for file, records in (
        ("metrics.jsonl", lines),
        ("eval.jsonl", evals),
        ("histograms.jsonl", [{"step": 0, **histogram}]),
    ):
        (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    config = {"run_dir": "/secret/place", "model": {"path": "/secret/model", "dtype": "float32"}}
    config["quant"] = {"forward": "bf16", "rollout": sampler}
    start = {"devices": ["cpu:0"], "versions": {"jax": "1.2"}, "host": "secret-host", "command": ["/secret/python"]}
    (folder / "run.json").write_text(json.dumps({"config": config, "starts": [start | {"pid": 7}]}))
    if base:
        (folder / "base.json").write_text(json.dumps({"sha256": base}))
    if done:
        (folder / "done.json").write_text("{}")
    if tested:
        counts = [int(n) for n in rng.binomial(4, right, 200)]
        test = {"version": steps, "schemes": {scheme: counts, "bf16": counts, sampler: counts}}
        (folder / "test.json").write_text(json.dumps({"num_samples": 4, "final": test, "selected": test}))


def make_results(tmp_path, rates, **options):
    """An archive with the main arms at these accuracies, three seeds each."""
    work = tmp_path / "work"
    for name, right in rates.items():
        for seed in CPU.seeds:
            write_run(work, Run(arm=ARMS[name], rung=CPU.main, seed=seed).name, right=right + 0.002 * seed, **options)
    counts = [2, 1, 3, 2] * 50
    (work / "base_test.json").write_text(
        json.dumps({"num_samples": 4, "schemes": dict.fromkeys(("bf16", *CPU.rungs), counts)})
    )
    (work / "base.json").write_text('{"sha256": "abc"}')
    path = tmp_path / "results.tar.xz"
    archive.pack(work, path, "cpu")
    return path


GAP = {"1_bf16_grpo": 0.9, "2_rollout_grpo": 0.6, "3_rollout_tbpo": 0.7, "4_qarl_tbpo": 0.84}
NO_GAP = dict.fromkeys(GAP, 0.8)


def test_an_archive_comes_back_and_names_no_place(tmp_path):
    path = make_results(tmp_path, GAP)
    members = archive.read(path)
    assert not [text for text in members.values() if b"secret" in text]
    loaded = results.load(path)["cpu"]
    assert len(loaded.runs) == 12
    assert loaded.sha256 == "abc"
    run = loaded.runs["w4a16_g-1/4_qarl_tbpo/seed1"]
    assert (run.arm, run.seed, run.sampler, run.program) == ("4_qarl_tbpo", 1, "w4a16:g-1", "w4a16_g-1/4_qarl_tbpo")
    assert len(run.metrics) == 4
    assert results.load(path)["gpu"].runs == {}


def test_the_same_results_give_the_same_bytes(tmp_path):
    (tmp_path / "b").mkdir()
    assert make_results(tmp_path, GAP).read_bytes() == make_results(tmp_path / "b", GAP).read_bytes()


def test_packing_adds_and_keeps_the_run_with_more_steps(tmp_path):
    path = make_results(tmp_path, {"1_bf16_grpo": 0.9})
    later = tmp_path / "later"
    write_run(later, "bf16/1_bf16_grpo/seed0", steps=2, done=False, tested=False)  # another stretch, cut short
    write_run(later, "w4a16_g-1/4_qarl_tbpo/seed0", steps=5)
    assert archive.pack(later, path, "cpu") == 4
    runs = results.load(path)["cpu"].runs
    assert len(runs["bf16/1_bf16_grpo/seed0"].metrics) == 4
    assert runs["bf16/1_bf16_grpo/seed0"].is_complete
    assert len(runs["w4a16_g-1/4_qarl_tbpo/seed0"].metrics) == 5


def test_runs_of_another_base_are_refused(tmp_path):
    path = make_results(tmp_path, {"1_bf16_grpo": 0.9})
    before = path.read_bytes()
    for number, base in enumerate(("other", None)):  # another one, and one that nobody knows
        work = tmp_path / f"work{number}"
        write_run(work, "w4a16_g-1/4_qarl_tbpo/seed0", base=base)
        with pytest.raises(UserError, match="different policies"):
            archive.pack(work, path, "cpu")
    assert path.read_bytes() == before


def test_a_run_without_a_hash_has_that_of_its_archive(tmp_path):
    work, path = tmp_path / "work", tmp_path / "results.tar.xz"
    write_run(work, "bf16/1_bf16_grpo/seed0", base=None)
    (work / "base.json").write_text('{"sha256": "abc"}')
    assert archive.pack(work, path, "cpu") == 1
    later = tmp_path / "later"
    write_run(later, "bf16/1_bf16_grpo/seed1", base="abc")
    assert archive.pack(later, path, "cpu") == 2
    (work / "base.json").write_text('{"sha256": "other"}')
    with pytest.raises(UserError, match="cpu/runs/bf16/1_bf16_grpo/seed"):
        archive.pack(work, path, "cpu")


def test_results_too_large_for_the_repository_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "LIMIT_BYTES", 100)
    with pytest.raises(UserError, match="more than"):
        make_results(tmp_path, {"1_bf16_grpo": 0.9})
    assert not (tmp_path / "results.tar.xz").exists()


def test_the_state_goes_home_in_small_parts_and_comes_back(tmp_path):
    work, rng = tmp_path / "work", np.random.default_rng(0)
    unfinished, finished = work / "runs" / "x" / "a" / "seed0", work / "runs" / "x" / "b" / "seed0"
    for folder, steps in ((unfinished, (10, 20)), (finished, (10, 20))):
        for step in steps:
            place = folder / "checkpoints" / f"step_{step:08d}"
            place.mkdir(parents=True)
            (place / "arrays").write_bytes(rng.bytes(3000))
            (place / "manifest.json").write_text("{}")
        (folder / "metrics.jsonl").write_text("{}\n")
    (finished / "done.json").write_text("{}")
    archive.save_state(work, tmp_path / "out", part_bytes=1000, most=8)
    parts = sorted((tmp_path / "out").iterdir())
    assert 1 < len(parts) <= 8
    assert max(part.stat().st_size for part in parts) <= 1000
    back = tmp_path / "back"
    archive.load_state(back, tmp_path / "out")
    names = {str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()}
    assert "runs/x/a/seed0/checkpoints/step_00000020/arrays" in names  # the newest of the unfinished run
    assert not any("step_00000010" in name or "b/seed0/checkpoints" in name for name in names)
    same = "runs/x/a/seed0/checkpoints/step_00000020/arrays"
    assert (back / same).read_bytes() == (work / same).read_bytes()


def test_what_does_not_fit_stays_behind_and_is_named(tmp_path, capsys):
    place = tmp_path / "work" / "runs" / "x" / "a" / "seed0" / "checkpoints" / "step_00000010"
    place.mkdir(parents=True)
    (place / "arrays").write_bytes(np.random.default_rng(0).bytes(9000))
    (place / "manifest.json").write_text("{}")
    archive.save_state(tmp_path / "work", tmp_path / "out", part_bytes=1000, most=8)
    assert "the checkpoint of runs/x/a/seed0" in capsys.readouterr().out
    archive.load_state(tmp_path / "back", tmp_path / "out")
    assert not list((tmp_path / "back").rglob("arrays"))


@pytest.mark.parametrize("tested", [False, True])
def test_the_checkpoint_of_a_diverged_run_goes_along_until_it_is_tested(tmp_path, tested):
    folder = tmp_path / "work" / "runs" / "x" / "a" / "seed0"
    place = folder / "checkpoints" / "step_00000010"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    (folder / "failed.json").write_text("{}")
    if tested:
        (folder / "test.json").write_text("{}")
    archive.save_state(tmp_path / "work", tmp_path / "out")
    archive.load_state(tmp_path / "back", tmp_path / "out")
    assert bool(list((tmp_path / "back").rglob("manifest.json"))) is not tested


def test_a_missing_part_is_noticed(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "big").write_bytes(np.random.default_rng(0).bytes(3000))
    archive.save_state(tmp_path / "work", tmp_path / "out", part_bytes=1000, most=8)
    max((tmp_path / "out").iterdir()).unlink()
    with pytest.raises(UserError, match="missing or cut off"):
        archive.load_state(tmp_path / "back", tmp_path / "out")
    with pytest.raises(UserError, match=r"no state\.00"):
        archive.load_state(tmp_path / "back", tmp_path)


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "x.tar.xz").write_text("no")
    with pytest.raises(UserError, match="not a readable"):
        archive.read(tmp_path / "x.tar.xz")


# ---- text and figures ----------------------------------------------------------------------------------------------


def whole(loaded):
    """Both pages, the answer first."""
    return "\n".join(report.pages(loaded).values())


def test_a_gap_and_the_share_that_is_recovered_are_stated_with_their_runs(tmp_path):
    text = whole(results.load(make_results(tmp_path, GAP)))
    assert "the gap of quantized rollouts at `w4a16:g-1` is 30." in text or "is 29." in text
    recovered = next(line for line in text.splitlines() if line.startswith("- ") and "QaRL recovers" in line)
    share = float(recovered.partition("recovers ")[2].partition(" ")[0])
    assert share == pytest.approx(80, abs=6)  # (0.84 - 0.6) / (0.9 - 0.6), with the noise of 800 responses a seed
    assert "w4a16_g-1/4_qarl_tbpo" in recovered
    assert "seeds 0, 1, 2" in recovered
    answer = next(line for line in text.splitlines() if line.startswith("| CPU, small, `w4a16:g-1` |"))
    assert recovered.partition("recovers ")[2].partition(" of it")[0] in answer


def test_without_a_gap_nothing_is_recovered(tmp_path):
    text = whole(results.load(make_results(tmp_path, NO_GAP)))
    assert "no gap at `w4a16:g-1`" in text
    assert "is not excluded" in text
    assert "recovers" not in text.replace("QaRL recovers |", "").replace("bf16 learner recovers |", "")  # two columns
    answer = next(line for line in text.splitlines() if line.startswith("| CPU, small, `w4a16:g-1` |"))
    assert "| none (" in answer
    assert "| - | - |" in answer


def test_what_was_not_run_is_said(tmp_path):
    nothing = whole(results.load(tmp_path / "none.tar.xz"))
    assert "On the H200: not run yet." in nothing
    assert nothing.count("Not run yet.") == 2
    text = whole(results.load(make_results(tmp_path, {"1_bf16_grpo": 0.9, "2_rollout_grpo": 0.9})))
    assert "- `w4a16_g-1/4_qarl_tbpo/seed0`: not run yet" in text
    assert "- `w4a16_g-1/a_grpo/seed0`: not run yet" in text
    assert "QaRL recovers" not in text
    assert "alignment adds" not in text


def test_an_incomplete_run_is_left_out_and_named(tmp_path):
    path = make_results(tmp_path, {"1_bf16_grpo": 0.9, "3_rollout_tbpo": 0.9})
    work = tmp_path / "more"
    write_run(work, "w4a16_g-1/2_rollout_grpo/seed0", steps=3, done=False, tested=False)
    archive.pack(work, path, "cpu")
    text = whole(results.load(path))
    assert "- `w4a16_g-1/2_rollout_grpo/seed0`: stopped after 3 steps, not used" in text
    row = next(line for line in text.splitlines() if line.startswith("| quantized rollout, bf16 learner, GRPO"))
    assert "not run yet" in row


def test_a_diverged_run_counts_with_its_last_checkpoint_and_is_named(tmp_path):
    path = make_results(tmp_path, GAP)
    work, name = tmp_path / "more", "w4a16_g-1/2_rollout_grpo/seed1"
    write_run(work, name, right=0.1, steps=5, done=False)
    failure = {"step": 5, "update": 2, "checkpoint": 5, "error": "..."}
    (work / "runs" / name / "failed.json").write_text(json.dumps(failure))
    first = work / "runs" / "w4a16_g-1" / "a_grpo" / "seed0"  # before its first record
    write_run(work, "w4a16_g-1/a_grpo/seed0", right=0.4, done=False)
    (first / "metrics.jsonl").unlink()
    (first / "failed.json").write_text(json.dumps(failure | {"step": 0, "checkpoint": 0}))
    archive.pack(work, path, "cpu")
    loaded = results.load(path)
    text = whole(loaded)
    assert loaded["cpu"].accuracy("w4a16_g-1/2_rollout_grpo", "final", True, [1]).mean() == pytest.approx(0.1, abs=0.05)
    row = next(line for line in text.splitlines() if line.startswith("| quantized rollout, bf16 learner, GRPO"))
    assert "| 0, 1 (diverged), 2 |" in row
    assert f"diverged: `{name}`)" in next(line for line in text.splitlines() if "the gap of quantized" in line)
    assert f"- `{name}`: the gradient was not finite in step 5, update 2; its last checkpoint, version 5: " in text
    assert "| aligned, GRPO (diverged) | `w4a16_g-1/a_grpo/seed0` |" in text


def test_vllm_s_runs_stand_beside_the_embedded_sampler_s(tmp_path):
    path = make_results(tmp_path, GAP)
    assert "### vLLM as the sampler, `w4a16:g-1`, one seed\n\nNot run yet." in whole(results.load(path))
    work = tmp_path / "more"
    for name, right in GAP.items():
        write_run(work, Run(arm=ARMS[name], rung=CPU.main, seed=0, vllm=True).name, right=right - 0.2)
    archive.pack(work, path, "cpu")
    text = whole(results.load(path)).partition("### vLLM as the sampler")[2].partition("###")[0]
    row = next(line for line in text.splitlines() if line.startswith("| QaRL"))
    assert "`w4a16_g-1_vllm/4_qarl_tbpo/seed0`" in row
    assert "worse (`w4a16_g-1/4_qarl_tbpo/seed0`)" in row
    assert "(`bf16_vllm/1_bf16_grpo` less `w4a16_g-1_vllm/2_rollout_grpo`, seed 0)" in text


@pytest.mark.parametrize(("length", "words"), [(18.2, "was 18.2."), (None, "is not on record.")])
def test_the_base_s_response_length_is_stated_or_unknown(tmp_path, length, words):
    path = make_results(tmp_path, {"1_bf16_grpo": 0.9})
    work = tmp_path / "more"
    work.mkdir()
    test = json.loads(archive.read(path)["cpu/base_test.json"]) | ({} if length is None else {"response_len": length})
    (work / "base_test.json").write_text(json.dumps(test))
    archive.pack(work, path, "cpu")
    line = next(x for x in whole(results.load(path)).splitlines() if x.startswith("Bands on a response"))
    assert line.endswith(f"19.4 tokens; that of the policy before RL {words}")


def test_every_row_of_numbers_names_its_runs(tmp_path):
    text = whole(results.load(make_results(tmp_path, GAP)))
    lines = text.splitlines()
    heads = {before for before, after in itertools.pairwise(lines) if after.startswith("| ---")}
    rows = [x for x in lines if x.startswith("| ") and x not in heads and any(c.isdigit() for c in x)]
    schemes = {f"`{scheme}`" for scheme in ("bf16", *CPU.rungs)}  # the base's table names its file above it
    assert not [row for row in rows if "/" not in row and row.split(" | ")[0].lstrip("| ") not in schemes]


def test_seconds_are_compared_only_where_runs_had_the_machine_to_themselves(tmp_path):
    path = make_results(tmp_path, GAP)
    text = whole(results.load(path))
    assert "nothing follows about a speed-up" in text
    work = tmp_path / "timed"
    for name, seconds in (("bf16/1_bf16_grpo", 3.0), ("w4a16_g-1/4_qarl_tbpo", 2.0)):
        write_run(work, name, seconds=seconds, done=False, tested=False)
    (work / "runs").rename(work / "timing")
    archive.pack(work, path, "cpu")
    text = whole(results.load(path))
    row = next(line for line in text.splitlines() if line.startswith("| `timing/w4a16_g-1/4_qarl_tbpo`"))
    # rollout 1, log-probs 0.1, update 0.5, publish 0.05, the rest of 2 seconds 0.35; 3 / 2 as fast as bf16
    assert row == "| `timing/w4a16_g-1/4_qarl_tbpo` | 1.000 | 0.100 | 0.500 | 0.050 | 0.350 | 2.000 | 1.50 |"
    # The training runs stay, below, labelled and without a speed-up.
    assert text.index("which shared the machine: nothing follows about a speed-up") > text.index(row)
    assert "\n| `w4a16_g-1/4_qarl_tbpo/seed0` | 1.000 | 0.100 | 0.500 | 0.050 | 0.350 | 2.000 |\n" in text


@pytest.mark.slow
def test_figures_and_text_are_written(tmp_path):
    path = make_results(tmp_path, GAP)
    written = figures.make(path, tmp_path / "docs")
    pages, drawn = written[:2], written[2:]
    assert [str(page.relative_to(tmp_path / "docs")) for page in pages] == ["results.md", "appendix/results.md"]
    assert [file.name for file in drawn] == ["cpu_w4a16_g-1.png", "cpu_ratios.png", "cpu_seconds.png"]
    assert all(f"../results/{file.name}" in pages[1].read_text() for file in drawn)
    assert "(results/cpu_w4a16_g-1.png)" in pages[0].read_text()
    assert all(file.stat().st_size > 5000 for file in drawn)
    before = [file.read_bytes() for file in written]
    assert [file.read_bytes() for file in figures.make(path, tmp_path / "docs")] == before


@pytest.mark.slow
def test_the_committed_text_is_that_of_the_committed_results():
    path = arms.HERE / "results.tar.xz"
    for page, text in report.pages(results.load(path)).items():
        assert (arms.ROOT / "docs" / page).read_text() == text


def test_curves_keep_seeds_apart(tmp_path):
    loaded = results.load(make_results(tmp_path, GAP))["cpu"]
    names = ["bf16/1_bf16_grpo", "never/run"]
    (curve,) = report.curves(loaded, names, "mismatch/k3")
    assert (curve.label, set(curve.seeds)) == (names[0], {0, 1, 2})
    assert curve.seeds[0] == ([0, 1, 2, 3], [1e-3] * 4)
    (held_out,) = report.curves(loaded, names, "eval/reward/mean", held_out=True)
    assert held_out.seeds[0] == ([0, 4], [0.4, 0.9])
