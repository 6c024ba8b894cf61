# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.parity --model DIR --scheme w8a8 --engine cpu [--json]`: climbs the ladder of promises.

The ladder is `verify/ladder.py`. With `--at RUN/first_mismatch.jsonl`: which block makes that token's log-prob differ
(`verify/first_mismatch.py`). With `--modes`: whether an engine computes the same op by op and in CUDA graphs
(`verify/modes.py`).
Exit code 0: all are kept, 1: one is not, 2: it could not be tried."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import quant
from qarl_jax.run import shipped
from qarl_jax.runtime import progress
from qarl_jax.types import UserError, command, entry_point
from qarl_jax.verify import first_mismatch, ladder, modes


@entry_point
@progress.shown()
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns 1 where a promise is broken, otherwise 0."""
    defaults = ladder.Options()
    parser = argparse.ArgumentParser(
        prog=command("parity"),
        description="Climbs the ladder of promises with a learner and a live vLLM: grids, layers, tokens.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    must: dict[str, Any] = {"required": True, "default": argparse.SUPPRESS}  # no "(default: None)" in the help
    parser.add_argument("--model", **must, help="Hugging Face folder")
    parser.add_argument("--scheme", **must, help=f"{', '.join(quant.scheme_names())}; with groups of 64: w4a16:g64")
    parser.add_argument("--engine", **must, choices=("cpu", "cuda"), help="whose arithmetic vLLM runs here")
    unset = argparse.SUPPRESS
    parser.add_argument("--at", metavar="FILE", default=unset, help="a run's first_mismatch.jsonl: which block differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--prompts", type=int, default=defaults.prompts, help="random prompts, a sample each")
    parser.add_argument("--prompt-len", type=int, default=defaults.prompt_len, help="tokens of a prompt")
    parser.add_argument("--response-len", type=int, default=defaults.response_len, help="tokens of a sample")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of prompts and samples")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU engine; 0: all")
    parser.add_argument(
        "--attention",
        choices=("engine", "auto", "xla", "cudnn", "flash3"),
        default=defaults.attention,
        help="the learner's; engine: what mirrors the engine's own",
    )
    arithmetics = ("batch_invariant", "vllm")
    parser.add_argument(
        "--arithmetic", choices=arithmetics, default=defaults.arithmetic, help="as rollout.engine.arithmetic"
    )
    parser.add_argument("--eager", action="store_true", help="run the engine's operations one by one")
    parser.add_argument("--modes", action="store_true", help="compare an eager engine with one in CUDA graphs instead")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="shards of the engine (1 or 2)")
    parser.add_argument("--lora-rank", type=int, default=0, help="of random adapters of all linear layers; 0: none")
    parser.add_argument("--kv-cache-gb", type=float, default=defaults.kv_cache_gb, help="of the engine")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=defaults.gpu_memory_utilization,
        help="share of the device's memory the engine may use",
    )
    args = parser.parse_args(argv, argparse.Namespace(at=""))
    args.model = shipped.path(args.model)
    options = ladder.Options(
        **{f.name: getattr(args, f.name) for f in dataclasses.fields(ladder.Options) if f.name != "unaligned"}
    )

    def show(rung: ladder.Rung) -> None:
        if not args.json:
            verdict = {True: "ok", False: "BROKEN", None: "-"}[rung.ok]
            print(f"{rung.name:18} {verdict:7} {rung.detail}", flush=True)

    try:
        if min(options.prompts, options.prompt_len, options.response_len) < 1:
            raise UserError("--prompts, --prompt-len and --response-len must be at least 1")
        quant.parse_scheme(args.scheme)
        if args.at:
            result = first_mismatch.at(args.model, args.scheme, args.engine, options, args.at)
        elif args.modes:
            result = modes.compare_modes(args.model, args.scheme, args.engine, options, show)
        else:
            result = ladder.climb(args.model, args.scheme, args.engine, options, show)
    except BridgeError as error:
        raise UserError(str(error)) from None
    if args.json:
        print(json.dumps(result))
    elif args.at:
        print(f"recorded: {json.dumps(result['found'])}")
        print(f"first difference: {result['where'] or 'no block differs in a prefill, so decoding differs from it'}")
    else:
        for key, title in (
            ("own_routing", "the same samples, experts chosen by the learner itself (above: by the engine)"),
            ("unaligned", "the same samples, bf16 learner with plain arithmetic"),
        ):
            if key in result:
                print(f"\n{title}\n{'':26} {ladder.line(result[key])}")
        broken = result["first_broken"]
        unpromised = any(rung["ok"] is None and rung["name"] == "alignment" for rung in result["rungs"])
        kept = "the promises of a pair that is not aligned are kept" if unpromised else "all promises kept"
        print(f"\nfirst broken rung: {broken}" if broken else f"\n{kept}")
    return 0 if result["first_broken"] is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
