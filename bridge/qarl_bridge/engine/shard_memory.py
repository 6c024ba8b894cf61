# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Gives the shared-memory files of a tensor-parallel CPU engine (in /dev/shm) unique names, and unlinks them early.

vLLM names them `-tp:0-[0-1]-cpushm-...` for every engine that is launched from outside. So the files of a killed engine
make the next start fail ("create shm in SHMManager failed"), and two engines of a host share files. Here a name begins
with the process id of the first shard, and a file is unlinked once all shards have mapped it.
"""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import re
from typing import Any

FOLDER = pathlib.Path("/dev/shm")
_OURS = re.compile(r"qarl-shards-(\d+)-")


def keep_apart(owner: int, module: str = "vllm.distributed.device_communicators.cpu_communicator") -> None:
    """Patches vLLM, before it starts, to name shared-memory files after `owner`, the first shard's process id."""
    kind = importlib.import_module(module)._CPUSHMDistributed
    if getattr(kind, "owner", None) is None:
        kind.make_group_name = staticmethod(_named(kind, kind.make_group_name))
        kind._init_cpu_shm = _without_names(kind._init_cpu_shm)
    kind.owner = owner


def _named(kind: Any, original: Any) -> Any:
    @functools.wraps(original)
    def make_group_name(communicator: Any) -> str:
        return f"qarl-shards-{kind.owner}-{original(communicator).lstrip('/-')}"

    return make_group_name


def _without_names(original: Any) -> Any:
    @functools.wraps(original)
    def join(self: Any) -> int:
        handle = original(self)  # ends with a barrier: all shards have mapped all files
        for path in FOLDER.glob(f"*{_escaped(self.group_name)}*"):
            path.unlink(missing_ok=True)  # by whichever shard comes first
        return handle

    return join


def _escaped(name: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", name)


def remove_stale(folder: pathlib.Path = FOLDER) -> list[str]:
    """Removes shared-memory files whose first shard's process has ended; returns their names."""
    removed = []
    for path in folder.iterdir() if folder.is_dir() else ():
        found = _OURS.search(path.name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
