# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the share of weights that an update changes, by dtype and rounding of the masters, and how far these move.

    python -m benchmarks.masters --model assets/tiny-qwen3 --updates 50 --out benchmarks/results/masters_tiny_cpu.json

Every update's gradient is that of a next-token loss on random tokens, at the masters as they are.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp

from qarl_jax import models
from qarl_jax.optim import build, leafwise

WAYS = {
    "float32": ("float32", "nearest"),
    "bfloat16, nearest": ("bfloat16", "nearest"),
    "bfloat16, stochastic": ("bfloat16", "stochastic"),
}


def loss(graphdef: Any, params: Any, qweights: Any, tokens: jax.Array) -> jax.Array:
    """Computes the mean next-token loss of tokens [B, T]."""
    logits = models.merge(graphdef, params, qweights)(tokens[:, :-1])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -jnp.mean(picked)


def measure(folder: str, way: str, lr: float, updates: int) -> dict[str, float]:
    """Applies updates to a model's masters and measures how far these move, over all weights together.

    Returns:
      moved: mean share of weights that an update changes. covered: the way from first to last masters along the one
      that float32 sums of the same updates would go, over its length (1: all of it).
    """
    dtype, rounding = WAYS[way]
    graphdef, params, qweights = models.split(models.load_hf(folder, param_dtype=dtype))
    optimizer = leafwise.Optimizer(build.Muon(lr=lr, weight_decay=0.0, master_rounding=rounding), updates)
    vocab = models.config_of(graphdef).vocab_size

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        tokens = jax.random.randint(key, (4, 64), 0, vocab)
        grads = jax.grad(functools.partial(loss, graphdef))(params, qweights, tokens)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        scalars = optimizer.scalars(state.count, leafwise.clipping_norm(grads))
        arrays = jax.tree.leaves(grads), jax.tree.leaves(params), leafwise.moments_of(params, state)
        each = zip(optimizer.leaves(params), *arrays, strict=True)
        asked = [optimizer.step(leaf, scalars, *own)[0] for leaf, *own in each]
        after, state, _ = leafwise.update(optimizer, grads, state, params)
        changed = sum(jnp.sum(a != b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True))
        return after, state, asked, changed

    first, state = params, leafwise.init(optimizer, params)
    total = [jnp.zeros(p.shape, jnp.float32) for p in jax.tree.leaves(params)]
    size, moved = sum(p.size for p in jax.tree.leaves(params)), 0
    for number in range(updates):
        params, state, asked, changed = step(params, state, jax.random.fold_in(jax.random.key(0), number))
        total, moved = list(map(jnp.add, total, asked)), moved + int(changed)
    way_made = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), params, first)
    dot = lambda a, b: float(sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)))  # noqa: E731
    return {"moved": moved / updates / size, "covered": dot(way_made, total) / dot(total, total)}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="assets/tiny-qwen3", help="model folder")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args(argv)
    rows = {way: measure(args.model, way, args.lr, args.updates) for way in WAYS}
    found = {"model": args.model, "lr": args.lr, "updates": args.updates, "rows": rows}
    text = json.dumps(found | {"command": f"python -m benchmarks.masters {' '.join(argv or sys.argv[1:])}"}, indent=1)
    print(text)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
