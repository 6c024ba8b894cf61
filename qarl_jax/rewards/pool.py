# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker processes for grading, with a hard deadline per task.

Symbolic verifiers run on text that a model wrote. Some texts take minutes, some never return, some crash the
interpreter; a user's function may do all of that. So each worker is a process of its own (`_worker.py`, without JAX)
and leads a process group. It sees no GPU, except those that a reward model runs on. A task that misses its deadline
gets no score; its worker is killed with all that it started, and replaced. A task whose worker ended by itself runs
once more. Workers are also replaced after `recycle_after` tasks, because sympy's caches grow.

Workers that run or evaluate what a policy wrote are jailed (`jail.py`): programs, and expressions that math-verify and
reasoning-gym's scorers evaluate. A user's function or environment is not jailed: it has all rights of its user.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qarl_jax.rewards import _worker, jail
from qarl_jax.typed_config.annotations import internal
from qarl_jax.types import UserError, at_least

_SCRIPT = os.path.join(os.path.dirname(__file__), "_worker.py")
# Importing sympy on a loaded two-core machine takes seconds.
_START_S = 120.0
# A task that takes longer is spoken of.
_NOTICE_S = 10.0
_JAILED = ("math", "gym", "code")


@functools.cache
def _launcher(pid: int) -> concurrent.futures.ThreadPoolExecutor:
    """The thread that starts all workers of process `pid`. A jail ends with the thread that started it
    (PR_SET_PDEATHSIG), and this one ends with the trainer."""
    return concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="launcher")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """The worker processes that grade responses (`WorkerPool`).

    Attributes:
      workers: processes; 0: one per core, at most 8.
      timeout_s: seconds a single response may take; then it scores 0.
      recycle_after: tasks after which a worker is replaced; 0: never. No config can set it.
      memory_mb: address space of a worker in MiB; 0: not limited.
    """

    workers: int = 0
    timeout_s: float = 5.0
    recycle_after: int = internal(500)
    memory_mb: int = 4096

    def __post_init__(self) -> None:
        at_least(self, 0, "workers", note="; 0 means one per core")
        if not 0 < self.timeout_s <= 600:
            raise UserError(f"timeout_s must be above 0 and at most 600 seconds, got {self.timeout_s}.")
        at_least(self, 0, "recycle_after", note="; 0 means never")
        if self.memory_mb and self.memory_mb < 512:
            raise UserError(
                f"memory_mb must be at least 512 (sympy alone takes hundreds), or 0: no limit; got {self.memory_mb}."
            )


@dataclasses.dataclass(frozen=True)
class Answer:
    """The result of one task. `score`: None if the task failed. `error`: what went wrong, or empty. `ended`: the worker
    ended by itself. `scores`: those of a task that is a batch."""

    score: float | None
    error: str = ""
    ended: bool = False
    scores: tuple[float, ...] = ()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class WorkerPool:
    """A pool of worker processes of one kind; answers come in the order of the tasks.

    Args:
      kind: the grader that the workers load, such as "math" (`_worker.py`).
      cfg: see `PoolConfig`.
      setup: argument of the grader's start, in the form that `kind` takes.
      name: the workers' name in messages; empty: made from `kind`.
      say: called with a line of text when a task takes long.
      jailed: jail the workers (`jail.py`); those of math, gym and code always are.
      python: the interpreter of workers that are not jailed.
      gpus: CUDA_VISIBLE_DEVICES of such workers; empty: none.
      start_s: seconds that a worker may take to start.
    """

    def __init__(
        self,
        kind: str,
        cfg: PoolConfig,
        *,
        setup: str = "",
        name: str = "",
        say: Callable[[str], None] = _tell,
        jailed: bool = False,
        python: str = sys.executable,
        gpus: str = "",
        start_s: float = _START_S,
    ):
        self.kind = kind
        self.python, self.gpus, self.start_s = python, gpus, start_s
        self.cfg = cfg
        self.setup = setup
        self.name = name or f"the {kind} grading process"
        self.say = say
        self.jailed = jailed or kind in _JAILED
        if self.jailed:
            jail.announce(say)
        self.size = cfg.workers or min(8, os.cpu_count() or 1)
        self.restarts = 0
        self._lock = threading.Lock()  # of `restarts`: a thread per worker counts
        self._workers: list[Worker | None] = [None] * self.size
        self._interrupted = False
        self._at: list[tuple[int, float] | None] = [None] * self.size  # each worker's task, and since when
        # Holds the list, not the pool: a dropped pool still takes its processes with it.
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def start(self, slot: int = 0) -> Worker:
        """Returns the worker of a slot, and starts it if it does not run. Raises as `answers`."""
        worker = self._workers[slot]
        if worker is None:
            worker = self._workers[slot] = Worker(self)
        return worker

    def map(self, tasks: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Returns a score per task; None if the task missed its deadline or crashed its worker. Raises as `answers`."""
        return [None if answer is None else answer.score for answer in self.answers(tasks)]

    def answers(
        self,
        tasks: Sequence[Mapping[str, Any]],
        *,
        names: Sequence[str] = (),
        strict: bool = False,
    ) -> list[Answer | None]:
        """Runs tasks and returns one answer per task.

        Args:
          tasks: JSON objects in the form that the kind takes (`_worker.py`).
          names: the tasks' names in messages about slow tasks.
          strict: begin no task after an error; the answer of a task that was not begun is None.

        Raises:
          UserError: a worker cannot start (a missing package).
        """
        if not tasks:
            return []
        out: list[Answer | None] = [None] * len(tasks)
        queue = iter(range(len(tasks)))  # next() on it is atomic
        slots = range(min(self.size, len(tasks)))
        told: set[int] = set()
        self._interrupted = False
        with concurrent.futures.ThreadPoolExecutor(len(slots)) as threads:
            waiting = {threads.submit(self._serve, slot, queue, tasks, out, strict) for slot in slots}
            try:
                while waiting:
                    done, waiting = concurrent.futures.wait(waiting, timeout=_NOTICE_S)
                    for each in done:
                        each.result()
                    self._tell_of_long(names, told)
            except BaseException:  # an interrupt: nobody is to wait for a deadline
                self._interrupted = True
                _drain(queue)
                for worker in self._workers:
                    if worker is not None:
                        worker.kill()
                raise
        return out

    def _tell_of_long(self, names: Sequence[str], told: set[int]) -> None:
        for at in self._at:
            if at is not None and at[0] not in told and (seconds := time.monotonic() - at[1]) >= _NOTICE_S:
                told.add(at[0])
                task = f" on {names[at[0]]}" if names else ""
                self.say(f"waiting for {self.name}{task}: {seconds:.0f} s by now, ended after {self.cfg.timeout_s:g} s")

    def _serve(
        self, slot: int, queue: Any, tasks: Sequence[Mapping[str, Any]], out: list[Answer | None], strict: bool
    ) -> None:
        for i in queue:
            self._at[slot] = i, time.monotonic()
            answer = self._ask(slot, tasks[i])
            if answer.ended and not self._interrupted:
                # By the task, or by somebody else (no memory left, a kill): a second time tells.
                answer = self._ask(slot, tasks[i])
            out[i] = answer
            self._at[slot] = None
            if strict and answer.error:
                _drain(queue)

    def _ask(self, slot: int, task: Mapping[str, Any]) -> Answer:
        worker = self.start(slot)
        answer = worker.ask(task, self.cfg.timeout_s)
        if answer.score is None or (self.cfg.recycle_after and worker.served >= self.cfg.recycle_after):
            with self._lock:
                self.restarts += answer.score is None
            worker.stop()
            self._workers[slot] = None
        return answer

    def close(self) -> None:
        """Ends the processes; the pool can be used again and then starts new ones."""
        _stop_all(self._workers)


def _drain(queue: Any) -> None:
    """Exhausts an iterator."""
    collections.deque(queue, maxlen=0)


def _stop_all(workers: list[Worker | None]) -> None:
    for slot, worker in enumerate(workers):
        if worker is not None:
            worker.stop()
            workers[slot] = None


class Worker:
    """A worker process and its two pipes.

    Raises:
      UserError: the process does not start, for example because a package is missing.
    """

    def __init__(self, pool: WorkerPool):
        self.served = 0
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        hidden = {"CUDA_VISIBLE_DEVICES": pool.gpus, "JAX_PLATFORMS": "cpu"}
        mine = pool.kind in (
            "function",
            "environment",
        )  # what a user's function prints is for the user, and its threads are its own
        if not mine and pool.kind != "model":
            hidden |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        timeout_s, memory_mb = str(pool.cfg.timeout_s), str(pool.cfg.memory_mb)
        # -P: this folder has a math_verify.py of its own, which must not shadow the package.
        command = jail.command() if pool.jailed else [pool.python, "-P"]
        self.process = (
            _launcher(os.getpid())
            .submit(
                subprocess.Popen,
                [*command, _SCRIPT, pool.kind, timeout_s, memory_mb, pool.setup],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if mine else self.errors,
                env={**(jail.environment() if pool.jailed else os.environ), **hidden},
                start_new_session=True,  # Ctrl-C is the trainer's business
            )
            .result()
        )
        self.buffer = b""
        line = self._read_line(pool.start_s)
        greeting = {"error": self._last_words()} if line is None else json.loads(line)
        if "error" in greeting:
            self.stop()
            raise UserError(f"{pool.name} did not start: {greeting['error']}")

    def ask(self, task: Mapping[str, Any], timeout_s: float) -> Answer:
        """Sends a task and returns its answer, whose score is None after a timeout, a crash or a malformed reply."""
        self.served += 1
        until = time.monotonic() + timeout_s
        line = self._read_line(until - time.monotonic()) if self.send(task, timeout_s) else None
        if line is not None:
            try:
                answer = json.loads(line)
                return Answer(
                    float(answer["score"]), answer.get("error", ""), scores=tuple(map(float, answer.get("scores", ())))
                )
            except (ValueError, KeyError, TypeError, RecursionError):  # written by what it evaluates
                return Answer(None, "it wrote what is no answer")
        end = "" if time.monotonic() > until else self._end()
        return Answer(None, end or f"it took longer than {timeout_s:g} s", ended=bool(end))

    def send(self, task: Mapping[str, Any], timeout_s: float = _START_S) -> bool:
        """Sends a task. Returns False, and kills the worker, if it does not read the task within `timeout_s`."""
        assert self.process.stdin is not None
        handle, deadline = self.process.stdin.fileno(), time.monotonic() + timeout_s
        os.set_blocking(handle, False)
        data = memoryview(json.dumps(task).encode() + b"\n")
        with contextlib.suppress(OSError):  # it is gone, which shows when it is listened to
            while data:
                if not select.select([], [handle], [], max(0.0, deadline - time.monotonic()))[1]:
                    self.kill()
                    return False
                data = data[os.write(handle, data) :]
        return True

    def _read_line(self, timeout_s: float) -> bytes | None:
        assert self.process.stdout is not None
        handle = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([handle], [], [], left)[0]:
                return None
            chunk = os.read(handle, 65_536)
            if not chunk:
                return None
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line

    def _end(self) -> str:
        """Describes how the process ended; empty if it runs. It is not reaped, so that its id stays taken."""
        for _ in range(20):  # the pipe closes a moment before
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                how = "exit code" if ended.si_code == os.CLD_EXITED else "signal"
                return f"it ended its process, with {how} {ended.si_status}"
            time.sleep(0.005)
        return ""

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"no message, within {_START_S:g} s at most"

    def kill(self) -> None:
        """Kills the process and its descendants."""
        if self.process.returncode is not None:  # its number may be somebody else's
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, signal.SIGSTOP)  # it starts nothing more
            _worker.end_started(self.process.pid)
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kills the process and its descendants, reaps it and closes its pipes."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                try:
                    pipe.close()
                except (OSError, ValueError):  # unsent bytes for a process that is gone; another thread closes it, too
                    continue
