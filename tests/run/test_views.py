# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Views: accuracy by the base's pass rate, the same questions with a plan or facts, and their figure."""

import json

import pytest

from qarl_jax import plot, train
from qarl_jax.run import build, evaluation, views
from qarl_jax.types import UserError
from tests.reference import tiny


def record(prompt, correct, of=4):
    return {"prompt": prompt, "num_correct": correct, "responses": [{}] * of}


def test_levels_are_the_bases_pass_rates_and_their_means_the_policys():
    rates = {"a": 0.0, "b": 0.0, "c": 0.25, "d": 0.26, "e": 1.0}
    records = [record("a", 0), record("b", 2), record("c", 1), record("d", 4), record("e", 4)]
    found = views.by_difficulty(records, rates)
    assert {key: value for key, value in found.items() if key.count("/") == 1} == {
        "eval/difficulty_0": 0.25,
        "eval/difficulty_25": 0.25,
        "eval/difficulty_50": 1.0,
        "eval/difficulty_100": 1.0,
    }
    assert found["eval/difficulty_0/prompts"] == 2
    assert found["eval/difficulty_0/low"] < 0.25 < found["eval/difficulty_0/high"]
    twice = views.by_difficulty([*records, record("a", 0), record("b", 2)], rates)  # two questions, each asked twice
    assert twice["eval/difficulty_0/low"] == found["eval/difficulty_0/low"]
    with pytest.raises(UserError, match="1 of 2 questions are not in it"):
        views.by_difficulty([record("a", 1), record("z", 1)], rates)


@pytest.mark.slow
def test_a_run_is_seen_in_every_view_and_drawn(tmp_path, capsys):
    world = tiny.World(tmp_path)
    rows = [
        {"prompt": f"{i}+{j}=", "answer": str(i + j), "solution": f"add {i}\n{i}+{j}={i + j}\n{i + j}"}
        for i in range(10)
        for j in range(10)
    ]
    world.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    world = world.changed(train={"steps": 1}, eval={"at_start": False, "at_end": False, "num_prompts": 10})
    assert train.main(world.command()) == 0
    run, base = str(world.run_dir), tmp_path / "base.jsonl"
    four = ["eval.num_samples=4", "eval.temperature=1.0"]
    assert evaluation.main(["--checkpoint", run, "--out", str(base), *four]) == 0
    capsys.readouterr()
    asked = ["--checkpoint", run, "--view", "difficulty,plan", "--base", str(base), "--json", *four]
    assert evaluation.main(asked) == 0
    lines = capsys.readouterr().out
    (world.run_dir / "views.jsonl").write_text(lines)
    found = [json.loads(line) for line in lines.splitlines()]
    assert [each["view"] for each in found] == ["difficulty", "plan"]
    own = [json.loads(line) for line in base.read_text().splitlines()]
    assert sum(v for k, v in found[0].items() if k.endswith("/prompts") and "difficulty" in k) == len(own)
    # The same policy, the same random numbers: its level is its own pass rate.
    never = [r for r in own if r["num_correct"] == 0]
    assert found[0].get("eval/difficulty_0", 0.0) == 0.0
    assert found[0].get("eval/difficulty_0/prompts", 0) == len(never)
    assert f"views_{world.run_dir.name}.png" in [path.name for path in plot.draw([run], tmp_path / "figures")]


def test_a_base_of_other_questions_is_refused_before_the_model_is_loaded(capsys, tmp_path, monkeypatch):
    world, base = tiny.World(tmp_path), tmp_path / "base.jsonl"
    base.write_text(json.dumps(record("another question", 1)) + "\n")
    monkeypatch.setattr(build, "load_policy", lambda *_, **__: pytest.fail("the model was loaded"))
    assert evaluation.main([*world.command(), "--view", "difficulty", "--base", str(base)]) == 2
    assert "questions are not in it; evaluate the base on the same data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--view", "plans"], "Did you mean plan"),
        (["--view", "difficulty"], "go together"),
        (["--base", "x.jsonl"], "go together"),
    ],
)
def test_mistakes_are_told_in_one_sentence(arguments, said, capsys, tmp_path):
    world = tiny.World(tmp_path)
    assert evaluation.main([*world.command(), *arguments]) == 2
    assert said in capsys.readouterr().err
