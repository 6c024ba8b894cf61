# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The page's data says what the files say, grows as they grow, and disarms what the policy wrote."""

import json
import math

import pytest

from qarl_jax import plot
from qarl_jax.observe import curves, run_data
from qarl_jax.observe.run_data import RunData
from qarl_jax.types import UserError
from tests.reference.pages import HOSTILE, SAMPLES, sample, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "tbpo", SAMPLES)


def whole(folder, **options):
    return RunData(folder, "a", **options).part({})[0]


def append(path, *records):
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_run_is_described_by_what_ran_and_what_came_of_it(run):
    about = whole(run)["about"]
    rows = dict(about["rows"])
    assert rows["command"] == "train --config x.yaml"
    assert rows["policy"] == "models/<tiny>, 2,005,760 parameters"
    assert rows["scheme"] == "bf16; sampler w4a16"
    assert rows["loss"] == "tbpo (clip_high 0.008)"
    assert rows["held out"] == "0.125 → 0.625 (95 %: 0.250 to 0.875; 8 prompts (6 different) x 4 samples)"
    assert (rows["code"], rows["devices"]) == ("abc", "cpu:0")
    assert about["config"] == "seed: 3  # <b>\n"
    assert about["settings"]["loss.clip_high"] == "0.008"


def test_metrics_are_columns_and_later_parts_have_what_is_new(run):
    data = RunData(run, "a")
    part, have = data.part({})
    assert part["fresh"]
    assert part["metrics"]["steps"] == list(range(10))
    assert part["metrics"]["values"]["reward/mean"] == pytest.approx([0.2 + s / 20 for s in range(10)])
    assert part["metrics"]["values"]["eval/reward/mean"] == [None] * 9 + [0.625]
    assert max(have.values()) < 2**53  # what JavaScript gives back unchanged
    again, have = data.part(have)
    assert set(again) == {"name", "fresh", "written"}
    append(run / "metrics.jsonl", {"step": 10, "reward/mean": 0.75, "new": None})
    append(run / "samples.jsonl", sample(10, ["x"], [0]))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "rew')  # being written
    part, have = data.part(have)
    assert part["metrics"] == {"from": 10, "steps": [10], "values": {"reward/mean": [0.75]}}
    assert (part["samples"]["from"], len(part["samples"]["rows"])) == (5, 1)
    assert not part["fresh"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ard/mean": 0.5}\n')
    assert data.part(have)[0]["metrics"]["steps"] == [11]


def test_a_long_file_comes_in_pieces(run):
    data = RunData(run, "a", most=100)
    part, have = data.part({})
    steps, pieces = part["metrics"]["steps"], 1
    while part.get("more"):
        part, have = data.part(have)
        steps += part.get("metrics", {"steps": []})["steps"]
        pieces += 1
    assert steps == list(range(10))
    assert pieces > 4
    assert have["samples"] == 5


def test_a_run_that_resumes_is_sent_anew(run):
    data = RunData(run, "a")
    _, have = data.part({})
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "fresh").write_text("".join(lines[:4]))
    (run / "fresh").replace(run / "metrics.jsonl")
    part, have = data.part(have)
    assert part["fresh"]
    assert part["metrics"]["steps"] == [0, 1, 2, 3]
    assert len(part["samples"]["rows"]) == 5
    assert not data.part(have)[0]["fresh"]


def test_a_sample_is_a_line_in_the_list_and_is_read_in_full_where_it_is_asked_for(run):
    data = RunData(run, "a")
    rows = data.part({})[0]["samples"]["rows"]
    assert [row["step"] for row in rows] == [0, 0, 5, 5, 9]
    assert [row["sign"] for row in rows] == ["pos", "neg", "neg", "zero", "pos"]
    assert [row["dropped"] for row in rows] == [0, 3, 2, 0, 1]
    assert not any("tokens" in row for row in rows)
    third = data.sample(2)
    assert third["tokens"] == ["a", " b", " c", " d"]
    assert third["fates"] == ["kept", "below", "rejected", "kept"]
    assert third["columns"]["push"] == [-0.225, -0.0, -0.0, -0.225]
    assert (third["update"], third["updates"], third["ratio"]) == (2, 4, 1.0123)
    assert data.find("WAIT") == [1]
    assert data.find("2+2") == [0, 1, 2, 3]
    assert data.find('& "') == data.find("\u202e") == [4]  # escaped in the file
    with pytest.raises(IndexError):
        data.sample(5)


def test_what_the_policy_wrote_is_disarmed(run):
    last = RunData(run, "a")
    last.look()
    found = last.sample(4)
    # Control characters as pictures, a lone surrogate and a character that turns text around disarmed.
    assert (
        found["tokens"][0]
        == "</script><img src=x onerror=console.error('owned')> & \"'[U+202E] ␀\ufffd␛[31m↵\n{{ 7*7 }}"
    )
    assert found["tokens"][1] == "·"  # part of a character
    for text in (found["prompt"], found["answer"], found["uid"], found["response"], found["head"]):
        assert "\ud800" not in text
        assert "\u202e" not in text
    assert found["prompt"] == found["tokens"][0]


def test_a_report_has_the_samples_of_steps_spread_over_the_run_in_full(tmp_path):
    run = write_run(tmp_path / "long", [sample(step, ["a"], [0]) for step in range(101)])
    rows = whole(run, steps=5)["samples"]["rows"]
    assert [row["step"] for row in rows] == [0, 25, 50, 75, 100]
    assert [row["full"]["tokens"] for row in rows] == [["a"]] * 5
    assert whole(run, steps=0)["samples"]["rows"] == []
    assert run_data.spread([3, 4, 5], 1) == [5]
    assert run_data.spread([3, 4], 7) == [3, 4]


def test_texts_without_numbers_and_runs_without_samples(tmp_path):
    bare = {key: SAMPLES[0][key] for key in ("step", "uid", "prompt", "response", "answer", "reward")}
    rows = whole(write_run(tmp_path / "old", [bare]), steps=3)["samples"]["rows"]
    assert (rows[0]["full"]["tokens"], rows[0]["full"]["response"], rows[0]["sign"]) == (
        [],
        "so we get 4<eos>",
        "unknown",
    )
    assert "samples" not in whole(write_run(tmp_path / "none"))


def test_an_objective_without_one_band_for_all_responses_has_none_drawn():
    edges = {"clip_high": 4e-4, "neg_clip_low": 3e-4, "neg_clip_high": 7e-4}
    assert run_data.limits({"name": "tbpo", "bands": "fixed"} | edges)["level"] == "response"
    assert run_data.limits({"name": "tbpo", "bands": "spread"} | edges) == {}
    assert run_data.limits({"name": "dppo", "clip_high": 0.15}) == {}


def test_the_picture_of_the_band_has_every_count_and_the_objectives_edges(run):
    band = whole(run)["band"]
    assert band["steps"] == [(s, s) for s in range(10)]
    assert [sum(column) for column in band["kinds"]["seq_ratio_pos"]] == [10] * 10
    assert {len(column) for column in band["kinds"]["ratio_neg"]} == {len(band["edges"]) + 1}
    assert run_data.limits({"name": "tbpo", "clip_high": 4e-4, "neg_clip_low": 3e-4, "neg_clip_high": 7e-4}) == {
        "level": "response",
        "pos": [None, math.log1p(4e-4)],
        "neg": [math.log1p(-3e-4), math.log1p(7e-4)],
    }
    assert run_data.limits({"name": "grpo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}) == {
        "level": "token",
        "pos": [None, math.log(1.28)],
        "neg": [pytest.approx(math.log(0.8)), math.log(3.0)],
    }
    assert run_data.limits({"name": "sapo"}) == {}
    assert run_data.buckets(range(250), 120) == [(a, min(a + 3, 250)) for a in range(0, 250, 3)]


def test_changed_codes_are_means_over_a_columns_steps(run):
    lines = [{"step": s, "flips/q": [s / 8, None], "flips/up": [0.25]} for s in range(240)]
    (run / "histograms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flips = whole(run)["flips"]
    assert flips["steps"][:2] == [(0, 1), (2, 3)]
    assert flips["weights"]["q"][:2] == [[0.0625, None], [pytest.approx(2.5 / 8, rel=1e-2), None]]
    assert flips["weights"]["up"] == [[0.25]] * 120


def test_mismatch_is_summed_by_the_position_of_a_token_also_where_tokens_are_left_out(tmp_path):
    record = sample(0, list("abcd"), [0] * 4)
    record["tokens"] |= {"mismatch": [1.0, math.exp(0.5), math.exp(-0.25), None], "left_out": [2, 300]}
    other = sample(1, list("ab"), [0] * 2)
    other["tokens"]["mismatch"] = [math.exp(1.0), 1.0]
    first, second = whole(write_run(tmp_path / "run", [record, other]))["positions"]["halves"]
    assert first["rows"] == [[1, 0.0, 0.0, 1], [2, 0.5, 0.5, 1], [362, 0.25, 0.25, 1]]  # token 303 is of 257 to 362
    assert (second["label"], second["rows"]) == ("step 1", [[1, 1.0, 1.0, 1], [2, 0.0, 0.0, 1]])


def test_full_colour_is_at_what_few_tokens_exceed():
    tokens = {"ratio": [1.0] * 19 + [math.exp(0.5), None, 0.0], "gain": [2.0, 0.0]}
    assert run_data.strong(tokens, -0.5) == [0.0, 0.0, 0.0, 1.0]
    assert run_data.strong({"ratio": [math.exp(0.5)] * 3}, None) == [0.5, 0.0, 0.0, 0.0]


def test_settings_that_changed_within_a_run_stand_beside_the_step_they_changed_at(run):
    record = json.loads((run / "run.json").read_text())
    first, *_ = record["starts"]
    later = [{"step": step, "changed": [f"optimizer.lr 0 -> {step}"]} for step in (2, 6, 4, 4)]
    (run / "run.json").write_text(json.dumps(record | {"starts": [first, *later, {"step": 9, "changed": []}]}))
    rows = [row for row in whole(run)["about"]["rows"] if row[0].startswith("from")]
    assert rows == [("from step 2", "optimizer.lr 0 -> 2"), ("from step 4", "optimizer.lr 0 -> 4")]  # 6 was made anew


def test_broken_files_are_one_sentence(run):
    (run / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json is not JSON"):
        whole(run)
    (run / "metrics.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        whole(run)


def test_the_page_has_every_panel_of_the_figures_and_those_asked_for():
    specs = curves.specs(["my/own"])
    assert [spec["title"] for spec in specs[:-1]] == [panel.title for panel in curves.PANELS]
    assert [spec["title"] for spec in specs if spec["asked"]] == ["my/own"]
    assert plot.load_runs is curves.load_runs
    assert HOSTILE not in json.dumps(specs)
