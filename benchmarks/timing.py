# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times calls, each until its result is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds_of(call: Callable[[], Any], times: int) -> list[float]:
    """Times `times` calls, one after the other, each until its result is there; the first compiles."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - started)
    return found
