# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Caches compiled programs on disk between runs, and counts compilations, because a step waits while it compiles.

The programs of an 8B step take a minute to compile and seconds to read back. A run keeps them in the folder
`train.compile_cache`. XLA's cache key covers program, flags, versions and device: runs and machines may share a folder,
and losing it costs only time.
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
    """Counts the programs that this process compiles from now on, in any thread."""

    def __init__(self) -> None:
        _listen()
        self._seen = _counted

    def take(self) -> int:
        """Returns the number of programs compiled since the last call (or since the counter was made)."""
        new, self._seen = _counted - self._seen, _counted
        return new

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count programs compiled inside the block, such as those of a first save or evaluation."""
        before = _counted
        try:
            yield
        finally:
            self._seen += _counted - before


_NO_ZEROS = {"xla_gpu_enable_dus_accumulator_zero_init_elimination": True}


@functools.cache
def backward_options() -> dict[str, bool] | None:
    """Returns `compiler_options` for `jax.jit` of a program with a backward pass; None if this XLA has none.

    A scan over layers saves activations for the backward in stacked arrays. JAX first fills them with zeros, although
    the scan overwrites every layer. On an H200 this takes 1.7 % of a step of Qwen3-8B
    (`docs/operations/performance.md`). An option of recent XLA versions for GPUs removes the fill.
    """
    if jax.default_backend() != "gpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=_NO_ZEROS).lower().compile()
    except jax.errors.JaxRuntimeError:  # an XLA that does not know the option
        return None
    return _NO_ZEROS


def enable_cache(choice: str) -> str | None:
    """Turns on JAX's persistent compilation cache.

    Args:
      choice: "auto": JAX's configured folder if there is one; else ~/.cache/qarl_jax/xla (or under XDG_CACHE_HOME) on
        an accelerator. On a CPU auto caches nothing: programs compile fast and fit one CPU model only. "off": none.
        Otherwise the folder.

    Returns:
      The folder in use; None if there is none or it cannot be written, which is no error.
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
