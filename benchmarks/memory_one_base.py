# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares planned and allocated memory of adapters on a base that learner and engine share, without a GPU.

    python -m benchmarks.memory_one_base --out benchmarks/results/memory_one_base_h200.json

The load is that of benchmarks/sessions/onebase/0/20-32b.sh: Qwen2.5-32B, rank 32, rows of 8,448 tokens. A line per
`model.remat`: bytes of the gradients' program beside the base, compiled for an H200, and `memory.learner.parts`. Needs
what `benchmarks.memory` needs. cuDNN's workspace is not counted: it takes the device itself.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import types
from typing import Any

import jax
import numpy as np
from flax import nnx

from benchmarks import memory, random_folder, step_gpu
from qarl_jax import models
from qarl_jax.memory import learner as on_learner
from qarl_jax.models.params import part_of, united
from qarl_jax.rollout.vllm import one_base
from qarl_jax.run import build, config
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime.mesh import param_shardings

SHAPES = "qwen2.5-32b"
LOAD = "--case nvfp4 --lora-rank 32 --batch 64 --response-len 2048 --mean-len 400 --rows 1"


def run_of(folder: str, remat: str) -> RunConfig:
    """Returns the run's config on an absent GPU; makes the model folder if there is none."""
    if not (pathlib.Path(folder) / "config.json").exists():
        random_folder.make(pathlib.Path(folder), random_folder.config_of(SHAPES, 0), 0.02, weights=False, mean_len=400)
    args = step_gpu.build_parser().parse_args(["--folder", folder, *LOAD.split()])
    absent = [f"model.remat={remat}", "quant.engine=cuda", "rollout.engine.memory=given"]
    return config.load(step_gpu.CONFIG, [*step_gpu.overrides(args, folder, f"{folder}/run"), *absent])


class _Absent:
    """A buffer of no GPU."""

    def __init__(self, size: int, ordinal: int):
        del size, ordinal
        self.place = one_base.buffers.messages.DeviceMemory(device="GPU-0", handle=bytes(64))


def compiled_bytes(cfg: RunConfig, mesh: Any) -> dict[str, int]:
    """Compiles the gradients' program; returns bytes of its arguments without a shared base, results, temporaries."""
    one_base.buffers.GpuMemory = _Absent  # type: ignore[assignment, misc]
    graphdef = build.policy_graphdef(cfg)
    learner = build.make_learner(cfg, graphdef, mesh)
    kept = one_base.OneBase(graphdef, mesh).abstract() if on_learner.held_once(cfg) else nnx.State({})

    def at(tree: Any) -> Any:
        places = param_shardings(tree, mesh)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)

    frozen = jax.eval_shape(lambda p: learner.trainable.held(graphdef, p), learner.abstract_params)
    shared = set(models.by_path(kept))
    held = united(part_of(at(frozen), lambda path: path not in shared), kept)
    masters = learner.abstract_state().params
    grads = jax.tree.map(lambda p: p.update(dtype=learner.grad_dtype), masters)
    batch = learner.abstract_batch(cfg.micro_batch_rows, cfg.row_len)
    old = batch.rollout_logprobs  # in shape
    counts = [jax.ShapeDtypeStruct((), np.float32, sharding=learner.replicated)] * 2
    with jax.set_mesh(mesh):
        traced = learner._accumulate.trace(grads, masters, held, batch, old, *counts, None, None)
        found = traced.lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    # A weight of a fused module is an argument of its own in the count, of the same memory.
    base = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
    return {
        "arguments": found.argument_size_in_bytes - base,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }


def compiled(cfg: RunConfig, mesh: Any) -> dict[str, Any]:
    """Compiles as `compiled_bytes` does; returns the bytes beside the plan."""
    parts, found = on_learner.parts(cfg, per_device=True), compiled_bytes(cfg, mesh)
    held = sum(found.values()) + parts["optimizer"]
    return found | {"planned": parts, "planned_over_held": round(sum(parts.values()) / held, 3)}


def absent_h200() -> Any:
    """Returns the mesh of an H200 that is not there; kernels are told of it, too. Call it before anything compiles."""
    memory.without_autotuning()
    mesh = memory.absent_gpus()
    hopper = types.SimpleNamespace(core_count=132, compute_capability="9.0", platform="gpu")
    jax.default_backend, jax.local_devices = lambda: "gpu", lambda *args, **more: [hopper]  # what kernels ask
    return mesh


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    mesh = absent_h200()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for remat in ("full", "attention"):
            rows.append({"remat": remat} | compiled(run_of(folder, remat), mesh))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        pathlib.Path(args.out).write_text(memory.report(rows, __spec__.name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
