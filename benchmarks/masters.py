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
      moved: mean share of weights that an update changes. moved_by_all: share that differs after the last one. covered:
      the way from first to last masters along the one that float32 sums of the same updates would go, over its length
      (1: all of it).
    """
    dtype, rounding = WAYS[way]
    load = lambda: models.split(models.load_hf(folder, param_dtype=dtype))  # noqa: E731
    graphdef, tree, qweights = load()
    optimizer = leafwise.Optimizer(build.Muon(lr=lr, weight_decay=0.0, master_rounding=rounding), updates)
    vocab = models.config_of(graphdef).vocab_size

    @jax.jit
    def gradient(params: Any, key: jax.Array) -> Any:
        tokens = jax.random.randint(key, (4, 64), 0, vocab)
        return jax.grad(functools.partial(loss, graphdef))(params, qweights, tokens)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=(3, 4, 5))
    def step(leaf: leafwise.Leaf, scalars: Any, grad: Any, param: Any, moments: Any, total: Any) -> Any:
        asked, moments = optimizer.step(leaf, scalars, grad, param, moments)
        after = optimizer.added(leaf, scalars.updates, param, asked)
        return after, moments, total + asked, jnp.sum(after != param)

    leaves, (params, structure) = optimizer.leaves(tree), jax.tree.flatten(tree)
    moments = leafwise.moments_of(tree, leafwise.init(optimizer, tree))
    del tree  # the steps donate its leaves
    totals = [jnp.zeros(param.shape, jnp.float32) for param in params]
    size, moved = sum(param.size for param in params), 0
    for number in range(updates):
        key = jax.random.fold_in(jax.random.key(0), number)
        grads = jax.tree.leaves(gradient(structure.unflatten(params), key))
        scalars = jax.jit(optimizer.scalars)(jnp.int32(number), leafwise.clipping_norm(grads))
        for i in reversed(range(len(leaves))):  # each gradient is given back once it is used
            made = step(leaves[i], scalars, grads.pop(), params[i], moments[i], totals[i])
            params[i], moments[i], totals[i], changed = made
            moved += int(changed)
    del moments
    by_all, along, asked = 0, 0.0, 0.0
    for first, last, total in zip(jax.tree.leaves(load()[1]), params, totals, strict=True):
        by_all += int(jnp.sum(last != first))
        along += float(jnp.vdot(last.astype(jnp.float32) - first.astype(jnp.float32), total))
        asked += float(jnp.vdot(total, total))
    return {"moved": moved / updates / size, "moved_by_all": by_all / size, "covered": along / asked}


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
