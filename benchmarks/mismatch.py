# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Mismatch between learner and live vLLM, scheme by scheme, beside two baselines on the same prompts and seeds.

    python benchmarks/mismatch.py --model assets/tiny-qwen3 --out benchmarks/results/mismatch_cpu.json

Per scheme: the aligned pair (the learner under the engine's scheme and arithmetic), and the pair that quantized
rollouts usually are (a bf16 learner with plain arithmetic, on the same samples). The row `bf16` is the third pair: a
bf16 learner on a bf16 engine. Only positions whose entropy exceeds 0.5 nat count. Estimators: qarl_jax/parity.py.

    python benchmarks/mismatch.py --mixture /tmp/moe --out benchmarks/results/mismatch_moe_cpu.json

makes a random Qwen3-MoE in that folder (three layers, eight experts, two per token; matrices drawn three times as large
as usual, so that its distributions are not flat) and compares on it. Its aligned pair sends tokens to the experts the
engine chose (`rollout.router_replay`); "own routing" is the same learner with its own choice.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path

import jax
from flax import nnx

from qarl_jax import models
from qarl_jax.types import UserError
from qarl_jax.verify import ladder

SCHEMES = ("bf16", "w8a8", "w4a8", "w4a16")


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def make_mixture(folder: Path) -> None:
    """A random mixture of experts as a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    graphdef, params, _ = models.split(models.random_model(models.read_config(folder), 0))
    params = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params)
    models.save_hf(models.merge(graphdef, params, nnx.State({})), folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="Hugging Face folder")
    source.add_argument("--mixture", type=Path, help="folder to make a random mixture of experts in")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--engine", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=8)
    parser.add_argument("--response-len", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mismatch_cpu.json"))
    args = parser.parse_args()
    if args.mixture:
        make_mixture(args.mixture)
    options = ladder.Options(
        prompts=args.prompts,
        prompt_len=args.prompt_len,
        response_len=args.response_len,
        threads=args.threads,
        bf16_pair=False,
    )
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "results": [],
    }
    print("| scheme | pair | tokens | k1 | k3 | mean | max | within 1e-4 |\n|---|---|---|---|---|---|---|---|")
    try:
        for scheme in args.schemes:
            result = ladder.climb(str(args.model or args.mixture), scheme, args.engine, options)
            record["results"].append(result)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            for pair in ("aligned", "own_routing", "unaligned"):
                if pair in result:
                    s, name = result[pair], pair.replace("_", " ")
                    print(
                        f"| {scheme} | {name} | {s['tokens']} | {s['k1']:+.1e} | {s['k3']:.1e} | {s['mean_abs']:.1e} |"
                        f" {s['max_abs']:.1e} | {s['within_1e-4']:.1%} |",
                        flush=True,
                    )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
