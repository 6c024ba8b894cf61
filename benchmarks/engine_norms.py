# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times the engine's kernels between a layer's products on a GPU, beside the kernels of vLLM that they replace.

    python -m benchmarks.engine_norms --shapes 8b --rows 1 64 128 --out FILE

"norm" is RMSNorm of a sum with int8 codes, and "heads" RMSNorm and rotary embedding of queries and keys. "apart" is the
same with vLLM's quantizer and rotary kernel. Each is launched eight times in a CUDA graph: microseconds a launch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.low_bit_products import microseconds
from benchmarks.shapes import SIZES

_LAUNCHES, _WIDTH = 8, 128


def measured(shapes: str, rows: int) -> dict[str, float]:
    """Times the kernels for `rows` rows: microseconds by name."""
    from qarl_bridge.engine.cuda import norm_ops
    from vllm import _custom_ops

    size = SIZES[shapes]
    hidden, heads, kv = size["hidden"], size["heads"], size["kv"]
    gains = torch.rand(hidden, device="cuda").bfloat16(), torch.rand(_WIDTH, device="cuda").bfloat16()
    table = torch.rand(4096, _WIDTH, device="cuda").bfloat16()
    x, r = (torch.randn(rows, hidden, device="cuda").bfloat16() for _ in "xr")
    qk = torch.randn(rows, (heads + 2 * kv) * _WIDTH, device="cuda").bfloat16()[:, : (heads + kv) * _WIDTH]
    at = torch.randint(0, 4096, (rows,)).cuda()

    def turned() -> None:
        parts = qk.split([heads * _WIDTH, kv * _WIDTH], -1)
        both = [norm_ops.rms_norm(one.view(rows, -1, _WIDTH), gains[1], 1e-6).view(rows, -1) for one in parts]
        _custom_ops.rotary_embedding(at, *both, _WIDTH, table, True)

    kernels: dict[str, Callable[[], Any]] = {
        "norm": lambda: norm_ops.rms_norm(x, gains[0], 1e-6, r, norm_ops.room_for_codes(x)),
        "norm, apart": lambda: _custom_ops.scaled_int8_quant(norm_ops.rms_norm(x, gains[0], 1e-6, r)[0]),
        "heads": lambda: norm_ops.rotated_norms(qk, heads, (gains[1], gains[1]), 1e-6, at, table),
        "heads, apart": turned,
    }
    times = (
        (name, microseconds(lambda k=k: [k() for _ in range(_LAUNCHES)], "cuda", 9)) for name, k in kernels.items()
    )
    return {name: round(us / _LAUNCHES, 2) for name, us in times}


def measurements(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for rows in args.rows:
        yield {"shapes": args.shapes, "rows": rows, "us": measured(args.shapes, rows)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_norms", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", choices=SIZES, default="8b")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128, 256])
    parser.add_argument("--out", help="write the rows there, one JSON object a line")
    args = parser.parse_args(argv)
    rows = []
    for row in measurements(args):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
