# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Grading in other processes, with a deadline that always holds.

Symbolic verifiers run on text that a model wrote. Some texts take minutes, some never return, some crash the
interpreter. So each worker is a process of its own (`_worker.py`: no JAX, no accelerator); a task that misses its
deadline gets None and its worker is killed and replaced. Workers are also replaced after `recycle_after` tasks,
because sympy's caches grow.

A worker bounds time and memory. It is not a sandbox: several reasoning-gym scorers evaluate expressions, so grade
untrusted models where you would also run untrusted code.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from qarl_jax.types import UserError

_SCRIPT = os.path.join(os.path.dirname(__file__), "_worker.py")
# Importing sympy on a loaded two-core machine takes seconds.
_START_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Attributes:
    workers: processes; 0: one per core, at most 8.
    timeout_s: seconds a single response may take; then it scores 0.
    recycle_after: tasks after which a worker is replaced.
    memory_mb: address space of a worker.
    """

    workers: int = 0
    timeout_s: float = 5.0
    recycle_after: int = 500
    memory_mb: int = 4096

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise UserError(f"workers must not be negative, got {self.workers}; 0 means one per core.")
        if not 0 < self.timeout_s <= 600:
            raise UserError(f"timeout_s must be above 0 and at most 600 seconds, got {self.timeout_s}.")
        if self.recycle_after < 1:
            raise UserError(f"recycle_after must be at least 1 task, got {self.recycle_after}.")
        if self.memory_mb < 512:
            raise UserError(f"memory_mb must be at least 512, got {self.memory_mb}: sympy alone takes some hundred.")


class WorkerPool:
    """A few graders of one kind. `map` keeps the order of its tasks."""

    def __init__(self, kind: str, cfg: PoolConfig):
        self.kind = kind
        self.cfg = cfg
        self.size = cfg.workers or min(8, os.cpu_count() or 1)
        self.restarts = 0
        self._lock = threading.Lock()  # of `restarts`: a thread per worker counts
        self._workers: list[_Worker | None] = [None] * self.size
        # Holds the list, not the pool: a dropped pool still takes its processes with it.
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def map(self, tasks: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Scores; None where a task missed its deadline or brought its worker down.

        Raises:
          UserError: a worker cannot start (a missing package).
        """
        if not tasks:
            return []
        out: list[float | None] = [None] * len(tasks)
        queue = iter(range(len(tasks)))  # next() on it is atomic
        slots = min(self.size, len(tasks))
        with concurrent.futures.ThreadPoolExecutor(slots) as threads:
            for done in [threads.submit(self._serve, slot, queue, tasks, out) for slot in range(slots)]:
                done.result()
        return out

    def _serve(self, slot: int, queue: Any, tasks: Sequence[Mapping[str, Any]], out: list[float | None]) -> None:
        for i in queue:
            worker = self._workers[slot]
            if worker is None:
                worker = self._workers[slot] = _Worker(self.kind, self.cfg)
            out[i] = worker.ask(tasks[i], self.cfg.timeout_s)
            if out[i] is None or worker.served >= self.cfg.recycle_after:
                with self._lock:
                    self.restarts += out[i] is None
                worker.stop()
                self._workers[slot] = None

    def close(self) -> None:
        """Ends the processes; the pool can be used again and then starts new ones."""
        _stop_all(self._workers)


def _stop_all(workers: list[_Worker | None]) -> None:
    for slot, worker in enumerate(workers):
        if worker is not None:
            worker.stop()
            workers[slot] = None


class _Worker:
    """One process and its two pipes."""

    def __init__(self, kind: str, cfg: PoolConfig):
        self.served = 0
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        hidden = {
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        # -P: this folder has a math_verify.py of its own, which must not shadow the package.
        self.process = subprocess.Popen(
            [sys.executable, "-P", _SCRIPT, kind, str(cfg.timeout_s), str(cfg.memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, **hidden},
            start_new_session=True,  # Ctrl-C is the trainer's business
        )
        self.buffer = b""
        if self._read_line(_START_S) is None:
            self.process.kill()
            self.process.wait()
            self.errors.seek(0)
            reason = self.errors.read().decode(errors="replace").strip().splitlines()
            self.stop()
            raise UserError(f"the {kind} grading process did not start: {reason[-1] if reason else 'no message'}")

    def ask(self, task: Mapping[str, Any], timeout_s: float) -> float | None:
        """One score, or None if it did not come in time."""
        self.served += 1
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return None
        line = self._read_line(timeout_s)
        return None if line is None else float(json.loads(line)["score"])

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

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unsent bytes for a process that is gone
                    continue
