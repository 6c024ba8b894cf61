# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs a command for a limited time, watches a GPU's memory, and writes lines of JSON. Imports no JAX, no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from typing import Any


def written(line: Mapping[str, Any], out: str | None) -> None:
    """Prints a line, and appends it to a file if one is named."""
    print(json.dumps(line), flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def said_by_driver(field: str, ordinal: int = 0) -> str:
    """Returns a field of nvidia-smi, of the `ordinal`th GPU that this process sees; empty: there is none."""
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    number = visible[ordinal] if ordinal < len(visible) else ordinal
    query = ["nvidia-smi", f"--id={number}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:  # no NVIDIA driver here
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def used_bytes(ordinal: int = 0) -> int:
    """Returns the memory in use, by any process, on the `ordinal`th GPU that this process sees; 0: there is none."""
    return int(said_by_driver("memory.used", ordinal) or 0) << 20


@contextlib.contextmanager
def most_used(ordinal: int = 0) -> Iterator[list[int]]:
    """A context that samples `used_bytes` four times a second; yields a list whose only entry is the largest."""
    most, done = [used_bytes(ordinal)], threading.Event()

    def watch() -> None:
        while not done.wait(0.25):
            most[0] = max(most[0], used_bytes(ordinal))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def finished(command: list[str], log: str, limit_s: float, env: dict[str, str] | None = None) -> int | None:
    """Runs a command with its output in a file; returns its exit code. None: it took too long and was killed."""
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=env)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # so it ends with Ctrl-C, too, which does not reach it
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
