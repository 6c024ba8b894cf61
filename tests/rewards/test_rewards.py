# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Every reward gives every text a defined number, and the right one to the tables below."""

import contextlib
import dataclasses
import os

import numpy as np
import pytest

from qarl_jax.data import make_char_tokenizer
from qarl_jax.rewards import (
    Grader,
    Sample,
    code,
    environment,
    exact,
    format,
    function,
    judge,
    math_verify,
    overlong,
    pool,
    reasoning_gym,
    reward_model,
    total,
)
from qarl_jax.types import Prompt, UserError
from tests.reference import reward_servers
from tests.reference import rewards as user
from tests.reference.bridge_world import alive, wait_for
from tests.reference.rollouts import Characters, completion

ORIGIN = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}, "seed": 3, "size": 10, "index": 4}

HOSTILE = [
    "",
    " \n",
    "\x00",
    "\ud800",
    "<answer>",
    "</think><think>",
    "\\boxed{",
    "\\boxed{}" * 200,
    "9" * 5000,
    "((((" * 500,
    "__import__('os')._exit(1)",
    "\u202e42",
]


def prompt(answer="42", **meta):
    return Prompt(uid="t/0", tokens=(3,), text="?", answer=answer, meta=meta)


def sample(text, answer="42", finish_reason="stop", num_tokens=10, **meta):
    return Sample(prompt=prompt(answer, **meta), text=text, num_tokens=num_tokens, finish_reason=finish_reason)


POOL = {"workers": 1, "timeout_s": 60.0}
CONFIGS = {
    "exact": exact.Config(),
    "math_verify": math_verify.Config(**POOL),
    "reasoning_gym": reasoning_gym.Config(**POOL),
    "format": format.Config(),
    "overlong": overlong.Config(buffer_len=8),
    "python": function.Config(path=f"{user.__file__}:equal"),
    "code": code.Config(**POOL),
    "environment": environment.Config(),
}
# What a prompt's row has to hold besides its answer.
COLUMNS = {"code": {"prompt": "def f():", "entry_point": "f", "test": "def check(f):\n    assert f() == 1\n"}}


@pytest.fixture
def judge_config():
    with reward_servers.serving() as server:  # it finds no good word in these texts
        yield judge.Config(url=server.url, model="m", best=1.0, prompt="worth 0 {{ response }}")


@pytest.fixture
def reward_model_config(tmp_path):
    path = reward_servers.reward_model(tmp_path, deviation=0.0)
    return reward_model.Config(path=str(path), dtype="float32", **POOL)


# ---- the battery: a line in REWARDS enrols the newcomer
# ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", total.REWARDS)
def test_any_text_gets_a_finite_reward_in_order(name, request):
    module = total.REWARDS[name]
    serves = module in (judge, reward_model)
    cfg = request.getfixturevalue(f"{name}_config") if serves else CONFIGS.get(name) or module.Config()
    reward = module.Reward(cfg, 32)
    reasons = ("stop", "length", "abort")
    columns = {"origin": ORIGIN} | COLUMNS.get(name, {})
    samples = [sample(text, finish_reason=reason, **columns) for text in HOSTILE for reason in reasons]
    try:
        scores = reward.score(samples)
        assert scores.shape == (len(samples),)
        assert scores.dtype == np.float32
        assert np.isfinite(scores).all()
        assert (scores <= 0).all(), f"a hostile text earns reward: give {name} a config in CONFIGS that expects more"
        np.testing.assert_array_equal(reward.score(samples[::-1]), scores[::-1])
        assert reward.score([]).shape == (0,)
    finally:
        reward.close()


# ---- tables
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason", "cfg", "expected"),
    [
        ("42", "stop", {}, 1),
        ("the sum is\n42", "stop", {}, 1),
        ("42", "length", {}, 0),
        ("42", "abort", {}, 0),
        ("42", "length", {"truncated": "score"}, 1),
        ("41", "stop", {}, 0),
        ("<answer>42</answer>", "stop", {"extract": "tag"}, 1),
        ("42", "stop", {"extract": "tag"}, 0),
    ],
)
def test_exact_table(text, reason, cfg, expected):
    assert exact.Reward(exact.Config(**cfg), 32).score([sample(text, finish_reason=reason)]) == [expected]


@pytest.mark.parametrize(
    ("text", "cfg", "expected"),
    [
        ("<think>a</think><answer>b</answer>", {}, 1),
        (" <think>a</think>\n<answer>b</answer>\n", {}, 1),
        ("<think>a</think> so <answer>b</answer>", {}, 0),
        ("<answer>b</answer><think>a</think>", {}, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", {}, 0),
        ("<think><answer>b</answer></think>", {}, 0),
        ("a</think><answer>b</answer>", {"opened": True}, 1),
        ("<think>a</think><answer>b</answer>", {"opened": True}, 0),
        ("<r>x</r>", {"sections": ("r",)}, 1),
        ("", {}, 0),
    ],
)
def test_format_table(text, cfg, expected):
    assert format.Reward(format.Config(**cfg), 32).score([sample(text)]) == [expected]


@pytest.mark.parametrize(
    ("length", "reason", "expected"),
    # DAPO eq. 13 with L = 100, C = 20: zero up to 80, then (80 - n) / 20.
    [
        (0, "stop", 0.0),
        (80, "stop", 0.0),
        (85, "stop", -0.25),
        (100, "stop", -1.0),
        (100, "length", -1.0),
        (120, "stop", -1.0),
    ],
)
def test_overlong_table(length, reason, expected):
    reward = overlong.Reward(overlong.Config(buffer_len=20), 100)
    assert reward.score([sample("x", finish_reason=reason, num_tokens=length)]) == [np.float32(expected)]


def test_overlong_follows_the_limit_a_response_had():
    reward = overlong.Reward(overlong.Config(buffer_len=20), 100)
    samples = [dataclasses.replace(sample("x", num_tokens=45), max_tokens=limit) for limit in (0, 50, 60)]
    assert reward.score(samples).tolist() == [0.0, -0.75, -0.25]
    own = overlong.Reward(overlong.Config(buffer_len=20, max_len=100), 200)
    assert own.score(samples).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("so $x = \\frac{3}{6}$", "\\frac{1}{2}", 1),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1),
        ("\\boxed{(1, 2)}", "(1,2)", 1),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("The answer is 42.", "42", 1),
        ("\\boxed{41}", "42", 0),
        ("\\boxed{}", "42", 0),
        # What math-verify alone gets wrong (the module's text), and what hangs on the version of its parser.
        ("\\fbox{42}", "42", 1),
        ("41, no: \\fbox{41}", "42", 0),
        ("\\boxed{4.5 \\times 10^{33}}", "4.5e33", 1),
        ("\\boxed{1.6 \\cdot 10^{-19} \\text{ C}}", "1.6e-19", 1),
        ("\\boxed{1.7 \\times 10^{-19}}", "1.6e-19", 0),
        ("\\boxed{4500}", "4.5e3", 1),
        ("\\boxed{4210_5}", "4210_7", 0),
        ("\\boxed{4210_{5}}", "4210_5", 1),
        ("\\boxed{4210}", "4210_5", 1),
        ("so\n#### \u22125", "-5", 1),
        ("\\boxed{50\\%}", "50", 1),
        ("\\boxed{50\\%}", "0.5", 1),
        ("I do not know.", "42", 0),
        ("\\boxed{2 thirds}", "2", 0),
        ("\\boxed{7 wrong}", "7", 0),
        ("\\boxed{18 apples}", "18", 1),
    ],
)
def test_math_verify_table(math_reward, text, answer, expected):
    assert math_reward.score([sample(text, answer)]) == [expected]


@pytest.fixture(scope="module")
def math_reward():
    reward = math_verify.Reward(math_verify.Config(**POOL), 32)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def gym_entry():
    import reasoning_gym as gym

    config = dict(ORIGIN["config"])
    return gym.create_dataset("chain_sum", seed=ORIGIN["seed"], size=ORIGIN["size"], **config)[ORIGIN["index"]]


@pytest.mark.slow
def test_the_gym_scorer_sees_its_own_task_and_only_a_full_score_counts(gym_entry):
    answer = gym_entry["answer"]
    texts = [answer, f"I think\n{answer}", f"<answer>{answer}</answer>", f"{answer} or so", str(int(answer) + 1)]
    samples = [sample(text, answer, origin=ORIGIN) for text in texts]
    for threshold, expected in ((1.0, [1, 1, 1, 0, 0]), (None, None)):
        reward = reasoning_gym.Reward(reasoning_gym.Config(threshold=threshold, **POOL), 32)
        try:
            scores = reward.score(samples)
        finally:
            reward.close()
        if expected is not None:
            assert scores.tolist() == expected
        else:  # the library's partial credit: the answer's share of the text
            assert scores[3] == np.float32(len(answer) / len(f"{answer} or so"))


def test_the_gym_scorer_refuses_prompts_of_another_source():
    with pytest.raises(UserError, match=r"is not from data\.source"):
        reasoning_gym.Reward(reasoning_gym.Config(), 32).score([sample("1")])


# ---- user functions
# ---------------------------------------------------------------------------------------------------


def test_a_user_function_gets_text_answer_meta_and_options():
    cfg = function.Config(path=f"{user.__file__}:equal", options={"bonus": 0.5})
    assert function.Reward(cfg, 32).score([sample("42", extra=0.25)]) == [1.75]


def test_a_user_function_is_found_by_module_name():
    with contextlib.closing(function.Reward(function.Config(path="tests.reference.rewards:equal"), 32)) as reward:
        assert reward.score([sample("42"), sample("41")]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math", "expected package.module:function"),
        ("math:no_such", "math:no_such did not start: math has no function 'no_such'"),
        ("no_such_module:f", "importing no_such_module failed"),
        ("/nowhere/file.py:f", "no such file"),
        ("nowhere.py:f", f"no such file nowhere.py in {os.getcwd()}"),
    ],
)
def test_a_wrong_function_path_is_refused(path, message):
    with pytest.raises(UserError, match=message):
        function.Reward(function.Config(path=path), 32)


def test_a_file_that_exits_when_it_is_imported_is_refused(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"leaves\.py failed: SystemExit: 0"):
        function.Reward(function.Config(path=f"{tmp_path}/leaves.py:f"), 32)


@pytest.fixture(scope="module")
def bad_reward():
    """One whose function does what it is told, and with it the patience of three seconds."""
    with contextlib.closing(function.Reward(function.Config(path=f"{user.__file__}:bad", timeout_s=3.0), 32)) as reward:
        yield reward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise", "KeyError: 'oops'"),
        ("exit", "SystemExit: 0"),
        ("_exit", "it ended its process, with exit code 0"),
        ("hang", "it took longer than 3 s"),
        ("inf", "returned inf"),
        ("nan", "returned nan"),
        ("1e300", r"returned 1e\+300"),
        ("text", "could not convert"),
        ("none", "TypeError"),
        ("list", "TypeError"),
    ],
)
def test_a_failing_user_function_stops_the_run_and_names_function_and_prompt(bad_reward, text, message):
    with pytest.raises(UserError, match=message) as caught:
        bad_reward.score([sample("1"), sample(text), sample("1")])
    assert str(caught.value).startswith(f"reward function {user.__file__}:bad ")
    assert "on prompt t/0: " in str(caught.value)
    assert bad_reward.score([sample("1")]) == [1]  # and the next one is graded


def test_a_user_function_reads_none_of_the_trainers_messages(bad_reward):
    assert bad_reward.score([sample("read"), sample("1")]).tolist() == [0, 1]


def test_what_a_user_function_forks_ends_with_the_reward_and_answers_nothing(tmp_path):
    noted = tmp_path / "pids"
    with contextlib.closing(function.Reward(function.Config(path=f"{user.__file__}:bad"), 32)) as reward:
        assert reward.score([sample(f"fork {noted}"), sample("1"), sample("1")]).tolist() == [1, 1, 1]
        (child,) = map(int, noted.read_text().split())
        assert alive(child)
    wait_for(lambda: not alive(child))


def test_a_user_function_that_takes_long_is_spoken_of_and_an_interrupt_need_not_wait(monkeypatch):
    monkeypatch.setattr(pool, "_NOTICE_S", 0.2)
    with contextlib.closing(function.Reward(function.Config(path=f"{user.__file__}:bad", timeout_s=300), 32)) as reward:
        said = []

        def say(text):
            said.append(text)
            raise KeyboardInterrupt

        reward.pool.say = say
        with pytest.raises(KeyboardInterrupt):
            reward.score([sample("hang")] * 5)
        assert len(said) == 1
        assert f"{user.__file__}:bad on prompt t/0: 0 s by now, ended after 300 s" in said[0]
        reward.pool.say = said.append  # a new process takes its time to start on a busy machine
        assert reward.score([sample("1")]) == [1]


# ---- sums and grading
# ---------------------------------------------------------------------------------------------------


def test_a_sum_weighs_its_terms_and_reports_each():
    terms = (
        total.Term(reward=exact.Config()),
        total.Term(reward=format.Config(sections=("answer",)), coef=0.1),
        total.Term(reward=overlong.Config(buffer_len=10), coef=0.5),
        total.Term(reward=exact.Config(extract="tag"), coef=0.0),
    )
    grader = Grader(total.Config(terms=terms), max_response_len=20)
    values, parts = grader.score([sample("<answer>42</answer>", num_tokens=15), sample("41", num_tokens=5)])
    # 1 + 0.1 - 0.5 * 0.5, and nothing.
    np.testing.assert_allclose(values, [0.85, 0.0], rtol=1e-6)
    assert {name: part.tolist() for name, part in parts.items()} == {
        "exact": [1, 0],
        "format": [1, 0],
        "overlong": [-0.5, 0],
        "exact#2": [1, 0],
    }


def test_grading_keeps_prompts_samples_and_rewards_together():
    prompts = [dataclasses.replace(prompt(str(i)), uid=str(i)) for i in range(3)]
    texts = [["0", "1"], ["1"], ["", "2", "x"]]
    completions = [[completion(map(ord, text)) for text in group] for group in texts]
    groups, parts = Grader(exact.Config(), max_response_len=4).grade(Characters(), prompts, completions)
    assert [group.rewards.tolist() for group in groups] == [[1, 0], [1], [0, 1, 0]]
    assert [group.prompt.uid for group in groups] == ["0", "1", "2"]
    assert groups[2].texts == ("", "2", "x")
    assert parts["exact"].tolist() == [1, 0, 1, 0, 1, 0]


def test_tags_that_are_special_tokens_are_graded_and_the_end_token_is_not(tmp_path):
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    tokenizer = make_char_tokenizer("0123456789+", tmp_path, extra_tokens=tags)
    drawn = tokenizer("<think>1+1</think><answer>2</answer><eos>").input_ids
    for cfg in (format.Config(), exact.Config(extract="tag"), exact.Config(extract="auto")):
        groups, _ = Grader(cfg, max_response_len=40).grade(tokenizer, [prompt("2")], [[completion(drawn)]])
        assert groups[0].rewards.tolist() == [1], cfg
    assert groups[0].texts == ("<think>1+1</think><answer>2</answer>",)


@pytest.mark.parametrize(
    "make",
    [
        lambda: total.Config(terms=()),
        lambda: total.Term(reward=exact.Config(), coef=float("nan")),
        lambda: format.Config(sections=()),
        lambda: overlong.Config(buffer_len=0),
        lambda: overlong.Reward(overlong.Config(buffer_len=50), 32),
        lambda: math_verify.Config(timeout_s=0.0),
        lambda: math_verify.Config(workers=-1),
        lambda: math_verify.Config(memory_mb=1),
        lambda: math_verify.Config(recycle_after=-1),
        lambda: reasoning_gym.Config(threshold=2.0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(UserError):
        make()
