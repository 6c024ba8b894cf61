# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Live engines that are forked from one process that has imported vLLM: importing is most of an engine's start."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from qarl_bridge.engine.cpu import build

from qarl_jax.rollout.vllm import process

_PARENT = """
import json, os, sys, traceback
from qarl_bridge import cli
from qarl_bridge.engine import engine
engine._prepare_environment(False)
import vllm
import vllm.v1.worker.cpu_worker
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

def run(arguments, environment, log):
    code = 3
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        null = os.open(os.devnull, os.O_RDWR)
        for theirs, ours in ((null, 0), (out, 1), (out, 2)):
            os.dup2(theirs, ours)
        os.environ.clear()
        os.environ.update(environment)
        arguments[arguments.index("--parent-pid") + 1] = str(os.getppid())
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    asked = json.loads(line)
    if isinstance(asked, int):
        pid, status = os.waitpid(asked, os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
    elif pid := os.fork():
        print(pid, flush=True)
    else:
        run(*asked)
"""


class _Parent:
    """The process that forks; it ends with this one, and so do its engines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps(what), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            assert answer, f"the process that forks engines ended with {self._process.wait()}"
            return json.loads(answer)


_made = functools.cache(_Parent)
_making = threading.Lock()  # else threads that start engines at once make a parent each, and ask the wrong one


def _parent() -> _Parent:
    with _making:
        return _made()


class Forked:
    """A forked engine, with the methods of `subprocess.Popen` that `BridgeProcess` has use for."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: str):
        self.returncode: int | None = None
        self._polling = threading.Lock()
        self.pid: int = _parent().ask([list(arguments), dict(environment), log])

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                self.returncode = _parent().ask(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("an engine", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _started(command: Sequence[str], *, env: Mapping[str, str], stdout: Any, **options: Any) -> Any:
    """Stands in for `subprocess.Popen`: forks an engine of one process, and starts anything else."""
    engine = json.loads(command[command.index("--options") + 1]) if "--options" in command else {}
    forks = engine.get("engine", "vllm") == "vllm" and engine.get("tensor_parallel_size", 1) == 1
    on_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    if forks and on_cpu and command[0] == sys.executable and build.VARIABLE not in env:
        return Forked(command[3:], env, os.readlink(f"/proc/self/fd/{stdout.fileno()}"))
    return subprocess.Popen(command, env=env, stdout=stdout, **options)


class _Subprocess:
    """The module `subprocess`, but for `Popen`."""

    Popen = staticmethod(_started)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """While open, this process's bridges are forked from one that has imported vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", _Subprocess())
        yield
