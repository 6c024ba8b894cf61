# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole step, phase by phase: rollout, old log-probs, updates, publish; aligned and rollout-only, against bf16.

    python -m benchmarks.step_gpu --model 8b --rows 4 --updates 4 --rollout-tok-per-s bf16=N w8a8=N fp8=N w4a16=N

One step trains `updates` x rows x seq tokens, every one of them sampled. The learner's phases are measured here, at
Qwen3 shapes with random weights and fixed lengths: quantization, one scoring pass over all rows, and the updates.
Sampling is not: give the engine's measured tokens/s per scheme, at the same lengths. Nor is publishing, if
--publish-s has it per scheme, as `benchmarks/publish.py` measures it on a shared card; otherwise the phase is the
published tensors brought to the host (what a bridge on another host is handed). Rows of the table:

    bf16          sampler and learner in bf16
    S             learner and sampler under scheme S (QaRL)
    S rollout     sampler under S, learner in bf16 (quantized rollout)
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.timing import seconds_of
from qarl_jax import models
from qarl_jax.runtime import mesh


def timed(call: Any, repeats: int) -> float:
    """Median seconds of a call, after one to compile."""
    return float(np.median(seconds_of(call, repeats + 1)[1:]))


def phases(
    setting: shapes.Setting, repeats: int, published: str | None = None, publish_s: float | None = None
) -> dict[str, float]:
    """Seconds of one quantization, one scoring pass, one update and one publish of a learner.

    Args:
      published: the sampler's scheme, where it is not the learner's.
      publish_s: of a publish, where it is known; None: measured to the host.
    """
    made, abstract, _ = shapes.make_learner(setting, mesh.make_mesh(fsdp=-1))
    state = made.init(shapes.random_params(abstract, made.param_shardings))
    host = shapes.batch(setting)
    batch, counts = made.put(host), (host.loss_mask.sum(), setting.rows * setting.segments)
    quantize = made.quantize
    if published is not None:
        quantize = made.quantizer(models.with_scheme(made.graphdef, models.parse_rules(published, 128)))
    out = {"quantize": timed(lambda: made.quantize(state.params), repeats)}
    qweights = made.quantize(state.params)
    out["score"] = timed(lambda: made.score(state.params, qweights, batch)[0], repeats)

    def publish() -> Any:
        tensors = quantize(state.params)
        # Layers without a QTensor travel in bfloat16; a bf16 sampler takes all of them so. An array that was brought to
        # the host once stays there, so these are new.
        return jax.device_get(tensors if jax.tree.leaves(tensors) else jax.tree.map(jnp.copy, state.params))

    out["publish"] = timed(publish, repeats) if publish_s is None else publish_s

    def update() -> Any:
        nonlocal state
        state, _ = made.update(state, qweights, [batch], [batch.rollout_logprobs], *counts)
        return state

    return out | {"update": timed(update, repeats)}


def step(found: dict[str, float], tokens: int, updates: int, tok_per_s: float) -> dict[str, float]:
    """Seconds per phase of a whole step."""
    out = {
        "rollout": tokens / tok_per_s,
        "old_logprobs": updates * found["score"] if updates > 1 else 0.0,
        "update": updates * (found["update"] + found["quantize"]),
        "publish": found["publish"],
    }
    return out | {"step": sum(out.values())}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=shapes.SIZES, default="8b")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--master", default="bfloat16")
    parser.add_argument("--engine", default="plain", help="whose arithmetic the learner has: plain or cuda")
    parser.add_argument("--rollout-tok-per-s", nargs="+", required=True, metavar="SCHEME=N", help="bf16 among them")
    parser.add_argument("--publish-s", nargs="*", default=[], metavar="SCHEME=S", help="seconds of a publish")
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    speeds, publish_s = (
        {name: float(text) for name, text in (item.split("=") for item in given)}
        for given in (args.rollout_tok_per_s, args.publish_s)
    )
    if "bf16" not in speeds:
        parser.error("--rollout-tok-per-s needs bf16=..., which everything is compared with")
    tokens = args.updates * args.rows * args.seq
    table: dict[str, dict[str, float]] = {}
    runs = [("bf16", "bf16", None)]
    runs += [(name, name, None) for name in speeds if name != "bf16"]
    runs += [(f"{name} rollout", "bf16", name) for name in speeds if name != "bf16"]
    for label, scheme, published in runs:
        setting = shapes.Setting(
            model=args.model,
            scheme=scheme,
            rows=args.rows,
            seq=args.seq,
            remat=args.remat,
            master=args.master,
            engine=args.engine,
            grad=args.master,
        )
        found = phases(setting, args.repeats, published, publish_s.get(published or scheme))
        table[label] = step(found, tokens, args.updates, speeds[published or scheme])
        table[label]["of_bf16"] = table["bf16"]["step"] / table[label]["step"]
        print(json.dumps({"run": label} | table[label]), flush=True)
        jax.clear_caches()
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"settings": vars(args), "device": jax.devices()[0].device_kind, "steps": table}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
