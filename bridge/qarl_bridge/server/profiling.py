# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the engine's time goes while it loads and reads back."""

from __future__ import annotations

import contextlib
import cProfile
import os
import pstats
from collections.abc import Iterator


@contextlib.contextmanager
def profiled(folder: str, name: str) -> Iterator[None]:
    """Where the time goes: DIR/NAME.prof for tools, DIR/NAME.txt for people."""
    if not folder:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        os.makedirs(folder, exist_ok=True)
        profile.dump_stats(os.path.join(folder, f"{name}.prof"))
        with open(os.path.join(folder, f"{name}.txt"), "w", encoding="utf-8") as file:
            pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(60)
