# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What the grouped products of experts reach on a GPU, tile by tile, at Qwen3-30B-A3B's shapes.

    python -m benchmarks.grouped [--tokens 16384] [--out FILE]

Each token has 8 of 128 experts, which get unequal shares (Dirichlet, 3). Kinds: `rows`, the forward in bfloat16 and
int8 and, its weight transposed beforehand, the gradient of the activations; `weights`, that of the weights. Printed and
written per tile (`kernels.experts_triton.Tile`): TFLOP/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gemm import seconds
from benchmarks.shapes import SIZES
from qarl_jax.kernels import experts_triton
from qarl_jax.kernels.experts_triton import Tile

TILES = (
    Tile(),
    Tile(warps=8),
    Tile(stages=4),
    Tile(n=256, warps=8),
    Tile(n=256, warps=8, stages=4),
    Tile(k=128, stages=2),
    Tile(k=128, stages=3, warps=8),
    Tile(m=64, n=256),
)


def measure(
    kind: str, product: Callable[..., Any], operands: Sequence[jax.Array], tiles: Sequence[Tile], repeats: int
) -> list[dict[str, Any]]:
    """A line per tile; `operands` end with the group sizes, and the first two have M rows or N outputs and K inputs."""
    lines = []
    shapes = [list(x.shape) for x in operands[:2]]
    work = 2 * operands[0].size * (operands[1].shape[1] if kind == "rows" else operands[1].shape[-1]) / 1e12
    for tile in tiles:
        line = {"kind": kind, "shapes": shapes, "dtype": str(operands[0].dtype), "tile": dataclasses.asdict(tile)}
        call = jax.jit(functools.partial(product, tile=tile))
        try:
            seconds(lambda call=call: call(*operands), 1)
            line["tflops"] = work / seconds(lambda call=call: call(*operands), repeats)
        except jax.errors.JaxRuntimeError as error:  # too large for the multiprocessor
            line["error"] = str(error).split("\n")[0]
        lines.append(line)
        print(json.dumps(line), flush=True)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", default="")
    args = parser.parse_args(argv)
    size, rng = SIZES["30b-a3b"], np.random.default_rng(0)
    m, experts = args.tokens * size["experts_per_token"], size["experts"]
    sizes = jnp.asarray(rng.multinomial(m, rng.dirichlet(np.full(experts, 3.0))), jnp.int32)
    lines = []
    for n, k in ((size["expert_inter"], size["hidden"]), (size["hidden"], size["expert_inter"])):
        for dtype, out in ((jnp.bfloat16, jnp.bfloat16), (jnp.int8, jnp.int32)):
            x, w, dy = (jnp.asarray(rng.integers(-9, 9, s), dtype) for s in ((m, k), (experts, n, k), (m, n)))
            rows = lambda x, w, sizes, tile, out=out: experts_triton.product(x, w, sizes, out, tile=tile)  # noqa: E731
            lines += measure("rows", rows, (x, w, sizes), TILES, args.repeats)
            if dtype == jnp.bfloat16:
                weights = lambda dy, x, sizes, tile: experts_triton.weight_gradient(dy, x, sizes, dy.dtype, tile=tile)  # noqa: E731
                lines += measure("weights", weights, (dy, x, sizes), TILES, args.repeats)
        if args.out:
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump(
                    {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "results": lines}, file, indent=1
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
