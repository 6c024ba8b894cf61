# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A lock on a folder, held by one process."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from qarl_jax.types import UserError

log = logging.getLogger(__name__)


def own(file: Path, what: str, remedy: str) -> TextIO:
    """Locks a file and returns it; the lock ends when it is closed, or with the process, however the process ends.

    A POSIX lock, not flock: forked workers that outlast a killed process would hold the latter.

    Args:
      file: the file, which is made. what: the noun of the error message. remedy: the way out, beside a stop.

    Raises:
      UserError: another process holds the lock.
      OSError: the file cannot be opened.
    """
    held = file.open("a+")
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        held.seek(0)
        owner = held.read().strip() or "unknown"
        held.close()
        raise UserError(f"{what} is in use by process {owner}: stop it, or {remedy}.") from None
    except OSError as error:
        log.warning("No lock on %s (%s): make sure that no second process uses it.", file, error)
    held.truncate(0)
    held.write(f"{os.getpid()}\n")
    held.flush()
    return held


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Raises `UserError` with `what` for an `OSError` of the block, which makes a folder of the user's."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} cannot be written: {error.strerror or error}. Name a folder of yours.") from None


@contextlib.contextmanager
def owned(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Holds the lock PATH.lock beside a path that is being made, then removes it.

    Raises:
      UserError: another process holds the lock, or it cannot be written.
    """
    lock = path.with_name(path.name + ".lock")
    with writing(what):
        path.parent.mkdir(parents=True, exist_ok=True)
        held = own(lock, what, remedy)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.close()
