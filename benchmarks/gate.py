# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests that every sampled token has equal log-probs in learner and engine, to the bit.

    python -m benchmarks.gate --model DIR [--schemes w8a8 fp8 w4a16 bf16] [--updates 2] [--conditions all] [--json FILE]

For every scheme: the learner's tensors are published into a live vLLM, which samples; the learner scores every token;
the two float32 log-probs must be equal to the bit. Then the masters are moved a little, as an optimizer would, and it
starts again with the next version. Two negative controls must find differences: one weight of the learner's is changed
by a single step of its grid; and, with `--vllm-arithmetic`, the engine computes with vLLM's own kernels, op by op, so
that blocks can be compared. Exit code 0: every token equal and every control found; 1: not.

What requests meet (`--conditions`); the engine counts what it did to them, and a condition that did not come about
fails, too:

    plain       prompts and responses of one length each
    long        prompts of every length up to `--long-prompt`
    samples     eight samples of each prompt, prompts that begin alike: hits in the prefix cache
    stop        responses that end at a stop token, at temperature 1.4, so that the batch shrinks unevenly
    cool        temperature 0.6
    chunks      an engine that computes few tokens in a step: prompts are cut into chunks, and join those in decoding
    preempted   an engine whose KV cache is too small: sequences lose their place in it and are computed again

A sequence that differs is prefilled once more (`layers.first_difference`): the first block whose outputs differ on the
engine's own inputs is named; where no block does, decoding differs from prefilling.

On a CPU it runs, too, against vLLM's CPU build (tests/parity/test_gate_vllm.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax import models
from qarl_jax.models.params import part_of, united
from qarl_jax.quant import QTensor, resolve
from qarl_jax.quant.schemes import nvfp4_words
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.vllm import one_base
from qarl_jax.rollout.vllm.engine import Config, VllmEngine, leave_memory_to_vllm
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import Prompt, entry_point
from qarl_jax.verify import ladder, layers

INVARIANT = "batch_invariant"
SAMPLES = 8  # of a prompt, in `samples`
_BLOCK = 128  # tokens to a page of the KV cache, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """A condition under which the engine samples, such as a full KV cache.

    Attributes:
      tight: in the engine with little room.
      met: counters that must have grown: the engine's (`StatusReply.met`), or "stopped", responses with a stop token.
    """

    tight: bool = False
    met: tuple[str, ...] = ()


CONDITIONS = {
    "plain": Condition(),
    "long": Condition(),
    "samples": Condition(met=("cached_tokens",)),
    "stop": Condition(met=("stopped",)),
    "cool": Condition(),
    "chunks": Condition(tight=True, met=("chunks", "joined")),
    "preempted": Condition(tight=True, met=("preempted", "joined")),
}


def prompts_of(name: str, vocab: int, args: argparse.Namespace, seed: int) -> list[Prompt]:
    """Makes the prompts of a condition."""
    if name not in ("long", "samples", "chunks"):  # a sequence that loses its place must have grown by a page
        length = args.long_prompt * 3 // 4 if name == "preempted" else args.prompt_len
        return ladder.random_prompts(vocab, args.sequences, length, seed)
    if name == "samples":  # three quarters of each prompt are those of the first
        prompts = ladder.random_prompts(vocab, max(1, args.sequences // SAMPLES), args.long_prompt, seed)
        shared = args.long_prompt * 3 // 4
        first = prompts[0].tokens[:shared]
        return [dataclasses.replace(prompt, tokens=first + prompt.tokens[shared:]) for prompt in prompts]
    prompts = ladder.random_prompts(vocab, args.sequences, args.long_prompt, seed)
    lengths = np.random.default_rng(seed).permutation(np.linspace(1, args.long_prompt, len(prompts)).astype(int))
    return [dataclasses.replace(p, tokens=p.tokens[:n]) for p, n in zip(prompts, lengths, strict=True)]


def sampling_of(name: str, vocab: int, args: argparse.Namespace) -> SamplingConfig:
    """Returns a condition's sampling settings. Every 32nd token of the vocabulary may be a stop token, of 1,024 at most
    (the bridge's limit)."""
    stop = tuple(range(7, vocab, max(32, -(-vocab // 1024)))) if name == "stop" else ()
    temperature = {"stop": 1.4, "cool": 0.6}.get(name, args.temperature)
    return SamplingConfig(max_response_len=args.response_len, temperature=temperature, stop_token_ids=stop)


def engine_of(tight: bool, config: models.ModelConfig, arithmetic: str, args: argparse.Namespace) -> Config:
    """Returns the engine's settings; tight: a quarter of the sequences at once, and a KV cache for 3/5 of these."""
    length = max(args.prompt_len, args.long_prompt) + args.response_len
    room: dict[str, Any] = {"kv_cache_gb": args.kv_cache_gb, "max_num_seqs": args.sequences}
    if tight:
        together = max(4, args.sequences // 4)
        pages = -(-length // _BLOCK)
        heads = config.num_kv_heads // args.tensor_parallel
        kv = 4 * _BLOCK * config.num_layers * heads * config.head_dim  # bytes of a shard's page: keys and values
        room = {
            "kv_cache_gb": kv * (together * pages * 3 // 5 + 1) / 2**30,
            "max_num_seqs": together,
            "max_num_batched_tokens": max(together, args.long_prompt // 4),
        }
    return Config(
        **room,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_model_len=length,
        readback=args.readback,
        arithmetic=arithmetic,  # type: ignore[arg-type]
        eager=arithmetic != INVARIANT,
        record_routing=args.replay,
        tensor_parallel_size=args.tensor_parallel,
        visible_gpus=args.visible_gpus,
        threads=args.threads,
        log_file=args.engine_log,
    )


def unequal(
    weights: PolicyWeights, sampled: ladder.Sampled, temperature: float = 1.0, *, replay: bool = False
) -> np.ndarray:
    """Returns a mask [N, T] bool of response tokens whose log-prob differs between learner and engine."""
    logprobs, _ = ladder.score(weights, sampled, temperature=temperature, replay=replay)
    return sampled.response & (logprobs != sampled.logprobs)


def moved(weights: PolicyWeights, key: jax.Array, by: float = 3e-5) -> PolicyWeights:
    """Returns the policy after a stand-in for an update: normal noise is added to every master that is not fixed, and
    the masters are quantized."""
    stays = lambda path: path in weights.fixed or models.is_fixed(path)  # noqa: E731
    fixed = part_of(weights.params, stays)
    leaves, structure = jax.tree.flatten(part_of(weights.params, lambda path: not stays(path)))
    keys = jax.random.split(key, len(leaves))
    leaves = [leaf + by * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    params = united(fixed, jax.tree.unflatten(structure, leaves))
    qweights = weights.qweights if weights.fixed else models.quantize_params(weights.graphdef, params)
    return dataclasses.replace(weights, params=params, qweights=qweights)


def one_weight_changed(weights: PolicyWeights) -> PolicyWeights:
    """Returns the policy with one code changed, or, if nothing is quantized, one master by one bfloat16 step."""

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
        at = (0,) * q.codes.ndim
        if isinstance(q.scheme, nvfp4_words.Config):  # its first output, of those that the engine fuses
            at = (0, 0, q.scheme.first, 0)
        code = q.codes[at]
        if q.codes.dtype == jnp.float8_e4m3fn:
            code = (code.astype(jnp.float32) * 1.125 + 0.5).astype(code.dtype)
        else:
            code = code ^ jnp.ones((), code.dtype)
        return dataclasses.replace(q, arrays=q.arrays | {"codes": q.codes.at[at].set(code)})

    return dataclasses.replace(weights, qweights=jax.tree.map(change, weights.qweights, is_leaf=is_weight))


def observed(
    engine: VllmEngine, weights: PolicyWeights, name: str, args: argparse.Namespace, seed: int
) -> tuple[ladder.Sampled, float, dict[str, Any]]:
    """Samples under one condition; returns the samples, their temperature, and the condition's row of the table."""
    vocab = models.config_of(weights.graphdef).vocab_size
    prompts, sampling = prompts_of(name, vocab, args, seed), sampling_of(name, vocab, args)
    before, start = engine.status().met, time.time()
    groups = engine.generate(prompts, num_samples=SAMPLES if name == "samples" else 1, sampling=sampling, key=seed)
    row: dict[str, Any] = {"condition": name, "seed": seed, "sampling_s": time.time() - start}
    completions = [one for group in groups for one in group]
    row["met"] = {key: count - before.get(key, 0) for key, count in engine.status().met.items()}
    row["met"]["stopped"] = sum(one.finish_reason == "stop" for one in completions)
    sampled = ladder.Sampled.of(completions)
    wrong = unequal(weights, sampled, sampling.temperature, replay=args.replay)
    row |= {"tokens": int(sampled.response.sum()), "unequal": int(wrong.sum())}
    row |= {"exact": 1 - row["unequal"] / row["tokens"], "tok_per_s": round(row["tokens"] / row["sampling_s"])}
    if wrong.any():
        number = int(np.argmax(wrong.any(axis=1)))
        last = int(np.argmax(wrong[number]))
        before = [int(t) for t in sampled.tokens[number, :last]]  # a token's log-prob comes from those before it
        where = layers.first_difference(engine.probe, weights, before)
        row["where"] = f"response {number}, position {last}: {where or 'none in a prefill: decoding differs from it'}"
    return sampled, sampling.temperature, row


def run(path: str, scheme: str, args: argparse.Namespace, arithmetic: str, tight: bool) -> Iterator[dict[str, Any]]:
    """Runs one engine under one scheme; yields the rows of its conditions, and one of the control."""
    begun = time.time()
    rules = models.rules_with_tables(scheme, args.tables)
    weights = ladder.load(path, rules, resolve("auto").profile, shards=args.tensor_parallel, lora_rank=args.lora_rank)
    config = engine_of(tight, models.config_of(weights.graphdef), arithmetic, args)
    names = [name for name in args.conditions if CONDITIONS[name].tight == tight]
    same = {"scheme": scheme, "arithmetic": arithmetic, "engine": "tight" if tight else "roomy"}
    same |= {"shards": args.tensor_parallel} if args.tensor_parallel > 1 else {}
    engine = VllmEngine(config, run_id="gate")
    held = engine.hold_once(weights.graphdef, make_mesh()) if args.lora_rank and arithmetic == INVARIANT else None
    if held is not None:
        weights = one_base.moved_into(held, weights)
        same["base_held_once_gib"] = held.nbytes / 2**30
    try:
        for version in range(args.updates + 1):
            if version:
                weights = moved(weights, jax.random.key(version))
            engine.publish(weights, version)
            for name in names if arithmetic == INVARIANT else ["plain"]:
                sampled, temperature, row = observed(engine, weights, name, args, args.seed + version)
                needed = [m for m in CONDITIONS[name].met if not (m == "cached_tokens" and args.replay)]
                missing = [m for m in needed if not row["met"][m]]
                row["ok"] = (row["unequal"] == 0) == (arithmetic == INVARIANT) and not missing
                yield same | row | ({"did_not_come_about": missing} if missing else {})
        found = int(unequal(one_weight_changed(weights), sampled, temperature, replay=args.replay).sum())
        execution = engine.facts.execution if engine.facts else ""
        total = round(time.time() - begun, 1)
        yield same | {"control": found, "ok": found > 0, "execution": execution, "total_s": total}
    finally:
        engine.close()


@entry_point
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--schemes", nargs="+", default=["w8a8", "fp8", "w4a16", "bf16"])
    parser.add_argument("--tables", default="", help="scheme of embedding and head; empty: bf16")
    parser.add_argument("--conditions", nargs="+", default=["plain"], choices=[*CONDITIONS, "all"])
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--long-prompt", type=int, default=512, help="longest prompt of the conditions that have such")
    parser.add_argument("--response-len", type=int, default=512)
    parser.add_argument("--updates", type=int, default=1, help="versions published after the first")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--replay", action="store_true", help="the learner sends tokens to the experts of the engine")
    parser.add_argument("--lora-rank", type=int, default=0, help="of random adapters, which alone move; 0: none")
    parser.add_argument("--readback", default="off", choices=("off", "sampled", "full"), help="as in rollout.engine")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="shards of the engine, on as many GPUs")
    parser.add_argument("--visible-gpus", default="", help="as in rollout.engine; empty: those that the learner sees")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-cache-gb", type=float, default=14.0)
    parser.add_argument("--threads", type=int, default=0, help="of an engine on a CPU; 0: all")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.5)
    parser.add_argument("--vllm-arithmetic", action="store_true", help="the second negative control, one more engine")
    parser.add_argument("--engine-log", default="", help="file for what the engine says")
    parser.add_argument("--json", help="write the rows there")
    args = parser.parse_args(argv)
    if "all" in args.conditions:
        args.conditions = list(CONDITIONS)
    leave_memory_to_vllm()
    rows = []
    engines = sorted({CONDITIONS[name].tight for name in args.conditions})
    runs = [(scheme, INVARIANT, tight) for scheme in args.schemes for tight in engines]
    if args.vllm_arithmetic:
        runs.append((args.schemes[-1], "vllm", False))
    for scheme, arithmetic, tight in runs:
        for row in run(args.model, scheme, args, arithmetic, tight):
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
