# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures whole steps of the trainer with live engines on its GPUs: sampling, rewards, updates, publishing.

    python -m benchmarks.step_gpu --shapes 4b --folder /tmp/4b --case w8a8 --batch 128 --out results.jsonl
    python -m benchmarks.step_gpu --shapes 30b-a3b --cards 2 --folder /tmp/30b --case w4a16 --steps 5
    python -m benchmarks.step_gpu --shapes 30b-a3b --layers 8 --folder /tmp/30b-8 --case w4a16
    python -m benchmarks.step_gpu --recipe configs/gpu/recipes.yaml --folder /tmp/4b arm=1x80

Each call is one case and ends within ten minutes; a folder that does not exist is made first, without weights: the run
draws random ones on its devices. `--cards` spreads the learner over so many, with an engine on each. An MoE
model, and any model on several GPUs, is trained as large ones are: bfloat16 masters, moments in int8 on the host, an
update's responses in one micro-batch, one version staged at a time, and routing replayed.
Cases:

    bf16            sampler and learner in bf16
    w8a8            learner and sampler under that scheme (QaRL), the learner in the sampler's arithmetic
    w8a8-rollout    sampler under w8a8, learner in bf16 with plain arithmetic (quantized rollout)

w8a8 stands for every scheme, with its group: w2a16_asym:g32.

`--recipe` runs a config at its own lengths instead, with random weights in the shapes that its model's name stands for.
Prompts and reward are the folder's; nothing is evaluated. The words after the options go on to the run, an arm first.

`--lora-rank` freezes the base, which is then drawn and quantized weight by weight; adapters learn as in QeRL (8-bit
AdamW, gradient norms clipped at 0.2, tokens of an update weighted alike).
`--batch` responses of `--response-len` tokens make `--updates` updates. The first step warms up; the line of JSON holds
means over the `--steps` after it: tokens per second of the sampler and of the step, seconds per phase (`time/*`), k3
between sampler and learner, how many of the compared tokens have another log-prob in the learner, the share of
sequences that TBPO drops (after the first update), and what the plan said beside the most that JAX held on each
GPU (`learner_gib`) and that all processes together did (`most_used_gib`). A run that is cut short after its second
step still says what its steps did. `--arithmetic` is as in rollout.engine, and the line names it. A random policy shows
every difference: its k3 is no trained model's. `--proximal learner` scores old log-probs in a pass before the updates,
where an aligned run takes the sampler's (`train.proximal`).

Where a step has several mini-batches, updates may begin while its last groups are decoded (`qarl_jax/loop/tail.py`).
`tail` in the line has the seconds after the first complete mini-batch, those of them in which the learner was idle, and
the seconds of updates that were hidden. `--waits` makes no update before all groups are there, to compare with.

With `--run-dir` the run is kept in that folder and saved after every step. The same command then goes on where an
earlier one was cut short, and its line is about all steps; one that began anew or went on is left out of the means.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import random_folder, shapes
from benchmarks.watched import finished, most_used, written
from qarl_jax import models
from qarl_jax.memory import choose
from qarl_jax.memory import plan as planner
from qarl_jax.memory.learner import GIB
from qarl_jax.metrics import phases
from qarl_jax.models import published
from qarl_jax.observe import recorder
from qarl_jax.run import config
from qarl_jax.types import UserError

CONFIG = "configs/one_h200_8b.yaml"
WAITING = """
import sys
from qarl_jax import train
from qarl_jax.loop import updates
updates.waits = lambda *args: "to compare"
sys.exit(train.main())
"""
PROMPT_LEN, SAMPLES = 64, 8


def shared(args: argparse.Namespace, folder: str, run_dir: str) -> dict[str, Any]:
    """Returns the overrides of every run: random weights, a folder's prompts and reward, no evaluation."""
    return {
        "model.path": folder,
        "model.init": "random",
        "run_dir": run_dir,
        "data.source": f"{{name: jsonl, path: {folder}/prompts.jsonl}}",
        "data.template": "{{ question }}",
        "reward": f'{{name: python, path: "{folder}/reward.py:graded"}}',
        "train.steps": 1 + args.steps,
        "train.proximal": args.proximal,
        "checkpoint.every": int(bool(args.run_dir)),
        "checkpoint.keep": 1,
        "checkpoint.at_end": "false",
        "eval.every": 0,
        "eval.at_start": "false",
        "eval.at_end": "false",
        "log.view": "lines",
    }


def of_recipe(args: argparse.Namespace, folder: str, run_dir: str) -> list[str]:
    """Returns the overrides of a recipe's run."""
    values = shared(args, folder, run_dir) | {"data.system": "", "data.holdout": 0}
    return [*args.overrides, *(f"{key}={value}" for key, value in values.items())]


def overrides(args: argparse.Namespace, folder: str, run_dir: str) -> list[str]:
    """Returns the overrides of a case's run."""
    scheme = args.case.removesuffix("-rollout")
    rollout = scheme != args.case
    prompts = args.batch // SAMPLES
    longest = PROMPT_LEN + args.response_len
    values: dict[str, Any] = shared(args, folder, run_dir) | {
        "model.remat": "auto",
        "quant.forward": "bf16" if rollout else scheme,
        "quant.engine": "plain" if rollout else "auto",
        "quant.kernels": "auto",
        "data.max_prompt_len": PROMPT_LEN,
        "rollout.num_samples_per_prompt": SAMPLES,
        "rollout.max_response_len": args.response_len,
        "rollout.engine.max_model_len": longest,
        "rollout.engine.max_num_seqs": args.batch,
        "rollout.engine.memory": "auto",
        "rollout.engine.transport": "auto",
        "rollout.engine.arithmetic": args.arithmetic,
        "optimizer.offload": "auto",
        "train.prompts_per_step": prompts,
        "train.prompts_per_update": prompts // args.updates,
        "train.micro_batch_rows": args.rows,
        "train.row_len": 4 * longest,
        "train.max_segments": max(8, 4 * longest // (PROMPT_LEN + (args.mean_len or longest))),
        "log.samples_per_step": 16,
        "log.sample_tokens": 2 * longest,
    }
    if rollout:
        values["quant.rollout"] = scheme
    if args.lora_rank:
        del values["optimizer.offload"]  # adapters' moments are small
        values |= {
            "lora": f"{{rank: {args.lora_rank}, alpha: {args.lora_rank}}}",
            "optimizer": "{name: adamw, lr: 1e-5, b2: 0.99, weight_decay: 0.1, clip_norm: 0.2}",
            "optimizer.moment_dtype": "int8",
            "optimizer.second_moment_dtype": "int8",
            "loss": "{name: dapo, clip_high: 0.28, mismatch: tis, mismatch_cap: 2.0}",
        }
    if "experts" in shapes.SIZES[args.shapes]:
        values |= {"rollout.router_replay": str(not rollout).lower(), "model.remat": "full"}
    if args.cards > 1 or "experts" in shapes.SIZES[args.shapes]:
        del values["optimizer.offload"]  # to be said after the name
        values |= {
            "model.param_dtype": "bfloat16",
            "optimizer.name": args.optimizer,  # begins the section anew
            "optimizer.lr": 1e-6,
            "optimizer.moment_dtype": "int8",
            "optimizer.second_moment_dtype": "int8",
            "optimizer.offload": "true",
            "quant.code_flips": "false",
            "rollout.engine.staging_buffers": 1,
            "train.max_segments": 1,
            "train.row_len": longest,
            "train.micro_batch_rows": args.batch // args.updates,
        }
    if args.cards > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(args.cards)))
        values |= {
            "mesh.fsdp": args.cards,
            "rollout.engine.replicas": args.cards,
            "rollout.engine.visible_gpus": ";".join(visible.split(",")[: args.cards]),
            "rollout.engine.shares_gpus": "true",
            "rollout.engine.max_num_seqs": -(-args.batch // args.cards),
        }
    return [f"{key}={value}" for key, value in values.items()] + args.overrides


def fitting(words: list[str], size: int | None) -> list[str]:
    """Returns the overrides `words`, with those that the memory plan advises if the run does not fit the GPU."""
    if size is None:
        return words
    cfg = config.load(CONFIG, words)
    if choose.fits(cfg, size):
        return words
    settings = choose.smaller(cfg, size)
    if settings is None:
        raise UserError("this case does not fit the GPU, and no settings were found that do")
    return [*words, *choose.words(settings)]


def planned(file: str, words: list[str], size: int | None) -> dict[str, float]:
    """Returns the memory plan of a GPU, GiB by part; empty without a GPU."""
    if size is None:
        return {}
    _, plan = choose.settle(config.load(file, words), size)
    assert plan is not None
    parts = {f"learner: {name}": n for name, n in plan.learner.items()} | {"JAX takes": int(plan.fraction * size)}
    parts |= {"base of both": plan.one_base, "staging": plan.staging} | {
        f"engine: {name}": n for name, n in plan.engine.items()
    }
    return {name: round(n / GIB, 3) for name, n in parts.items()}


def unequal_tokens(records: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Counts, over some steps, (response tokens whose log-prob differs between learner and sampler, compared
    tokens)."""
    wrong = sum(round(round(record["train/tokens"]) * (1.0 - record["mismatch/exact"])) for record in records)
    return wrong, sum(round(record["train/tokens"] * record["mismatch/checked"]) for record in records)


def steps_done(run_dir: pathlib.Path) -> int:
    """Counts the steps that a run has recorded."""
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def summary(run_dir: pathlib.Path) -> dict[str, Any]:
    """Summarizes the steps after the first as means. The first step of every process compiles, and is left out."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first = records[0]
    steps = [record for record in records[1:] if "time/start_s" not in record] or records[1:]

    def mean(key: str) -> float | None:
        found = [record[key] for record in steps if record.get(key) is not None]
        return float(np.mean(found)) if found else None

    mismatches = run_dir / "first_mismatch.jsonl"
    named = sorted(f"time/{name}_s" for name in (*phases(steps[0]), "step"))
    return {
        "tokens_per_s": mean("time/tok_per_s"),
        "rollout_tokens_per_s": mean("time/rollout_tok_per_s"),
        "seconds": {key.removeprefix("time/").removesuffix("_s"): mean(key) for key in named},
        "publish": {
            key.removeprefix("time/publish/"): mean(key) for key in steps[0] if key.startswith("time/publish/")
        },
        "tail": {
            name: mean(f"time/{name}_s") for name in ("rollout/tail", "rollout/idle", "update/hidden", "beside/update")
        },
        "first_step_s": first["time/step_s"],
        "start": {key.removeprefix("time/"): v for key, v in first.items() if key.startswith("time/start_")},
        "learner_gib": [v for key, v in sorted(records[-1].items()) if key.startswith("perf/most_gib_")],
        "k3": mean("mismatch/k3"),
        "max_abs": max(record["mismatch/max_abs"] for record in records[1:]),
        "unequal_tokens": list(unequal_tokens(records)),
        "updates": int(sum(record["train/updates"] for record in records)),
        "first_mismatches": recorder.read_lines(mismatches) if mismatches.exists() else [],
        "dropped": mean("later/clip/seq_dropped"),
        "model_tflops": mean("perf/model_tflops"),
        "response_tokens": mean("response/tokens"),
    }


def named(args: argparse.Namespace) -> models.ModelConfig:
    """Returns the shapes of a recipe's model, by its name, with `args.layers` layers if given."""
    with published.folder(config.load(args.recipe, args.overrides).model.path) as folder:
        return models.read_config(folder, **({"num_layers": args.layers} if args.layers else {}))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=shapes.SIZES, default="4b")
    parser.add_argument("--recipe", default="", help="a config to run instead of a case")
    parser.add_argument("--folder", required=True, help="a model folder; made where there is none")
    parser.add_argument("--layers", type=int, default=0, help="of a new folder's model; 0: all")
    parser.add_argument("--cards", type=int, default=1, help="that the learner is spread over, with an engine on each")
    parser.add_argument("--updates", type=int, default=2, help="of a step")
    parser.add_argument(
        "--optimizer", choices=("muon", "adamw"), default="muon", help="of an MoE model or several GPUs"
    )
    parser.add_argument("--case", default="w8a8", help="bf16, a scheme, or one with -rollout")
    parser.add_argument("--batch", type=int, default=128, help="responses of a step")
    parser.add_argument("--response-len", type=int, default=1024)
    parser.add_argument("--lora-rank", type=int, default=0, help="of adapters on a frozen base; 0: all learns")
    parser.add_argument(
        "--mean-len", type=int, default=0, help="of the responses, drawn by a new folder's stop tokens; 0: full length"
    )
    parser.add_argument("--rows", default="auto", help="train.micro_batch_rows")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that warms up")
    parser.add_argument("--arithmetic", default="batch_invariant", choices=("batch_invariant", "vllm"))
    parser.add_argument("--proximal", default="auto", choices=("auto", "learner", "sampler"), help="train.proximal")
    parser.add_argument("--waits", action="store_true", help="no update begins before a step's last group is there")
    parser.add_argument("--deviation", type=float, default=0.02, help="of random weights")
    parser.add_argument("--limit-s", type=float, default=570.0)
    parser.add_argument("--run-dir", default="", help="a folder to keep the run in, and to go on in; empty: none")
    parser.add_argument("--log", default="", help="where the run's output goes")
    parser.add_argument("--out", default="", help="a file that the line is appended to")
    parser.add_argument("overrides", nargs="*", help="section.field=value, of the run")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    began = time.perf_counter()
    folder = pathlib.Path(args.folder).absolute()
    file = args.recipe or CONFIG
    if not (folder / "config.json").exists():
        shape = named(args) if args.recipe else random_folder.config_of(args.shapes, args.layers)
        random_folder.make(folder, shape, args.deviation, weights=False, mean_len=args.mean_len)
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = pathlib.Path(args.run_dir or f"{scratch}/run").absolute()
        if args.recipe:
            words = of_recipe(args, str(folder), str(run_dir))
        else:
            words = fitting(overrides(args, str(folder), str(run_dir)), planner.capacity())
        program = ["-c", WAITING] if args.waits else ["-m", "qarl_jax.train"]
        command = [sys.executable, *program, "--config", file, *words]
        log = args.log or f"{scratch}/log"
        plan = planned(file, words, planner.capacity())
        with contextlib.ExitStack() as stack:
            most = [stack.enter_context(most_used(ordinal)) for ordinal in range(args.cards)]
            code = finished(command, log, args.limit_s - (time.perf_counter() - began))
        case = {"case": args.case, "batch": args.batch, "shapes": args.shapes, "layers": args.layers}
        found: dict[str, Any] = {"recipe": args.recipe} if args.recipe else case
        found |= {"code": code, "cards": args.cards, "arithmetic": args.arithmetic, "planned_gib": plan}
        found |= {"proximal": args.proximal, "waits": args.waits, "updates_per_step": args.updates}
        found["most_used_gib"] = [used[0] / GIB for used in most]
        text = pathlib.Path(log).read_text(errors="replace")
        told = ("execution", "publishing over", "hold the frozen base")
        said = [one for one in text.splitlines() if one.startswith("device ") or any(word in one for word in told)]
        found["said"] = said[-6:]
        if steps_done(run_dir) > 1:
            found |= summary(run_dir)
        if code != 0:
            found["tail"] = text.splitlines()[-12:]
        found |= {"seconds_in_all": time.perf_counter() - began, "overrides": words}
    written(found, args.out)
    return 0 if code == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
