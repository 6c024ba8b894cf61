# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation: what counts as an answer, and the command end to end."""

import dataclasses
import json

import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.rewards import Grader, exact, format, total
from qarl_jax.run import config, evaluation
from qarl_jax.run.estimators import interval
from qarl_jax.types import Prompt, Turn, UserError
from tests.reference import tiny
from tests.reference.rollouts import Characters, completion

pytestmark = pytest.mark.usefixtures("shared_learners")

# ---- answers -------------------------------------------------------------------------------------------------------


def graded(grader, expected, *rows):
    """Groups and parts for prompts with the answers `expected`; each response is text or (text, finish_reason)."""

    prompts = [Prompt(uid=f"p/{i}", tokens=(1,), text="?", answer=answer) for i, answer in enumerate(expected)]
    completions = []
    for row in rows:
        pairs = [response if isinstance(response, tuple) else (response, "stop") for response in row]
        completions.append([completion(map(ord, text), prompt=(1,), finish_reason=reason) for text, reason in pairs])
    return grader.grade(Characters(), prompts, completions)


def measured(cfg, expected, *rows):
    grader = Grader(cfg, max_response_len=16)
    return evaluation.measure(*graded(grader, expected, *rows), grader)


def test_equal_numbers_vote_together_and_truncated_responses_do_not_vote():
    result = measured(exact.Config(), ["0.5"], ["1/2", "7", "7", "0.50", ".5"])
    assert result.metrics["eval/maj_at_5"] == 1.0
    assert result.metrics["eval/avg_at_5"] == pytest.approx(0.6)
    (record,) = result.prompts
    assert (record["majority"], record["majority_correct"], record["num_correct"]) == ("1/2", True, 3)
    cut = measured(exact.Config(), ["7"], [("7", "length"), ("7", "length"), "8", ""])
    assert cut.metrics["eval/maj_at_4"] == 0.0
    assert cut.metrics["eval/no_answer"] == 0.75
    assert cut.metrics["eval/truncated"] == 0.5
    scored = measured(exact.Config(truncated="score"), ["7"], [("7", "length"), ("7", "length"), "8", ""])
    assert scored.metrics["eval/maj_at_4"] == 1.0


def test_numbers_and_their_standard_errors_by_hand():
    result = measured(exact.Config(), ["1", "2"], ["1", "1", "3", "1"], ["2", "5", "5", "6"])
    m = result.metrics
    assert m["eval/reward/mean"] == m["eval/avg_at_4"] == m["eval/pass_at_1"] == pytest.approx((0.75 + 0.25) / 2)
    assert m["eval/reward/stderr"] == pytest.approx(np.std([0.75, 0.25], ddof=1) / np.sqrt(2))
    # 1 - C(1,2)/C(4,2) = 1 and 1 - C(3,2)/C(4,2) = 1/2
    assert m["eval/pass_at_2"] == pytest.approx(0.75)
    assert m["eval/pass_at_2/stderr"] == pytest.approx(np.std([1, 0.5], ddof=1) / np.sqrt(2))
    # Pairs: (1 1) right, (3 1) goes to the first; (2 5) goes to the first, (5 6) wrong.
    assert m["eval/maj_at_2"] == pytest.approx((0.5 + 0.5) / 2)
    assert m["eval/reward/best"] == 1.0
    assert (m["eval/prompts"], m["eval/different_prompts"], m["eval/responses"]) == (2.0, 2.0, 8.0)


def test_a_question_asked_more_often_than_others_widens_the_interval():
    m = measured(exact.Config(), ["1", "1", "1", "2"], *[["1", "3"]] * 4).metrics
    wanted = interval(np.array([0.5, 0.5, 0.5, 0.0]), 16 / (9 + 1), 2)
    assert (m["eval/avg_at_2/low"], m["eval/avg_at_2/high"]) == pytest.approx(wanted)
    assert m["eval/different_prompts"] == 2


def test_tokens_of_an_environment_are_neither_length_nor_errors():
    grader = Grader(exact.Config(), max_response_len=16)
    groups, parts = graded(grader, ["7"], ["7"])
    logprobs = np.log([0.5, 1.0, 1.0, 1e-9]).astype(np.float32)
    episode = dataclasses.replace(
        completion(map(ord, "1??7"), logprobs), turns=(Turn(start=0, end=1), Turn(start=3, end=4))
    )
    numbers = evaluation.measure([dataclasses.replace(groups[0], completions=(episode,))], parts, grader).metrics
    assert (numbers["eval/response_len/mean"], numbers["eval/error_tokens"]) == (2, 0.5)


def test_an_environments_words_are_no_answer_of_the_policy():
    grader = Grader(exact.Config(extract="last_number"), max_response_len=16)
    episode = dataclasses.replace(completion(map(ord, "x7no")), turns=(Turn(start=0, end=1), Turn(start=2, end=4)))
    prompt = Prompt(uid="p", tokens=(1,), text="?", answer="7")
    result = evaluation.measure(*grader.grade(Characters(), [prompt], [[episode]]), grader)
    (record,) = result.prompts[0]["responses"]
    assert (record["text"], record["answer"], record["correct"]) == ("x7no", None, False)
    assert result.metrics["eval/no_answer"] == 1.0


def test_a_score_of_one_prompt_has_a_wide_interval_and_no_standard_error():
    m = measured(exact.Config(), ["1"], ["1"]).metrics
    assert m["eval/reward/mean"] == m["eval/pass_at_1"] == 1.0
    assert (m["eval/reward/low"], m["eval/reward/high"]) == (pytest.approx(0.2065, abs=1e-4), 1.0)
    assert not any(key.endswith("stderr") for key in m)


def test_in_a_sum_of_rewards_the_verifier_says_what_is_correct():
    terms = (total.Term(reward=format.Config(), coef=0.1), total.Term(reward=exact.Config(), coef=0.5))
    result = measured(total.Config(terms=terms), ["7"], ["7", "8"])
    assert result.metrics["eval/avg_at_2"] == 0.5
    assert result.metrics["eval/reward/mean"] < 0.5


def test_the_table_shows_every_estimate():
    text = evaluation.table(measured(exact.Config(), ["1"], ["1", "2", "1", "1"]).metrics)
    assert "0.7500              0.1179 to 0.9854" in text
    for label in ("reward", "avg@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "truncated", "stderr", "95 %"):
        assert label in text


# ---- configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"num_samples": 4, "temperature": 0.0}, "greedy responses to a prompt are all the same"),
    ],
)
def test_impossible_evaluations_are_refused(tmp_path, section, says):
    tree = {"model": {"path": "m"}, "data": {"source": {"name": "jsonl", "path": "d"}}, "eval": section}
    with pytest.raises(UserError, match=says):
        config.from_dict(tree)


def test_a_run_that_resumes_forgets_the_evaluations_of_later_versions(tmp_path):
    for version in (0, 2, 4):
        evaluation.record(tmp_path, version, evaluation.Evaluation(metrics={"eval/x": 1.0}, prompts=[]))
    assert [one["version"] for one in evaluation.history(tmp_path, up_to=2)] == [0, 2]
    for name in evaluation.FILES:
        assert [json.loads(line)["version"] for line in (tmp_path / name).read_text().splitlines()] == [0, 2]


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(compiled_programs, tmp_path_factory):
    """A finished run, evaluated with four samples to a prompt."""
    world = tiny.World(tmp_path_factory.mktemp("world")).changed(
        eval={"num_samples": 4, "temperature": 1.0}, train={"steps": 1}
    )
    assert train.main(world.command()) == 0
    return world


def as_json(capsys, *arguments):
    capsys.readouterr()
    assert evaluation.main([*map(str, arguments), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


@pytest.mark.slow
def test_a_run_is_evaluated_as_it_evaluated_itself(run, capsys, tmp_path):
    out = tmp_path / "responses.jsonl"
    found = as_json(capsys, "--checkpoint", run.run_dir, "--out", out)
    assert found == {key: value for key, value in run.records("eval")[-1].items() if key.startswith("eval/")}
    assert {
        "eval/avg_at_4",
        "eval/pass_at_1",
        "eval/pass_at_4",
        "eval/maj_at_4",
        "eval/maj_at_4/stderr",
    } <= found.keys()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == found["eval/prompts"] == 4
    rewards = [[response["reward"] for response in record["responses"]] for record in records]
    assert np.shape(rewards) == (4, 4)
    assert np.mean(rewards) == pytest.approx(found["eval/reward/mean"])
    correct = run.records("eval_correct")
    assert [one["version"] for one in correct] == [one["version"] for one in run.records("eval")]
    assert correct[-1]["num_correct"] == {record["uid"]: record["num_correct"] for record in records}


@pytest.mark.slow
def test_steps_folders_schemes_and_sampling_can_be_chosen(run, capsys):
    own = as_json(capsys, "--checkpoint", run.run_dir)
    step = as_json(capsys, "--checkpoint", run.run_dir / "checkpoints" / "step_00000001")
    assert step == own
    folder = as_json(capsys, *run.command(), "--model", run.model)
    start = run.records("eval")[0]
    assert folder == {key: value for key, value in start.items() if key.startswith("eval/")}
    assert folder != own
    full = as_json(capsys, *run.command(), "--scheme", "bf16")
    assert full != folder
    assert as_json(capsys, *run.command("quant.forward=w4a16:g128"), "--scheme", "bf16") == full
    nested = run.command("quant.forward=w2a16_midpoint:g32", "train.widths=[8,2]")
    assert as_json(capsys, *nested, "--scheme", "w4a16:g32") == folder  # a scheme of one width
    narrow = as_json(capsys, "--checkpoint", run.run_dir, "eval.top_p=0.5", "eval.num_samples=3", "eval.num_prompts=0")
    assert narrow["eval/prompts"] > 4
    assert "eval/pass_at_3" in narrow


@pytest.mark.slow
def test_other_data_can_be_evaluated(run, capsys, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    overrides = [f"eval.data.source.path={file}", "eval.data.source.name=jsonl", "eval.data.template=raw"]
    found = as_json(capsys, "--checkpoint", run.run_dir, *overrides, "reward.name=exact")
    assert found["eval/prompts"] == 2


@pytest.mark.slow
def test_the_bridge_can_be_the_engine(run, capsys):
    found = as_json(capsys, "--checkpoint", run.run_dir, "--engine", "vllm", "rollout.engine.engine=fake")
    assert found["eval/prompts"] == 4


@pytest.mark.slow
def test_a_reader_gets_a_table(run, capsys):
    capsys.readouterr()
    assert evaluation.main(["--checkpoint", str(run.run_dir)]) == 0
    said = capsys.readouterr().out
    assert "version 1, w4a16:g32, engine jax" in said
    assert "4 prompts x 4 samples, temperature 1" in said
    assert "maj@4" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --config FILE, --checkpoint RUN or both"),
        (["--checkpoint", "{run}", "--out", "{run}"], "not a file in a folder that exists"),
        (["--checkpoint", "{run}/nothing"], "no checkpoint"),
        (["--checkpoint", "assets/tiny-qwen3"], "evaluate takes it as --model"),
        (["{run}"], "is a run: --checkpoint"),
        (["--checkpoint", "{run}", "eval.num_sample=3"], "num_samples"),
        (["--checkpoint", "{run}", "--scheme", "w3a3"], "w3a3"),
        (["--checkpoint", "{run}", "data.holdout=0.5"], "data.holdout=0.5 is above the run's 0.2"),
    ],
)
def test_mistakes_are_told_in_one_sentence(run, capsys, arguments, says):
    capsys.readouterr()
    assert evaluation.main([argument.replace("{run}", str(run.run_dir)) for argument in arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert any(word in error for word in says.split("|")), error
