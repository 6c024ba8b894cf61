# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole steps, run by the trainer through the live engine on one card: sampling, rewards, updates, publishing.

    python -m benchmarks.step_gpu --shapes 4b --folder /tmp/4b --case w8a8 --batch 128 --out results.jsonl

Each call is one case and ends within ten minutes; a folder that does not exist is made first, with random weights.
Cases:

    bf16            sampler and learner in bf16
    w8a8 fp8 w4a16  learner and sampler under that scheme (QaRL), the learner in the sampler's arithmetic
    w8a8-rollout    sampler under w8a8, learner in bf16 with plain arithmetic (quantized rollout); fp8 and w4a16, too

`--batch` responses of `--response-len` tokens make two updates. The run's first step warms up; the line of JSON holds
means over the `--steps` after it: tokens per second of the sampler and of the step, seconds per phase (`time/*`), k3
between sampler and learner, of all tokens of all steps how many have another log-prob in the learner, the share of
sequences that TBPO drops (after the first update), and what the card's plan said. Every case samples with the same
execution mode (`--execution`, as in rollout.engine), which the line names. A random policy shows every difference: its
k3 is no trained model's.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import random_folder, shapes
from benchmarks.memory_draws import most_used
from qarl_jax.metrics import phases
from qarl_jax.observe import recorder
from qarl_jax.run import card, config
from qarl_jax.types import UserError

CONFIG = "configs/one_h200_8b.yaml"
SCHEMES = ("w8a8", "fp8", "w4a16")
CASES = ("bf16", *SCHEMES, *(f"{scheme}-rollout" for scheme in SCHEMES))
PROMPT_LEN, SAMPLES = 64, 8


def overrides(args: argparse.Namespace, folder: str, run_dir: str) -> list[str]:
    """The command-line settings of a case."""
    scheme, _, rollout = args.case.partition("-")
    prompts = args.batch // SAMPLES
    longest = PROMPT_LEN + args.response_len
    values: dict[str, Any] = {
        "model.path": folder,
        "model.remat": "auto",
        "run_dir": run_dir,
        "quant.forward": "bf16" if rollout else scheme,
        "quant.engine": "plain" if rollout else "auto",
        "quant.kernels": "auto",
        "data.source": f"{{name: jsonl, path: {folder}/prompts.jsonl}}",
        "data.template": "{{ question }}",
        "data.max_prompt_len": PROMPT_LEN,
        "reward": f'{{name: python, path: "{folder}/reward.py:graded"}}',
        "rollout.num_samples_per_prompt": SAMPLES,
        "rollout.max_response_len": args.response_len,
        "rollout.engine.max_model_len": longest,
        "rollout.engine.max_num_seqs": args.batch,
        "rollout.engine.memory": "auto",
        "rollout.engine.transport": "auto",
        "rollout.engine.execution": args.execution,
        "optimizer.offload": "auto",
        "train.steps": 1 + args.steps,
        "train.prompts_per_step": prompts,
        "train.prompts_per_update": prompts // 2,
        "train.micro_batch_rows": args.rows,
        "train.row_len": 4 * longest,
        "train.max_segments": 8,
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "eval.every": 0,
        "eval.at_start": "false",
        "eval.at_end": "false",
        "log.view": "lines",
        "log.samples_per_step": 16,
        "log.sample_tokens": 2 * longest,
    }
    if rollout:
        values["quant.rollout"] = scheme
    return [f"{key}={value}" for key, value in values.items()] + args.overrides


def fitting(words: list[str], size: int | None) -> list[str]:
    """`words`, and what else the plan advises where they do not fit the card."""
    if size is None:
        return words
    cfg = config.load(CONFIG, words)
    if card.fits(cfg, size):
        return words
    advised = card.savings(cfg, size)
    if advised is None:
        raise UserError("this case does not fit the card, and no settings were found that do")
    return [*words, *advised]


def unequal_tokens(records: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """(response tokens whose log-prob is another in the learner than in the sampler, response tokens) of some steps."""
    tokens = [round(record["train/tokens"]) for record in records]
    shares = [1.0 - record["mismatch/exact"] for record in records]
    return sum(round(n * share) for n, share in zip(tokens, shares, strict=True)), sum(tokens)


def summary(run_dir: pathlib.Path) -> dict[str, Any]:
    """What the steps after the first say."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, steps = records[0], records[1:]

    def mean(key: str) -> float | None:
        found = [record[key] for record in steps if record.get(key) is not None]
        return float(np.mean(found)) if found else None

    named = sorted(f"time/{name}_s" for name in phases(steps[0]))
    return {
        "tokens_per_s": mean("time/tok_per_s"),
        "rollout_tokens_per_s": mean("time/rollout_tok_per_s"),
        "seconds": {key.removeprefix("time/").removesuffix("_s"): mean(key) for key in named},
        "first_step_s": first["time/step_s"],
        "start": {key.removeprefix("time/"): v for key, v in first.items() if key.startswith("time/start_")},
        "k3": mean("mismatch/k3"),
        "max_abs": max(record["mismatch/max_abs"] for record in steps),
        "unequal_tokens": list(unequal_tokens(records)),
        "updates": int(sum(record["train/updates"] for record in records)),
        "first_unequal": recorder.read_lines(run_dir / "unequal.jsonl") if (run_dir / "unequal.jsonl").exists() else [],
        "dropped": mean("later/clip/seq_dropped"),
        "model_tflops": mean("perf/model_tflops"),
        "response_tokens": mean("response/tokens"),
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=shapes.SIZES, default="4b")
    parser.add_argument("--folder", required=True, help="a model folder; made where there is none")
    parser.add_argument("--case", choices=CASES, default="w8a8")
    parser.add_argument("--batch", type=int, default=128, help="responses of a step")
    parser.add_argument("--response-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=2, help="train.micro_batch_rows")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that warms up")
    parser.add_argument("--execution", default="auto", choices=("auto", "eager", "graphs", "compiled"))
    parser.add_argument("--deviation", type=float, default=0.02, help="of random weights")
    parser.add_argument("--limit-s", type=float, default=570.0)
    parser.add_argument("--log", default="", help="where the run's output goes")
    parser.add_argument("--out", default="", help="a file that the line is appended to")
    parser.add_argument("overrides", nargs="*", help="section.field=value, of the run")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    began = time.perf_counter()
    folder = pathlib.Path(args.folder).absolute()
    if not (folder / "config.json").exists():
        random_folder.make(folder, args.shapes, args.deviation)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = pathlib.Path(scratch) / "run"
        words = fitting(overrides(args, str(folder), str(run_dir)), card.card_bytes())
        command = [sys.executable, "-m", "qarl_jax.train", "--config", CONFIG, *words]
        log = args.log or f"{scratch}/log"
        with open(log, "wb") as output, most_used() as most:
            limit = args.limit_s - (time.perf_counter() - began)
            try:
                code = subprocess.run(command, stdout=output, stderr=output, timeout=limit, check=False).returncode
            except subprocess.TimeoutExpired:
                code = None
        found: dict[str, Any] = {"case": args.case, "batch": args.batch, "shapes": args.shapes, "code": code}
        found |= {"execution": args.execution, "most_used_gib": most[0] / card.GIB}
        text = pathlib.Path(log).read_text(errors="replace")
        found["said"] = [line for line in text.splitlines() if "execution" in line or line.startswith("card ")][-4:]
        if code == 0:
            found |= summary(run_dir)
        else:
            found["tail"] = text.splitlines()[-6:]
        found |= {"seconds_in_all": time.perf_counter() - began, "overrides": words}
    print(json.dumps(found), flush=True)
    if args.out:
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    return 0 if code == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
