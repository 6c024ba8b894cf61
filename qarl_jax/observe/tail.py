# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads the lines that another process appended to a .jsonl file since the last read. Imports no JAX."""

from __future__ import annotations

import os
from pathlib import Path


class Tail:
    """A reader that returns each complete line of a growing file once.

    Args:
      path: the file; need not exist yet.
      most: bytes read at a time, up to the end of a line; -1: all.

    Attributes:
      more: True if the last call did not reach the end of the file.

    Example:
      tail = Tail(run / "metrics.jsonl")
      anew, lines = tail.read()    # anew: the file was cut or replaced, and `lines` are those of its beginning
    """

    def __init__(self, path: str | os.PathLike[str], most: int = -1):
        self.path, self._most, self.more = Path(path), most, False
        self._at, self._file = 0, (0, 0)

    def read(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Returns whether the file was cut or replaced since the last call, and (byte offset, line) of new lines.

        An incomplete last line is left for a later call.
        """
        known = self._file != (0, 0)
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                anew = known and ((found.st_dev, found.st_ino) != self._file or found.st_size < self._at)
                self._file = (found.st_dev, found.st_ino)
                self._at = 0 if anew else self._at
                file.seek(self._at)
                data = file.read(self._most)
                if self._most >= 0:
                    data += file.readline()
                self.more = file.tell() < found.st_size
        except FileNotFoundError:
            self._at, self._file = 0, (0, 0)
            return known, []
        out = []
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            out.append((self._at, line))
            self._at += len(line)
        return anew, out
