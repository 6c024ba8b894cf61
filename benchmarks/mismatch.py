# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Mismatch between learner and live vLLM, scheme by scheme, beside two baselines on the same prompts and seeds.

    python benchmarks/mismatch.py --model assets/tiny-qwen3 --out benchmarks/results/mismatch_cpu.json

Per scheme: the aligned pair (the learner under the engine's scheme and arithmetic), and the pair that quantized
rollouts usually are (a bf16 learner with plain arithmetic, on the same samples). The row `bf16` is the third pair: a
bf16 learner on a bf16 engine. Only positions whose entropy exceeds 0.5 nat count. Estimators: qarl_jax/parity.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path

from qarl_jax import parity
from qarl_jax.types import UserError

SCHEMES = ("bf16", "w8a8", "w4a8", "w4a16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--engine", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=8)
    parser.add_argument("--response-len", type=int, default=40)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/mismatch_cpu.json"))
    args = parser.parse_args()
    options = parity.Options(
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
            result = parity.climb(args.model, scheme, args.engine, options)
            record["results"].append(result)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            for pair in ("aligned", "unaligned"):
                if pair in result:
                    s = result[pair]
                    print(
                        f"| {scheme} | {pair} | {s['tokens']} | {s['k1']:+.1e} | {s['k3']:.1e} | {s['mean_abs']:.1e} |"
                        f" {s['max_abs']:.1e} | {s['within_1e-4']:.1%} |",
                        flush=True,
                    )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
