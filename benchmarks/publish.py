# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds per publish into a running vLLM, by phase: quantize, copy out and hash, validate, load in place, read back.

    python benchmarks/publish.py --out benchmarks/results/publish_cpu.json

Random weights in the shapes of Qwen3: `tiny` has about a million parameters, `100mb` about 50 million (100 MB in bf16).
The first publish starts the engine and is not counted; the median of the next ones is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax

from qarl_jax import models, quant
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.vllm import Config, VllmEngine

# hidden, intermediate, layers, q-heads, kv-heads, vocabulary
SIZES = {"tiny": (128, 256, 4, 2, 1, 512), "100mb": (512, 2048, 12, 8, 4, 4096)}
PHASES = ("quantize_s", "stage_s", "transfer_s", "validate_s", "drain_s", "load_s", "readback_s", "total_s")


def graph(size: str, scheme: str, engine: str):
    hidden, inter, layers, heads, kv_heads, vocab = SIZES[size]
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values))
        config = models.read_config(
            folder,
            compute_dtype="bfloat16",
            param_dtype="float32",
            quant=models.parse_rules(scheme),
            numerics=quant.resolve(engine),
        )
    graphdef, params, _ = models.split(models.random_model(config, 0))
    return graphdef, params


def measure(size: str, scheme: str, engine_name: str, repeats: int, readback: str) -> dict:
    graphdef, params = graph(size, scheme, engine_name)
    quantize = jax.jit(lambda params: models.quantize_params(graphdef, params))
    engine = VllmEngine(Config(kv_cache_gb=0.1, max_model_len=256, readback=readback), run_id="publish")
    reports = []
    try:
        for version in range(repeats + 1):
            start = time.perf_counter()
            qweights = jax.block_until_ready(quantize(params))
            quantized = time.perf_counter()
            report = engine.publish(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights), version)
            report["quantize_s"] = quantized - start
            report["total_s"] = time.perf_counter() - start
            reports.append(report)
    finally:
        engine.close()
    median = {phase: statistics.median(r[phase] for r in reports[1:]) for phase in PHASES}
    size_bytes = reports[-1]["bytes"]
    return {
        "size": size,
        "scheme": scheme,
        "readback": readback,
        "parameters": int(sum(x.size for x in jax.tree.leaves(params))),
        "bytes": int(size_bytes),
        "gb_per_s": size_bytes / median["total_s"] / 1e9,
        "repeats": repeats,
        **median,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    parser.add_argument("--schemes", nargs="+", default=("bf16", "w8a8", "w4a16"))
    parser.add_argument("--engine", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--readback", default="sampled", choices=("off", "sampled", "full"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/publish_cpu.json"))
    args = parser.parse_args()
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "results": [],
    }
    print("| size | scheme | MB | " + " | ".join(p.removesuffix("_s") for p in PHASES) + " | GB/s |")
    print("|" + "---|" * (len(PHASES) + 4))
    for size in args.sizes:
        for scheme in args.schemes:
            r = measure(size, scheme, args.engine, args.repeats, args.readback)
            record["results"].append(r)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            cells = " | ".join(f"{r[p]:.3f}" for p in PHASES)
            print(f"| {size} | {scheme} | {r['bytes'] / 1e6:.1f} | {cells} | {r['gb_per_s']:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
