# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the planned peak memory of a learner's update with what XLA allocates, without a GPU.

    python -m benchmarks.memory --out benchmarks/results/memory_h200.json

XLA compiles the update of Qwen3 shapes ahead of time for an H200 (`--moe`: of Qwen3-30B-A3B for two) and says what
it will hold: arguments, results that share no buffer with them, and temporaries. `plan.update_parts` computes the same
from shapes alone. One JSON line per case; `tests/memory/test_learner.py` holds the prediction to the recorded ones.

What is needed is jax's CUDA plugin (`pip install "jax[cuda12]"`) and, where there is no GPU,
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu. Kernels are not autotuned: that takes the device itself, and moves
no buffer of a size that matters.

    python -m benchmarks.memory --measure --out measured.json

takes three updates of each of `MEASURED` on the GPU that is here, each in a process of its own, and sets the peak that
the device reports beside the plan: Qwen3-8B under Muon, what configs/one_h200_8b.yaml trains and then a packed row of
16,384 tokens with bfloat16 masters, its state in bfloat16, in int8, and on the host. About a minute per case and, for
those with a state on the host, a pinned host memory of 10 to 38 GB. `--only 0 2` measures these alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from benchmarks import shapes
from benchmarks.shapes import Setting
from qarl_jax.learning.learner import Learner
from qarl_jax.learning.state import TrainState
from qarl_jax.memory import learner as on_learner
from qarl_jax.optim import by_stack, leafwise
from qarl_jax.runtime.mesh import MESH_AXES, param_shardings
from qarl_jax.types import TrainBatch

TARGET = pathlib.Path(__file__).parent / "targets" / "h200.txtpb"


LONG_ROW = Setting(model="8b", scheme="w4a16", rows=1, seq=16384, optimizer="muon", segments=8)
# What configs/one_h200_8b.yaml trains: float32 masters, moments on the host, a prompt and 16,384 tokens of response.
SHIPPED = dataclasses.replace(LONG_ROW, seq=18432, segments=1, master="float32", offload=True)
MEASURED = (
    SHIPPED,
    LONG_ROW,
    dataclasses.replace(LONG_ROW, moments="int8"),
    dataclasses.replace(LONG_ROW, offload=True),
    dataclasses.replace(LONG_ROW, moments="int8", offload=True),
    dataclasses.replace(SHIPPED, segments=16),
)

CASES = (
    Setting(model="0.6b", rows=8),
    Setting(model="0.6b", rows=8, remat="dots", scheme="w4a16"),
    Setting(model="0.6b", rows=16, seq=2048, remat="mixer", scheme="bf16"),
    Setting(model="8b"),
    Setting(model="8b", remat="mixer"),
    Setting(model="8b", scheme="bf16", remat="dots"),
    LONG_ROW,
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
    *(
        Setting(
            model="4b",
            scheme=scheme,
            rows=2,
            seq=2304,
            segments=4,
            remat=remat,
            master="float32",
            optimizer="muon",
            moments="int8",
            offload=True,
        )
        for scheme, remat in (("bf16", "full"), ("bf16", "mixer"), ("w4a16", "attention"), ("w8a8", "mixer"))
    ),
    *MEASURED[2:5],
    dataclasses.replace(LONG_ROW, master="float32", offload=True),
    dataclasses.replace(LONG_ROW, seq=1024, moments="int8", offload=True),  # its update is the fullest moment
)
# The gradient of Qwen3-30B-A3B on two GPUs, of which `benchmarks.step_gpu --cards 2` makes two or more updates a step.
_MOE = Setting(model="30b-a3b", scheme="w4a16", rows=64, seq=1088, optimizer="muon", moments="int8", cards=2)
MOE_CASES = tuple(
    dataclasses.replace(_MOE, offload=True, scheme=scheme, rows=rows, remat=remat, engine=engine)
    for scheme, rows, remat, engine in (
        ("w4a16", 64, "full", "plain"),
        ("w4a16", 16, "full", "plain"),
        ("w4a16", 32, "full", "cuda"),
        ("bf16", 64, "full", "plain"),
        ("w8a8", 64, "full", "plain"),
        ("fp8", 32, "full", "plain"),
        ("w4a16", 32, "mixer", "plain"),
    )
)


def lower(case: Setting, mesh: Mesh) -> list[tuple[Any, int]]:
    """Lowers the programs of a case's update for CUDA from shapes alone. Returns each with the bytes held while it
    runs: its arguments, and other arrays that stay."""
    made, params, qweights = shapes.make_learner(dataclasses.replace(case, attention="cudnn"), mesh)

    def put(tree: Any) -> Any:
        places = param_shardings(tree, mesh)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, places)

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
    rest = put(qweights), batch, floats, count, count, None
    with jax.set_mesh(mesh):
        if not case.offload:
            guarded = put(jax.ShapeDtypeStruct((), jnp.bool_))
            traces = [(made._update.trace(state, guarded, *rest), 0)]
        else:
            beside = on_learner.nbytes(qweights, mesh)
            traces = [(made._grads.trace(state.params, *rest), on_learner.nbytes(params, mesh) + beside)]
            traces += streamed(made, state, beside, mesh)
        return [(trace.lower(lowering_platforms=("cuda",)), held) for trace, held in traces]


def streamed(made: Learner, state: TrainState, beside: int, mesh: Mesh) -> list[tuple[Any, int]]:
    """Traces the programs of an update with an optimizer state on the host; returns each with the bytes held in it."""
    groups, programs = by_stack.groups_of(state.params), made._apply.programs(state)
    params, moments = jax.tree.leaves(state.params), leafwise.moments_of(state.params, state.opt_state)
    grads = [x.update(dtype=made.grad_dtype) for x in params]
    norm = jax.ShapeDtypeStruct((), jnp.float32, sharding=made.replicated)
    held = on_learner.nbytes(state.params, mesh) + beside
    held += sum(jax.tree.leaves(on_learner.bytes_of_each(state.params, mesh, made.grad_dtype)))
    stored = leafwise.moments_of(state.params, on_learner.bytes_of_each(state.opt_state, mesh))
    visits = [sum(sum(jax.tree.leaves(stored[i])) for i in group) for group in groups]
    traces = []
    for number, (group, program) in enumerate(zip(groups, programs, strict=True)):
        own = ([row[i] for i in group] for row in (params, moments, grads))
        traced = program.trace(*own, state.opt_state.count, (norm, norm))
        neighbours = [*visits[max(0, number - 1) : number], *visits[number + 1 : number + 2], 0]
        traces.append((traced, held + visits[number] + max(neighbours)))
    return traces


def absent_gpus(count: int = 1) -> Mesh:
    """Makes a mesh (fsdp) of H200s that this machine does not need to have."""
    # The kernels' own checks ask the GPUs of this host.
    from jax._src.cudnn import fused_attention_stablehlo as fused

    fused.check_cudnn_version = lambda: 91000
    fused.check_compute_capability = lambda version: True
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=TARGET.read_text(), topology=f"1x1x{count}"
    )
    grid = np.array(topology.devices[:count]).reshape((1, count, 1, 1))
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def compiled_bytes(case: Setting, mesh: Mesh) -> dict[str, Any]:
    """Compiles a case and returns the bytes of its larger program: arguments and what stays beside them, new results,
    temporaries."""
    lowered, started, sizes = lower(case, mesh), time.perf_counter(), []
    for program, held in lowered:
        found = program.compile().memory_analysis()
        sizes.append(
            {
                "arguments": max(held, found.argument_size_in_bytes),
                "results": found.output_size_in_bytes - found.alias_size_in_bytes,
                "temporaries": found.temp_size_in_bytes,
            }
        )
    largest = max(sizes, key=lambda size: sum(size.values()))
    return largest | {"compile_s": round(time.perf_counter() - started, 1)}


def measured_bytes(case: Setting, arguments: list[str]) -> dict[str, Any]:
    """Runs three updates in a process of its own and returns what the device reports; a peak is per process."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.json"
        options = [f"--schemes={case.scheme}", f"--out={out}", "--steps=1"]
        for field in dataclasses.fields(Setting):
            value = getattr(case, field.name)
            if isinstance(value, bool):
                options += [f"--{field.name}"] if value else []
            elif field.name != "scheme":
                options.append(f"--{field.name}={value}")
        subprocess.run([sys.executable, "-m", "benchmarks.learner", *options, *arguments], check=True)
        (found,) = json.loads(out.read_text())["results"]
    return found


def measure(out: str, arguments: list[str], only: list[int] | None = None) -> None:
    """Measures each case of `MEASURED`; prints, and writes to `out`, the device's peak and the plan by part, in GB.

    Args:
      arguments: more of them for `benchmarks.learner`, after those of the case.
      only: places of cases in `MEASURED`; None: all.
    """
    rows = []
    for case in MEASURED if only is None else [MEASURED[i] for i in only]:
        found = measured_bytes(case, arguments)
        setting = Setting(**{field.name: found[field.name] for field in dataclasses.fields(Setting)})
        planned = {name: size / 1e9 for name, size in shapes.planned(setting).items()}
        sums = {"planned_gb": sum(planned.values()), "host_gb": shapes.host_bytes(setting) / 1e9, "planned": planned}
        rows.append(found | sums)
        if found["peak_gb"]:  # 0 where a device does not say
            rows[-1]["planned_over_measured"] = sums["planned_gb"] / found["peak_gb"]
        print(json.dumps(rows[-1]), flush=True)
        if out:
            pathlib.Path(out).write_text(json.dumps({"results": rows}, indent=1) + "\n")


def without_autotuning() -> None:
    """Disables XLA's autotuning, which needs the GPU itself; call it before the first backend is made."""
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"


def report(rows: list[dict[str, Any]], module: str) -> str:
    """Returns the text of the result file: how it was made (`python -m module`), then a line per case."""
    head = {
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "how": "compiled ahead of time for H200s (benchmarks/targets/h200.txtpb), cuDNN attention; no GPU present",
        "jax": jax.__version__,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "\n".join(["{", *lines, ' "results": [', ",\n".join(map(json.dumps, rows)), "]}"]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="")
    parser.add_argument("--measure", action="store_true", help="run MEASURED on the GPU that is here")
    parser.add_argument("--only", type=int, nargs="*", help="measure these of MEASURED only; default: all")
    parser.add_argument("--moe", action="store_true", help="compile MOE_CASES, for two GPUs, instead of CASES")
    parser.add_argument("--cases", type=int, nargs="*", help="compile these of them only; default: all")
    args, more = parser.parse_known_args(argv)
    if args.measure:
        measure(args.out, more, args.only)
        return 0
    if more:
        parser.error(f"unknown: {' '.join(more)}")
    without_autotuning()
    cases = MOE_CASES if args.moe else CASES
    meshes = {count: absent_gpus(count) for count in {case.cards for case in cases}}
    rows = []
    for case in cases if args.cases is None else [cases[i] for i in args.cases]:
        found = compiled_bytes(case, meshes[case.cards])
        compiled = found["arguments"] + found["results"] + found["temporaries"]
        rows.append(
            dataclasses.asdict(case)
            | found
            | {"predicted_over_compiled": round(sum(shapes.planned(case).values()) / compiled, 3)}
        )
        print(json.dumps(rows[-1]), flush=True)
        jax.clear_caches()
        if args.out:
            pathlib.Path(args.out).write_text(report(rows, __spec__.name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
