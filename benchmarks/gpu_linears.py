# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the learner's linear layers, jitted on a GPU, with vLLM's CUDA kernels on equal inputs.

    PYTHONPATH=.:bridge:$VLLM python benchmarks/gpu_linears.py --out gpu_linears.json

In one process: JAX computes first and leaves numpy arrays, torch and vLLM's kernels come after. Shapes (K, N) are those
of Qwen3-0.6B to 8B, rows M from a single decoded token to a prefill.

    w8a8    vllm._custom_ops.scaled_int8_quant, cutlass_scaled_mm (with and without bias)
    fp8     scaled_fp8_quant (per token) + cutlass_scaled_mm, whose accumulation is reduced: reported, never promised

bf16 and w4a16 are not vLLM's own products in the engine: tests/gpu/test_cuda_ops.py has them.

Printed per case: share of outputs equal to the last bit, largest difference in bf16 ulps, relative L2 error, and for
the schemes with quantized activations the share of equal codes and scales. Exit code 1 if a promise of PROMISED is
broken.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs the GPU too

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax import quant
from qarl_jax.verify.layers import Difference

# K, N of Qwen3's layers: 0.6B (qkv, down), 4B (gate_up), 8B (qkv, o, gate_up, down)
SHAPES = ((1024, 4096), (3072, 1024), (2560, 19456), (4096, 6144), (4096, 4096), (12288, 4096))
ROWS = (1, 16, 33, 512)
PROMISED = {"w8a8": 1.0, "fp8": 0.0}


def inputs(k: int, n: int, m: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws (master weight [N, K], activations [M, K] bfloat16 with a few large channels, bias [N] bfloat16)."""
    rng = np.random.default_rng(seed)
    w = (0.02 * rng.standard_normal((n, k), np.float32)).astype(jnp.bfloat16)
    x = rng.standard_normal((m, k), np.float32)
    x[:, rng.choice(k, 8, replace=False)] *= 20
    return w, x.astype(jnp.bfloat16), rng.standard_normal(n, np.float32).astype(jnp.bfloat16)


def learner(scheme: str, w: np.ndarray, x: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, Any]:
    """Computes the learner's (outputs [M, N], QTensor of numpy arrays) under the numerics profile `cuda`."""
    numerics = quant.resolve("cuda")
    qtensor = quant.quantize(jnp.asarray(w), quant.on_engine(quant.parse_scheme(scheme), numerics))
    y = quant.dot(
        jnp.asarray(x),
        jnp.asarray(w),
        qtensor,
        None if bias is None else jnp.asarray(bias),
        numerics=numerics,
    )
    return np.asarray(y), jax.tree.map(np.asarray, qtensor)


def to_torch(torch: Any, array: np.ndarray) -> Any:
    """Copies a numpy array to a CUDA tensor of equal bytes."""
    name = array.dtype.name
    array = np.array(array)  # writable, contiguous
    if name in ("bfloat16", "float8_e4m3fn"):
        bits = torch.from_numpy(array.view(np.uint16 if name == "bfloat16" else np.uint8))
        return bits.cuda().view(getattr(torch, name))
    return torch.from_numpy(array).cuda()


def from_torch(torch: Any, tensor: Any) -> np.ndarray:
    """Copies a tensor to the host, as float32."""
    return tensor.float().cpu().numpy()


class Kernels:
    """vLLM's CUDA kernels for one layer each."""

    def __init__(self) -> None:
        import torch
        from vllm import _custom_ops as ops

        self.torch, self.ops = torch, ops

    def w8a8(self, qtensor: Any, x: Any, bias: Any) -> Any:
        x_q, x_s, _ = self.ops.scaled_int8_quant(x, None, None, symmetric=True)
        weight, scale = to_torch(self.torch, qtensor.codes), to_torch(self.torch, qtensor.scales)
        return self.ops.cutlass_scaled_mm(
            x_q, weight.t(), scale_a=x_s, scale_b=scale, out_dtype=self.torch.bfloat16, bias=bias
        )

    def fp8(self, qtensor: Any, x: Any, bias: Any) -> Any:
        x_q, x_s = self.ops.scaled_fp8_quant(x, None, use_per_token_if_dynamic=True)
        weight, scale = to_torch(self.torch, qtensor.codes), to_torch(self.torch, qtensor.scales)
        return self.ops.cutlass_scaled_mm(
            x_q, weight.t(), scale_a=x_s, scale_b=scale, out_dtype=self.torch.bfloat16, bias=bias
        )


def cases(schemes: list[str], shapes: Any, rows: Any) -> list[tuple[str, int, int, int, bool]]:
    """Lists the comparisons as (scheme, K, N, M, with bias)."""
    return [(s, k, n, m, b) for s in schemes for k, n in shapes for m in rows for b in (False, True)]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schemes", nargs="+", choices=tuple(PROMISED), default=list(PROMISED))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES], help="KxN")
    parser.add_argument("--out", type=Path, default=Path("gpu_linears.json"))
    return parser


def summarize(results: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Returns a row of statistics per scheme, and whether a promise of `PROMISED` is broken."""
    rows, broken = [], False
    for scheme in dict.fromkeys(r["scheme"] for r in results):
        mine = [r for r in results if r["scheme"] == scheme]
        outputs = sum(r["count"] for r in mine)
        share = sum(r["equal"] * r["count"] for r in mine) / outputs
        kept = min(r["equal"] for r in mine) >= PROMISED[scheme]
        broken |= not kept
        rows.append(
            {
                "scheme": scheme,
                "cases": len(mine),
                "bit_equal_cases": sum(r["equal"] == 1 for r in mine),
                "equal": share,
                "worst_case_equal": min(r["equal"] for r in mine),
                "max_ulp": max(r["max_ulp"] for r in mine),
                "relative": max(r["relative"] for r in mine),
                "promise_kept": kept,
            }
        )
    return rows, broken


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if jax.default_backend() != "gpu":
        print("error: this compares CUDA kernels: run it where JAX and torch both see a GPU", file=sys.stderr)
        return 2
    shapes = [tuple(int(part) for part in shape.split("x")) for shape in args.shapes]
    kernels = Kernels()
    torch = kernels.torch
    results = []
    for seed, (scheme, k, n, m, with_bias) in enumerate(cases(args.schemes, shapes, args.rows)):
        w, x, bias = inputs(k, n, m, seed)
        mine, qtensor = learner(scheme, w, x, bias if with_bias else None)
        theirs = getattr(kernels, scheme)(qtensor, to_torch(torch, x), to_torch(torch, bias) if with_bias else None)
        d = Difference.of(f"{scheme} K={k} N={n} M={m}{' bias' if with_bias else ''}", mine, from_torch(torch, theirs))
        results.append(
            {
                "scheme": scheme,
                "k": k,
                "n": n,
                "m": m,
                "bias": with_bias,
                "equal": d.equal,
                "max_abs": d.max_abs,
                "max_ulp": d.max_ulp,
                "relative": d.relative,
                "count": d.count,
            }
        )
        print(f"{d.module:40} {d.equal:9.4%} equal  {d.max_ulp:8.1f} ulp  {d.relative:.1e}", flush=True)
    rows, broken = summarize(results)
    for row in rows:
        print(json.dumps(row))
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "torch": torch.__version__,
        "summary": rows,
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(broken)


if __name__ == "__main__":
    raise SystemExit(main())
