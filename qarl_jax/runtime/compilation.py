# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: kept on disk between runs, and counted, because a step that compiles is a step that waits.

The programs of an 8B step take a minute to compile and seconds to read back. A run keeps them in a folder of the user's
(`train.compile_cache`); XLA's key for an entry covers program, flags, versions and device, so that a folder may be
shared by runs and machines, and losing it costs time alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_COMPILED = "/jax/core/compile/backend_compile_duration"  # one event per program built or read from the cache
_counted = 0


def _on_event(event: str, duration_secs: float, **kwargs: Any) -> None:
    global _counted
    del duration_secs, kwargs
    _counted += event == _COMPILED


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_on_event)


class Recompiles:
    """Counts the programs that this process builds from now on, whatever asks for them."""

    def __init__(self) -> None:
        _listen()
        self._seen = _counted

    def take(self) -> int:
        """Programs built since the last call (or since the counter was made)."""
        new, self._seen = _counted - self._seen, _counted
        return new

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves programs built inside uncounted: those of a first save or evaluation make no training step wait."""
        before = _counted
        try:
            yield
        finally:
            self._seen += _counted - before


_NO_ZEROS = {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}


@functools.cache
def backward_options() -> dict[str, bool] | None:
    """`compiler_options` for `jax.jit` of a program with a backward pass; None where there are none to give.

    What a scan over layers keeps for the backward lies in stacks that JAX fills with zeros first, though the scan
    writes every layer of them: 1.7 % of a step of Qwen3-8B on an H200 (`docs/operations/performance.md`). XLA for GPUs
    leaves that out if told to, in versions that know how.
    """
    if jax.default_backend() != "gpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=_NO_ZEROS).lower().compile()
    except jax.errors.JaxRuntimeError:  # an XLA that does not know the option
        return None
    return _NO_ZEROS


def enable_cache(choice: str) -> str | None:
    """Keeps compiled programs in a folder from here on.

    Args:
      choice: "auto": JAX's own folder, if it was given one; else ~/.cache/qarl_jax/xla (or under XDG_CACHE_HOME) on an
        accelerator, and none on a CPU, whose programs compile fast and fit only the CPU they were made for. "off":
        none. Otherwise the folder.

    Returns:
      The folder in use; None where there is none, also because it cannot be written: no run fails for want of a cache.
    """
    if choice == "off":
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        return None
    if choice == "auto":
        if own := jax.config.values["jax_compilation_cache_dir"]:
            return str(own)
        if jax.default_backend() == "cpu":
            return None
        root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        choice = os.path.join(root, "qarl_jax", "xla")
    folder = os.path.abspath(os.path.expanduser(choice))
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # one that was set up without a folder stays off otherwise
    return folder
