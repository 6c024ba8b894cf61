# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times publishes into a running vLLM, by phase, and runs a soak: a hundred publishes with generation in between.

    python -m benchmarks.publish --shapes tiny 100mb                           # on a CPU
    python -m benchmarks.publish --shapes 8b --schemes w4a16 w8a8 bf16 --engine cuda --out .../publish_h200.json
    python -m benchmarks.publish --shapes 8b --engine cuda --transport nccl --engine-device 1       # on two GPUs
    python -m benchmarks.publish --model assets/tiny-qwen3 --schemes w8a8 --soak 100

Random weights in the shapes of a Qwen3, or the model of a folder. A publish goes from "update applied" to "the engine
serves the new version":

    quantize   masters -> QTensors (jitted; part of an update, not of total_s)
    stage      cast, copy and fingerprint: into a memory file, or (cuda_ipc, nccl) into a buffer on the GPU
    open       the bridge maps it, or (nccl) receives it, at receive_gb_per_s
    validate   every fingerprint, every float
    drain      waiting for running requests (none here)
    load       into the live layers, fingerprints checked at the door
    readback   one-hot rows through the live layers
    other      messages

`copy_s` is what a plain copy of the same bytes takes there (host memory or GPU): total_s cannot be less than a few of
them. The first publish starts the engine and is not counted; the median of the next ones is.

The soak publishes the model and a slightly moved one in turn, samples after each, checks the version of every
completion, and compares the memory of both processes (and of the GPU) after a tenth of the way and at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the engine shares the GPU

import jax
import numpy as np
from flax import nnx
from qarl_bridge.client import sender
from qarl_bridge.protocol.messages import BridgeError

from benchmarks import shapes
from qarl_jax import models
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.vllm.engine import Config, VllmEngine
from qarl_jax.verify import ladder

PHASES = ("stage_s", "open_s", "validate_s", "drain_s", "load_s", "readback_s", "other_s", "total_s")


def shaped(shape: str, layers: int, scheme: str, engine: str) -> PolicyWeights:
    """Makes a random policy in the shapes of a Qwen3, not quantized; bfloat16 masters publish equal bytes."""
    config = shapes.model_config(shapes.Setting(model=shape, layers=layers, scheme=scheme, engine=engine))
    graphdef, abstract, _ = models.split(models.abstract_model(config))
    params = {}
    for number, (keys, variable) in enumerate(nnx.to_flat_state(abstract)):
        like = variable.get_value()
        if keys[-1] == "kernel":
            value = _noise(jax.random.key(number), like.shape, like.dtype)
        else:
            value = jax.numpy.ones(like.shape, like.dtype)
        params[keys] = variable.replace(value)
    return PolicyWeights(graphdef=graphdef, params=nnx.from_flat_state(params), qweights=None)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _noise(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Deviation 0.02. A stack is drawn layer by layer: at once, experts would take several times their own memory."""
    if len(shape) < 3:
        return 0.02 * jax.random.normal(key, shape, dtype)
    return jax.lax.map(lambda key: _noise(key, shape[1:], dtype), jax.random.split(key, shape[0]))


_quantize = jax.jit(models.quantize_params, static_argnums=0)


def moved(weights: PolicyWeights, scale: float) -> PolicyWeights:
    """Scales the policy's matrices a little and quantizes them, so that scales and bytes change."""
    params = jax.tree.map(lambda x: x * np.asarray(scale, x.dtype) if x.ndim > 1 else x, weights.params)
    return dataclasses.replace(weights, params=params, qweights=_quantize(weights.graphdef, params))


def copy_seconds(nbytes: int, on_gpu: bool) -> float:
    """Times a plain copy of that many bytes (at most 1 GiB, scaled): on the device, or in host memory."""
    size = min(nbytes, 1 << 30)
    if on_gpu:
        source = jax.block_until_ready(jax.numpy.zeros(size // 4, jax.numpy.int32))
        copy = jax.jit(lambda x: x + 1)  # reads and writes every byte once
        times = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready(copy(source))
            times.append(time.perf_counter() - start)
    else:
        host = np.zeros(size, np.uint8)
        target = np.empty_like(host)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            np.copyto(target, host)
            times.append(time.perf_counter() - start)
    return min(times[1:]) * nbytes / size


def engine_for(args: argparse.Namespace, log: list[str]) -> VllmEngine:
    def note(line: str) -> None:
        log.append(line)
        print(f"# {line}", file=sys.stderr, flush=True)

    return VllmEngine(
        Config(
            kv_cache_gb=args.kv_cache_gb,
            max_model_len=256,
            max_num_seqs=16,
            readback=args.readback,
            transport=args.transport,
            visible_gpus=args.engine_device,
            threads=args.threads,
            gpu_memory_utilization=args.gpu_memory_utilization,
            profile=args.profile,
            log_file=args.log_file,
            python=args.python,
        ),
        run_id="publish",
        log=note,
    )


def measure(name: str, weights: PolicyWeights, scheme: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the median seconds per phase over `args.repeats` publishes."""
    log: list[str] = []
    engine = engine_for(args, log)
    reports = []
    try:
        for version in range(args.repeats + 1):
            weights = dataclasses.replace(weights, qweights=None)  # the only ones, or two would be in memory
            start = time.perf_counter()
            qweights = jax.block_until_ready(_quantize(weights.graphdef, weights.params))
            quantized = time.perf_counter()
            weights = dataclasses.replace(weights, qweights=qweights)
            report = engine.publish(weights, version)
            report["quantize_s"] = quantized - start
            report["total_s"] = time.perf_counter() - quantized
            report["other_s"] = report["total_s"] - sum(report[p] for p in PHASES[:-2])
            reports.append(report)
            print(f"# {scheme} version {version}: {report['total_s']:.3f} s", file=sys.stderr, flush=True)
        notes = engine.status().facts.notes
        facts = engine.facts
    finally:
        engine.close()
    median = {phase: statistics.median(r[phase] for r in reports[1:]) for phase in ("quantize_s", *PHASES)}
    nbytes = int(reports[-1]["bytes"])
    on_gpu = jax.default_backend() == "gpu"
    copy_s = copy_seconds(nbytes, on_gpu)
    assert facts is not None
    return {
        "shapes": name,
        "scheme": scheme,
        "engine": f"{facts.engine} {facts.engine_version} {facts.isa}",
        "kernels": sorted(set(facts.kernels.values())),
        "notes": [*notes, *log],
        "readback": args.readback,
        "parameters": int(sum(x.size for x in jax.tree.leaves(weights.params))),
        "bytes": nbytes,
        "tensors": int(reports[-1]["tensors"]),
        "gb_per_s": nbytes / median["total_s"] / 1e9,
        "transport": engine.route,
        "engine_device": args.engine_device,
        "receive_gb_per_s": nbytes / median["open_s"] / 1e9 if engine.route == "nccl" else None,
        "copy_s": copy_s,
        "share_of_copy_bandwidth": copy_s / median["total_s"],
        "repeats": args.repeats,
        **median,
        "first_publish_s": reports[0]["total_s"],
        "all_total_s": [r["total_s"] for r in reports[1:]],
    }


def rss_bytes(pid: int) -> int:
    """Returns the resident memory of a process, in bytes."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024


@functools.cache
def _gpu() -> Any:
    """The first GPU; None without one. Kept: every new handle would take memory of its own."""
    try:
        return sender.gpu_buffers(0).device
    except BridgeError:
        return None


def gpu_bytes() -> int | None:
    """Returns the memory in use on the first GPU by all processes, in bytes; None: no GPU."""
    if _gpu() is None:
        return None
    free, total = _gpu().memory()
    return total - free


def soak(name: str, weights: PolicyWeights, scheme: str, args: argparse.Namespace) -> dict[str, Any]:
    """Makes `args.soak` publishes with generation in between, and returns times and memory growth.

    Raises:
      RuntimeError: a completion carries another version than the one published last.
    """
    policies = (moved(weights, 1.0), moved(weights, 1.01))
    vocab = models.config_of(weights.graphdef).vocab_size
    prompts = ladder.random_prompts(vocab, 4, 8, 0)
    sampling = SamplingConfig(max_response_len=8)
    log: list[str] = []
    engine = engine_for(args, log)
    sizes: list[tuple[int, int, int | None]] = []
    completions, totals = 0, []
    outputs: dict[int, Any] = {}
    start = time.perf_counter()
    try:
        for version in range(args.soak):
            totals.append(engine.publish(policies[version % 2], version)["total_s"])
            drawn = engine.generate(prompts, num_samples=2, sampling=sampling, key=7)
            for group in drawn:
                for completion in group:
                    spans = [(span.version, span.start, span.end) for span in completion.versions]
                    if spans != [(version, 0, len(completion.tokens))]:
                        raise RuntimeError(f"after publishing {version} a completion carries {spans}")
                    completions += 1
            tokens = [[c.tokens for c in group] for group in drawn]
            if outputs.setdefault(version % 2, tokens) != tokens:
                raise RuntimeError(f"version {version} does not sample what the same weights sampled before")
            assert engine.facts is not None
            sizes.append((rss_bytes(os.getpid()), rss_bytes(engine.facts.pid), gpu_bytes()))
        notes = engine.status().facts.notes
    finally:
        engine.close()
    early = sizes[min(max(2, args.soak // 10), len(sizes)) - 1]
    growth = [None if a is None or b is None else b - a for a, b in zip(early, sizes[-1], strict=True)]
    return {
        "shapes": name,
        "scheme": scheme,
        "publishes": args.soak,
        "completions": completions,
        "wrong_versions": 0,
        "distinct_outputs": outputs[0] != outputs[1],
        "restarts": engine.restarts,
        "seconds": time.perf_counter() - start,
        "median_total_s": statistics.median(totals[1:]),
        "trainer_rss_bytes": [early[0], sizes[-1][0]],
        "engine_rss_bytes": [early[1], sizes[-1][1]],
        "gpu_bytes": [early[2], sizes[-1][2]],
        "growth_bytes_trainer_engine_gpu": growth,
        "notes": [*notes, *log],
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=tuple(shapes.SIZES), default=[])
    parser.add_argument("--model", default="", help="a Hugging Face folder instead of shapes")
    parser.add_argument("--layers", type=int, default=0, help="layers of a shape; 0: all")
    parser.add_argument("--schemes", nargs="+", default=("bf16", "w8a8", "w4a16"))
    parser.add_argument("--engine", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--soak", type=int, default=0, help="that many publishes with generation in between")
    parser.add_argument("--readback", default="sampled", choices=("off", "sampled", "full"))
    parser.add_argument("--transport", default="auto", choices=("auto", "cuda_ipc", "nccl", "host"))
    parser.add_argument("--engine-device", default="", help="the engine's GPU, as CUDA_VISIBLE_DEVICES names it")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kv-cache-gb", type=float, default=0.1)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--profile", default="", help="folder for profiles of the engine's loads")
    parser.add_argument("--log-file", default="", help="where the bridge's output goes")
    parser.add_argument("--python", default="", help="interpreter of the bridge")
    parser.add_argument("--out", type=Path, default=Path("publish.json"))
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.model and args.shapes:
        raise SystemExit("--model and --shapes exclude each other")
    record: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.publish", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "device": str(jax.devices()[0].device_kind),
        },
        "results": [],
    }
    print("| shapes | scheme | MB | " + " | ".join(p.removesuffix("_s") for p in PHASES) + " | GB/s | of a copy |")
    print("|" + "---|" * (len(PHASES) + 5))
    for name in (args.model,) if args.model else args.shapes or ("tiny", "100mb"):
        for scheme in args.schemes:
            if args.model:
                weights = dataclasses.replace(ladder.load(name, scheme, args.engine), qweights=None)
            else:
                weights = shaped(name, args.layers, scheme, args.engine)
            if args.soak:
                r = soak(name, weights, scheme, args)
                print(json.dumps(r), flush=True)
            else:
                r = measure(name, weights, scheme, args)
                cells = " | ".join(f"{r[p]:.3f}" for p in PHASES)
                print(
                    f"| {name} | {scheme} | {r['bytes'] / 1e6:.1f} | {cells} | {r['gb_per_s']:.2f} | "
                    f"{r['share_of_copy_bandwidth']:.1%} |",
                    flush=True,
                )
            record["results"].append(r)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            del weights
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
