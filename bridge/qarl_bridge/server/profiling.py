# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Profiles of an engine that loads, reads back and samples."""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def profiled(folder: str, name: str) -> Iterator[None]:
    """Profiles a block into DIR/NAME.prof for tools and DIR/NAME.txt for people."""
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
    """A profile of a repeated action, from its repetition `FIRST` to `LAST`.

    Where a GPU computes, the functions that wait for it stand in the profile with the time that they waited.
    """

    FIRST, LAST = 200, 299

    def __init__(self, folder: str, name: str):
        """folder: as of `profiled`."""
        self._folder, self._name = folder, name
        self._done = 0
        self._profile = cProfile.Profile()

    def run(self, step: Callable[[], None]) -> None:
        """Do it once more."""
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
