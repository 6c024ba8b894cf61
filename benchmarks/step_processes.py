# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Repeats a run of `benchmarks.step_gpu` over several GPUs as one process for each of them, an engine in each.

    python -m benchmarks.step_gpu --cards 4 --folder DIR --out one.jsonl ...
    python -m benchmarks.step_processes one.jsonl --processes 4 --run-dir DIR --out four.jsonl

The last line of one.jsonl gives the settings. All processes are on this host, and NCCL joins them. Writes a line of the
first process's record, in the form of one.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.step_gpu import CONFIG, steps_done, summary
from benchmarks.watched import written


def own(word: str) -> bool:
    """Tells whether an override stays as it is when each process has one engine on its own GPU."""
    return word.split("=", 1)[0] not in ("run_dir", "rollout.engine.replicas", "rollout.engine.visible_gpus")


def commands(words: Sequence[str], processes: int, run_dir: pathlib.Path, on_gpus: bool) -> list[list[str]]:
    """Makes the command of each process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = [f"distributed.coordinator=127.0.0.1:{port}", f"distributed.num_processes={processes}"]
    base = [
        sys.executable,
        "-m",
        "qarl_jax.train",
        "--config",
        CONFIG,
        *filter(own, words),
        f"run_dir={run_dir}",
        *told,
    ]
    return [
        [*base, f"distributed.process_id={n}", *([f"distributed.local_devices=[{n}]"] if on_gpus else [])]
        for n in range(processes)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("line", type=pathlib.Path, help="the file that `benchmarks.step_gpu --out` wrote")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--run-dir", type=pathlib.Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="a process has the devices that XLA_FLAGS makes")
    parser.add_argument("--limit-s", type=float, default=400.0)
    parser.add_argument("--out", default="", help="a file that the line is appended to")
    parser.add_argument("overrides", nargs="*", help="settings beside those of the line")
    args = parser.parse_intermixed_args(argv)
    one = json.loads(args.line.read_text().splitlines()[-1])
    began = time.perf_counter()
    run_dir = args.run_dir.absolute()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    logs = [run_dir.with_name(f"{run_dir.name}.{n}.log") for n in range(args.processes)]
    running = []
    try:
        words = [*one["overrides"], *args.overrides]
        for log, command in zip(logs, commands(words, args.processes, run_dir, not args.cpu), strict=True):
            with open(log, "w", encoding="utf-8") as file:
                options: dict[str, Any] = {"stderr": subprocess.STDOUT, "start_new_session": True}
                running.append(subprocess.Popen(command, stdout=file, **options))
        # One that ends with an error ends the others, by itself (`runtime/peers.py`).
        while any(process.poll() is None for process in running) and time.perf_counter() - began < args.limit_s:
            time.sleep(0.5)
    finally:
        for process in running:  # with the engines and reward workers that a killed one would leave
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    codes = [process.wait() for process in running]
    line = {"case": one["case"], "shapes": one["shapes"], "batch": one["batch"], "processes": args.processes}
    line |= {"codes": codes, "seconds_in_all": time.perf_counter() - began, "overrides": one["overrides"]}
    if steps_done(run_dir) > 1:
        line |= summary(run_dir)
    if any(codes):
        line["tails"] = [log.read_text(errors="replace").splitlines()[-8:] for log in logs]
    written(line, args.out)
    return int(any(codes))


if __name__ == "__main__":
    raise SystemExit(main())
