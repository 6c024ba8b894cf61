# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes of `tests.chaos`: forked from one that has imported everything, watched, killed, asked for an answer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

PATIENCE_S = 900  # for one process: on a busy machine vLLM takes its time to start


class BrokenError(Exception):
    """A promise that did not hold. `tries`: how many tries it was that did not."""

    def __init__(self, text: str, tries: int = 1):
        super().__init__(text)
        self.tries = tries


class ImpossibleError(Exception):
    """A kind of trial that this machine cannot run; says why."""


def fork(task: Callable[[], int], log: pathlib.Path) -> int:
    """The process that runs `task`, in a session of its own; its exit code is what that returns. It writes to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing outlives an interrupted hour
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = task()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """The exit code (negative: the signal), None if it still runs after that time."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def kill(pid: int) -> None:
    """The process alone, not what it started: that is to end by itself."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def finish(pid: int, seconds: float = PATIENCE_S) -> int:
    """The exit code of a process that is to end by itself."""
    code = wait(pid, seconds)
    if code is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise BrokenError(f"still running after {seconds:.0f} s")
    return code


def children(pid: int, word: str) -> list[int]:
    """Children of a process with `word` in their command line."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and word in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


def computed(task: Callable[[], Any], folder: pathlib.Path, seconds: float = PATIENCE_S) -> Any:
    """What `task` returns, in a process of its own, which may use JAX; its errors are raised here."""
    answer, log = folder / "answer.pickle", folder / "computed.log"

    def run() -> int:
        try:
            result: Any = ("returned", task())
        except (BrokenError, ImpossibleError) as error:
            result = ("raised", error)
        answer.write_bytes(pickle.dumps(result))
        return 0

    code = finish(fork(run, log), seconds)
    if code:
        raise BrokenError(f"exit code {code}: {log.read_text()[-2000:]}")
    how, result = pickle.loads(answer.read_bytes())
    if how == "raised":
        raise result
    return result


def own_mounts() -> None:
    """A mount namespace for this process. Raises `ImpossibleError` where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    newns, newuser = 0x00020000, 0x10000000
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(newns) and libc.unshare(newns | newuser):
        raise ImpossibleError(f"no mount namespace: {os.strerror(ctypes.get_errno())}")
    with contextlib.suppress(OSError):  # not in a user namespace of our own
        pathlib.Path("/proc/self/setgroups").write_text("deny")
        pathlib.Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        pathlib.Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
