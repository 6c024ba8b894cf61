# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The pool's deadline holds whatever a worker does, and its processes go when it goes."""

import base64
import concurrent.futures
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from qarl_jax.rewards import pool as pool_module
from qarl_jax.rewards.pool import PoolConfig, WorkerPool
from qarl_jax.types import UserError
from tests.reference import rewards
from tests.reference.bridge_world import alive, wait_for

# A worker that does what its task says, speaking the protocol of _worker.py.
SCRIPT = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
served = 0
for line in sys.stdin:
    task = json.loads(line)
    served += 1
    if task["do"] == "hang":
        time.sleep(1000)
    if task["do"] == "spin":
        10 ** 10 ** 10  # inside one native call: no signal handler of this process can run
    if task["do"] == "die":
        os._exit(7)
    if task["do"] == "slow":
        time.sleep(0.5)
    if task["do"] == "garbage":
        print("[1, {", flush=True)
    if task["do"] == "half":
        sys.stdout.write('{"score"'); sys.stdout.flush(); time.sleep(1000)
    answer = {"pid": os.getpid(), "served": served, "slow": 0.5}.get(task["do"], task["do"])
    print(json.dumps({"score": answer}), flush=True)
"""


@pytest.fixture
def make_pool(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(pool_module, "_SCRIPT", str(script))
    pools = []

    def make(**options):
        pools.append(WorkerPool("test", PoolConfig(**{"workers": 2, "timeout_s": 60.0} | options)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def do(*words):
    return [{"do": word} for word in words]


def test_scores_come_back_in_order(make_pool):
    pool = make_pool(workers=3)
    assert pool.map(do(*range(50))) == list(range(50))
    assert pool.map([]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "trouble", ["hang", *(pytest.param(how, marks=pytest.mark.nightly) for how in ("spin", "half")), "die", "garbage"]
)
def test_a_bad_task_gets_none_and_harms_no_other(make_pool, trouble):
    pool = make_pool(timeout_s=2.0)
    start = time.monotonic()
    scores = pool.map(do(1, trouble, 2, trouble, 3, 4))
    assert scores == [1, None, 2, None, 3, 4]
    assert pool.restarts == (4 if trouble == "die" else 2)  # whose worker has ended is asked once more
    assert time.monotonic() - start < 120  # and not the thousand seconds of the trouble
    assert pool.map(do(5)) == [5]


def test_a_worker_that_somebody_kills_is_replaced_and_the_task_graded(make_pool):
    pool = make_pool(workers=1)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        (pid,) = map(int, pool.map(do("pid")))
        scores = thread.submit(pool.map, do("slow", 2))
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        assert scores.result(60) == [0.5, 2]


def test_a_task_longer_than_a_pipe_cannot_wait_for_a_worker_that_reads_nothing(make_pool):
    pool = make_pool(workers=1, timeout_s=1.0)
    (pid,) = map(int, pool.map(do("pid")))
    os.kill(pid, signal.SIGSTOP)
    assert pool.map([{"do": 1, "text": "x" * 1_000_000}]) == [None]
    assert pool.map(do(2)) == [2]  # by its successor


def test_a_worker_is_replaced_after_its_share_of_tasks(make_pool):
    pool = make_pool(workers=1, recycle_after=3)
    assert pool.map(do(*["served"] * 7)) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("how", ["close", "drop"])
def test_no_process_outlives_the_pool(make_pool, how):
    pool = WorkerPool("test", PoolConfig(workers=1, timeout_s=60.0))
    make_pool()
    (pid,) = map(int, pool.map(do("pid")))
    assert alive(pid)
    if how == "close":
        pool.close()
    del pool
    assert not alive(pid)


def test_a_worker_that_cannot_start_says_why(make_pool, tmp_path):
    pool = make_pool()
    (tmp_path / "worker.py").write_text("import no_such_package_here")
    with pytest.raises(UserError, match="did not start: ModuleNotFoundError: No module named 'no_such_package_here'"):
        pool.map(do(1))


def test_a_worker_in_the_middle_of_a_task_ends_with_a_killed_trainer():
    hangs = base64.b64encode(pickle.dumps((sys.path, f"{rewards.__file__}:bad", {}))).decode()
    worker = [sys.executable, "-P", pool_module._SCRIPT, "function", "600", "0", hangs]
    task = json.dumps({"call": base64.b64encode(pickle.dumps(("hang", "", {}))).decode()})
    program = f"""
import subprocess, time
worker = subprocess.Popen({worker!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
worker.stdout.readline()
worker.stdin.write({task!r}.encode() + b"\\n")
worker.stdin.flush()
print(worker.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as trainer:
        pid = int(trainer.stdout.readline())
        trainer.kill()
    wait_for(lambda: not alive(pid))


@pytest.mark.slow
def test_hostile_mathematics_cannot_hold_up_a_run():
    pool = WorkerPool("math", PoolConfig(workers=2, timeout_s=5.0))
    texts = [
        "\\boxed{9^{9^{9^{9^9}}}}",
        "\\boxed{" + "\\frac{1}{" * 300 + "2" + "}" * 300 + "}",
        "\\boxed{42}",
        "((" * 2000,
    ]
    texts += ["\\boxed{\\int_0^1 x^{x^{x^{x}}} dx}", "\\boxed{100000!}", "$" * 4000]
    try:
        start = time.monotonic()
        scores = pool.map([{"text": text, "answer": "42"} for text in texts])
        # At most the deadline per task, on two workers, and the starts of replaced workers.
        assert time.monotonic() - start < 120
        assert [score or 0.0 for score in scores] == [float(text == "\\boxed{42}") for text in texts]
    finally:
        pool.close()
