# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Times the engine's products of low-bit weights against cuBLAS' in bf16, at a model's shapes.

    python -m benchmarks.low_bit_products --shapes 8b qwen2.5-32b --rows 1 8 256 [--tiles] --out FILE

The products of a layer (q|k|v, o, gate|up, down) run together in one CUDA graph, over several layers with weights of
their own; before each replay a write of 256 MB takes what the L2 cache held. Printed per scheme and number of rows:
microseconds a layer, times bf16 (cuBLAS), share of the GPU's bandwidth, and whether every output has the bits of the
decoded weights' product. `w2a2` and `w4a4` are timed with the rounding of activations. `--tiles` times each product
alone, under every tile of `_TRIED` that fits. On a CPU, where there is nothing of that, the bridge's CPU layers are
timed; it has none for `w4a16` and `nvfp4`, whose kernels are timed without vLLM's layers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from qarl_bridge.protocol import formats, split_k

from benchmarks.shapes import SIZES

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second
SCHEMES = ["w2a16_asym:g32", "w2a16_asym:g64", "w3a16_asym:g32", "w4a16_asym:g32", "w2a2:g32", "w4a4:g32"]
_DECODED_ROWS = 512  # more rows are multiplied by the decoded weight
_FLUSH = 256 * 2**20
Product = Callable[[torch.Tensor], torch.Tensor]
Tile = tuple[int, int, int, int, int]
_TRIED = {
    16: "16/64/128/4/4 16/64/256/4/3 16/64/256/4/4 16/64/256/4/5 16/64/512/4/3",
    32: "32/64/128/4/4 32/64/128/4/3 32/64/256/4/2 32/64/256/4/3 32/64/256/4/4 32/128/128/4/3 32/128/256/4/3",
    64: "64/64/128/4/4 64/64/128/4/3 64/64/256/4/2 64/64/256/4/3 64/128/128/4/3 64/128/128/4/4 32/64/256/4/3",
    128: "128/64/128/4/4 128/64/128/4/3 128/64/256/4/3 64/128/128/4/3 64/64/128/4/4 64/64/256/4/3 128/128/128/8/3",
    256: "128/64/128/4/3 256/64/128/4/3 128/128/128/8/3 64/128/128/4/3",
}


class Job(NamedTuple):
    """One product to time: a scheme's layer [n, k] with `rows` rows; None: the tile and order of parts as they are."""

    scheme: str
    n: int
    k: int
    rows: int
    tile: Tile | None
    split: bool | None


def layers_of(shapes: str) -> dict[str, tuple[int, int]]:
    """Returns the shape [N, K] of each product of a layer, as an engine fuses them."""
    size = SIZES[shapes]
    hidden, inner, width = size["hidden"], size["inter"], size.get("head_dim", 128)
    heads = (size["heads"] + 2 * size["kv"]) * width, size["heads"] * width
    return {
        "qkv": (heads[0], hidden),
        "o": (hidden, heads[1]),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def arrays_of(bits: int, group: int, n: int, k: int, device: str) -> dict[str, torch.Tensor]:
    """Makes the published arrays of a random weight, by name; its values are of the order of 0.01."""
    made = {
        f"weight_u{width}": torch.randint(0, 256, (n, k * width // 8), device=device).to(torch.uint8)
        for width in formats.LANES[bits]
    }
    unit = 2 ** (8 - bits)
    made["weight_zero_point"] = (torch.randint(0, 2**bits, (n, k // group), device=device) * unit).to(torch.uint8)
    scales = torch.randint(64, 120, (n, k // group), device=device).to(torch.uint8)
    made["weight_scale"] = scales.view(torch.float8_e4m3fn)
    made["weight_tensor_scale"] = torch.tensor([2.0**-15], device=device)
    return made


def widths_of(scheme: str) -> tuple[int, int, int]:
    """Reads a scheme's name, such as "w2a16_asym:g64": (bits of a weight, group, bits of an activation or 0)."""
    name, _, suffix = scheme.partition(":g")
    if scheme in ("bf16", "nvfp4", "w4a16"):
        return {"bf16": (16, 0, 0), "nvfp4": (4, 16, 0), "w4a16": (4, 128, 0)}[scheme]
    bits, activations = name.removeprefix("w").partition("_")[0].split("a")
    return int(bits), int(suffix or 32), int(activations) % 16


def bytes_of(scheme: str, weights: int) -> float:
    """Counts the bytes of a number of weights, with their scales and zero points."""
    bits, group, _ = widths_of(scheme)
    return 2 * weights if bits == 16 else weights * bits / 8 + (1 if scheme == "nvfp4" else 2) * weights / group


def layer_of(scheme: str, n: int, k: int, device: str) -> tuple[Any, torch.nn.Module]:
    """Makes the engine's layer of a random weight: (the method that computes it, the module that holds it)."""
    if device == "cuda":
        from qarl_bridge.engine.cuda.asym import BatchInvariantAsymmetricLinear as Kind
    else:
        from qarl_bridge.engine.cpu.linear import Float64AsymmetricLinear as Kind  # type: ignore[assignment]
    layer = torch.nn.Module()
    layer.logical_widths = [n]
    bits, group, activation_bits = widths_of(scheme)
    kind = Kind(bits, group, False, activation_bits=activation_bits)
    for name, value in arrays_of(bits, group, n, k, device).items():
        own = kind.zeros if name == formats.zero_points() else name
        layer.register_parameter(own, torch.nn.Parameter(value, requires_grad=False))
    kind.process_weights_after_loading(layer)
    return kind, layer


def weight_of(scheme: str, n: int, k: int) -> tuple[Any, Any, Any]:
    """Makes a random weight [n, k] as `ops.product` reads it: (weight, scales, factors)."""
    if scheme == "bf16":
        return (torch.randn(n, k, device="cuda") * 0.02).bfloat16(), None, None
    if scheme not in ("nvfp4", "w4a16"):
        bits, group, _ = widths_of(scheme)
        return random_words(bits, group, n, k), None, None
    words = torch.randint(-(2**31), 2**31 - 1, (k // 128, n, 16), dtype=torch.int32, device="cuda")
    if scheme == "w4a16":
        return words, (torch.rand(k // 128, n, device="cuda") * 0.01).bfloat16(), None
    scales = torch.randint(64, 120, (k // 64, n, 4), device="cuda").to(torch.uint8).view(torch.int32).squeeze(-1)
    return words, scales, torch.full((n,), 2.0**-12, device="cuda")


def product_of(scheme: str, n: int, k: int, device: str) -> Product:
    """Makes the product of an engine's layer with a random weight [n, k]."""
    if scheme not in ("nvfp4", "w4a16"):
        kind, layer = layer_of(scheme, n, k, device)
        return functools.partial(kind.apply_weights, layer)
    from qarl_bridge.engine.cuda import ops

    words, scale, factor = weight_of(scheme, n, k)

    def product(x: torch.Tensor) -> torch.Tensor:
        if len(x) <= _DECODED_ROWS:
            return ops.product(x, words, scale, factor=factor)
        return ops.product(x, ops.dequantized(words, scale), factor=factor)

    return product


def microseconds(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Times `run` in a CUDA graph: the median of `repeats` replays, each after a write that empties the L2 cache."""
    run()
    if device == "cpu":
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            found.append(1e6 * (time.perf_counter() - start))
        return sorted(found)[repeats // 2]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device=device)
    events = []
    for number in range(repeats):
        flush.fill_(number % 2)
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        graph.replay()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return 1e3 * sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def together(
    shapes: dict[str, tuple[int, int]], products: Sequence[dict[str, Product]], rows: int, device: str, repeats: int
) -> float:
    """Times all products of one layer together, in microseconds, as the mean of several layers."""
    inputs = {name: torch.randn(rows, k, device=device).bfloat16() for name, (_, k) in shapes.items()}

    def run() -> None:
        for layer in products:
            for name, product in layer.items():
                product(inputs[name])

    return microseconds(run, device, repeats) / len(products)


def compared(args: argparse.Namespace, size: str, device: str) -> Iterator[dict[str, Any]]:
    """Times every scheme at a size's shapes and every number of rows; yields a row for each, bf16 first."""
    shapes = layers_of(size)
    weights = sum(n * k for n, k in shapes.values())
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    peak = next((speed for name, speed in BANDWIDTH.items() if name in card), None)
    base: dict[int, float] = {}
    for scheme in ("bf16", *args.schemes):
        products: list[dict[str, Product]] = []
        for _ in range(args.layers):
            if scheme == "bf16":
                held = {name: (torch.randn(n, k, device=device) * 0.01).bfloat16() for name, (n, k) in shapes.items()}
                products.append({n: lambda x, w=w: torch.nn.functional.linear(x, w) for n, w in held.items()})
            else:
                products.append({name: product_of(scheme, *shape, device) for name, shape in shapes.items()})
        for rows in args.rows:
            us = together(shapes, products, rows, device, args.repeats)
            bf16 = base.setdefault(rows, us)
            row = {"card": card, "shapes": size, "scheme": scheme, "rows": rows, "us": round(us, 2)}
            row |= {"bf16_us": round(bf16, 2), "times": round(bf16 / us, 2)}
            if peak:
                row["of_bandwidth"] = round(bytes_of(scheme, weights) / peak / us * 1e6, 3)
            if scheme != "bf16" and device == "cuda":
                row["equal"] = all(equal(products[0][name], k, rows) for name, (_, k) in shapes.items())
            yield row
        products.clear()


def equal(product: Product, k: int, rows: int) -> bool:
    """Tells whether the outputs of `rows` rows alone have the bits that they have within 1,024 rows."""
    x = torch.randn(1024, k, device="cuda").bfloat16()
    return torch.equal(product(x[:rows]), product(x)[:rows])


def random_words(bits: int, group: int, n: int, k: int) -> Any:
    """Makes a random weight as the CUDA kernel reads it, without vLLM's layers."""
    from qarl_bridge.engine.cuda import asym_ops

    made = arrays_of(bits, group, n, k, "cuda")
    lanes = {width: made[f"weight_u{width}"] for width in formats.LANES[bits]}
    upper = max(lanes)
    return asym_ops.Words(
        codes=asym_ops.interleaved(lanes[upper], upper),
        low=asym_ops.interleaved(lanes[1], 1) if bits == 3 else None,
        levels=asym_ops.levels_of(made["weight_scale"], made["weight_zero_point"], k),
        steps=torch.full((n,), 2.0**-15, dtype=torch.bfloat16, device="cuda"),
        bits=bits,
        group=group,
        middle=0,
    )


def tiles_of(rows: int) -> list[Tile]:
    """Lists tiles that may suit `rows` rows: (rows, outputs, inputs, warps, stages)."""
    height = max(16, min(256, 1 << (rows - 1).bit_length()))
    return [(*map(int, tile.split("/")),) for tile in _TRIED[height].split()]  # type: ignore[misc]


def run_tile(job: Job, held: tuple[Any, Any, Any], x: torch.Tensor) -> torch.Tensor:
    """Multiplies x by a weight of `weight_of` under a job's tile and order of parts."""
    from qarl_bridge.engine.cuda import ops

    weight, scale, factor = held
    return ops.product(x, weight, scale, factor=factor, tile=job.tile, split=job.split)


def compile_tile(job: Job) -> None:
    """Compiles a job's kernel into Triton's cache, in a process of its own."""
    with contextlib.suppress(Exception):  # Triton's, of shared memory or registers
        run_tile(job, weight_of(job.scheme, job.n, job.k), torch.zeros(job.rows, job.k, device="cuda").bfloat16())


def tiles(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times each product alone: as it is, and under every tile that fits; the first tile also with two parts of K one
    after the other. Many processes first compile each kernel, for the smallest layer that has it."""
    from qarl_bridge.engine.cuda import asym_ops

    shapes = {shape: f"{size} {name}" for size in args.shapes for name, shape in layers_of(size).items()}
    jobs = [
        Job(scheme, n, k, rows, tile, split)
        for (n, k), scheme, rows in itertools.product(shapes, args.schemes, args.rows)
        for tile, split in [(None, None), (tiles_of(rows)[0], False), *((tile, None) for tile in tiles_of(rows))]
        if split is None or split_k.splits_of(n, k) > 1
        if tile is None or asym_ops.in_whole(tile[2], k, split_k.splits_of(n, k))
    ]
    smallest: dict[Any, Job] = {}
    for job in sorted(filter(lambda job: job.tile, jobs), key=lambda job: job.n * job.k):
        smallest.setdefault((*job[:1], *job[3:], split_k.splits_of(job.n, job.k)), job)
    with multiprocessing.get_context("spawn").Pool(min(args.processes, os.cpu_count() or 1)) as pool:
        for _ in pool.imap_unordered(compile_tile, smallest.values()):
            pass
    for (n, k, scheme), group in itertools.groupby(jobs, key=lambda job: (job.n, job.k, job.scheme)):
        weights = [weight_of(scheme, n, k) for _ in range(args.layers)]
        for rows, of_rows in itertools.groupby(group, key=lambda job: job.rows):
            x = torch.randn(rows, k, device="cuda").bfloat16()
            y = run_tile(Job(scheme, n, k, rows, None, None), weights[0], x)
            row: dict[str, Any] = {"layer": shapes[n, k], "n": n, "k": k, "scheme": scheme, "rows": rows}
            row |= {"equal": True, "tiles": []}
            for job in of_rows:
                us, equal = timed(job, weights, x, y, args.repeats)
                row["equal"] &= equal
                if job.tile is None:
                    row["us"] = us
                elif job.split is not None:
                    row["in_turn"] = us, job.tile
                elif us is not None:
                    row["tiles"].append((us, job.tile))
            yield row | {"tiles": sorted(row["tiles"])}


def timed(
    job: Job, weights: Sequence[tuple[Any, Any, Any]], x: torch.Tensor, y: torch.Tensor, repeats: int
) -> tuple[float | None, bool]:
    """Times one product: (microseconds, whether the first weight's is y to the bit). The former is None if the tile
    does not fit the GPU's shared memory or registers."""
    try:
        equal = torch.equal(run_tile(job, weights[0], x), y)
    except Exception:  # Triton's, of shared memory or registers
        torch.cuda.synchronize()
        return None, True
    us = microseconds(lambda: [run_tile(job, held, x) for held in weights], "cuda", repeats)
    return round(us / len(weights), 2), equal


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_bit_products", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=["8b"])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 256])
    parser.add_argument("--layers", type=int, default=8, help="with weights of their own")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--tiles", action="store_true", help="each product alone under every tile, on a GPU")
    parser.add_argument("--processes", type=int, default=12, help="that compile tiles")
    parser.add_argument("--out", help="write the rows there, one JSON object a line")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and {"nvfp4", "w4a16"} & set(args.schemes):
        parser.error("the products of nvfp4 and w4a16 need a Hopper GPU (H100, H200)")
    rows = []
    for row in tiles(args) if args.tiles else (row for size in args.shapes for row in compared(args, size, device)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0 if all(row.get("equal", True) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
