# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about files that come with the package, and about the run that `qarl init` writes."""

import json
import os
import pathlib
import shlex

import pytest

from qarl_jax.loop import step_metrics
from qarl_jax.run import config, init, shipped
from qarl_jax.types import UserError
from tests.reference.tiny import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_shipped_config_is_found_by_path_and_by_name_and_its_policy_with_it():
    for name in ("quickstart", "configs/quickstart.yaml", QUICKSTART):
        assert shipped.config_file(name) == QUICKSTART
    assert shipped.config_file("papers/arms").endswith("configs/papers/arms.yaml")
    assert config.load("quickstart").model.path == str(ROOT / "assets" / "tiny-qwen3")


def test_a_file_of_the_users_own_comes_first(tmp_path):
    for name in ("configs/quickstart.yaml", "assets/tiny-qwen3/config.json", "quickstart/config.yaml"):
        pathlib.Path(name).parent.mkdir(parents=True)
        pathlib.Path(name).write_text(pathlib.Path(QUICKSTART).read_text())
    assert shipped.config_file("configs/quickstart.yaml") == "configs/quickstart.yaml"
    assert shipped.config_file("quickstart") == "quickstart/config.yaml"
    assert config.load("quickstart").model.path == "assets/tiny-qwen3"


def test_a_name_that_no_config_has_is_told_with_those_near():
    with pytest.raises(UserError, match=r"quickstrat: no such config\. Did you mean quickstart\?.*quickstart_vllm"):
        config.load("quickstrat")
    with pytest.raises(UserError, match=r"mine\.yaml: no such config file"):
        config.load("mine.yaml")


def test_a_new_run_names_its_own_files_and_replaces_none(capsys):
    assert init.main(["my_run/"]) == 0
    assert "next: python -m qarl_jax.train my_run" in capsys.readouterr().out
    cfg = config.load("my_run")
    assert (cfg.run_dir, cfg.data.source.path) == ("my_run/run", "my_run/data.jsonl")
    assert cfg.reward.path == "my_run/reward.py:graded"
    assert sorted(os.listdir("my_run")) == ["config.yaml", "data.jsonl", "reward.py"]
    pathlib.Path("my_run/config.yaml").unlink()
    assert init.main(["my_run"]) == 2
    assert not os.path.exists("my_run/config.yaml")
    assert "my_run/reward.py is there already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["my run", "mine, first", "a: b #1"])
def test_a_new_run_may_have_a_name_with_spaces_and_signs(name, capsys):
    assert init.main([name]) == 0
    assert f"next: python -m qarl_jax.train '{name}'" in capsys.readouterr().out
    cfg = config.load(name)
    assert (cfg.run_dir, cfg.data.source.path) == (f"{name}/run", f"{name}/data.jsonl")
    assert cfg.reward.path == f"{name}/reward.py:graded"
    lines = [shlex.split(line, comments=True) for line in step_metrics.next_steps(cfg)[1:]]
    assert [line[-1] for line in lines] == [f"{name}/run", f"{name}/run", "models/run"]


def test_the_data_of_a_new_run_is_right_and_its_reward_tells_near_from_far():
    init.write(".")
    rows = [json.loads(line) for line in pathlib.Path("data.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) >= 200
    assert all(str(eval(row["question"].rstrip("="))) == row["answer"] for row in rows)
    space = {}
    exec(pathlib.Path("reward.py").read_text(), space)
    assert [space["graded"](text, "5", {}, near=0.2) for text in ("4+1\n5", "4", "8", "five")] == [1.0, 0.2, 0.0, 0.0]


@pytest.mark.slow
def test_a_new_run_trains_as_it_is():
    from qarl_jax import train

    init.write("mine")
    small = ["train.steps=2", "train.prompts_per_step=8", "train.prompts_per_update=4", "train.micro_batch_rows=8"]
    assert train.main(["mine", *small, "eval.num_prompts=8", "log.trackers=[]"]) == 0
    records = [json.loads(line) for line in pathlib.Path("mine/run/metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1]
    assert all(0 < record["reward/mean"] < 1 for record in records)
