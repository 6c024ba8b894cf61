# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times attention alone: every implementation, plain and packed rows, forward and forward + backward.

    python -m benchmarks.attention --rows 4 --seq 4096 --heads 32 --kv 8 [--segments 1 8] [--implementations cudnn xla]

TFLOP/s count what the segments of a row need, 2 N H sum_i T_i^2 forward (causal) and three times that with the
backward, so that an implementation that works through masked blocks shows it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gemm import seconds
from qarl_jax.kernels.attention_vendor import runs
from qarl_jax.models.attention import attention


def measure(args: argparse.Namespace, implementation: str, segments: int) -> dict[str, Any]:
    """Measures milliseconds and TFLOP/s of one implementation at one number of segments per row."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((args.rows, args.seq, n, args.head_dim), np.float32), jnp.bfloat16)
        for n in (args.heads, args.kv, args.kv)
    )
    ids = None
    if segments > 1:
        each = -(-args.seq // segments)
        ids = jnp.broadcast_to(jnp.arange(args.seq, dtype=jnp.int32) // each + 1, (args.rows, args.seq))

    @jax.jit
    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        found = None if ids is None else runs(ids, segments + 1)
        return attention(q, k, v, segment_ids=ids, packed_runs=found, implementation=implementation)

    both = jax.jit(jax.grad(lambda q, k, v: forward(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)))
    took = seconds(lambda: forward(q, k, v), args.repeats), seconds(lambda: both(q, k, v), args.repeats)
    work = 2 * args.rows * args.heads * args.head_dim * segments * (args.seq / segments) ** 2
    memory = both.lower(q, k, v).compile().memory_analysis()
    return {
        "implementation": implementation,
        "segments": segments,
        "forward_ms": took[0] * 1e3,
        "both_ms": took[1] * 1e3,
        "forward_tflops": work / took[0] / 1e12,
        "both_tflops": 3 * work / took[1] / 1e12,
        "temporaries_gb": memory.temp_size_in_bytes / 1e9,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("rows", 4), ("seq", 4096), ("heads", 32), ("kv", 8), ("head_dim", 128), ("repeats", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--segments", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--implementations", nargs="+", default=["cudnn", "xla"])
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    results = []
    for implementation in args.implementations:
        for segments in args.segments:
            results.append(measure(args, implementation, segments))
            print(json.dumps(results[-1]), flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"settings": vars(args), "results": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
