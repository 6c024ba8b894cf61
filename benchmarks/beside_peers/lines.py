# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes lines of JSON that can stand side by side: of a peer's run, and of a run of `benchmarks.step_gpu`.

    python -m benchmarks.beside_peers.lines RUN_DIR --name NAME --out results.jsonl

`benchmarks.step_gpu --run-dir RUN_DIR` kept the run. Means leave out the first `--discard` steps, as in peers' lines.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.watched import said_by_driver, written

PROMPT_LEN = 64  # words, a token each


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what all peers' scripts take: the model's folder, a step's size, settings, and where its line goes."""
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="responses of a prompt")
    parser.add_argument("--response-len", type=int, default=512, help="tokens of every response")
    parser.add_argument("--updates", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--discard", type=int, default=2, help="first steps, which no mean holds")
    parser.add_argument("--micro", type=int, default=16, help="responses of a forward and backward pass")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the masters")
    parser.add_argument("--utilization", type=float, default=0.3, help="vLLM's share of the GPU's memory")
    parser.add_argument("--liger", action="store_true", help="liger's kernels")
    parser.add_argument("--no-checkpointing", action="store_true", help="no recomputation of activations")
    parser.add_argument("--name", default="", help="of the line")
    parser.add_argument("--out", default="", help="a file that the line is appended to")


def mean(rows: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """Returns the mean of a key over the rows that have it."""
    found = [row[key] for row in rows if isinstance(row.get(key), (int, float))]
    return round(statistics.mean(found), 6) if found else None


def known(peer: str, args: argparse.Namespace, packages: Sequence[str]) -> dict[str, Any]:
    """Returns what is known of a peer's run before it begins: versions, GPU, settings."""
    settings = {key: value for key, value in vars(args).items() if key not in ("folder", "name", "out")}
    versions = {package: importlib.metadata.version(package) for package in packages if installed(package)}
    line = {"peer": peer, "name": args.name or peer, "versions": versions, "gpu": said_by_driver("name") or "none"}
    return line | {"folder": args.folder.name, "settings": settings}


def installed(package: str) -> bool:
    """Tells whether a distribution is there."""
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def speeds(args: argparse.Namespace, seconds: Mapping[str, float | None], generating: str) -> dict[str, Any]:
    """Returns tokens per second of the whole step, and of its phase `generating`."""
    tokens = args.prompts * args.samples * args.response_len
    took = {"tokens_per_s": seconds.get("step"), "generated_per_s": seconds.get(generating)}
    return {key: round(tokens / value, 1) if value else None for key, value in took.items()}


def own(records: Sequence[Mapping[str, Any]], discard: int) -> dict[str, Any]:
    """Summarizes the `metrics.jsonl` of a run of ours."""
    kept = records[discard:]
    phases = [key for key in kept[0] if key.startswith("time/") and key.endswith("_s") and "per_s" not in key]
    return {
        "step_s": [round(record["time/step_s"], 4) for record in records],
        "seconds": {key.removeprefix("time/").removesuffix("_s"): mean(kept, key) for key in phases},
        "tokens_per_s": mean(kept, "time/tok_per_s"),
        "generated_per_s": mean(kept, "time/rollout_tok_per_s"),
        "response_tokens": mean(kept, "response/tokens"),
        "mismatch": {
            "k3": mean(kept, "mismatch/k3"),
            "exact": mean(kept, "mismatch/exact"),
            "max_abs": max(record.get("mismatch/max_abs") or 0.0 for record in kept),
        },
        "peak_learner_gib": max(
            (value for key, value in records[-1].items() if key.startswith("perf/most_gib_")), default=None
        ),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="of a run")
    parser.add_argument("--discard", type=int, default=2)
    parser.add_argument("--name", default="")
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    file = args.folder / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if len(records) <= args.discard:
        raise SystemExit(f"{args.folder}: {len(records)} steps, of which the first {args.discard} count for no mean")
    written(known("qarl_jax", args, ("jax", "vllm")) | own(records, args.discard), args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
