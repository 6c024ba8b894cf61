# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Jails the processes that run or evaluate what a policy wrote, with bubblewrap where the machine has it.

    bubblewrap   user, PID, network, IPC, UTS and cgroup namespaces of its own; a read-only file system that holds the
                 Python interpreter, its packages and this package; an empty /tmp; no /proc, no terminal, no
                 capabilities; a few environment variables. The jail ends with the trainer, and all in it with the jail.
    inside       `_sandbox.lock_down`: a filter of system calls, and Landlock where the kernel has it

Without a working bubblewrap only `lock_down` protects the machine, and the run's log says so. SECURITY.md says what
each of the two promises.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from qarl_jax.rewards import _sandbox

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
# Of a virtual environment it is the interpreter that the environment was made with.
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
_DEVICES = ("/dev/null", "/dev/urandom")
_PROBE_S = 60.0


def command() -> list[str]:
    """Returns the command to put before a script's path and arguments; start it with `environment`."""
    return [*bubblewrap()[0], _PYTHON, "-P", "-S", "-B"]


def environment() -> dict[str, str]:
    """Returns all environment variables of a jailed process."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHASHSEED") if name in os.environ}
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONPATH": os.pathsep.join(_packages()), **kept}


@functools.cache
def bubblewrap() -> tuple[tuple[str, ...], str]:
    """Returns (command prefix that jails a program, ""), or ((), reason) if bubblewrap does not work. Cached."""
    if (program := shutil.which("bwrap")) is None:
        return (), "bubblewrap is not installed"
    jail = [program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--tmpfs", "/tmp"]
    for path in _sandbox.readable([_PYTHON, _PACKAGE, *_packages()]):
        jail += ["--ro-bind", path, path]
    for path in _DEVICES:
        jail += ["--dev-bind", path, path]
    jail += ["--remount-ro", "/", "--chdir", "/tmp", "--"]
    try:
        probe = [*jail, _PYTHON, "-S", "-c", ""]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_S, env=environment(), check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"bubblewrap does not work here: {error}"
    if done.returncode:
        return (), f"bubblewrap does not work here: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
    return tuple(jail), ""


def walls() -> tuple[bool, str]:
    """Returns (True if bubblewrap works, words that name the protections in force)."""
    abi = _sandbox.landlock_abi()
    inner = ("a filter of system calls" if _sandbox.HAS_FILTER else "no filter of system calls") + (
        f" and Landlock (ABI {abi})" if abi else ""
    )
    _, why = bubblewrap()
    return not why, f"{inner} alone: {why}" if why else f"bubblewrap, and in it {inner}"


@functools.cache
def announce(say: Callable[[str], None]) -> None:
    """Calls each `say` once with the protections in force, if bubblewrap does not work."""
    whole, found = walls()
    if not whole:
        say(f"what the policy writes is run or evaluated behind {found}. SECURITY.md says what that leaves open.")


def _packages() -> list[str]:
    return [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
