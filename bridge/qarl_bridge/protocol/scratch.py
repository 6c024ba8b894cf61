# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes temporary folders, and removes temporary folders of killed processes.

A process holds a lock on its folder, which the kernel releases when the process ends. A process that makes a folder
first removes unlocked folders whose names have an equal prefix.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile

from qarl_bridge.protocol.errors import BridgeError

_LOCK = ".lock"
_FALLBACK = "/tmp"
_SOCKET_PATH = 107
"""Bytes of a unix socket's path, on Linux."""
_SOCKET_NAME = 37
"""The length of "/" and of the longest socket name in such a folder, a UUID that vLLM gives."""


class Scratch:
    """A new temporary folder of mode 0700, whose `path` is short enough for unix sockets in it.

    Args:
      kind: prefix of the folder's name, e.g. "qarl-bridge-". Unlocked folders with this prefix are removed.

    Raises:
      BridgeError("setup"): the path of TMPDIR is too long for sockets, and /tmp cannot be written.
    """

    def __init__(self, kind: str):
        folder = _short(kind)
        sweep(kind, folder)
        # Locked before it has a name that a sweep looks at.
        hidden = tempfile.mkdtemp(prefix=f".{kind}", dir=folder)
        self._lock = os.open(os.path.join(hidden, _LOCK), os.O_CREAT | os.O_RDWR, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody sweeps there either
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        parent, name = os.path.split(hidden)
        self.path = os.path.join(parent, name.removeprefix("."))
        os.rename(hidden, self.path)

    def close(self) -> None:
        """Removes the folder and its lock. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _short(kind: str) -> str:
    """Returns the temporary directory, or /tmp where the directory's path leaves no room for a socket's name."""
    folder = tempfile.gettempdir()
    most = _SOCKET_PATH - _SOCKET_NAME - len(f"/{kind}12345678")
    if len(os.fsencode(folder)) <= most:
        return folder
    if os.access(_FALLBACK, os.W_OK | os.X_OK):
        return _FALLBACK
    raise BridgeError(
        f"the temporary directory {folder} is too long for unix sockets in it, and {_FALLBACK} cannot be written: set"
        f" TMPDIR to a folder of at most {most} bytes",
        "setup",
    )


def sweep(kind: str, folder: str) -> None:
    """Removes this user's folders in `folder` whose name begins with `kind` and whose lock is free."""
    for entry in os.scandir(folder):
        if not entry.name.startswith(kind) or entry.is_symlink():
            continue
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # not one of ours, or removed meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except OSError:
            pass  # held
        finally:
            os.close(lock)
