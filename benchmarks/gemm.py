# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures XLA's matrix products at a model's shapes: dtypes, weight layouts, autotuning, and whole quantized layers.

    python -m benchmarks.gemm --model 8b --tokens 16384 [--autotune 0 4] [--out FILE]

Per shape [tokens, K] x [N, K] and kind: microseconds and TFLOP/s. Kinds: bf16 (rounded by the kernel) and bf16_f32
(float32 written), int8 and fp8 with weights [N, K] and, `_kn`, [K, N]; then `dot` under every scheme, activation
quantization and rescale included. XLA reads its flags at start, so each level of autotuning is a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import SIZES
from benchmarks.timing import seconds_of
from qarl_jax import quant
from qarl_jax.types import UserError

KINDS: dict[str, tuple[Any, Any, bool]] = {  # operands, result, weights as [K, N]
    "bf16": (jnp.bfloat16, jnp.bfloat16, False),
    "bf16_kn": (jnp.bfloat16, jnp.bfloat16, True),
    "bf16_f32": (jnp.bfloat16, jnp.float32, False),
    "int8": (jnp.int8, jnp.int32, False),
    "int8_kn": (jnp.int8, jnp.int32, True),
    "fp8": (jnp.float8_e4m3fn, jnp.float32, False),
    "fp8_bf16": (jnp.float8_e4m3fn, jnp.bfloat16, False),
}


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Times a call: the median of three timings of `repeats` calls, divided by `repeats`."""
    jax.block_until_ready(call())
    return float(np.median(seconds_of(lambda: [call() for _ in range(repeats)][-1], 3))) / repeats


def products(model: str) -> dict[str, tuple[int, int]]:
    """Returns the distinct linear layers of a model: name -> shape [N, K]."""
    size = SIZES[model]
    width = size.get("head_dim", 128)
    return {
        "q": (size["heads"] * width, size["hidden"]),
        "kv": (size["kv"] * width, size["hidden"]),
        "up": (size["inter"], size["hidden"]),
        "down": (size["hidden"], size["inter"]),
    }


def measure(model: str, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Times every kind and scheme at every shape of a model's layers."""
    out = []
    for name, (n, k) in products(model).items():

        def line(kind: str, took: float, name: str = name, n: int = n, k: int = k) -> None:
            out.append(
                {
                    "layer": name,
                    "shape": [tokens, n, k],
                    "kind": kind,
                    "us": took * 1e6,
                    "tflops": 2 * tokens * n * k / took / 1e12,
                }
            )
            print(json.dumps(out[-1]), flush=True)

        rng = np.random.default_rng(0)
        x32, w32 = (rng.standard_normal(shape, np.float32) for shape in ((tokens, k), (n, k)))
        for kind, (dtype, result, transposed) in KINDS.items():
            x, w = (jnp.asarray(np.clip(np.round(a * 32), -127, 127), dtype) for a in (x32, w32))
            w = w.T.copy() if transposed else w
            contract = (((1,), (0,) if transposed else (1,)), ((), ()))
            product = jax.jit(
                functools.partial(jax.lax.dot_general, dimension_numbers=contract, preferred_element_type=result)
            )
            line(kind, seconds(lambda product=product, x=x, w=w: product(x, w), repeats))
        x, w = jnp.asarray(x32, jnp.bfloat16), jnp.asarray(w32, jnp.bfloat16)
        for scheme in quant.scheme_names():
            config = quant.parse_scheme(scheme, 128 if k % 128 == 0 else 32)
            try:
                qt = None if config is None else quant.quantize(w, config)
            except UserError as problem:  # a scheme that does not take this shape
                print(json.dumps({"layer": name, "kind": f"dot/{scheme}", "refused": str(problem)}), flush=True)
                continue
            line(f"dot/{scheme}", seconds(lambda x=x, w=w, qt=qt: quant.dot(x, w, qt), repeats))
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SIZES, default="8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--autotune", nargs="*", type=int, default=[], help="levels of --xla_gpu_autotune_level")
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    if args.autotune:
        base = ["--model", args.model, "--tokens", str(args.tokens), "--repeats", str(args.repeats)]
        for level in args.autotune:
            print(json.dumps({"autotune": level}), flush=True)
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level={level}"
            command = [sys.executable, "-m", "benchmarks.gemm", *base]
            subprocess.run(command, check=True, env=os.environ | {"XLA_FLAGS": flags.strip()})
        return 0
    results = measure(args.model, args.tokens, args.repeats)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"device": jax.devices()[0].device_kind, "results": results}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
