# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests the memory plan on random settings: a run that it calls fitting must run on a GPU, others must be refused.

    python -m benchmarks.memory_draws draw --model DIR --count 10 --seed 0 > draws.jsonl
    python -m benchmarks.memory_draws run draws.jsonl --only 0 1 2 > results.jsonl
    python -m benchmarks.memory_draws compile draws.jsonl > compiled.jsonl

`draw` needs no GPU if it is told how large the GPU is (--card-gb): it draws settings until it has `count` that the
plan calls fitting and `count` that it does not, and prints each as a line of JSON. `run` runs them: a fitting one must
make a step, one that does not fit must be refused, with exit code 2, before anything is loaded. Each line of the
results says what happened, after how many seconds, and how much of the GPU was in use at most. `compile` needs no GPU
either, but jax's CUDA plugin, as benchmarks/memory.py says. It compiles what a step of each fitting draw runs, for a
GPU that is absent, and sets the most that XLA holds beside the plan and beside what JAX takes of the GPU.

DIR holds config.json, a tokenizer, prompts.jsonl ({"prompt", "answer"}) and reward.py with `graded`, as
`benchmarks.random_folder` makes it; without safetensors the runs draw random weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import memory
from benchmarks.watched import finished, most_used
from qarl_jax.memory import choose
from qarl_jax.memory import learner as on_learner
from qarl_jax.memory import plan as planner
from qarl_jax.run import build, config
from qarl_jax.types import UserError

CONFIG = "configs/one_h200_8b.yaml"
# What is drawn, independently of each other.
CHOICES: dict[str, list[Any]] = {
    "quant.forward": ["bf16", "w8a8", "fp8", "w4a16"],
    "model.param_dtype": ["float32", "bfloat16"],
    "model.remat": ["full", "attention", "mixer", "dots", "auto"],
    "train.grad_dtype": ["float32", "bfloat16"],
    "train.micro_batch_rows": [1, 2, 4, 8],
    "train.row_len": [1280, 2560, 5120, 10240],
    "train.prompts_per_step": [8, 16, 32],
    "rollout.max_response_len": [128, 512, 1024],
    "rollout.engine.kv_cache_gb": [0, 2, 8, 20, 40],
    "rollout.engine.gpu_memory_utilization": [0.15, 0.3, 0.5],
    "rollout.engine.memory": ["given", "auto"],
    "rollout.engine.transport": ["auto", "host"],
    "optimizer.name": ["muon", "adamw"],
    "optimizer.moment_dtype": ["float32", "bfloat16"],
    "optimizer.offload": ["false", "true", "auto"],
}


def overrides(model: str, drawn: dict[str, Any]) -> list[str]:
    """Returns the command-line settings of a draw: one step, no evaluation, no checkpoint."""
    fixed = {
        "model.path": model,
        "data.source": f"{{name: jsonl, path: {model}/prompts.jsonl}}",
        "data.template": "{{ question }}",
        "data.max_prompt_len": 64,
        "reward": f'{{name: python, path: "{model}/reward.py:graded"}}',
        "rollout.engine.max_model_len": 1088,
        "train.steps": 1,
        "train.prompts_per_update": drawn["train.prompts_per_step"],
        "checkpoint.every": 0,
        "eval.every": 0,
        "eval.at_start": "false",
        "eval.at_end": "false",
        "log.view": "lines",
    }
    if not any(name.endswith(".safetensors") for name in os.listdir(model)):
        fixed["model.init"] = "random"
    return [f"{key}={value}" for key, value in (fixed | drawn).items()]


def draws(model: str, count: int, seed: int, size: int) -> Iterator[dict[str, Any]]:
    """Draws `count` settings that fit a GPU of `size` bytes and `count` that do not, in the order they were drawn."""
    rng = random.Random(seed)
    left = {True: count, False: count}
    while any(left.values()):
        drawn = {key: rng.choice(values) for key, values in CHOICES.items()}
        if drawn["optimizer.name"] == "adamw":  # a name of its own begins a section anew
            drawn |= {"optimizer.lr": 1e-6}
        words = overrides(model, drawn)
        try:
            cfg = config.load(CONFIG, words)
        except UserError:  # the draw makes no sense for a reason of its own
            continue
        try:
            choose.settle(cfg, size)
            fits, said = True, ""
        except UserError as error:
            fits, said = False, str(error)
        if left[fits]:
            left[fits] -= 1
            yield {"fits": fits, "said": said, "card_gib": size / on_learner.GIB, "overrides": words}


def run(draw: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Runs `python -m qarl_jax.train` on a draw; returns exit code, seconds and peak memory."""
    with tempfile.TemporaryDirectory() as folder, most_used() as most:
        command = [
            sys.executable,
            "-m",
            "qarl_jax.train",
            "--config",
            CONFIG,
            *draw["overrides"],
            f"run_dir={folder}/r",
        ]
        start = time.perf_counter()
        log = f"{folder}/log"
        code = finished(command, log, limit_s)
        with open(log, encoding="utf-8", errors="replace") as file:
            tail = file.read().strip().splitlines()[-3 if code is not None else -12 :]
        seconds = time.perf_counter() - start
        stepped = os.path.exists(f"{folder}/r/metrics.jsonl") and os.path.getsize(f"{folder}/r/metrics.jsonl") > 0
    kept = (code == 0 and stepped) if draw["fits"] else (code == 2 and not stepped)
    return draw | {
        "kept": kept,
        "code": code,
        "seconds": seconds,
        "most_used_gib": most[0] / on_learner.GIB,
        "tail": tail,
    }


def compiled(draw: dict[str, Any]) -> dict[str, Any]:
    """Compiles a draw's step for an absent GPU; returns the most that XLA holds, beside the plan, in GiB."""
    size = int(draw["card_gib"] * on_learner.GIB)
    cfg, plan = choose.settle(config.load(CONFIG, draw["overrides"]), size)
    assert plan is not None
    cfg = config.on_a_gpu(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, attention="cudnn")))
    mesh = memory.absent_gpus()
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), mesh)
    resting = ("masters", "optimizer", "QTensors", "QTensors published before")  # counted from shapes, no estimates
    held = sum(plan.learner.get(part, 0) for part in resting)
    if not learner.options.one_program:
        held += on_learner.nbytes(learner.abstract_state().params, mesh, learner.grad_dtype)
    sizes = [program.memory_analysis() for program in build.compile_ahead(cfg, learner, 0)]
    most = max(
        max(held, one.argument_size_in_bytes)
        + one.output_size_in_bytes
        - one.alias_size_in_bytes
        + one.temp_size_in_bytes
        for one in sizes
    )
    planned = sum(plan.learner.values())
    jax.clear_caches()
    return draw | {
        "remat": cfg.model.remat,
        "offload": cfg.optimizer.offload,
        "planned_gib": round(planned / on_learner.GIB, 2),
        "compiled_gib": round(most / on_learner.GIB, 2),
        "jax_takes_gib": round(plan.fraction * draw["card_gib"], 2),
        "planned_over_compiled": round(planned / most, 3),
        "kept": most <= plan.fraction * size,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    drawing = verbs.add_parser("draw")
    drawing.add_argument("--model", required=True)
    drawing.add_argument("--count", type=int, default=10)
    drawing.add_argument("--seed", type=int, default=0)
    drawing.add_argument("--card-gb", type=float, help="GiB; default: this machine's GPU")
    running = verbs.add_parser("run")
    compiling = verbs.add_parser("compile")
    for verb in (running, compiling):
        verb.add_argument("draws")
        verb.add_argument("--only", type=int, nargs="*", help="numbers of lines; default: all")
    running.add_argument("--limit-s", type=float, default=280.0)
    args = parser.parse_args(argv)
    if args.verb == "draw":
        size = planner.capacity() if args.card_gb is None else int(args.card_gb * on_learner.GIB)
        if size is None:
            parser.error("there is no GPU here: say --card-gb")
        for draw in draws(args.model, args.count, args.seed, size):
            print(json.dumps(draw), flush=True)
        return 0
    with open(args.draws, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    if args.verb == "compile":
        memory.without_autotuning()
    broken = 0
    for number in range(len(lines)) if args.only is None else args.only:
        if args.verb == "compile" and not lines[number]["fits"]:
            continue
        result = compiled(lines[number]) if args.verb == "compile" else run(lines[number], args.limit_s)
        broken += not result["kept"]
        print(json.dumps({"number": number} | result), flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
