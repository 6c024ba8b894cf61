# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A program that the policy wrote stays in its jail: every attempt to leave it is refused, under either wall."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from qarl_jax.rewards import _sandbox, jail
from qarl_jax.rewards.pool import PoolConfig, WorkerPool
from qarl_jax.rollout.environments import Episodes, Python
from tests.reference import escapes
from tests.reference.bridge_world import alive, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="Linux on x86-64")

# A process of the same user without capabilities, as the trainer of an ordinary user is.
NO_CAPABILITIES = """
import ctypes, struct, sys
ctypes.CDLL(None).capset(struct.pack("II", 0x20080522, 0), struct.pack("6I", *[0] * 6))
"""
VICTIM = f"{NO_CAPABILITIES}\nprint('ready', flush=True)\nsys.stdin.read()"
FIND = jail.bubblewrap  # before any test replaces it
TASK = {"uid": "t", "text": "", "answer": "", "meta": {}}


@pytest.fixture(scope="module")
def victim():
    with subprocess.Popen([sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "token"
    path.write_text("whole")
    return path


@contextlib.contextmanager
def behind(wall):
    """Only the filter, or the whole jail."""
    whole = FIND()
    if wall == "bubblewrap" and not whole[0]:
        pytest.skip(whole[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jail, "bubblewrap", lambda: whole if wall == "bubblewrap" else ((), "left out"))
        yield


@pytest.fixture(scope="module", params=["bubblewrap", "filter"])
def wall(request):
    with behind(request.param):
        yield request.param


@pytest.fixture(scope="module")
def run(wall):
    """run(program) -> what the tool `python` says of it."""
    with contextlib.closing(Episodes(Python(program_s=20.0, max_chars=100_000))) as episodes:
        episodes.ask({"episode": 0, "reset": TASK}).result()
        yield lambda text: episodes.ask({"episode": 0, "step": f"```python\n{text}\n```"}).result()["observation"]


@pytest.fixture(scope="module")
def became(run, victim, file):
    """The outcome of every attempt, made by one program."""
    return json.loads(run(escapes.program(escapes.ALL, victim.pid, str(file))))


@pytest.mark.parametrize("name", escapes.ALL)
def test_an_attempt_to_escape_is_refused(wall, became, name):
    assert became[name] == escapes.REFUSALS[name][wall == "filter"]


def test_every_ordinary_attempt_succeeds_outside(victim, file):
    attempts = escapes.HIDDEN | escapes.ORDINARY
    program = escapes.program(attempts, victim.pid, str(file))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == dict.fromkeys(attempts, "done")
    assert victim.poll() is None


def test_only_the_whole_jail_hides_that_a_file_is_there(wall, run, file):
    found = run(
        f"import os; print(os.path.exists({str(file)!r}), os.path.exists({sys.base_prefix + '/lib'!r}))"
    ).split()
    assert found == ["False" if wall == "bubblewrap" else "True", "True"]


def test_a_program_sees_no_variable_of_the_trainer(run):
    assert set(run("import os; print(*os.environ)").split()) <= {"PATH", "LC_ALL", "PWD"}


GREEDY = {
    "memory": ("bytearray(1 << 31)", "MemoryError"),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "RuntimeError: can't start new thread",
    ),
    "output": ("while True: print('x' * 100_000)", "error: too much output"),
    "open files": ("import os\nwhile True: os.dup(1)", "Too many open files"),
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_program_is_stopped(run, name):
    program, refusal = GREEDY[name]
    assert refusal in run(program)


def test_a_scorer_that_evaluates_an_answer_opens_nothing(wall, tmp_path):
    answer = f"[open({str(tmp_path / 'made')!r}, 'w').write('x')]"  # reasoning-gym passes it to eval()
    origin = {"dataset": "string_insertion", "config": {}, "seed": 0, "size": 2, "index": 0}
    with contextlib.closing(WorkerPool("gym", PoolConfig(workers=1, timeout_s=60.0))) as pool:
        assert pool.map([{"answer": answer, "origin": origin}]) == [0.0]
    assert not (tmp_path / "made").exists()


def test_a_worker_outlives_the_call_that_started_it(wall):
    task = {"program": "def f(): return 1", "test": "def check(f): assert f() == 1", "entry_point": "f"}
    with contextlib.closing(WorkerPool("code", PoolConfig(workers=1, timeout_s=60.0), setup="1024")) as pool:
        assert pool.map([task]) == pool.map([task]) == [1.0]
        assert pool.restarts == 0


TRAINER = """
import sys
from qarl_jax.rewards import _sandbox, jail
from qarl_jax.rewards.pool import PoolConfig, WorkerPool
if sys.argv[1] == "filter":
    jail.bubblewrap = lambda: ((), "left out")
program = "def f():\\n while True: pass"
task = {"program": program, "test": "def check(f): f()", "entry_point": "f"}
WorkerPool("code", PoolConfig(workers=1, timeout_s=600.0), setup="1024").map([task])
"""


@pytest.mark.slow
def test_a_running_program_ends_with_a_killed_trainer(wall):
    with subprocess.Popen([sys.executable, "-c", TRAINER, wall]) as trainer:
        # The trainer's worker and its program; bubblewrap is two more.
        wait_for(lambda: len(descendants(trainer.pid)) >= (4 if wall == "bubblewrap" else 2))
        started = descendants(trainer.pid)
        trainer.kill()
    wait_for(lambda: not any(map(alive, started)))


def descendants(pid):
    found = []
    for thread in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in thread.read_text().split():
            found += [int(child), *descendants(child)]
    return found


def test_a_run_says_once_that_only_the_filter_holds():
    said = []
    with behind("filter"):
        for _ in range(2):
            WorkerPool("code", PoolConfig(), say=said.append)
    assert len(said) == 1
    assert "a filter of system calls" in said[0]
    assert "alone: left out" in said[0]


@pytest.mark.parametrize(
    ("script", "reason"), [("exit 3", "no reason given"), ("echo no namespaces here >&2; exit 1", "no namespaces here")]
)
def test_a_bubblewrap_that_does_not_work_is_left_out_with_its_reason(tmp_path, monkeypatch, script, reason):
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert FIND.__wrapped__() == ((), f"bubblewrap does not work here: {reason}")


def test_no_program_is_run_that_could_read_the_trainer(tmp_path):
    """A kernel without Landlock, and a trainer without capabilities."""
    source = pathlib.Path(_sandbox.__file__).read_text()
    without = source.replace("if abi := landlock_abi():", "if abi := 0:")
    assert without != source
    (tmp_path / "without.py").write_text(without)
    worker = f"import sys; sys.path.append({str(tmp_path)!r}); import without; without.prepare(1024)"
    trainer = (
        f"{NO_CAPABILITIES}\nimport subprocess\nraise SystemExit(subprocess.call([sys.executable, '-c', {worker!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", trainer], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "it could read the trainer's environment and memory; install bubblewrap" in done.stderr
