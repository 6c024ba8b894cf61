# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Does a single sampled token have another log-prob in the learner than in the engine?

    python -m benchmarks.gate --model DIR [--schemes w8a8 fp8 w4a16 bf16] [--updates 2] [--json FILE]

For every scheme: the learner's tensors are published into a live vLLM, which samples; the learner scores every token;
the two float32 log-probs must be equal to the bit. Then the masters are moved a little, as an optimizer would, and it
starts again with the next version. Two negative controls must find differences: one weight of the learner's is changed
by a single step of its grid; and, with `--vllm-kernels`, the engine computes with vLLM's own kernels instead of the
contract's. Exit code 0: every token equal and every control found; 1: not.

A sequence that differs is prefilled once more, block by block, and the first block whose outputs differ on the engine's
own inputs is named, with the first token it happens at; where no block does, decoding differs from prefilling.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax import models
from qarl_jax.quant import QTensor
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, leave_memory_to_vllm
from qarl_jax.verify import ladder, layers


def unequal(weights: PolicyWeights, sampled: ladder.Sampled, temperature: float = 1.0) -> np.ndarray:
    """[N, T] bool: response tokens whose log-prob is another in the learner."""
    logprobs, _ = ladder.score(weights, sampled, temperature=temperature)
    return sampled.response & (logprobs != sampled.logprobs)


def moved(weights: PolicyWeights, key: jax.Array, by: float = 3e-5) -> PolicyWeights:
    """The policy after something like an update: normal noise on every master, and what it quantizes to."""
    leaves, structure = jax.tree.flatten(weights.params)
    keys = jax.random.split(key, len(leaves))
    leaves = [leaf + by * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(structure, leaves)
    return dataclasses.replace(weights, params=params, qweights=models.quantize_params(weights.graphdef, params))


def one_weight_changed(weights: PolicyWeights) -> PolicyWeights:
    """The same policy but for one code, or, where nothing is quantized, one bfloat16 step of one master."""

    def is_weight(x: Any) -> bool:
        return isinstance(x, QTensor)

    if not jax.tree.leaves(weights.qweights):
        leaves, structure = jax.tree.flatten(weights.params)
        number = max(range(len(leaves)), key=lambda i: leaves[i].ndim)
        leaf = leaves[number]
        at = (0,) * leaf.ndim
        leaves[number] = leaf.at[at].set(leaf[at] * 1.0078125 + 2.0**-9)
        return dataclasses.replace(weights, params=jax.tree.unflatten(structure, leaves))
    done = False

    def change(q: QTensor) -> QTensor:
        nonlocal done
        if done:
            return q
        done = True
        at = (0,) * q.qvalue.ndim
        code = q.qvalue[at]
        if q.qvalue.dtype == jnp.float8_e4m3fn:
            code = (code.astype(jnp.float32) * 1.125 + 0.5).astype(code.dtype)
        else:
            code = code ^ jnp.ones((), code.dtype)
        return dataclasses.replace(q, qvalue=q.qvalue.at[at].set(code))

    return dataclasses.replace(weights, qweights=jax.tree.map(change, weights.qweights, is_leaf=is_weight))


def first_block(engine: VllmEngine, weights: PolicyWeights, sequence: list[int]) -> str:
    """Which block makes the first difference in a prefill of `sequence`, and at which token."""
    model = models.merge(weights.graphdef, weights.params, weights.qweights)
    for number in range(model.config.num_layers):
        (record,) = engine.probe(sequence, [f"model.layers.{number}"])
        mine, theirs = layers.block_outputs(model, record)
        tokens = np.flatnonzero((mine != theirs).any(axis=(0, 2)))
        if len(tokens):
            return f"block {number}, from token {tokens[0]} on ({len(tokens)} of {len(sequence)} tokens)"
    return "no block differs in a prefill: decoding differs from it"


def run(path: str, scheme: str, args: argparse.Namespace, kernels: str) -> dict[str, Any]:
    """One scheme. Returns its row of the table."""
    begun = time.time()
    weights = ladder.load(path, scheme, "cuda")
    config = models.config_of(weights.graphdef)
    engine_config = Config(
        kv_cache_gb=args.kv_cache_gb,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_num_seqs=args.sequences,
        max_model_len=args.prompt_len + args.response_len,
        readback="off",
        kernels=kernels,  # type: ignore[arg-type]
    )
    row: dict[str, Any] = {"scheme": scheme, "kernels": kernels, "tokens": 0, "unequal": 0, "sampling_s": 0.0}
    engine = VllmEngine(engine_config, run_id="gate")
    try:
        for version in range(args.updates + 1):
            if version:
                weights = moved(weights, jax.random.key(version))
            engine.publish(weights, version)
            prompts = ladder.random_prompts(config.vocab_size, args.sequences, args.prompt_len, args.seed + version)
            sampling = SamplingConfig(max_response_len=args.response_len, temperature=args.temperature)
            start = time.time()
            groups = engine.generate(prompts, num_samples=1, sampling=sampling, key=args.seed + version)
            row["sampling_s"] += time.time() - start
            sampled = ladder.Sampled.of([one for group in groups for one in group])
            wrong = unequal(weights, sampled, args.temperature)
            row["tokens"] += int(sampled.response.sum())
            row["unequal"] += int(wrong.sum())
            if wrong.any() and "where" not in row and kernels == "contract":
                number = int(np.argmax(wrong.any(axis=1)))
                last = int(np.argmax(wrong[number]))
                row["where"] = f"prompt {number} of seed {args.seed + version}, position {last}: " + first_block(
                    engine, weights, [int(t) for t in sampled.tokens[number, : last + 1]]
                )
        row["control"] = int(unequal(one_weight_changed(weights), sampled, args.temperature).sum())
        row["execution"] = engine.facts.execution if engine.facts else ""
    finally:
        engine.close()
    row["ok"] = (row["unequal"] == 0) == (kernels == "contract") and row["control"] > 0
    return row | {"total_s": round(time.time() - begun, 1), "tok_per_s": round(row["tokens"] / row["sampling_s"])}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--schemes", nargs="+", default=["w8a8", "fp8", "w4a16", "bf16"])
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--response-len", type=int, default=512)
    parser.add_argument("--updates", type=int, default=1, help="versions published after the first")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-cache-gb", type=float, default=14.0)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--vllm-kernels", action="store_true", help="the second negative control, one more engine")
    parser.add_argument("--json", help="write the rows there")
    args = parser.parse_args()
    leave_memory_to_vllm()
    rows = []
    runs = [(scheme, "contract") for scheme in args.schemes]
    if args.vllm_kernels:
        runs.append((args.schemes[-1], "vllm"))
    for scheme, kernels in runs:
        row = run(args.model, scheme, args, kernels)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"command": " ".join(sys.argv), "device": jax.devices()[0].device_kind, "rows": rows}, file, indent=1
            )
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
