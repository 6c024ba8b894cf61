# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a learner's update: what the plan predicts beside what the compiler allocates, without a GPU.

    python -m benchmarks.memory --out benchmarks/results/memory_h200.json

XLA compiles the update of Qwen3 shapes ahead of time for an H200 and says what it will hold: arguments, results that
share no buffer with them, and temporaries. `plan.update_parts` computes the same from shapes alone. One JSON line per
case; `tests/test_plan.py` holds the prediction to the recorded ones.

What is needed is jax's CUDA plugin (`pip install "jax[cuda12]"`) and, where there is no GPU,
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu. Kernels are not autotuned: that takes the device itself, and moves
no buffer of a size that matters.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import time
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from benchmarks import shapes
from benchmarks.shapes import Setting
from qarl_jax import sharding
from qarl_jax.learner import TrainState
from qarl_jax.types import TrainBatch

TARGET = pathlib.Path(__file__).parent / "targets" / "h200.txtpb"


CASES = (
    Setting(model="0.6b", rows=8),
    Setting(model="0.6b", rows=8, remat="dots", scheme="w4a16"),
    Setting(model="0.6b", rows=16, seq=2048, remat="mixer", scheme="bf16"),
    Setting(model="8b"),
    Setting(model="8b", remat="mixer"),
    Setting(model="8b", scheme="bf16", remat="dots"),
    Setting(model="8b", scheme="w4a16", rows=1, seq=16384, optimizer="muon", segments=8),
    Setting(model="8b", scheme="fp8", rows=2, seq=2048, master="float32", grad="float32", layers=12),
    Setting(scheme="bf16"),
    Setting(),
    Setting(scheme="w4a16"),
    Setting(scheme="fp8"),
    Setting(remat="attention"),
    Setting(remat="mixer"),
    Setting(remat="dots"),
    Setting(scheme="bf16", remat="dots"),
    Setting(master="float32", grad="float32"),
    Setting(master="float32"),
    Setting(chunk=8192),
    Setting(chunk=512),
    Setting(rows=1, seq=16384, segments=16),
    Setting(optimizer="muon", master="float32"),
)


def lower(case: Setting, mesh: Mesh) -> Any:
    """The update of a case, lowered for CUDA from shapes alone."""
    made, params, qweights = shapes.make_learner(dataclasses.replace(case, attention="cudnn"), mesh)

    def put(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=made.replicated), tree)

    ints, floats, flags = (
        jax.ShapeDtypeStruct((case.rows, case.seq), dtype, sharding=made.batch_sharding)
        for dtype in (jnp.int32, jnp.float32, jnp.bool_)
    )
    batch = TrainBatch(
        tokens=ints, positions=ints, segment_ids=ints, loss_mask=flags, rollout_logprobs=floats, advantages=floats
    )
    count = put(jax.ShapeDtypeStruct((), jnp.float32))
    state = TrainState(
        params=put(params),
        opt_state=put(jax.eval_shape(made.optimizer.init, params)),
        updates=put(jax.ShapeDtypeStruct((), jnp.int32)),
    )
    with jax.set_mesh(mesh):
        trace = made._update.trace(state, put(qweights), batch, floats, count, count, None)
        return trace.lower(lowering_platforms=("cuda",))


def absent_gpu() -> Mesh:
    """A mesh of one H200 that need not be here."""
    # The kernels' own checks ask the GPUs of this host.
    from jax._src.cudnn import fused_attention_stablehlo as fused

    fused.check_cudnn_version = lambda: 91000
    fused.check_compute_capability = lambda version: True
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=TARGET.read_text(), topology="1x1x1"
    )
    grid = np.array(topology.devices[:1]).reshape((1,) * len(sharding.MESH_AXES))
    return Mesh(grid, sharding.MESH_AXES, axis_types=(AxisType.Auto,) * len(sharding.MESH_AXES))


def compiled_bytes(case: Setting, mesh: Mesh) -> dict[str, Any]:
    """What the compiler allocates for a case: arguments, new results, temporaries."""
    lowered = lower(case, mesh)
    started = time.perf_counter()
    found = lowered.compile().memory_analysis()
    return {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "compile_s": round(time.perf_counter() - started, 1),
    }


def report(rows: list[dict[str, Any]]) -> str:
    """The result file: how it was made, then a line per case."""
    head = {
        "command": "python -m benchmarks.memory --out benchmarks/results/memory_h200.json",
        "how": "compiled ahead of time for one H200 (benchmarks/targets/h200.txtpb), cuDNN attention; no GPU present",
        "jax": jax.__version__,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "\n".join(["{", *lines, ' "results": [', ",\n".join(map(json.dumps, rows)), "]}"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    mesh, rows = absent_gpu(), []
    for case in CASES:
        found = compiled_bytes(case, mesh)
        compiled = found["arguments"] + found["results"] + found["temporaries"]
        rows.append(
            dataclasses.asdict(case)
            | found
            | {"predicted_over_compiled": round(sum(shapes.planned(case).values()) / compiled, 3)}
        )
        print(json.dumps(rows[-1]), flush=True)
        jax.clear_caches()
        if args.out:
            pathlib.Path(args.out).write_text(report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
