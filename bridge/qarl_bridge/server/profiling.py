# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes cProfile profiles of an engine's loads, read-backs and sampling steps."""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def profiled(folder: str, name: str) -> Iterator[None]:
    """Profiles a `with` block into FOLDER/NAME.prof and, as text, FOLDER/NAME.txt; an empty folder disables it."""
    if not folder:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        _write(profile, folder, name)


class Steps:
    """A profile of calls number `FIRST` to `LAST` of a repeated action.

    On a GPU, a function's time includes its waits for the GPU.
    """

    FIRST, LAST = 200, 299

    def __init__(self, folder: str, name: str):
        """folder, name: as in `profiled`."""
        self._folder, self._name = folder, name
        self._done = 0
        self._profile = cProfile.Profile()

    def run(self, step: Callable[[], None]) -> None:
        """Calls `step`, with the profiler on for calls number `FIRST` to `LAST`; then writes the profile."""
        if not self._folder or not self.FIRST <= self._done <= self.LAST:
            step()
        else:
            self._profile.runcall(step)
            if self._done == self.LAST:
                _write(self._profile, self._folder, self._name)
        self._done += 1


def _write(profile: cProfile.Profile, folder: str, name: str) -> None:
    os.makedirs(folder, exist_ok=True)
    profile.dump_stats(os.path.join(folder, f"{name}.prof"))
    with open(os.path.join(folder, f"{name}.txt"), "w", encoding="utf-8") as file:
        pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(60)
