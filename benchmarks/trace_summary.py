# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Summarizes where a profiled step spent its time: kernels by total time, from the trace that `jax.profiler` wrote.

    python -m benchmarks.trace_summary RUN_DIR/profile [--top 25] [--by kind]

Reads the newest `*.trace.json.gz` under the folder (the file Perfetto opens). Only a device's own rows count where
there are any; on a CPU all rows do. `--by kind` adds kernels up by what they are (GEMM, attention, copy, ...).
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import pathlib
import re
from collections.abc import Iterable
from typing import Any

KINDS = (
    ("GEMM", r"gemm|cublas|cutlass|nvjet|xmma|matmul|dot_general|^dot"),
    ("attention", r"fmha|flash|attention|softmax"),
    ("collective", r"nccl|all-?reduce|all-?gather|reduce-?scatter|all-?to-?all"),
    ("copy", r"memcpy|memset|^copy|transpose"),
    ("fusion", r"fusion|^loop_|^input_|fused"),
)


def kind_of(name: str) -> str:
    """Classifies a kernel by its name (GEMM, attention, copy, ...)."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.I)), "other")


def newest(folder: str | pathlib.Path) -> pathlib.Path:
    """Finds the newest trace under a folder.

    Raises:
      SystemExit: there is none.
    """
    found = sorted(pathlib.Path(folder).rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"{folder}: no *.trace.json.gz there; a profile is written by train.profile_steps=[N]")
    return found[-1]


def totals(events: Iterable[dict[str, Any]]) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Sums microseconds and calls by kernel name, over device rows if there are any, without enclosing rows (steps)."""
    events = list(events)
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    devices = {pid for pid, name in processes.items() if "/device:" in name and "CPU" not in name}
    out: collections.Counter[str] = collections.Counter()
    calls: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("ph") != "X" or (devices and event["pid"] not in devices):
            continue
        if devices and not re.search(r"stream|ops", threads.get((event["pid"], event["tid"]), "stream"), re.I):
            continue
        out[event["name"]] += event.get("dur", 0.0)
        calls[event["name"]] += 1
    return out, calls


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument("--by", choices=["name", "kind"], default="name")
    args = parser.parse_args(argv)
    path = newest(args.folder)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found, calls = totals(json.load(file)["traceEvents"])
    if args.by == "kind":
        kinds: tuple[collections.Counter[str], ...] = collections.Counter(), collections.Counter()
        for kind, each in zip(kinds, (found, calls), strict=True):
            for name, amount in each.items():
                kind[kind_of(name)] += amount
        found, calls = kinds
    whole = sum(found.values())
    print(f"{path}: {whole / 1e3:.2f} ms")
    for name, us in found.most_common(args.top):
        print(f"{us / 1e3:10.3f} ms {us / max(whole, 1e-9):6.1%} {calls[name]:6d} x  {name[:120]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
