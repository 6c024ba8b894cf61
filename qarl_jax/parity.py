# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.parity --model DIR --scheme w8a8 --engine cpu [--json]`: climbs the ladder of promises.

The ladder is a list of checks of learner against engine: grids, layers, tokens (`verify/ladder.py`).
`--at RUN/first_mismatch.jsonl` names the model's block in which the recorded token starts to differ
(`verify/first_mismatch.py`). `--modes` compares an eager engine with one in CUDA graphs (`verify/modes.py`).
Exit code 0: all promises are kept, 1: one is broken, 2: the comparison could not run."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Sequence
from typing import Any

from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import quant
from qarl_jax.run import shipped
from qarl_jax.runtime import progress
from qarl_jax.types import UserError, command, entry_point
from qarl_jax.verify import first_mismatch, ladder, modes

OPTIONS = {
    "prompts": "random prompts, a sample each",
    "prompt_len": "tokens of a prompt",
    "response_len": "tokens of a sample",
    "seed": "of prompts and samples",
    "threads": "of the CPU engine; 0: all",
    "attention": "the learner's; engine: what mirrors the engine's own",
    "arithmetic": "as rollout.engine.arithmetic",
    "eager": "run the engine's operations one by one",
    "tensor_parallel_size": "shards of the engine (1, 2 or 4)",
    "lora_rank": "of random adapters of all linear layers; 0: none",
    "kv_cache_gb": "of the engine",
    "gpu_memory_utilization": "share of the device's memory the engine may use",
}
"""Options of the ladder on the command line, with their help."""


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
    parser.add_argument("--modes", action="store_true", help="compare an eager engine with one in CUDA graphs instead")
    kinds = typing.get_type_hints(ladder.Options)
    for name, words in OPTIONS.items():
        option, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        if default is False:
            parser.add_argument(option, action="store_true", help=words)
        else:
            choices = typing.get_args(kinds[name]) or None
            parser.add_argument(option, type=type(default), choices=choices, default=default, help=words)
    args = parser.parse_args(argv, argparse.Namespace(at=""))
    args.model = shipped.path(args.model)
    options = ladder.Options(**{name: getattr(args, name) for name in OPTIONS})

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
