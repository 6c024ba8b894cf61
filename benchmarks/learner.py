# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times a policy-gradient step of the learner at Qwen3 shapes with random weights, scheme by scheme, beside a peer.

    python -m benchmarks.learner --model 8b --schemes bf16 w8a8 fp8 w4a16 --remat mixer \\
        --peer "python peer_hf.py --model 8b --seq 4096 --rows 4 --steps 5 --remat --compile layer"

A step: quantization of all weights, forward, per-token log-probs, clipped loss (sequence-mean-token-mean), backward,
clip by global norm, AdamW. With --master bfloat16 parameters, gradients and both Adam moments are bfloat16 and there is
no fp32 master, the setting of the peer (transformers + torch.compile); with float32 they are what we train with. Model
FLOPs are those of `qarl_jax.observe.flops`.

--peer is a command that does the same work and prints `RESULT ... tokens_per_s=X ...`; it runs first, alone on the GPU,
and every line then has the ratio to it. Writes one JSON line per scheme to stdout, and all of them to --out; a scheme
that does not fit has an "error" there, and the exit code is 1. On a CPU: `--model tiny --rows 2 --seq 64`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import subprocess
from typing import Any

import jax
import numpy as np

from benchmarks import shapes
from benchmarks.timing import seconds_of
from qarl_jax import models
from qarl_jax.observe import flops
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import UserError


def run_peer(command: str) -> dict[str, str]:
    """Runs a peer's command and returns its RESULT line: key -> text."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    found = re.findall(r"^RESULT (.*)$", done.stdout, re.M)
    if done.returncode or not found:
        raise SystemExit(f"the peer gave no result (exit {done.returncode}): {command}\n{done.stderr[-2000:]}")
    return dict(item.split("=", 1) for item in found[-1].split())


def measure(setting: shapes.Setting, steps: int, profile: str = "") -> dict[str, Any]:
    """Measures seconds, tokens/s, model TFLOP/s and peak memory of a step."""
    mesh = make_mesh(fsdp=-1)
    made, abstract, _ = shapes.make_learner(setting, mesh)
    state = made.init(shapes.random_params(abstract, made.param_shardings))
    host = shapes.batch(setting)
    batch = made.put(host)
    counts = host.loss_mask.sum(), setting.rows * setting.segments

    def step() -> Any:
        nonlocal state
        state, _ = made.update(state, made.quantize(state.params), [batch], [batch.rollout_logprobs], *counts)
        return state

    times = seconds_of(step, steps + 2)  # the first compiles, the second warms up
    if profile:
        with jax.profiler.trace(profile):
            jax.block_until_ready(step())
    seconds = float(np.median(times[2:]))
    tokens = setting.rows * setting.seq
    config = models.config_of(made.graphdef)
    work = flops.training(config, flops.active_parameters(config, abstract), shapes.lengths(setting))
    peak = flops.of_devices(mesh.devices.flat)
    memory = jax.local_devices()[0].memory_stats() or {}
    return dataclasses.asdict(setting) | {
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "model_tflops": work / seconds / 1e12 / mesh.devices.size,
        "mfu": None if peak is None else work / seconds / peak,
        "peak_gb": memory.get("peak_bytes_in_use", 0) / 1e9,
        "first_step_s": times[0],
        "devices": mesh.devices.size,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w8a8", "fp8", "w4a16"])
    for field in dataclasses.fields(shapes.Setting):
        if isinstance(field.default, bool):
            parser.add_argument(f"--{field.name}", action="store_true")
        elif field.name != "scheme":
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--peer", default="", help="a command that prints RESULT tokens_per_s=...")
    parser.add_argument("--profile", default="", help="folder for a profile of one step per scheme")
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    peer = run_peer(args.peer) if args.peer else {}
    if peer:
        print(json.dumps({"peer": peer}), flush=True)
    fixed = {f.name: getattr(args, f.name) for f in dataclasses.fields(shapes.Setting) if f.name != "scheme"}
    results: list[dict[str, Any]] = []
    for scheme in args.schemes:
        setting = shapes.Setting(scheme=scheme, **fixed)
        try:
            result = measure(setting, args.steps, f"{args.profile}/{scheme}" if args.profile else "")
        except UserError as error:
            parser.error(str(error))
        except jax.errors.JaxRuntimeError as error:  # out of memory, as a rule; the others may fit
            result = dataclasses.asdict(setting) | {"error": str(error).split("\n")[0]}
        else:
            if peer:
                result["of_the_peer"] = result["tokens_per_s"] / float(peer["tokens_per_s"])
            if results and "error" not in results[0]:
                result["of_the_first"] = result["tokens_per_s"] / results[0]["tokens_per_s"]
        results.append(result)
        print(json.dumps(result), flush=True)
        if args.out:
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump({"peer": peer, "results": results}, file, indent=1)
        jax.clear_caches()
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
