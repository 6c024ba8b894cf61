# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders for temporary files that do not outlive their process for long, however it ends.

A folder's process holds a lock on it, which the kernel releases with the process. Whoever makes a folder of the same
kind first removes those whose lock is free: what processes that were killed have left behind.
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
    """A new folder of mode 0700, `path`, short enough for unix sockets in it.

    Args:
      kind: the beginning of its name, e.g. "qarl-bridge-". Folders of this kind that nobody holds are removed.

    Raises:
      BridgeError("setup"): TMPDIR is too long, and /tmp cannot be used.
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
        """Remove the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _short(kind: str) -> str:
    """The temporary directory; /tmp where that leaves no room for a socket's name."""
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
    """Remove this user's folders of a kind in `folder` that no process holds."""
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
