# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Cells of the experiment: each arm deploys what its name says, and the table pairs them by seed and question."""

import json
import pathlib

import numpy as np
import pytest

from experiments.when_to_quantize import cell, table
from qarl_jax.run import config


@pytest.fixture
def said(monkeypatch):
    """Commands that a cell would run."""
    seen = []
    monkeypatch.setattr(cell, "call", lambda *command: seen.append(command[2:] if "-m" in command else command) or "{}")
    return seen


def deployed(tmp_path, arm, grid="w4a16"):
    return cell.policy(tmp_path, arm, grid, 1, ["--config", "C"], "PY", ["train.steps=2"])


@pytest.mark.parametrize(
    ("arm", "scheme", "ends"),
    [
        ("rtn", "bf16", ["--config", "C", "--model", "{}/rl_bf16_1_hf", "--scheme", "w4a16"]),
        ("qarl", "w4a16", ["--checkpoint", "{}/rl_w4a16_1"]),
        ("qarl_elsewhere", "w8a8", ["--config", "C", "--model", "{}/rl_w8a8_1_hf", "--scheme", "w4a16"]),
    ],
)
def test_an_arm_trains_in_its_scheme_and_is_served_at_the_grid(tmp_path, said, arm, scheme, ends):
    assert deployed(tmp_path, arm) == [end.format(tmp_path) for end in ends]
    (trains, *exports) = said
    assert trains[0] == "qarl_jax.train"
    assert f"quant.forward={scheme}" in trains
    assert "train.steps=2" in trains
    assert [command[0] for command in exports] == ["qarl_jax.export"] * (arm != "qarl")


@pytest.mark.parametrize("arm", ["rtn", "gptq", "qarl", "qarl_elsewhere", "stock"])
def test_learner_and_sampler_of_a_run_have_one_scheme(tmp_path, said, arm):
    """The config of the plan names bf16 as the sampler's."""
    chosen = "configs/qwen25_coder_0p5b/bf16_tbpo.yaml"
    found = cell.policy(tmp_path, arm, "w4a16", 1, ["--config", chosen], "PY", [])
    quants = [[word for word in said[0] if word.startswith("quant.")]]
    quants += [[word for word in found if word.startswith("quant.")]] * (arm == "gptq")
    for overrides in quants:
        quant = config.load(chosen, overrides).quant
        assert quant.rollout_scheme == quant.forward
        assert f"quant.forward={quant.forward}" in overrides


def test_the_exported_codes_of_the_qarl_run_are_what_stock_vllm_gets(tmp_path, said):
    run = f"{tmp_path}/rl_w4a16_1"
    assert deployed(tmp_path, "stock") == [run, f"{run}_compressed-tensors"]
    assert said[-1][1:] == ("--checkpoint", run, "--format", "compressed-tensors", "--out", f"{run}_compressed-tensors")


def test_gptq_is_calibrated_on_the_trained_policys_responses_and_served_as_it_is(tmp_path, said):
    found = deployed(tmp_path, "gptq")
    model = f"{tmp_path}/rl_bf16_1_hf"
    assert found[2:] == ["--model", f"{model}_gptq_w4a16", *cell.at("w4a16"), "lora={}"]
    assert said[-1] == ("PY", str(cell.HERE / "gptq.py"), model, found[3], "w4a16", f"{model}_responses.jsonl")
    assert said[-2][:7] == ("qarl_jax.evaluate", "--config", "C", "--model", model, "--scheme", "bf16")
    assert "data.source.seed=1" in said[-2]  # other questions than those that judge it
    assert deployed(tmp_path, "gptq", "w3a16")[-3] == "quant.forward=w4a16"  # three-bit codes in four bits
    assert deployed(tmp_path, "untrained") == ["--config", "C", "--scheme", "w4a16"]


def test_the_table_pairs_arms_by_seed_and_question(tmp_path: pathlib.Path):
    rng = np.random.default_rng(0)
    lines = []
    for seed in (1, 2, 3):
        base = rng.random(400) < 0.4
        for arm, right in (("rtn", base), ("gptq", base), ("qarl", base | (rng.random(400) < 0.25))):
            name = f"{arm}_w4a16_{seed}.jsonl"
            rows = [{"uid": f"q/{i}", "num_correct": int(x), "responses": [{}]} for i, x in enumerate(right)]
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
            numbers = {"eval/avg_at_1": right.mean(), "eval/response_len/mean": 90.0, "eval/error_tokens": 1e-4}
            lines.append({"arm": arm, "grid": "w4a16", "seed": seed, "responses": name} | numbers)
    lines.insert(0, lines[0] | {"eval/avg_at_1": 0.0})  # measured once more below
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = table.less(tmp_path, table.read(tmp_path), "qarl", "rtn", "w4a16")
    assert found.seeds == 3
    assert found.mean == pytest.approx(0.6 * 0.25, abs=0.03)  # of those that were wrong, a quarter
    assert 0 < found.half < 0.1
    said = table.table(tmp_path)
    row = next(line for line in said.splitlines() if "| qarl |" in line).split(" | ")
    accuracy, half = row[3].split(" ± ")
    assert accuracy == f"{100 * np.mean([x['eval/avg_at_1'] for x in lines[3::3]]):.1f}"
    # Questions of three seeds are independent here, so that the seeds' scatter adds as much again: sqrt(2 / 1200).
    assert 100 * 1.96 * 0.5 / 1200**0.5 < float(half) < 10
    assert (
        row[4] == row[5] == f"{100 * found.mean:+.1f} ± {100 * found.half:.1f}"
    )  # less rtn, less gptq: equal answers here
    assert "| w4a16 | rtn | 3 |" in said
    assert table.less(tmp_path, table.read(tmp_path), "qarl", "rtn", "w8a8") is None
    (tmp_path / "cells.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line != lines[-3]))
    rows = table.table(tmp_path).splitlines()
    assert " (2 of 3 seeds) | " in next(row for row in rows if "| qarl |" in row)
    assert "of 3 seeds" not in next(row for row in rows if "| rtn |" in row)


def test_a_folder_without_cells_is_told_with_the_command_that_makes_one(tmp_path: pathlib.Path, capsys):
    assert table.main([str(tmp_path)]) == 2
    assert "no cells.jsonl here; make a cell first: python -m experiments.when_to" in capsys.readouterr().err


def test_a_torn_line_is_left_out_and_missing_responses_are_told_with_their_command(tmp_path: pathlib.Path, capsys):
    numbers = {"eval/avg_at_1": 0.5, "eval/response_len/mean": 9.0, "eval/error_tokens": 0.0}
    cell = {"arm": "rtn", "grid": "w4a16", "seed": 1, "responses": "rtn.jsonl"} | numbers
    rows = [json.dumps({"uid": f"q/{i}", "num_correct": i, "responses": [{}]}) for i in (0, 1)]
    (tmp_path / "rtn.jsonl").write_text("\n".join(rows))
    whole = json.dumps(cell)
    (tmp_path / "cells.jsonl").write_text(f"{whole}\n{whole[:60]}\n")
    assert table.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "| w4a16 | rtn | 1 | 50.0 ± " in said.out
    assert "cells.jsonl:2: torn, and left out" in said.err
    (tmp_path / "rtn.jsonl").write_text("\n".join(rows)[:-5])
    assert table.main([str(tmp_path)]) == 2
    assert "rtn.jsonl: missing or torn; make its cell again: python -m experiments.when" in capsys.readouterr().err
