# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Simulates asynchronous training from measured phase times: seconds per step, by split of the GPUs and staleness.

    python -m benchmarks.pipeline_sim --metrics runs/quickstart/metrics.jsonl --measured-on 1 --cards 8

reads the seconds of each step's phases of a run that waits (`train.asynchronous` off), and answers, for every split of
the GPUs between sampler and learner and for several `max_staleness`, how long a step takes in the mean. It is the
schedule of `qarl_jax/rollout/asynchronous.py` as a recurrence, with R_s and L_s the seconds that the batch of step s
takes to sample and to train on, and P those of a publish:

    begun(s)      the sampler is free, and version s - k is served
    sampled(s)    begun(s) + R_s
    learned(s)    max(sampled(s), published(s)) + L_s
    published(v)  learned(v - 1), then the wait of the sampler's schedule, then P

At `in flight` a version comes in at once, and costs the sampler P; `between batches` it waits for the batch in hand;
in `lockstep` for the batch of step v - 1 + k. k = 0 is the run that waits: it alone may use all GPUs for both phases.

What is assumed: each phase takes as long on n GPUs as on one divided by n, up to `--overhead` (a share that does not
shrink, of either); the times are those of the run in their order, over and over; and interruptions do not slow
sampling down.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np

from qarl_jax.observe.recorder import read_lines
from qarl_jax.types import UserError

Order = Literal["between batches", "in flight", "lockstep"]
ORDERS: tuple[Order, ...] = ("between batches", "in flight", "lockstep")
SAMPLING = ("time/rollout_s", "time/reward_s")


_STEPS = 400  # the run's times over and over, so that how it begins and ends counts for little


def simulate(
    sampling_s: Sequence[float], learning_s: Sequence[float], publish_s: float, k: int, order: Order = "between batches"
) -> list[float]:
    """Simulates the schedule; returns when each step's version is served, in seconds from the start.

    Args:
      sampling_s, learning_s: seconds of each step.
      publish_s: seconds of every publish.
      k: max_staleness; 0: learner and sampler wait for each other.
      order: when the sampler loads a new version.
    """
    steps = len(sampling_s)
    served = [0.0]  # when version v is served
    sampled: list[float] = []
    free = 0.0  # when the sampler can begin a batch

    def sample(step: int) -> None:
        nonlocal free
        begun = max(free, served[max(0, step - k)])
        sampled.append(begun + sampling_s[step])
        free = sampled[-1]

    for step in range(steps):
        while len(sampled) <= step:
            sample(len(sampled))
        learned = max(sampled[step], served[step]) + learning_s[step]
        # All that the sampler begins before the version is there.
        while len(sampled) < steps and len(sampled) <= step + k:
            if order != "lockstep" and max(free, served[max(0, len(sampled) - k)]) >= learned:
                break
            sample(len(sampled))
        if order == "in flight":
            served.append(learned + publish_s)
            if free > learned:  # the batch in hand, and what was begun meanwhile, waits for the publish
                sampled = [end + publish_s if end > learned else end for end in sampled]
                free += publish_s
        else:
            waits = max(learned, sampled[-1] if order == "lockstep" else _end_in_hand(sampled, learned))
            served.append(waits + publish_s)
        free = max(free, served[-1])
    return served[1:]


def _end_in_hand(sampled: Sequence[float], now: float) -> float:
    """When the batch ends that is being sampled at this moment; `now` where none is."""
    return min((end for end in sampled if end > now), default=now)


def per_step_s(served: Sequence[float]) -> float:
    """Returns the mean seconds of a step without the first and last quarter, where the pipeline fills and drains."""
    skip = len(served) // 4
    first, last = served[skip - 1] if skip else 0.0, served[len(served) - skip - 1]
    return (last - first) / (len(served) - 2 * skip)


def measured(path: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Reads (sampling, learning) seconds of every step but the first of a run, and those of a publish.

    Raises:
      UserError: the run has fewer than two steps, or sampled ahead itself.
    """
    records = read_lines(path)[1:]  # the first step compiles
    if not records:
        raise UserError(f"{path}: the times of at least two steps are needed; the first one compiles.")
    if any("time/ahead_rollout_s" in record for record in records):
        raise UserError(f"{path}: this run sampled ahead; take one with train.asynchronous off.")
    sampling = np.array([sum(record.get(key, 0.0) for key in SAMPLING) for record in records])
    publish = np.array([record.get("time/publish_s", 0.0) for record in records])
    rest = np.array([record["time/step_s"] - record.get("time/eval_s", 0.0) for record in records])
    return sampling, np.maximum(rest - sampling - publish, 0.0), float(publish.mean())


def table(
    sampling: np.ndarray,
    learning: np.ndarray,
    publish: float,
    *,
    measured_on: int,
    cards: int,
    ks: Sequence[int],
    order: Order,
    overhead: float,
) -> list[dict[str, float]]:
    """Formats seconds per step and speed-up: the synchronous run on all GPUs, then each split and staleness."""

    def on(seconds: np.ndarray, some: int) -> list[float]:
        return list(np.resize(seconds, _STEPS) * (overhead + (1 - overhead) * measured_on / some))

    waiting = per_step_s(simulate(on(sampling, cards), on(learning, cards), publish, 0))
    rows = [{"sampler": cards, "learner": cards, "k": 0, "step_s": waiting, "speedup": 1.0}]
    for sampler in range(1, cards):
        for k in ks:
            times = on(sampling, sampler), on(learning, cards - sampler)
            step_s = per_step_s(simulate(*times, publish, k, order))
            rows.append(
                {"sampler": sampler, "learner": cards - sampler, "k": k, "step_s": step_s, "speedup": waiting / step_s}
            )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline_sim", description=__doc__.split("\n")[0])
    parser.add_argument("--metrics", required=True, help="metrics.jsonl of a run that waits")
    parser.add_argument("--measured-on", type=int, default=1, help="GPUs that this run had")
    parser.add_argument("--cards", type=int, default=8)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--order", choices=ORDERS, default="between batches")
    parser.add_argument("--overhead", type=float, default=0.0, help="share of a phase that more GPUs do not shorten")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    sampling, learning, publish = measured(args.metrics)
    rows = table(
        sampling,
        learning,
        publish,
        measured_on=args.measured_on,
        cards=args.cards,
        ks=args.staleness,
        order=args.order,
        overhead=args.overhead,
    )
    if args.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{len(sampling)} steps on {args.measured_on} GPU(s): sampling {sampling.mean():.2f} s"
        f" (sd {sampling.std():.2f}), learning {learning.mean():.2f} s, publish {publish:.2f} s; {args.order}\n"
    )
    print("| sampler | learner | staleness | s per step | speed-up |\n|---|---|---|---|---|")
    for row in rows:
        waits = row["k"] == 0
        cards = ("all", "all") if waits else (str(row["sampler"]), str(row["learner"]))
        print(f"| {' | '.join(cards)} | {row['k']} | {row['step_s']:.2f} | {row['speedup']:.2f} |")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
