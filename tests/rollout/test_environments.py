# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments in their processes: what they answer, how long they may take, and that a fault stays in its episode."""

import contextlib
import importlib.util
import pathlib

import pytest

from qarl_jax.rollout import environments
from qarl_jax.rollout.environments import Calculator, Custom, Episodes, Python
from qarl_jax.types import UserError

CALCULATOR = pathlib.Path(environments.__file__).with_name("_calculator.py")

# Does what a turn says.
OBEDIENT = """
import asyncio, os, time

class Obedient:
    def __init__(self, start="hello"):
        self.start, self.turns = start, 0

    async def reset(self, task):
        return f"{self.start} {task['uid']} {task['answer']} {task['meta']['level']}"

    async def step(self, text):
        self.turns += 1
        if text == "raise":
            raise RuntimeError("no such door")
        if text == "sleep":
            await asyncio.sleep(60)
        if text == "block":
            time.sleep(60)
        if text == "exit":
            os._exit(3)
        if text == "nan":
            return "", float("nan"), False
        if text == "chat":
            return [{"role": "tool", "content": "42"}], 0.0, False
        return f"{text} {self.turns}", 0.5, text == "bye"

class Plain:
    def reset(self, task):
        return None

    def step(self, text):
        if text == "sleep":
            time.sleep(2)
        return text.upper(), 1, True
"""
TASK = {"uid": "t/1", "text": "", "answer": "7", "meta": {"level": 3}}


@pytest.fixture
def made(tmp_path):
    """make(cfg) -> Episodes, closed at the end; without a cfg those of OBEDIENT."""
    (tmp_path / "doors.py").write_text(OBEDIENT)
    with contextlib.ExitStack() as stack:

        def make(cfg=None, name="Obedient", **settings):
            settings = {"timeout_s": 5.0} | settings
            cfg = cfg or Custom(path=f"{tmp_path}/doors.py:{name}", **settings)
            return stack.enter_context(contextlib.closing(Episodes(cfg)))

        yield make


def asked(episodes, *calls):
    futures = [episodes.ask(call) for call in calls]
    return [future.result(timeout=60) for future in futures]


def test_the_calculator_reads_arithmetic_and_nothing_else():
    spec = importlib.util.spec_from_file_location("calculator", CALCULATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for expression, value in [
        ("12 * 3.5", "42"),
        ("(1 + 2) ** 3 - -4", "31"),
        ("7 / 2", "3.5"),
        ("7 // 0", "error: division by zero"),
        ("2 ** 10 ** 9", "error: not an expression"),
        ("__import__('os')", "error: not an expression"),
        ("(-8) ** 0.5", "error: not an expression"),
        ("True + 1", "error: not an expression"),
        ("1" * 300, "error: not an expression"),
        ("(" * 150, "error: not an expression"),
        ("", "error: not an expression"),
    ]:
        assert module.compute(expression) == value, expression


def test_a_calculator_computes_the_last_call_and_a_turn_without_one_is_the_answer(made):
    episodes = made(Calculator())
    said = asked(
        episodes,
        {"episode": 0, "reset": TASK},
        {"episode": 0, "step": "first <calc>1+1</calc> then <calc>6*7</calc>"},
        {"episode": 0, "step": "<calc>6*"},
    )
    assert said == [
        {"observation": ""},
        {"observation": "42", "reward": 0.0, "done": False},
        {"observation": "", "reward": 0.0, "done": True},
    ]


@pytest.mark.slow
def test_python_runs_in_the_sandbox_and_says_what_it_printed_or_what_ended_it(made):
    episodes = made(Python(program_s=2.0, max_chars=60))
    block = "Let me see.\n```python\n{}\n```\n".format
    programs = [
        "print(sum(range(10)))",
        "print(1)\nprint(1 // 0)",
        "open('/tmp/found', 'w')",
        "import socket; socket.socket()",
        "while True: pass",
        "print('x' * 1000)",
    ]
    calls = [{"episode": i, "reset": TASK} for i in range(len(programs))]
    asked(episodes, *calls)
    said = [
        x["observation"] for x in asked(episodes, *({"episode": i, "step": block(p)} for i, p in enumerate(programs)))
    ]
    assert said[0] == "45\n"
    assert said[1].startswith("1\nZeroDivisionError")
    assert "PermissionError" in said[2]
    assert "PermissionError" in said[3]
    assert said[4] in ("error: out of time", "error: ended with code -9")
    assert said[5] == "x" * 60
    assert asked(episodes, {"episode": 0, "step": "It is 45."}) == [{"observation": "", "reward": 0.0, "done": True}]


def test_a_class_of_the_users_gets_its_options_and_the_task(made):
    episodes = made(options={"start": "welcome"})
    assert asked(episodes, {"episode": 4, "reset": TASK}) == [{"observation": "welcome t/1 7 3"}]
    assert asked(episodes, {"episode": 4, "step": "bye"}) == [{"observation": "bye 1", "reward": 0.5, "done": True}]
    assert asked(episodes, {"episode": 4, "step": "chat"})[0]["observation"] == [{"role": "tool", "content": "42"}]


def test_a_plain_class_does_as_well(made):
    episodes = made(name="Plain")
    said = asked(episodes, {"episode": 0, "reset": TASK}, {"episode": 0, "step": "yes"})
    assert said == [{"observation": ""}, {"observation": "YES", "reward": 1.0, "done": True}]


def test_a_fault_ends_its_own_episode_alone(made):
    episodes = made(timeout_s=1.0)
    faults = {"raise": "RuntimeError: no such door", "sleep": "it took longer than 1 s", "nan": "the reward is nan"}
    asked(episodes, *({"episode": i, "reset": TASK} for i in range(4)))
    said = asked(episodes, *({"episode": i, "step": text} for i, text in enumerate([*faults, "go"])))
    for answer, wanted in zip(said, faults.values(), strict=False):
        assert wanted in answer["error"]
    assert said[3]["observation"] == "go 1"
    again = asked(episodes, *({"episode": i, "step": "go"} for i in range(4)))
    assert ["error" in answer for answer in again] == [True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["block", "exit"])
def test_a_process_that_is_lost_takes_its_own_episodes_with_it_and_is_replaced(made, fault):
    episodes = made(timeout_s=0.5, workers=2)
    asked(episodes, *({"episode": i, "reset": TASK} for i in range(4)))
    said = asked(episodes, *({"episode": i, "step": fault if i == 1 else "go"} for i in range(4)))
    assert ["error" in answer for answer in said] == [False, True, False, True]  # odd ones share a process
    asked(episodes, {"episode": 5, "reset": TASK})
    assert asked(episodes, {"episode": 5, "step": "go"})[0]["observation"] == "go 1"
    assert asked(episodes, {"episode": 2, "step": "go"})[0]["observation"] == "go 2"


def test_a_class_that_cannot_be_had_is_told_at_once(made, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        made(Custom(path=f"{tmp_path}/windows.py:Door"))
    with pytest.raises(UserError, match="has no function 'Window'"):
        made(name="Window")
    with pytest.raises(UserError, match="expected package"):
        Custom(path="Door")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"opening": ""}, "must not be empty"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        Calculator(**settings)
    with pytest.raises(UserError, match="below timeout_s"):
        Python(program_s=30.0)
