# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments in their processes: what they answer, how long they may take, and that a fault stays in its episode."""

import contextlib
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from qarl_jax.rewards import _worker
from qarl_jax.rollout import environments
from qarl_jax.rollout.environments import Calculator, Custom, Episodes, Python
from qarl_jax.types import UserError
from tests.reference.bridge_world import alive, wait_for

CALCULATOR = pathlib.Path(environments.__file__).with_name("_calculator.py")

# Does what a turn says.
OBEDIENT = """
import asyncio, os, signal, subprocess, sys, threading, time

class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")

class Obedient:
    def __init__(self, start="hello"):
        self.start, self.turns = start, 0

    async def reset(self, task):
        return f"{self.start} {task['uid']} {task['answer']} {task['meta']['level']}"

    async def step(self, text):
        self.turns += 1
        if text == "raise":
            raise RuntimeError("no such door")
        if text == "mute":
            raise Mute
        if text == "exit":
            sys.exit(0)
        if text == "exit in a task":
            await asyncio.ensure_future(asyncio.to_thread(sys.exit, 7))
        if text == "exit at once":
            os._exit(3)
        if text == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "sleep":
            await asyncio.sleep(60)
        if text == "block":
            time.sleep(60)
        if text == "spin":
            while True:
                pass
        if text == "close all":
            os.closerange(0, 1000)
        if text == "reward":
            return "", float(self.start), False
        if text == "words":
            return "", "0.5", False
        if text == "done":
            return "", 0.5, "no"
        if text == "pair":
            return "", 0.5
        if text == "bytes":
            return b"", 0.5, False
        if text == "close":
            print("to nobody")
            sys.stdout.close()
            os.close(1)
        if text == "thread":
            threading.Thread(target=time.sleep, args=(60,)).start()
        if text == "half":
            return "a" + chr(0xdcff), 0.5, False
        if text == "huge":
            return [{"role": "user", "content": "y" * 50_000_000}] * 2, 0.5, False
        if text == "chat":
            return [{"role": "tool", "content": "42"}], 0.0, False
        if text == "children":
            daemon = "import os; os.fork() or os.setsid() or os.fork() or os.execvp('sleep', ['sleep', '600'])"
            subprocess.run([sys.executable, "-c", daemon])
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            return str(child.pid), 0.5, False
        if text == "memory":
            return open("/proc/self/oom_score_adj").read().strip(), 0.5, False
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
    assert asked(episodes, {"episode": 0, "reset": TASK}) == [{"observation": ""}]
    said = asked(episodes, {"episode": 0, "step": "first <calc>1+1</calc> then <calc>6*7</calc>"})
    assert said == [{"observation": "42", "reward": 0.0, "done": False}]
    said = asked(episodes, {"episode": 0, "step": "<calc>6*"})
    assert said == [{"observation": "", "reward": 0.0, "done": True}]


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
    assert asked(episodes, {"episode": 4, "step": "chat"})[0]["observation"] == [{"role": "tool", "content": "42"}]
    assert asked(episodes, {"episode": 4, "step": "bye"}) == [{"observation": "bye 2", "reward": 0.5, "done": True}]


def test_a_plain_class_does_as_well(made):
    episodes = made(name="Plain")
    assert asked(episodes, {"episode": 0, "reset": TASK}) == [{"observation": ""}]
    said = asked(episodes, {"episode": 0, "step": "yes"})
    assert said == [{"observation": "YES", "reward": 1.0, "done": True}]


FAULTS = {
    "raise": "RuntimeError: no such door (doors.py, line ",
    "mute": "Mute: its text cannot be had",
    "exit": "SystemExit: 0",
    "exit in a task": "SystemExit: 7",
    "exit at once": "it ended its process, with exit code 3",
    "crash": "it ended its process, with signal 11",
    "sleep": "it took longer than timeout_s = 1 s",
    "block": "it took longer than timeout_s = 1 s",
    "spin": "it took longer than timeout_s = 1 s",
    "close all": "it ended its process",
    "reward": "the reward is 1e+300; step has to return a number of at most 1e+09",
    "words": "the reward is '0.5'",
    "done": "done is 'no'; step has to return True or False",
    "pair": "step has to return (observation, reward, done), not ('', 0.5)",
    "bytes": "an observation is text or a list of chat messages, not bytes",
}


def test_a_fault_ends_its_own_episode_alone(made):
    episodes = made(timeout_s=1.0, options={"start": "1e300"}, max_observation_len=10)
    turns = [*FAULTS, "go", "close", "thread", "half", "huge"]
    asked(episodes, *({"episode": i, "reset": TASK} for i in range(len(turns))))
    said = asked(episodes, *({"episode": i, "step": text} for i, text in enumerate(turns)))
    for answer, wanted in zip(said, FAULTS.values(), strict=False):
        assert wanted in answer["error"]
    well = [answer["observation"] for answer in said[len(FAULTS) :]]
    assert well == [
        "go 1",
        "close 1",
        "thread 1",
        "a\ufffd",
        [{"role": "user", "content": x} for x in ("y" * 2560, "")],
    ]
    again = asked(episodes, *({"episode": i, "step": "go"} for i in range(len(turns))))
    assert [answer.get("error", "") for answer in again] == ["its process has ended"] * len(FAULTS) + [""] * 5


@pytest.mark.parametrize("value", ["nan", "inf", "-1e10"])
def test_a_reward_is_a_number_that_can_be_summed(made, value):
    episodes = made(options={"start": value})
    asked(episodes, {"episode": 0, "reset": TASK})
    assert "the reward is" in asked(episodes, {"episode": 0, "step": "reward"})[0]["error"]


def started(pid):
    """Commands of what a process and its children have started."""
    return [name for child in _worker.children(pid) for name in [command(child), *started(child)]]


def command(pid):
    return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()


def test_what_an_episode_started_ends_with_it(made):
    episodes = made()
    host = episodes._host.process.pid
    asked(episodes, *({"episode": i, "reset": TASK} for i in range(3)))
    for i in (0, 1):
        asked(episodes, {"episode": i, "step": "children"})
    wait_for(lambda: started(host).count("sleep") == 4)  # a child in a session of its own, and an orphan
    asked(episodes, {"episode": 0, "step": "bye"})
    assert started(host).count("sleep") == 2
    asked(episodes, {"episode": 1, "step": "raise"})
    assert (started(host).count("sleep"), len(_worker.children(host))) == (0, 1)
    (said,) = asked(episodes, {"episode": 2, "step": "children"})
    assert asked(episodes, {"episode": 2}) == [{}]
    assert not _worker.children(host)
    assert not pathlib.Path(f"/proc/{said['observation']}").exists()


def test_what_episodes_started_ends_with_the_run(made):
    episodes = made()
    asked(episodes, {"episode": 0, "reset": TASK})
    (said,) = asked(episodes, {"episode": 0, "step": "children"})
    episodes.close()
    assert not alive(int(said["observation"]))


TRAINER = """
import sys, time
from qarl_jax.rollout.environments import Custom, Episodes
episodes = Episodes(Custom(path=sys.argv[1]))
episodes.ask({"episode": 0, "reset": {"uid": "", "answer": "", "meta": {"level": 0}}}).result()
print(episodes.ask({"episode": 0, "step": "children"}).result()["observation"], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_what_episodes_started_ends_with_a_trainer_that_is_killed(made, tmp_path):
    made()  # writes the file
    command = [sys.executable, "-c", TRAINER, f"{tmp_path}/doors.py:Obedient"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        child = int(trainer.stdout.readline())
        (host,) = _worker.children(trainer.pid)
        (episode,) = _worker.children(host)
        os.kill(host, signal.SIGSTOP)  # it notices all the same
        trainer.kill()
    wait_for(lambda: not any(map(alive, (child, episode, host))))


def test_a_host_that_is_lost_is_replaced(made):
    episodes = made()
    asked(episodes, {"episode": 0, "reset": TASK})
    waiting = episodes.ask({"episode": 0, "step": "sleep"})
    episodes._host.process.kill()
    assert "the process that holds all episodes was ended" in waiting.result(timeout=60)["error"]
    asked(episodes, {"episode": 1, "reset": TASK})
    assert asked(episodes, {"episode": 1, "step": "go"})[0]["observation"] == "go 1"
    assert asked(episodes, {"episode": 0, "step": "go"}) == [{"error": "its process has ended"}]


def test_where_memory_runs_out_an_episode_is_ended_first_and_not_the_trainer(made):
    episodes = made()
    asked(episodes, {"episode": 0, "reset": TASK})
    assert asked(episodes, {"episode": 0, "step": "memory"})[0]["observation"] == "1000"


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
