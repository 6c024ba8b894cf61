# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The plan of RL at two and three bits can be run: its commands and arms are configs that load."""

import json
import pathlib
import re
import shlex
import sys

import pytest

from experiments.qat import report
from qarl_jax.qat import command
from qarl_jax.run import config
from qarl_jax.typed_config import load

ROOT = pathlib.Path(__file__).parents[2]
PLAN = (ROOT / "experiments" / "qat" / "PLAN.md").read_text()


def test_the_commands_are_configs_that_load():
    (block,) = re.findall(r"```bash\n(.*?)```", PLAN, re.S)
    qat, rl = (shlex.split(line)[4:] for line in block.replace("\\\n", " ").splitlines())
    made = load.load(command.Config, ROOT / qat[0], qat[1:])
    cfg = config.load(ROOT / rl[0], rl[1:])
    assert (made.out, made.stages[-1]) == (cfg.model.path, cfg.quant.forward)
    words = shlex.split(re.search(r"Three bits: `(.*?)`", PLAN).group(1))
    assert load.load(command.Config, ROOT / qat[0], [*qat[1:], *words]).stages[-1] == "w3a16_asym:g32"
    words = shlex.split(re.search(r"begin with `(.*?)`\.", PLAN, re.S).group(1))
    assert load.load(command.Config, ROOT / qat[0], [*qat[1:], *words]).widths == (8, 4, 2)


@pytest.mark.parametrize("bits", [2, 3])
def test_the_arms_are_aligned_or_quantized_rollout(bits):
    arms = re.findall(r"^\| `(\w+)` \| `(.*?)` \| `(.*?)` \|$", PLAN, re.M)
    assert [name for name, *_ in arms] == ["qarl", "rollout", "nested_two", "nested_all"]
    for name, file, said in arms:
        given = said.replace("BITS", str(bits)).split()
        cfg = config.load(ROOT / "configs" / "qwen25_coder_0p5b" / file, given)
        assert cfg.quant.rollout_scheme == given[0].partition("=")[2]
        assert cfg.quant.forward == ("bf16" if name == "rollout" else cfg.quant.rollout_scheme)
        assert cfg.train.steps == 30


def test_the_report_pairs_arms_by_seed_and_question(tmp_path, capsys, monkeypatch):
    answers = {"qarl": ("1100", "1110"), "rollout": ("1000", "1100")}
    lines = [{"model": "one"}] + [
        {"start": "rounding", "scheme": "w2a16_asym:g32", "arm": arm, "seed": seed, "held_out": digits}
        for arm, each in answers.items()
        for seed, digits in enumerate(each, 1)
    ]
    lines[1:3] = [lines[1] | {"seed": 3, "held_out": "0000"}, *lines[2:0:-1]]  # no pair, and another order
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "runs.jsonl")])
    report.main()
    said = capsys.readouterr().out
    assert "qarl     +41.67 +- " in said
    assert "by seed 0.00, 75.00, 50.00" in said
    assert "qarl less rollout +25.00 +- 45.93  of seeds 1, 2\n" in said
    (tmp_path / "runs.jsonl").write_text(json.dumps(lines[-1]) + "\n" + json.dumps(lines[-1]))
    with pytest.raises(SystemExit, match=r"two runs of .*, seed"):
        report.main()


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"held_out": "110"}, ":2: 3 questions, and 4 of an earlier run"),
        ({"held_out": "1120"}, ":2: held_out needs a digit, 0 or 1,"),
        ({"held_out": ""}, ":2: held_out needs a digit, 0 or 1,"),
        ('{"start": "round', ":2: not a whole line of JSON"),
    ],
)
def test_the_report_refuses_answers_that_cannot_be_compared(line, error, tmp_path):
    file, run = tmp_path / "runs.jsonl", {"start": "rounding", "scheme": "w2a16_asym:g32", "arm": "qarl", "seed": 1}
    second = line if isinstance(line, str) else json.dumps(run | {"arm": "rollout"} | line)
    file.write_text(f"{json.dumps(run | {'held_out': '1100'})}\n{second}\n")
    with pytest.raises(SystemExit, match=error):
        report.arms(file)
    with pytest.raises(SystemExit, match=r"missing.jsonl: cannot be read \(No such file"):
        report.arms(tmp_path / "missing.jsonl")
