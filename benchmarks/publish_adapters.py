# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times versions of adapters on a live vLLM, by phase, without a learner.

    python -m benchmarks.publish_adapters --shapes 8b --rank 32 --publishes 50 --out FILE
    python -m benchmarks.publish_adapters --shapes tiny --rank 8 --publishes 5 --sequences 4 --response-len 8 \
        --kv-cache-gb 0.2 --threads 1                                                       # on a CPU

A random base in a Qwen3's shapes is published once, through host memory. Then come versions of random adapters of all
linear layers. While a version is staged, `--sequences` responses of the version before are decoded over another
connection; the engine finishes them before it loads (`drain`).

    stage       numpy -> a memory file, with fingerprints
    transfer    messages; the bridge maps the file
    check       fingerprints and values on the host; a copy to the engine's device, and its fingerprints there
    load        into the live layers; prefix and KV caches are cleared
    readback    live layers against the version
    pause       load + readback: no decode step runs
    all         the whole publish without drain

The line of JSON has medians, maxima and every publish, in seconds. It counts completions, and those that name another
version than they should, and gives the growth of memory, files and GPU memory after a tenth of the publishes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # shapes alone: a GPU is the engine's

import jax
import numpy as np
from qarl_bridge.client import sender
from qarl_bridge.protocol import adapters, messages

from benchmarks import shapes
from benchmarks.publish import gpu_bytes, rss_bytes
from benchmarks.watched import written
from qarl_jax import models
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.vllm.engine import engine_config
from qarl_jax.rollout.vllm.gpu_staging import layout
from qarl_jax.rollout.vllm.process import BridgeProcess

PHASES = ("stage", "transfer", "check", "drain", "load", "readback", "pause", "all")
PROMPT_LEN = 64


def version_of(name: str, layers: int, scheme: str, rank: int) -> tuple[Any, list[messages.Expected]]:
    """Returns the static half of a model with adapters, and the tensors of its complete version."""
    config = shapes.model_config(shapes.Setting(model=name, layers=layers, scheme=scheme))
    config = dataclasses.replace(config, lora=models.Lora(rank=rank, scale=1.0))
    graphdef, params, _ = models.split(models.abstract_model(config))
    qweights = jax.eval_shape(functools.partial(models.quantize_params, graphdef), params)
    places = layout(PolicyWeights(graphdef=graphdef, params=params, qweights=qweights))
    return graphdef, [messages.Expected(name=p.name, dtype=p.dtype, shape=list(p.shape)) for p in places]


def random_base(expected: Sequence[messages.Expected]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a base of random codes or small random weights; matrices repeat one block of 4 MiB."""
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, 4 << 20, dtype=np.uint8)
    normal = (0.02 * rng.standard_normal(1 << 21)).astype(messages.DTYPES["bfloat16"])
    shape_of = {one.name: one.shape for one in expected}
    for one in expected:
        dtype, leaf = messages.DTYPES[one.dtype], one.name.rpartition(".")[2]
        if leaf == "weight_shape":
            packed = shape_of[one.name.replace("weight_shape", "weight_packed")]
            yield one.name, np.array([packed[0], 8 * packed[1]], dtype)
        elif leaf.endswith("scale"):
            yield one.name, np.full(one.shape, 0.01, dtype)
        elif len(one.shape) < 2:
            yield one.name, np.ones(one.shape, dtype)
        elif one.dtype == "bfloat16":
            yield one.name, np.resize(normal, one.shape)
        else:
            codes = block & 0x77 if one.dtype == "float8_e4m3fn" else block  # no NaN
            yield one.name, np.resize(codes.view(dtype), one.shape)


def random_adapters(expected: Sequence[messages.Expected], seed: int) -> list[tuple[str, np.ndarray]]:
    """Draws a version of adapters that change the base a little; its matrices repeat one block of 4 MiB."""
    block = np.random.default_rng(seed).standard_normal(1 << 21)
    block = (0.02 * block).astype(messages.DTYPES["bfloat16"])
    return [(one.name, np.resize(block, one.shape)) for one in expected]


class Trainer:
    """A trainer of random adapters, with a second connection that samples."""

    def __init__(self, args: argparse.Namespace):
        graphdef, expected = version_of(args.shapes, args.layers, args.scheme, args.rank)
        self._own = [one for one in expected if adapters.is_adapter(one.name)]
        self._base = [one for one in expected if not adapters.is_adapter(one.name)]
        options = messages.EngineOptions(
            max_model_len=PROMPT_LEN + args.response_len,
            max_num_seqs=max(8, args.sequences),
            kv_cache_gb=args.kv_cache_gb,
            gpu_memory_utilization=0.1,
            tensor_parallel_size=args.tensor_parallel,
            threads=args.threads,
            profile=args.profile,
        )
        self._args = args
        self.bridge = BridgeProcess(arguments=["--options", options.to_json()], log_file=args.engine_log)
        address, key = self.bridge.start(engine_config(graphdef), expected)
        clients = []
        while len(clients) < 2:
            try:
                clients.append(sender.Client(address, key, timeout_s=600.0))
            except messages.BridgeError as error:
                if self.bridge.has_ended or error.code != "dead":
                    raise SystemExit(f"no engine: {error}: {self.bridge.last_words()}") from None
                time.sleep(0.5)
        self._client, self._sampler = clients
        self._client.acquire("adapters", 1)
        self.facts = self._client.facts
        self._over: sender.StagedVersion | None = None
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, self.facts.vocab_size, (args.sequences, PROMPT_LEN))
        self._draws = [messages.Draw(prompt=prompt.tolist(), seed=n) for n, prompt in enumerate(prompts)]

    def publish(self, step: int) -> dict[str, float]:
        """Publishes version `step`, the first one with its base; returns seconds per phase."""
        named: Any = random_adapters(self._own, step)
        if self._over is None:
            named = (pair for pairs in (random_base(self._base), named) for pair in pairs)
        held = sender.stage(
            named,
            version=messages.Version(run_id="adapters", incarnation=1, step=step),
            model=self.facts.model,
            scheme=self.facts.scheme,
            over=self._over,
        )
        report = self._client.publish(held, readback=self._args.readback)
        if self._over is None:
            self._over = held
        else:
            held.close()
        found = {name: report[f"{name}_s"] for name in ("stage", "drain", "load", "readback")}
        return {
            "bytes": report["bytes"],
            **found,
            "transfer": report["transfer_s"] - report["validate_s"],
            "check": report["validate_s"],
            "pause": found["load"] + found["readback"],
            "all": report["total_s"] - found["drain"],
        }

    def sample(self, length: int) -> list[int]:
        """Samples responses of so many tokens; returns the step that each names."""
        drawn = self._sampler.generate(self._draws, messages.Sampling(max_tokens=length, temperature=1.0))
        return [span.version.step for one in drawn for span in one.spans]

    def sizes(self) -> list[int]:
        """Returns bytes of the engine's process, its open files, and bytes in use on the first GPU (0: none)."""
        return [
            rss_bytes(self.facts.pid),
            len(os.listdir(f"/proc/{self.facts.pid}/fd")),
            gpu_bytes() or 0,
        ]

    def close(self) -> None:
        """Ends the engine."""
        for client in (self._client, self._sampler):
            client.close()
        self.bridge.close()


def in_a_row(trainer: Trainer, args: argparse.Namespace) -> dict[str, Any]:
    """Publishes versions while the ones before them are decoded."""
    first = trainer.publish(0)
    print(f"# base: {json.dumps(first)}", file=sys.stderr, flush=True)
    trainer.sample(args.response_len)  # warms up
    rows, steps, sizes = [], list[tuple[int, int]](), []
    for step in range(1, args.publishes + 1):
        before: list[int] = []
        decoding = threading.Thread(target=lambda into=before: into.extend(trainer.sample(args.response_len)))
        decoding.start()
        time.sleep(0.05)  # its prompts are there
        rows.append(trainer.publish(step))
        decoding.join()
        steps += [(step - 1, found) for found in before]
        start = time.perf_counter()
        steps += [(step, found) for found in trainer.sample(1)]
        rows[-1]["next"] = time.perf_counter() - start
        sizes.append(trainer.sizes())
        print(f"# {step}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    early = sizes[min(max(1, args.publishes // 10), len(sizes) - 1)]
    spread = {name: [round(row[name], 5) for row in rows] for name in PHASES}
    return {
        "bytes": rows[-1]["bytes"],
        "median": {name: statistics.median(row) for name, row in spread.items()},
        "most": {name: max(row) for name, row in spread.items()},
        "each": spread,
        "completions": len(steps),
        "wrong_versions": sum(wanted != found for wanted, found in steps),
        "growth_bytes_files_gpu": [late - soon for late, soon in zip(sizes[-1], early, strict=True)],
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish_adapters", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=tuple(shapes.SIZES), default="8b")
    parser.add_argument("--layers", type=int, default=0, help="0: the model's own")
    parser.add_argument("--scheme", default="w4a16", help="of the base")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--publishes", type=int, default=50)
    parser.add_argument("--sequences", type=int, default=64, help="responses that are decoded meanwhile")
    parser.add_argument("--response-len", type=int, default=128)
    parser.add_argument("--readback", default="sampled", choices=("off", "sampled", "full"))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--kv-cache-gb", type=float, default=19.0, help="as a step of 128 responses has at 8B")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--profile", default="", help="folder for profiles of the engine's loads")
    parser.add_argument("--engine-log", default="", help="file for what the engine says")
    parser.add_argument("--out", default="", help="a file that the line is appended to")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    start = time.perf_counter()
    trainer = Trainer(args)
    line = {
        "command": " ".join(["python -m benchmarks.publish_adapters", *(sys.argv[1:] if argv is None else argv)]),
        "engine": f"{trainer.facts.engine} {trainer.facts.engine_version} {trainer.facts.isa}",
        "start_s": round(time.perf_counter() - start, 1),
    }
    try:
        line |= in_a_row(trainer, args)
    finally:
        trainer.close()
    written(line, args.out)
    return int(line["wrong_versions"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
