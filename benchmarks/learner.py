# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Learner throughput on one GPU: one policy-gradient step at Qwen3 shapes with random weights, scheme by scheme.

    python benchmarks/learner.py --model 1.7b --schemes bf16 w8a8 fp8 w4a16 [--master bfloat16] [--rows 4] [--seq 4096]

A step: forward, per-token log-probs, clipped loss (sequence-mean-token-mean), backward, clip by
global norm, AdamW; full recomputation of layers, log-probs in chunks of 2,048 tokens. With --master bfloat16 parameters
and both Adam moments are bfloat16 and there is no fp32 master (the setting in which transformers + torch.compile was
measured); with float32 they are what we train with. Quantization of all weights is part of the step. Model FLOPs are
6 x parameters x tokens + 6 x layers x heads x head_dim x T^2 per row; recomputation is not counted.

Writes one JSON line per scheme to stdout, and all of them to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax import models, optimizer, sharding
from qarl_jax.learner import Learner, Options
from qarl_jax.loss import get_loss
from qarl_jax.types import TrainBatch

SIZES = {
    "tiny": {"hidden": 128, "inter": 256, "layers": 2, "heads": 4, "kv": 2, "head_dim": 32, "vocab": 512, "tied": True},
    "0.6b": {"hidden": 1024, "inter": 3072, "layers": 28, "heads": 16, "kv": 8, "vocab": 151936, "tied": True},
    "1.7b": {"hidden": 2048, "inter": 6144, "layers": 28, "heads": 16, "kv": 8, "vocab": 151936, "tied": True},
    "8b": {"hidden": 4096, "inter": 12288, "layers": 36, "heads": 32, "kv": 8, "vocab": 151936, "tied": False},
}


def model_config(size: dict[str, Any], scheme: str, master: str, engine: str) -> models.ModelConfig:
    """The ModelConfig of a Qwen3 of these sizes."""
    values = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": size["hidden"],
        "intermediate_size": size["inter"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
        "head_dim": size.get("head_dim", 128),
        "vocab_size": size["vocab"],
        "tie_word_embeddings": size["tied"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
    }
    from qarl_jax.quant import resolve

    return models.read_config(
        values,
        compute_dtype="bfloat16",
        param_dtype=master,
        quant=models.parse_rules(scheme, 128),
        remat="full",
        numerics=resolve(engine),
    )


def measure(args: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """Seconds, tokens/s, model TFLOP/s and peak memory of a step under one scheme."""
    size = SIZES[args.model]
    config = model_config(size, scheme, args.master, args.engine)
    graphdef, abstract, _ = models.split(models.abstract_model(config))
    mesh = sharding.make_mesh()

    @jax.jit
    def random_params() -> Any:
        leaves, tree = jax.tree.flatten(abstract)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        drawn = [
            jax.random.normal(k, x.shape, x.dtype) * jnp.asarray(0.02, x.dtype) if x.ndim > 2 or max(x.shape) > 50000
            else jnp.ones(x.shape, x.dtype)
            for k, x in zip(keys, leaves, strict=True)
        ]  # fmt: skip
        return jax.tree.unflatten(tree, drawn)

    learner = Learner(
        graphdef,
        loss_fn=get_loss("grpo", aggregation="seq-mean-token-mean"),
        optimizer=optimizer.make_optimizer(
            optimizer.AdamW(lr=1e-5, moment_dtype="bfloat16" if args.master == "bfloat16" else "float32")
        ),
        mesh=mesh,
        options=Options(max_segments=1, logprob_chunk=2048),
    )
    state = learner.init(random_params())
    rng = np.random.default_rng(0)
    shape = (args.rows, args.seq)
    mask = np.ones(shape, bool)
    mask[:, 0] = False
    advantages = rng.standard_normal(args.rows).astype(np.float32)
    old = (-np.log(size["vocab"]) + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    batch = learner.put(
        TrainBatch(
            tokens=rng.integers(2, size["vocab"], shape, dtype=np.int32),
            positions=np.broadcast_to(np.arange(args.seq, dtype=np.int32), shape).copy(),
            segment_ids=np.ones(shape, np.int32),
            loss_mask=mask,
            rollout_logprobs=old,
            advantages=np.where(mask, advantages[:, None], 0).astype(np.float32),
        )
    )
    old_logprobs = jax.device_put(old, learner.batch_sharding)

    def step(state: Any) -> Any:
        qweights = learner.quantize(state.params)
        grads, _ = learner.accumulate_grads(
            learner.zero_grads(state), state.params, qweights, batch, old_logprobs, mask.sum(), args.rows
        )
        return learner.apply_update(state, grads)[0]

    started = time.perf_counter()
    state = jax.block_until_ready(step(state))
    compile_s = time.perf_counter() - started
    state = jax.block_until_ready(step(state))
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        state = jax.block_until_ready(step(state))
        times.append(time.perf_counter() - started)
    if args.profile:
        with jax.profiler.trace(args.profile):
            state = jax.block_until_ready(step(state))
    seconds = float(np.median(times))
    tokens = args.rows * args.seq
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(abstract))
    flops = 6 * count * tokens
    flops += args.rows * 6 * size["layers"] * size["heads"] * size.get("head_dim", 128) * args.seq**2
    memory = jax.devices()[0].memory_stats() or {}
    del state, learner, batch
    return {
        "model": args.model,
        "scheme": scheme,
        "master": args.master,
        "numerics": args.engine,
        "rows": args.rows,
        "seq": args.seq,
        "step_s": seconds,
        "tokens_per_s": tokens / seconds,
        "model_tflops": flops / seconds / 1e12,
        "peak_gb": memory.get("peak_bytes_in_use", 0) / 1e9,
        "first_step_s": compile_s,
        "parameters": count,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--schemes", nargs="+", default=["bf16", "w8a8", "fp8", "w4a16"])
    parser.add_argument("--master", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--engine", default="plain", help="numerics profile: plain, cpu, cuda")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", default="", help="folder for a profile of one step")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    results = []
    for scheme in args.schemes:
        results.append(measure(args, scheme))
        print(json.dumps(results[-1]), flush=True)
        jax.clear_caches()
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
