# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of batch-invariance in the engine: tokens per second with the bridge's kernels and with vLLM's.

    python -m benchmarks.engine_price --shapes 4b --schemes w8a8 fp8 w4a16 bf16 --sequences 64 128 256 --out FILE

Random weights of a Qwen3's shapes, drawn on the GPU, are published into two live engines that share it, one with
`arithmetic=batch_invariant` (CUDA graphs) and one with `arithmetic=vllm` (compiled). They sample in turn, never at
once: `--response-len` tokens for every sequence, `--repeats` times. A line of JSON per scheme and number of sequences
has the most tokens per second of either, and their ratio: 1 is a batch-invariance that costs nothing. `--apart` starts
one engine after the other, where a GPU has no room for two; `--transport host` stages no version on the GPU.
`--tensor-parallel` spreads each engine over so many GPUs, and the learner over all that there are; `publish_s` are the
seconds of a second publish, `bytes` all that it sends. `--arithmetics` leaves one out. Only `batch_invariant` serves
adapters (`--lora-rank`).

A CPU has one arithmetic, and both are that: `--shapes tiny --schemes w8a8 --sequences 4 --response-len 8`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks import shapes
from qarl_jax import models
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, leave_memory_to_vllm
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.verify import ladder

ARITHMETICS = ("batch_invariant", "vllm")
PROMPT_LEN = 64


def policy(args: argparse.Namespace, scheme: str) -> PolicyWeights:
    """Makes random weights under `scheme`, on the devices, for engines of the arguments' shapes and shards."""
    mesh = make_mesh(fsdp=-1)
    config = shapes.model_config(shapes.Setting(model=args.shapes, layers=args.layers, scheme=scheme, engine="auto"))
    numerics = dataclasses.replace(config.numerics, shards=args.tensor_parallel)
    config = dataclasses.replace(config, numerics=numerics)
    graphdef = models.split(models.abstract_model(config))[0]
    params = models.random_masters(config, mesh)
    quantized = jax.jit(lambda masters: models.quantize_params(graphdef, masters))(params)
    weights = PolicyWeights(graphdef=graphdef, params=params, qweights=quantized)
    return ladder.with_adapters(weights, args.lora_rank) if args.lora_rank else weights


def engine_config(arithmetic: str, config: models.ModelConfig, args: argparse.Namespace) -> Config:
    """Returns the settings of an engine whose KV cache holds all sequences at once."""
    longest = PROMPT_LEN + args.response_len
    pages = -(-longest // 128)  # of at most 128 tokens
    heads = config.num_kv_heads // args.tensor_parallel
    token = 4 * config.num_layers * heads * config.head_dim  # bytes of a shard: a key and a value, two bytes each
    return Config(
        arithmetic=arithmetic if jax.default_backend() == "gpu" else "batch_invariant",  # type: ignore[arg-type]
        max_model_len=longest,
        max_num_seqs=max(args.sequences),
        kv_cache_gb=1.1 * token * 128 * pages * max(args.sequences) / 2**30,
        gpu_memory_utilization=0.1,
        staging_buffers=args.staging_buffers,
        transport=args.transport,
        tensor_parallel_size=args.tensor_parallel,
        readback="off",
        log_file=f"{args.engine_log}.{arithmetic}" if args.engine_log else "",
        profile=args.profile,
    )


@contextlib.contextmanager
def engines_of(
    weights: PolicyWeights, names: Sequence[str], args: argparse.Namespace
) -> Iterator[dict[str, VllmEngine]]:
    """A context of live engines that hold the weights, started side by side."""
    config = models.config_of(weights.graphdef)
    engines = {name: VllmEngine(engine_config(name, config, args), run_id=f"price-{name}") for name in names}
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda engine: engine.publish(weights, 0), engines.values()))
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def tokens_per_s(engine: VllmEngine, vocab: int, sequences: int, response_len: int, seed: int) -> float:
    """Measures response tokens per second of one batch of random prompts, from call to last response."""
    prompts = ladder.random_prompts(vocab, sequences, PROMPT_LEN, seed)
    start = time.perf_counter()
    groups = engine.generate(
        prompts, num_samples=1, sampling=SamplingConfig(max_response_len=response_len, stop_token_ids=()), key=seed
    )
    return sum(len(one.tokens) for group in groups for one in group) / (time.perf_counter() - start)


def measure(scheme: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures both engines under a scheme; yields a record for each number of sequences."""
    weights = policy(args, scheme)
    vocab = models.config_of(weights.graphdef).vocab_size
    best: dict[int, dict[str, float]] = {n: dict.fromkeys(args.arithmetics, 0.0) for n in args.sequences}
    publish_s: dict[str, float] = {}
    for names in [[name] for name in args.arithmetics] if args.apart else [list(args.arithmetics)]:
        with engines_of(weights, names, args) as engines:
            for name, engine in engines.items():
                start = time.perf_counter()
                nbytes = int(engine.publish(weights, 1)["bytes"])
                publish_s[name] = round(time.perf_counter() - start, 3)
            for repeat in range(args.repeats + 1):  # the first warms up
                for n in args.sequences:
                    for name, engine in engines.items():
                        found = tokens_per_s(
                            engine, vocab, n, args.response_len if repeat else min(16, args.response_len), repeat
                        )
                        best[n][name] = max(best[n][name], found) if repeat else 0.0
    for n in args.sequences:
        found = {f"{name}_tok_per_s": round(best[n][name], 1) for name in args.arithmetics}
        if len(args.arithmetics) > 1:
            found["ratio"] = round(best[n]["batch_invariant"] / best[n]["vllm"], 3)
        yield (
            {"shapes": args.shapes, "scheme": scheme, "lora_rank": args.lora_rank}
            | {"shards": args.tensor_parallel, "sequences": n}
            | found
            | {"publish_s": publish_s, "bytes": nbytes}
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_price", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=shapes.SIZES, default="4b")
    parser.add_argument("--layers", type=int, default=0, help="0: the model's own")
    parser.add_argument("--schemes", nargs="+", default=["w8a8", "fp8", "w4a16", "bf16"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--response-len", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--apart", action="store_true", help="one engine after the other")
    parser.add_argument("--arithmetics", nargs="+", choices=ARITHMETICS, default=list(ARITHMETICS))
    parser.add_argument("--tensor-parallel", type=int, default=1, help="shards of an engine, on as many GPUs")
    parser.add_argument("--lora-rank", type=int, default=0, help="adapters on all linear layers, of this rank")
    parser.add_argument("--staging-buffers", type=int, default=1, choices=(0, 1, 2), help="as in rollout.engine")
    parser.add_argument("--transport", default="auto", choices=("auto", "host"), help="as in rollout.engine")
    parser.add_argument("--engine-log", default="", help="file for what the engines say, with their arithmetic's name")
    parser.add_argument("--profile", default="", help="folder for a profile of the last engine, as in rollout.engine")
    parser.add_argument("--out", help="a file that the lines are appended to")
    args = parser.parse_args(argv)
    leave_memory_to_vllm()
    same = {"device": jax.devices()[0].device_kind, "command": " ".join(sys.argv[1:])}
    for scheme in args.schemes:
        for line in measure(scheme, args):
            print(json.dumps(line), flush=True)
            if args.out:
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(same | line) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
