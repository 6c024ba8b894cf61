# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of the embedded sampler beside vLLM's CPU build: same policy, prompts and lengths, in one run.

    python benchmarks/rollout_cpu.py                                   # w4a16 and w8a8, fixed and ragged lengths
    python benchmarks/rollout_cpu.py --schemes bf16 --batch 32 --new 128 --engines jax

Both engines are driven through the `RolloutEngine` protocol and are given the same random policy of quickstart's size
by `publish`; vLLM runs behind its bridge, in eager mode, as in training. `fixed` draws exactly `--new` tokens for every
prompt; `ragged` ends responses at any of vocabulary / 32 stop tokens, so that lengths differ about as much as
geometric ones do. Every number is the median of `--repeats` calls after one that compiles and warms up; the engines
take turns, so that a busy machine slows both. The embedded sampler computes in float32, as quickstart does; vLLM in
bfloat16, the only thing it does.

The table goes to standard output, the raw numbers to benchmarks/results/rollout_cpu.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from qarl_jax import models, quant
from qarl_jax.rollout import PolicyWeights, RolloutEngine, SamplingConfig, make_engine
from qarl_jax.types import Prompt

RESULTS = pathlib.Path(__file__).parent / "results" / "rollout_cpu.json"


def random_policy(scheme: str, args: argparse.Namespace) -> PolicyWeights:
    """A random Qwen3 of quickstart's size under `scheme`."""
    config = models.ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_layers=args.layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        qk_norm=True,
        tie_embeddings=True,
        max_position_embeddings=2048,
        compute_dtype="float32",
        quant=models.parse_rules(scheme, 128),
        numerics=quant.resolve("cpu") if args.numerics == "cpu" else quant.resolve("plain"),
    )
    graphdef = models.split(models.abstract_model(config))[0]
    params, qweights = jax.jit(lambda key: models.split(models.Transformer(config, nnx.Rngs(key)))[1:])(
        jax.random.key(0)
    )
    return PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)


def engine_of(name: str, args: argparse.Namespace) -> RolloutEngine:
    if name == "jax":
        from qarl_jax.rollout.embedded.engine import Config

        return make_engine("jax", Config(batch_size=args.batch))
    from qarl_jax.rollout.vllm.engine import Config as VllmConfig

    return make_engine("vllm", VllmConfig(max_model_len=512, max_num_seqs=args.batch, kv_cache_gb=1.0))


def measure(
    engines: dict[str, RolloutEngine], prompts: list[Prompt], sampling: SamplingConfig, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Tokens per second of `generate`, engine by engine in turn, so that a busy machine slows all of them alike."""
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in engines}
    for repeat in range(args.repeats + 1):
        for name, engine in engines.items():
            start = time.perf_counter()
            groups = engine.generate(prompts, num_samples=args.samples, sampling=sampling, key=repeat)
            seconds = time.perf_counter() - start
            runs[name].append((seconds, sum(len(completion.tokens) for group in groups for completion in group)))
    out = {}
    for name, (first, *rest) in runs.items():
        rates = [tokens / seconds for seconds, tokens in rest]
        out[name] = {
            "tok_per_s": statistics.median(rates),
            "tok_per_s_all": rates,
            "tokens": [tokens for _, tokens in rest],
            "first_call_s": first[0],
        }
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["w4a16", "w8a8"])
    parser.add_argument("--engines", nargs="+", default=["jax", "vllm"], choices=["jax", "vllm"])
    parser.add_argument("--batch", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--prompts", type=int, default=64, help="different prompts")
    parser.add_argument("--samples", type=int, default=1, help="completions of each")
    parser.add_argument("--prompt-len", type=int, default=24)
    parser.add_argument("--new", type=int, default=64, help="tokens per response (ragged: at most)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument(
        "--numerics", choices=["plain", "cpu"], default="plain", help="arithmetic of the embedded sampler"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS)
    args = parser.parse_args(argv)

    rng = np.random.default_rng(0)
    ids = rng.integers(0, args.vocab, (args.prompts, args.prompt_len))
    prompts = [Prompt(uid=str(i), tokens=tuple(map(int, row)), text="", answer="") for i, row in enumerate(ids)]
    lengths = {
        "fixed": SamplingConfig(max_response_len=args.new),
        "ragged": SamplingConfig(max_response_len=args.new, stop_token_ids=tuple(range(0, args.vocab, 32))),
    }
    rows = []
    for scheme in args.schemes:
        weights = random_policy(scheme, args)
        with contextlib.ExitStack() as stack:
            engines, times = {}, {}
            for name in args.engines:
                engines[name] = stack.enter_context(contextlib.closing(engine_of(name, args)))
                seconds = []
                for version in range(2):
                    start = time.perf_counter()
                    engines[name].publish(weights, version)
                    seconds.append(time.perf_counter() - start)
                times[name] = {"start_s": seconds[0], "publish_s": seconds[1]}
            for kind, sampling in lengths.items():
                for name, measured in measure(engines, prompts, sampling, args).items():
                    rows.append({"scheme": scheme, "engine": name, "lengths": kind, **times[name], **measured})
                    print(f"{scheme} {kind} {name}: {measured['tok_per_s']:.0f} tok/s", file=sys.stderr, flush=True)

    rate = {(row["scheme"], row["lengths"], row["engine"]): row["tok_per_s"] for row in rows}
    print(f"{'scheme':8} {'lengths':8} {'embedded tok/s':>15} {'vLLM CPU tok/s':>15} {'ratio':>8}")
    for scheme in args.schemes:
        for kind in lengths:
            ours, theirs = rate.get((scheme, kind, "jax")), rate.get((scheme, kind, "vllm"))
            ratio = f"{ours / theirs:.1f}x" if ours and theirs else "-"
            cells = [f"{value:.0f}" if value else "-" for value in (ours, theirs)]
            print(f"{scheme:8} {kind:8} {cells[0]:>15} {cells[1]:>15} {ratio:>8}")
    host = {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    options = {key: value for key, value in vars(args).items() if key != "out"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"host": host, "options": options, "rows": rows}, indent=1) + "\n")
    return 0


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
