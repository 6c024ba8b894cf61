# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times an update on responses of ragged lengths: every response padded to the longest, against packed rows.

    python -m benchmarks.packing --lengths benchmarks/results/lengths_longhand.json --model 1.7b --scheme w8a8

--lengths holds {"lengths": [[prompt, response], ...]} of an RL run's rollout, in tokens; --samples makes such a file of
a run's own samples.jsonl, which has one response to each of `log.samples_per_step` prompts. The tokens themselves are
random, and so are the weights. Both ways do all the responses in one update of AdamW, in as few micro-batches of up to
--micro-tokens positions as hold them, evenly filled:

    padded   a response to a row, rows as long as --padded-len (by default the longest response)
    packed   rows of each --row-len, each filled with whole responses (`qarl_jax.data.packing`)

One JSON line each; seconds are of the whole update, tokens those that are no padding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from benchmarks import shapes
from benchmarks.timing import seconds_of
from qarl_jax.data.packing import Packed, pack
from qarl_jax.runtime import compilation
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import Completion, Prompt, RolloutGroup

_SEGMENTS = 64  # most responses to a packed row


def groups_of(lengths: list[tuple[int, int]], vocab: int, seed: int = 0) -> list[RolloutGroup]:
    """Makes groups of one response each, of these lengths (prompt, response), with random tokens and rewards."""
    rng = np.random.default_rng(seed)

    def draw(size: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(2, vocab, size))

    groups = []
    for number, (prompt_len, response_len) in enumerate(lengths):
        prompt = Prompt(uid=str(number), tokens=draw(prompt_len), text="", answer="")
        logprobs = (-np.log(vocab) + 0.1 * rng.standard_normal(response_len)).astype(np.float32)
        completion = Completion(
            prompt_tokens=prompt.tokens,
            tokens=draw(response_len),
            logprobs=logprobs,
            finish_reason="stop",
            versions=(),
        )
        reward = np.asarray([rng.standard_normal()], np.float32)
        groups.append(RolloutGroup(prompt=prompt, completions=(completion,), rewards=reward))
    return groups


def measure(setting: shapes.Setting, packed: Packed, rows: int, steps: int) -> dict[str, Any]:
    """Times an update on all rows of `packed`, `rows` rows at a time; the median, in seconds."""
    setting = dataclasses.replace(setting, rows=rows, seq=packed.batch.tokens.shape[1], segments=packed.max_segments)
    mesh = make_mesh(fsdp=-1)
    made, abstract, _ = shapes.make_learner(setting, mesh)
    state = made.init(shapes.random_params(abstract, made.param_shardings))
    micros = [made.put(batch) for batch in packed.micro_batches(rows)]
    old = [batch.rollout_logprobs for batch in micros]

    def step() -> Any:
        nonlocal state
        qweights = made.quantize(state.params)
        state, _ = made.update(state, qweights, micros, old, packed.num_tokens, packed.num_sequences)
        return state

    seconds_of(step, 2)  # compiles, warms up
    recompiles = compilation.Recompiles()
    times = seconds_of(step, steps)
    compiled = recompiles.take()
    real = int((packed.batch.segment_ids > 0).sum())
    return {
        "rows": int(packed.batch.tokens.shape[0]),
        "row_len": setting.seq,
        "rows_at_a_time": rows,
        "micro_batches": len(micros),
        "responses": packed.num_sequences,
        "tokens": real,
        "padding_share": packed.padding_share,
        "update_s": float(np.median(times)),
        "tokens_per_s": real / float(np.median(times)),
        "recompiles": compiled,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", type=pathlib.Path, help="JSON with the lengths of a rollout")
    source.add_argument("--samples", type=pathlib.Path, help="a run's samples.jsonl: write its lengths, and end")
    parser.add_argument("--model", default="1.7b", choices=tuple(shapes.SIZES))
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--scheme", default="w8a8")
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--row-len", type=int, nargs="+", default=[4096])
    parser.add_argument("--padded-len", type=int, default=0, help="0: the longest response with its prompt")
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args(argv)
    if args.samples:
        text = json.dumps({"lengths": lengths_of_samples(args.samples)})
        if args.out:
            args.out.write_text(f"{text}\n")
        else:
            print(text)
        return 0
    lengths = [(int(prompt), int(response)) for prompt, response in json.loads(args.lengths.read_text())["lengths"]]
    groups = groups_of(lengths, shapes.SIZES[args.model]["vocab"])
    advantages = [group.rewards for group in groups]
    padded_len = args.padded_len or max(map(sum, lengths))
    setting = shapes.Setting(model=args.model, layers=args.layers, scheme=args.scheme, remat=args.remat)
    results = []
    for way, row_len in (("padded", padded_len), *(("packed", row_len) for row_len in args.row_len)):
        filled = functools.partial(
            pack, groups, advantages, row_len=row_len, max_segments=1 if way == "padded" else _SEGMENTS
        )
        together = filled(rows_multiple=1).batch.tokens.shape[0]
        rows = -(-together // -(-together * row_len // args.micro_tokens))
        rows += -rows % jax.device_count()  # they are split over the devices
        packed = filled(rows_multiple=rows)
        results.append({"way": way} | measure(setting, packed, rows, args.steps))
        print(json.dumps(results[-1]), flush=True)
        jax.clear_caches()
        if args.out:
            record = {
                "model": args.model,
                "layers": args.layers,
                "scheme": args.scheme,
                "remat": args.remat,
                "lengths": args.lengths.name,
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "results": results,
            }
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def lengths_of_samples(path: pathlib.Path) -> list[tuple[int, int]]:
    """Reads the lengths (prompt, response), in tokens, of all samples of a run's first logged step."""
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    first = samples[0]["step"]
    return [(s["prompt_len"], s["response_len"]) for s in samples if s["step"] == first]


if __name__ == "__main__":
    raise SystemExit(main())
