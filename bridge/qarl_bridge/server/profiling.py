# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes profiles of an engine: its loads, read-backs and sampling steps on the host, and a GPU's kernels."""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
import sys
from collections.abc import Callable, Iterator
from typing import Any


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
    """A profile of calls number `FIRST` to `LAST` of a repeated action, then of a GPU's kernels up to `KERNELS`.

    On a GPU, a function's time includes its waits for the GPU. FOLDER/NAME.kernels.txt has the kernels of the process.
    """

    FIRST, LAST, KERNELS = 200, 299, 331

    def __init__(self, folder: str, name: str):
        """folder, name: as in `profiled`."""
        self._folder, self._name = folder, name
        self._done = 0
        self._profile = cProfile.Profile()
        self._kernels: Any = None

    def run(self, step: Callable[[], None]) -> None:
        """Calls `step`, with a profiler on for calls number `FIRST` to `KERNELS`; then writes the profiles."""
        number, self._done = self._done, self._done + 1
        if not self._folder or not self.FIRST <= number <= self.KERNELS:
            step()
        elif number <= self.LAST:
            self._profile.runcall(step)
            if number == self.LAST:
                _write(self._profile, self._folder, self._name)
                self._kernels = _begin_kernels()
        else:
            step()
            if number == self.KERNELS and self._kernels is not None:
                _write_kernels(self._kernels, self._folder, self._name, self.KERNELS - self.LAST)


def _begin_kernels() -> Any:
    """Starts torch's profiler of CUDA kernels; returns None where the engine uses no CUDA device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    found = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    found.start()
    return found


def _write_kernels(profiler: Any, folder: str, name: str, steps: int) -> None:
    """Stops the profiler; writes microseconds and launches of each kernel, a step."""
    profiler.stop()
    rows = [(one.device_time_total / steps, one.count / steps, one.key) for one in profiler.key_averages()]
    with open(os.path.join(folder, f"{name}.kernels.txt"), "w", encoding="utf-8") as file:
        file.write(f"{sum(us for us, _, _ in rows):.0f} us a step, mean of {steps} steps\n")
        for us, launches, kernel in sorted(rows, reverse=True):
            file.write(f"{us:10.1f} us {launches:8.1f} x  {kernel}\n")


def _write(profile: cProfile.Profile, folder: str, name: str) -> None:
    os.makedirs(folder, exist_ok=True)
    profile.dump_stats(os.path.join(folder, f"{name}.prof"))
    with open(os.path.join(folder, f"{name}.txt"), "w", encoding="utf-8") as file:
        pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(60)
