# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One cell of PLAN.md: trains what the arm needs, deploys it at a grid, and measures it. The same command redoes it.

    python -m experiments.when_to_quantize.cell WORK ARM GRID SEED [--config FILE] [--gptq-python PYTHON] [override ...]

| arm | policy at the grid |
|---|---|
| untrained | the base, rounded to nearest |
| rtn | RL in bf16, then rounded to nearest |
| gptq | RL in bf16, then GPTQ on the policy's own responses (`gptq.py`, in PYTHON's environment) |
| qarl | QaRL at the grid: the bytes that the run published last |
| qarl_elsewhere | QaRL at another grid, whose masters are rounded to nearest |
| stock | `qarl`'s, exported, in vLLM as it comes (`stock.py`) |

Runs lie in WORK and are shared by cells: one that is finished is not trained again, and one that was cut off goes on. A
line of WORK/cells.jsonl has the numbers of a cell, WORK/ARM_GRID_SEED.jsonl every response. Overrides are of the config
(train.steps=28 eval.num_prompts=2000). `table.py` compares arms.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ARMS = ("untrained", "rtn", "gptq", "qarl", "qarl_elsewhere", "stock")
GRIDS = ("w8a8", "w4a16", "w3a16")
ELSEWHERE = {"w8a8": "w4a16", "w4a16": "w8a8", "w3a16": "w4a16"}
HERE = pathlib.Path(__file__).parent


def trained_in(arm: str, grid: str) -> str | None:
    """Returns the scheme under which an arm's run is trained; None: the base model, untrained."""
    schemes = {"untrained": None, "rtn": "bf16", "gptq": "bf16", "qarl_elsewhere": ELSEWHERE[grid]}
    return schemes.get(arm, grid)


def at(scheme: str) -> list[str]:
    """Returns the overrides by which learner and sampler have one scheme, whatever a config says of the sampler's."""
    return [f"quant.forward={scheme}", "quant.rollout=null"]


def call(*command: str) -> str:
    print("+", *command, file=sys.stderr, flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def verb(name: str, *arguments: str) -> str:
    return call(sys.executable, "-m", f"qarl_jax.{name}", *arguments)


def exported(run: pathlib.Path, kind: str = "hf") -> pathlib.Path:
    """Exports the run's last masters as a bf16 folder, or its last codes, and returns the folder."""
    out = run.with_name(f"{run.name}_{kind}")
    if not out.exists():
        verb("export", "--checkpoint", str(run), "--format", kind, "--out", str(out))
    return out


def gptq(model: pathlib.Path, grid: str, config: list[str], python: str, overrides: list[str]) -> pathlib.Path:
    """Quantizes a model by GPTQ on its own responses to other questions at T = 1; returns the folder."""
    out, responses = (model.with_name(f"{model.name}_{end}") for end in (f"gptq_{grid}", "responses.jsonl"))
    if not out.exists():
        own = ["eval.temperature=1.0", "eval.num_samples=1", "eval.num_prompts=512", "data.source.seed=1"]
        asked = ["--model", str(model), "--scheme", "bf16", "--out", str(responses)]
        verb("evaluate", *config, *asked, *overrides, *own)
        call(python, str(HERE / "gptq.py"), str(model), str(out), grid, str(responses))
    return out


def policy(
    work: pathlib.Path, arm: str, grid: str, seed: int, config: list[str], python: str, more: list[str]
) -> list[str]:
    """Returns arguments of `evaluate` or `stock` for the deployed policy of a cell, which is made if it is missing."""
    scheme = trained_in(arm, grid)
    if scheme is None:
        return [*config, "--scheme", grid]
    run = work / f"rl_{scheme}_{seed}"
    trains = [f"run_dir={run}", f"seed={seed}", "eval.at_start=false", "eval.at_end=false", "eval.every=0"]
    verb("train", *config, *more, *trains, *at(scheme), "checkpoint.at_end=true")
    if arm == "qarl":
        return ["--checkpoint", str(run)]
    if arm == "stock":
        return [str(run), str(exported(run, "compressed-tensors"))]
    model = exported(run)
    if arm != "gptq":
        return [*config, "--model", str(model), "--scheme", grid]
    made = gptq(model, grid, config, python, more)
    # Frozen under adapters that add zero, a folder's own codes are computed with as they are, and not rounded again.
    return [*config, "--model", str(made), *at("w4a16" if grid == "w3a16" else grid), "lora={}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--config", default="configs/qwen25_coder_0p5b/bf16_tbpo.yaml")
    parser.add_argument("--gptq-python", default="python", help="of an environment with llm-compressor")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    args.work.mkdir(parents=True, exist_ok=True)
    config = ["--config", args.config]
    found = policy(args.work, args.arm, args.grid, args.seed, config, args.gptq_python, args.overrides)
    out = args.work / f"{args.arm}_{args.grid}_{args.seed}.jsonl"
    asked = [*args.overrides, f"seed={args.seed}"]
    if args.arm == "stock":
        said = call(sys.executable, "-m", "experiments.when_to_quantize.stock", *found, str(out), *asked)
    else:
        said = verb("evaluate", *found, "--json", "--out", str(out), *asked)
    numbers = json.loads(next(line for line in said.splitlines() if line.startswith('{"eval/')))  # vLLM logs there too
    cell = {"arm": args.arm, "grid": args.grid, "seed": args.seed, "responses": out.name} | numbers
    with (args.work / "cells.jsonl").open("a") as file:
        file.write(json.dumps(cell) + "\n")
    print(json.dumps(cell))


if __name__ == "__main__":
    main()
