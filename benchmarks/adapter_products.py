# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times the products of an engine's layer with adapters on a GPU, alone and with A summed in one part or in several.

    python -m benchmarks.adapter_products --shapes qwen2.5-32b --scheme nvfp4 --rank 32 --rows 8 64 --out FILE

A CUDA graph holds the products of `--layers` layers with weights of their own: q|k|v, o, gate|up and down, each with A
and B. A row of JSON has microseconds a layer: `base` alone; `one_part`, where A is summed in one part and further
kernels add B's product; `parts`, as engines compute (`qarl_bridge.protocol.split_k`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch
from qarl_bridge.protocol import split_k

from benchmarks.low_bit_products import layers_of, microseconds, weight_of
from benchmarks.shapes import SIZES
from benchmarks.watched import written

FUSED = {"qkv": 3, "gate_up": 2}  # adapters of a layer, one otherwise


class Layers:
    """Random layers with adapters of a rank, and one decode step's products."""

    def __init__(self, shapes: str, scheme: str, rank: int, count: int):
        self.layers = []
        for _ in range(count):
            products = []
            for name, (n, k) in layers_of(shapes).items():
                ranks = -(-rank * FUSED.get(name, 1) // 8) * 8
                a, b = ((torch.randn(shape, device="cuda") * 0.02).bfloat16() for shape in ((ranks, k), (n, ranks)))
                products.append((weight_of(scheme, n, k), a, b))
            self.layers.append(products)

    def run(self, x: dict[int, torch.Tensor], kind: str) -> None:
        """Computes all products for inputs x, by their size; kind: "base", "one_part" or "parts"."""
        from qarl_bridge.engine.cuda import ops

        for (weight, scale, factor), a, b in (one for layer in self.layers for one in layer):
            rows = x[a.shape[1]]
            y = ops.product(rows, weight, scale, factor=factor)
            if kind == "one_part":
                y = y - (0.0 - ops.product(ops.product(rows, a, splits=1), b, splits=1))
            elif kind == "parts":
                h = ops.product(rows, a, splits=split_k.splits_of_adapter(a.shape[1]))
                y = ops.product(h, b, splits=1, added=y)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapter_products", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=SIZES, default="8b")
    parser.add_argument("--scheme", choices=("nvfp4", "w4a16", "bf16"), default="nvfp4")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 128])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", help="a file that the rows are appended to")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("the products need a Hopper GPU (H100, H200)")
    layers = Layers(args.shapes, args.scheme, args.rank, args.layers)
    for count in args.rows:
        sizes = {k for _, k in layers_of(args.shapes).values()}
        x = {k: torch.randn(count, k, device="cuda").bfloat16() for k in sizes}
        row: dict[str, Any] = {"device": torch.cuda.get_device_name()}
        row |= {"shapes": args.shapes, "scheme": args.scheme, "rank": args.rank, "rows": count}
        for kind in ("base", "one_part", "parts"):
            row[kind] = round(microseconds(functools.partial(layers.run, x, kind), "cuda", 21) / args.layers, 1)
        written(row, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
