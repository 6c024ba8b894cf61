# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that share a machine, within a budget of seconds.

Four rules:

  * At most `compiles` processes (one) compile at a time, and never two the same program. A job whose program has never
    been compiled here is *cold* until it says otherwise (`Job.is_warm`); another cold one waits.
  * The budget is the caller's, not ours to overrun: nothing starts in the last `least_s` seconds of it, and `grace_s`
    before its end every running job gets SIGTERM, at which the trainer saves and exits with 0; then SIGKILL.
  * A job that waits for others (`Job.is_ready`) starts before what stands behind it as soon as it can, and holds up
    nothing until then.
  * A job that fails is reported with the end of its log and does not take the others with it. Where a failure is an end
    that the job may have (`Job.ends_with`), it is no failure.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A command that may be started again until it is done.

    Attributes:
      name: for messages.
      command: argv.
      log: file that its output is appended to.
      is_done: whether nothing is left to do. Asked before the start and after the end.
      is_ready: whether it can start; asked until it can.
      program: jobs with the same one share compiled programs.
      is_warm: whether this job has compiled what it needs (for a trainer: it has logged a step).
      ends_with: (exit code that is not 0, what this start of it has printed) -> whether that is an end that counts. It
        then leaves behind what `is_done` asks for.
    """

    name: str
    command: Sequence[str]
    log: pathlib.Path
    is_done: Callable[[], bool]
    is_ready: Callable[[], bool] = lambda: True
    program: str = ""
    is_warm: Callable[[], bool] = lambda: True
    ends_with: Callable[[int, str], bool] = lambda code, output: False


@dataclasses.dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    cold: bool
    device: str
    log_start: int

    def output(self) -> str:
        """What this start of the job has printed."""
        return self.job.log.read_bytes()[self.log_start :].decode(errors="replace")


class Budget:
    """Seconds left of a stretch. Example: Budget(600).left() -> 599.9; Budget(None) never ends."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = None if seconds is None else clock() + seconds

    def left(self) -> float:
        """Seconds left; infinite without a budget."""
        return float("inf") if self._end is None else self._end - self._clock()


def run_jobs(
    jobs: Sequence[Job],
    *,
    parallel: int,
    budget: Budget,
    devices: Sequence[str] = ("",),
    compiles: int = 1,
    warm: set[str] | None = None,
    least_s: float = 45.0,
    grace_s: float = 30.0,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
    poll_s: float = 0.25,
    cwd: pathlib.Path | None = None,
    failed: list[str] | None = None,
) -> bool:
    """Runs what is not done, in order, `parallel` at a time on each device; waits for all of it or for the end of the
    budget.

    Args:
      jobs: in the order they are to start.
      parallel: processes at a time on a device.
      devices: GPUs, as CUDA_VISIBLE_DEVICES names them; each job gets the least busy one. "": what there is.
      compiles: most processes that compile at a time.
      budget: see `Budget`.
      warm: programs that have been compiled before; those compiled here are added to it.
      least_s: nothing is started with fewer seconds left.
      grace_s: seconds before the end of the budget at which running jobs are told to stop.
      failed: the names of jobs that failed are added to it.

    Returns:
      Whether every job is done.
    """
    warm = set() if warm is None else warm
    waiting = [job for job in jobs if not job.is_done()]
    running: list[_Running] = []
    failed = [] if failed is None else failed
    before = len(failed)
    try:
        while waiting or running:
            for item in list(running):
                if item.cold and item.job.is_warm():
                    item.cold = False
                    warm.add(item.job.program)
                if item.process.poll() is not None:
                    running.remove(item)
                    if item.process.returncode == 0 and item.job.is_warm():
                        warm.add(item.job.program)
                    code = item.process.returncode
                    if item.job.is_done():
                        continue
                    if code == 0:
                        say(f"{item.job.name}: stopped before its end")
                    elif item.job.ends_with(code, item.output()):
                        say(f"{item.job.name}: ended early; see {item.job.log}")
                    else:
                        say(f"{item.job.name}: {_failure(item)}")
                        failed.append(item.job.name)
            if budget.left() <= grace_s:
                break
            _start(waiting, running, parallel, devices, compiles, budget, warm, least_s, environment, say, cwd)
            if not running:  # nothing waits, or time is too short, or what waits waits for what has failed
                break
            time.sleep(poll_s)
    finally:
        _stop(running, budget, say)
    return len(failed) == before and all(job.is_done() for job in jobs)


def _start(
    waiting: list[Job],
    running: list[_Running],
    parallel: int,
    devices: Sequence[str],
    compiles: int,
    budget: Budget,
    warm: set[str],
    least_s: float,
    environment: Mapping[str, str] | None,
    say: Callable[[str], None],
    cwd: pathlib.Path | None,
) -> None:
    for job in list(waiting):
        taken = [item.device for item in running]
        device = min(devices, key=taken.count)
        if taken.count(device) >= parallel or budget.left() <= least_s:
            return
        if not job.is_ready():
            continue
        cold = job.program not in warm
        compiling = [item.job.program for item in running if item.cold]
        if cold and (len(compiling) >= compiles or job.program in compiling):
            continue  # a warm one further down may start
        waiting.remove(job)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                list(job.command),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), **({"CUDA_VISIBLE_DEVICES": device} if device else {})},
                cwd=cwd,
            )
        running.append(_Running(job=job, process=process, cold=cold, device=device, log_start=log_start))
        say(f"{job.name}: started{f' on GPU {device}' if device else ''}{' (compiles)' if cold else ''}")


def _stop(running: list[_Running], budget: Budget, say: Callable[[str], None]) -> None:
    for item in running:
        if item.process.poll() is None:
            say(f"{item.job.name}: told to save and stop")
            item.process.send_signal(signal.SIGTERM)
    for item in running:
        # An interrupt without a budget waits as long as a save may take.
        patience = min(60.0, max(0.0, budget.left() - 2.0))
        try:
            item.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            say(f"{item.job.name}: killed; it goes on from its last checkpoint")
            item.process.kill()
            item.process.wait()


def _failure(item: _Running) -> str:
    lines = item.output().splitlines()[-15:]
    return f"failed with exit code {item.process.returncode}; the end of {item.job.log}:\n  " + "\n  ".join(lines)
