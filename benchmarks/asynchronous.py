# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times asynchronous against synchronous training on CPUs: a learner on one core, its two engines on another.

    python -m benchmarks.asynchronous --out FILE --lanes 12           # 36 runs, twelve at a time on 24 cores
    python -m benchmarks.asynchronous --out FILE --lanes 1 --seeds 0 --losses tbpo --learners aligned --staleness 0 1
    python -m benchmarks.asynchronous --out FILE --table              # what FILE holds

A run is an arm of the alignment experiment at its small scale (`SCALE`: the quickstart's policy and tasks, int4 weights
with one scale per row in the sampler): a loss, and a learner that computes with the sampler's tensors (`aligned`) or in
bfloat16 weights (`bf16`). Its engines are two bridges around the embedded sampler
(benchmarks/jax_bridge.py), processes of their own, and versions come in by the clock. Each run appends a line of JSON:

    step_s           of a step in the mean, without the first three (they compile) and without evaluations
    rollout_s        sampling and grading, wherever that happened; wait_s: what the learner waited for it
    publish_s        handing a version over, the wait for the batch in hand included
    learning_s       the rest of the step
    over_the_longer  step_s over the longer of rollout_s and learning_s: 1 is a perfect overlap

with the reward of every step, held-out rewards, the mismatch (k3) and how old tokens were. Runs that FILE has
are skipped, so an interrupted command can be repeated. `--budget-s` limits its seconds: unfinished runs are dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from qarl_bridge.protocol import messages

from qarl_jax.observe.recorder import read_lines

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
SCALE = (
    "quant.rollout=w4a16:g-1",
    "train.steps=30",
    "train.prompts_per_step=32",
    "train.prompts_per_update=4",
    "train.micro_batch_rows=12",
    "eval.num_prompts=128",
)
LOSSES = {
    # The paper's bands times sqrt(4096 / 19.4), to two digits: responses have 19.4 tokens here.
    "tbpo": "{name: tbpo, mismatch_cap: 2.0, clip_high: 0.006, neg_clip_low: 0.0045, neg_clip_high: 0.0105}",
    "grpo": "{name: grpo, clip_low: 0.2, clip_high: 0.2, mismatch: tis, mismatch_cap: 2.0}",
}
LEARNERS = {"aligned": "w4a16:g-1", "bf16": "bf16"}
ENGINES = 2
SLOTS = 128  # of an engine: half a step's responses
WARM_UP = 3  # steps that compile
_START_S = 180.0


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the comparison."""

    seed: int
    staleness: int
    loss: str
    learner: str

    @property
    def name(self) -> str:
        return f"{self.loss}_{self.learner}_k{self.staleness}_seed{self.seed}"

    def overrides(self, folder: str, rest: Sequence[str]) -> list[str]:
        """Returns the run's overrides of the experiment's config, for a run in `folder`."""
        endpoints = ", ".join(address(folder, number) for number in range(ENGINES))
        engine = f"name: vllm, endpoints: [{endpoints}], key_file: {folder}/key, max_model_len: 64"
        return [
            *SCALE,
            f"quant.forward={LEARNERS[self.learner]}",
            f"loss={LOSSES[self.loss]}",
            f"seed={self.seed}",
            f"run_dir={folder}/run",
            f"rollout.engine={{{engine}, max_num_seqs: {SLOTS}, start_timeout_s: {_START_S:g}}}",
            f"train.asynchronous.max_staleness={self.staleness}",
            "checkpoint={every: 0, at_end: false}",
            "eval.every=0",
            "log={view: 'off', trackers: [], samples_per_step: 0}",
            *rest,
        ]


def address(folder: str, number: int) -> str:
    """Returns the socket path of engine `number`."""
    return f"{folder}/s{number}"


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen]]:
    """A context with a list; every process that is appended to the list is killed when the context ends."""
    started: list[subprocess.Popen] = []
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def start(command: Sequence[str], core: int | None, log: pathlib.Path) -> subprocess.Popen:
    """Starts a Python process (`-m` and `command`) on one CPU core; None: on any core. Output goes to `log`."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pin = ["taskset", "-c", str(core)] if core is not None else []
    with open(log, "ab") as out:
        return subprocess.Popen(
            [*pin, sys.executable, "-m", *command], cwd=ROOT, env=environment, stdout=out, stderr=out
        )


def measure(run: Run, cores: Sequence[int], cache: str, rest: Sequence[str], deadline: float) -> dict[str, Any]:
    """Makes one run and returns its record, a line of the output file.

    Args:
      cores: of the learner, and of the engines, which share the last; none: nothing is pinned.
      cache: folder for compiled programs.
      rest: further overrides.
      deadline: of `time.monotonic`, when it is dropped.

    Raises:
      RuntimeError: it failed, or the time was over.
    """
    with tempfile.TemporaryDirectory(prefix="qarl-async-") as folder, processes() as started:
        messages.create_key(f"{folder}/key")
        log = pathlib.Path(folder, "log")
        overrides = [*run.overrides(folder, rest), f"train.compile_cache={cache}"]
        config = ["--config", str(CONFIG)]
        began = time.monotonic()
        for number in range(ENGINES):
            own = ["--socket", address(folder, number), "--key-file", f"{folder}/key", "--slots", str(SLOTS)]
            core = cores[min(1 + number, len(cores) - 1)] if cores else None
            started.append(start(["benchmarks.jax_bridge", *config, *own, *overrides], core, log))
        learner = start(["qarl_jax.train", *config, *overrides], cores[0] if cores else None, log)
        started.append(learner)
        while learner.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError("no time was left")
            time.sleep(0.2)
        if learner.returncode:
            raise RuntimeError(f"exit code {learner.returncode}\n{log.read_text()[-3000:]}")
        told = {"arm": run.name, **dataclasses.asdict(run), "wall_s": round(time.monotonic() - began, 1)}
        return told | summary(pathlib.Path(folder, "run"))


def summary(folder: pathlib.Path) -> dict[str, Any]:
    """Computes the record's fields (see the module docstring) from a run's metrics.jsonl and eval.jsonl."""
    records = read_lines(folder / "metrics.jsonl")
    held_out = read_lines(folder / "eval.jsonl")
    timed = records[WARM_UP:]

    def mean(*keys: str) -> float:
        return round(statistics.fmean(sum(record.get(key, 0.0) for key in keys) for record in timed), 4)

    asynchronous = "time/ahead_rollout_s" in records[-1]
    sampling = ("time/ahead_rollout_s", "time/ahead_reward_s") if asynchronous else ("time/rollout_s", "time/reward_s")
    step, wait = mean("time/step_s") - mean("time/eval_s"), mean("time/rollout_s", "time/reward_s")
    rollout, publish = mean(*sampling), mean("time/publish_s")
    learning = step - wait - publish
    return {
        "steps": len(records),
        "step_s": round(step, 4),
        "rollout_s": rollout,
        "wait_s": wait,
        "publish_s": publish,
        "learning_s": round(learning, 4),
        "over_the_longer": round(step / max(rollout, learning), 3),
        "lag_mean": round(statistics.fmean(r.get("rollout/lag_mean", 0.0) for r in records), 3),
        "lag_max": max(r.get("rollout/lag_max", 0.0) for r in records),
        "k3": float(np.mean([r["mismatch/k3"] for r in timed])),
        "held_out": [round(r["eval/reward/mean"], 4) for r in held_out],
        "reward": [round(r["reward/mean"], 4) for r in records],
        "times": {key: mean(key) for key in sorted(timed[-1]) if key.startswith("time/") and key.endswith("_s")},
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Formats a row for every loss, learner and staleness: mean over seeds, and half the 95 % interval (Student's
    t)."""
    from scipy import stats

    def of(values: Sequence[float], digits: int = 3) -> str:
        mean = f"{np.mean(values):.{digits}f}"
        if len(values) < 2:
            return mean
        return f"{mean} ± {stats.t.ppf(0.975, len(values) - 1) * stats.sem(values):.{digits}f}"

    phases = ("step_s", "rollout_s", "learning_s", "publish_s")
    head = ["loss", "learner", "staleness", "seeds", *phases, "of the bound", "k3", "reward, last 5", "held out"]
    rows = [head, ["---"] * len(head)]
    waits = {(x["loss"], x["learner"], x["seed"]): x for x in lines if not x["staleness"]}
    for key in sorted({(x["loss"], x["learner"], x["staleness"]) for x in lines}):
        own = [x for x in lines if (x["loss"], x["learner"], x["staleness"]) == key]
        beside = [(x, waits[x["loss"], x["learner"], x["seed"]]) for x in own if (*key[:2], x["seed"]) in waits]
        # The bound of the run that waits, where it was measured beside: the longer of its two phases.
        ratios = [x["step_s"] / max(y["rollout_s"], y["learning_s"]) for x, y in beside]
        rows.append(
            [
                *map(str, key),
                str(len(own)),
                *(of([x[name] for x in own], 2) for name in phases),
                of(ratios, 2) if ratios else "",
                f"{np.mean([x['k3'] for x in own]):.1e}",
                of([float(np.mean(x["reward"][-5:])) for x in own]),
                of([x["held_out"][-1] for x in own]),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchronous", description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="file of JSON lines; what is there is not run again")
    parser.add_argument("--table", action="store_true", help="only print what the file holds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS))
    parser.add_argument("--lanes", type=int, default=1, help="runs at a time")
    parser.add_argument("--cores-per-lane", type=int, default=2, help="learner, engines; 0: none is pinned")
    parser.add_argument("--first-core", type=int, default=0, help="of those that this process may use")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--cache", default="", help="folder for compiled programs; default: beside --out")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.field=value", help="in every run")
    args = parser.parse_args(argv)
    usable = sorted(os.sched_getaffinity(0))[args.first_core :]
    if args.lanes * args.cores_per_lane > len(usable) and not args.table:
        parser.error(f"{args.lanes} lanes of {args.cores_per_lane} cores, and {len(usable)} cores may be used")
    out = pathlib.Path(args.out)
    lines = read_lines(out) if out.exists() else []
    if args.table:
        print(table(lines))
        return 0
    done = {line["arm"] for line in lines}
    axes = itertools.product(args.seeds, args.staleness, args.losses, args.learners)
    waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
    for run in (Run(*one) for one in axes):
        if run.name not in done:
            waiting.put(run)
    deadline = time.monotonic() + args.budget_s
    cache = args.cache or str(out.resolve().parent / "async_programs")
    writing, failed = threading.Lock(), []

    def lane(number: int) -> None:
        cores = usable[number * args.cores_per_lane :][: args.cores_per_lane]
        while time.monotonic() < deadline:
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                line = measure(run, cores, cache, args.set, deadline)
            except RuntimeError as error:
                failed.append(run.name)
                print(f"{run.name}: {error}", file=sys.stderr, flush=True)
                continue
            with writing, open(out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{run.name}: {line['step_s']:.2f} s a step, {line['wall_s']:.0f} s in all", flush=True)

    threads = [threading.Thread(target=lane, args=(number,)) for number in range(args.lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if left := waiting.qsize() + len(failed):
        print(f"{left} runs are left; the same command goes on", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
