# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares planned and allocated memory of adapters on an int4 base that the learner holds itself, without a GPU.

    python -m benchmarks.memory_adapters --out benchmarks/results/memory_adapters_h200.json

The runs are arms of configs/gpu/recipes.yaml under w4a16, one row of 2,560 tokens, or of 18,432. A line per case: bytes
of the gradients' program, compiled for an H200, and `memory.learner.parts`. Needs what `benchmarks.memory` needs. A
chunk of log-probs is the fullest moment of 4B, the layers' backward that of 32B.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile

import jax

from benchmarks import memory, memory_one_base, random_folder
from qarl_jax.run import config
from qarl_jax.run.config import RunConfig

RECIPES = "configs/gpu/recipes.yaml"
SHORT = "train.logprob_chunk=128"
LONG = ["data.max_prompt_len=2048", "rollout.max_response_len=16384", "rollout.engine.max_model_len=18432"]
CASES: list[tuple[str, str, list[str]]] = [  # shapes, arm, overrides
    ("4b", "1x24_lora", ["model.remat=full"]),
    ("4b", "1x24_lora", ["model.remat=mixer"]),
    *(("32b", "1x80_lora", [f"model.remat={remat}"]) for remat in ("full", "attention", "mixer", "dots")),
    ("32b", "1x80_lora", ["model.remat=full", SHORT]),
    ("4b", "1x24_lora", ["model.remat=mixer", "quant.engine=plain"]),
    *(("30b-a3b", "1x80_lora", [f"model.remat={remat}", *LONG]) for remat in ("full", "mixer")),
    ("30b-a3b", "1x80_lora", ["model.remat=full"]),
]


def run_of(folder: pathlib.Path, shapes: str, arm: str, overrides: list[str]) -> RunConfig:
    """Returns the run's config on an absent GPU; makes the model folder if there is none."""
    if not (folder / "config.json").exists():
        random_folder.make(folder, random_folder.config_of(shapes, 0), weights=False)
    absent = [
        "quant.forward=w4a16",
        "quant.engine=cuda",
        "rollout.engine.memory=given",
        "train.grad_dtype=float32",
        "train.micro_batch_rows=1",
        "mesh.fsdp=1",
    ]
    data = [f"data.source={{name: jsonl, path: {folder}/prompts.jsonl}}", "data.holdout=0", "eval.every=0"]
    return config.load(RECIPES, [f"arm={arm}", f"model.path={folder}", *data, *absent, *overrides])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    mesh = memory_one_base.absent_h200()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shapes, arm, overrides in CASES:
            cfg = run_of(pathlib.Path(folder) / shapes, shapes, arm, overrides)
            case = {"shapes": shapes, "arm": arm, "overrides": overrides}
            rows.append(case | memory_one_base.compiled(cfg, mesh))
            print(json.dumps(rows[-1]), flush=True)
            jax.clear_caches()
            if args.out:
                pathlib.Path(args.out).write_text(memory.report(rows, __spec__.name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
