# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""In which order vLLM's CUDA kernels add up: their outputs, called directly, against products in orders we dictate.

    PYTHONPATH=.:bridge:$VLLM JAX_PLATFORMS=cuda,cpu python benchmarks/kernel_order.py w4a16 --out order_w4a16.json
    PYTHONPATH=.:bridge:$VLLM JAX_PLATFORMS=cuda,cpu python benchmarks/kernel_order.py fp8 --out order_fp8.json

w4a16: Machete, on the weights dequantized to bfloat16; --schedules runs every schedule of Machete, too.

    learner           quant.dot, as the learner multiplies these rows; learner_parts: in the parts `machete.plan` names
                      (split-K only); learner_many: as it multiplies 16,384 rows
    plan              one wgmma after the other per part, parts as `machete.plan` has them for these rows
    chain             the same in one part; split_S, split_S_down: in S equal ones, added upwards or downwards; groups:
                      in groups of 128 inputs
    torch, exact      cuBLAS; float64, rounded once

fp8: CUTLASS with scales that are powers of two, so that only the accumulator is seen. `f16` is the share of equal
outputs in float16, of which three bits more are seen, `error` the relative L2 error of float32 sums (of the kernel: of
its float16 outputs, with `exact_f16` for what the rounding alone costs).

    xla               as the compiler multiplies; xla_f32, xla_fast: by the algorithms of that name
    chain             in the tensor cores' accumulator all along; promoted_N: added in float32 every N inputs
    bf16              the codes as bfloat16: exact products
    exact             float64

and of whole layers, scales included: `learner`, and the chain with either scale first.

Printed and written per case: the share of outputs equal to the last bit. `products` is Pallas' Triton, the weight as
the left operand, as in Machete and in CUTLASS' kernels for few rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs the card too

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Primitive

from benchmarks.gpu_linears import Kernels, Machete, from_torch, inputs, to_torch
from qarl_jax import quant
from qarl_jax.numerics import machete
from qarl_jax.quant.schemes import fp8

# K, N: the alignment experiment's policy (down, qkv, o, gate_up), Qwen3-1.7B (down, qkv), 8B (qkv, down)
SHAPES = ((1024, 384), (384, 640), (384, 384), (384, 2048), (6144, 2048), (2048, 4096), (4096, 6144), (12288, 4096))
ROWS = (16, 64, 512, 2048)
MANY = 16384
NUMERICS = quant.resolve("cuda")
CONTRACT_LAST = (((1,), (1,)), ((), ()))
TILE_N, TILE_M, WIDTH = 128, 16, 12  # of a table of parts: outputs, rows, parts

Parts = list[tuple[int, int]]

# ---- a product whose order a table dictates --------------------------------------------------------------------------

# a [M, K], b [K, N], c float32 [M, N] -> c + a b, in the tensor cores' accumulator. Pallas has only a b, which Triton
# makes part of c's accumulator for bfloat16, and adds to c in float32 for fp8.
_DOT_ONTO = Primitive("dot_onto")
_DOT_ONTO.def_abstract_eval(lambda a, b, c: c)


@functools.cache
def _register() -> None:
    from jax._src.pallas.triton import lowering  # there is no public way to add an operation

    @lowering.register_lowering(_DOT_ONTO)
    def _(ctx: Any, a: Any, b: Any, c: Any) -> Any:
        return lowering.tt_dialect.dot(a, b, c, max_num_imprecise_acc=2**30)


def _kernel(x_ref: Any, w_ref: Any, t_ref: Any, o_ref: Any, *, step: int, promote: bool, interpret: bool) -> None:
    """One tile [TILE_N, TILE_M] of w x^T; t_ref: the table, flat."""
    i, j = pl.program_id(0), pl.program_id(1)
    cols = i * TILE_N + jnp.arange(TILE_N, dtype=jnp.int32)
    rows = j * TILE_M + jnp.arange(TILE_M, dtype=jnp.int32)
    base = (i * pl.num_programs(1) + j) * (2 * WIDTH)
    zeros = jnp.zeros((TILE_N, TILE_M), jnp.float32)

    def dot_onto(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        if interpret:
            return c + jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
        return _DOT_ONTO.bind(a, b, c)

    def add(a: jax.Array, b: jax.Array) -> jax.Array:
        """An addition of its own, which no compiler makes part of the accumulator."""
        if interpret:
            return a + b
        result = jax.ShapeDtypeStruct(a.shape, jnp.float32)
        (out,) = plgpu.elementwise_inline_asm(
            "add.rn.f32 $0, $1, $2;", args=(a, b), constraints="=f,f,f", pack=1, result_shape_dtypes=[result]
        )
        return out

    def part(p: jax.Array, total: jax.Array) -> jax.Array:
        first, end = t_ref[base + 2 * p], t_ref[base + 2 * p + 1]

        def body(s: jax.Array, acc: jax.Array) -> jax.Array:
            ks = first + s * step + jnp.arange(step, dtype=jnp.int32)
            w = plgpu.load(w_ref.at[cols[:, None], ks[None]])
            x = plgpu.load(x_ref.at[rows[:, None], ks[None]]).T
            return add(acc, dot_onto(w, x, zeros)) if promote else dot_onto(w, x, acc)

        return total + lax.fori_loop(0, (end - first) // step, body, zeros)

    plgpu.store(o_ref.at[rows[None], cols[:, None]], lax.fori_loop(0, WIDTH, part, zeros).astype(o_ref.dtype))


@functools.partial(jax.jit, static_argnames=("step", "promote", "dtype", "interpret"))
def products(
    x: jax.Array,
    w: jax.Array,
    table: jax.Array,
    *,
    step: int = 64,
    promote: bool = False,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> jax.Array:
    """x w^T in parts of K, each summed from zero, then added in float32 in the table's order.

    Args:
      x: [M, K] bfloat16 or float8_e4m3fn, M a multiple of TILE_M.
      w: [N, K] of the same type, N a multiple of TILE_N.
      table: int32 [N / TILE_N, M / TILE_M, WIDTH, 2] of inputs, first and end (`table_of`).
      step: inputs multiplied at a time.
      promote: each step is summed from zero and added in float32; otherwise the accumulator goes on.
      dtype: of the result [M, N].
      interpret: run it on any backend, slowly.
    """
    _register()
    (m, _), n = x.shape, w.shape[0]
    if table.shape != (n // TILE_N, m // TILE_M, WIDTH, 2) or n % TILE_N or m % TILE_M:
        raise ValueError(f"a table of shape {table.shape} is not one for {n} outputs and {m} rows")
    return pl.pallas_call(
        functools.partial(_kernel, step=step, promote=promote, interpret=interpret),
        grid=(n // TILE_N, m // TILE_M),
        out_shape=jax.ShapeDtypeStruct((m, n), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=f"products_{step}{'_promote' if promote else ''}",
    )(x, w, table.reshape(-1))


def table_of(n: int, m: int, parts: Callable[[int, int], Parts]) -> np.ndarray:
    """`products`' table; parts(output, row): of K, in inputs, of the tile that begins there."""
    table = np.zeros((n // TILE_N, math.ceil(m / TILE_M), WIDTH, 2), np.int32)
    for i, j in itertools.product(range(table.shape[0]), range(table.shape[1])):
        found = parts(i * TILE_N, j * TILE_M)
        if len(found) > WIDTH:
            raise ValueError(f"{len(found)} parts, and room for {WIDTH}")
        table[i, j, : len(found)] = found
    return table


def same_parts(n: int, m: int, parts: Parts) -> np.ndarray:
    """All tiles alike."""
    return table_of(n, m, lambda output, row: parts)


def planned(n: int, m: int, plan: machete.Plan) -> np.ndarray:
    """The parts Machete's tiles have."""

    def parts(output: int, row: int) -> Parts:
        found = plan.parts(output // plan.tile.weights, row // plan.tile.rows)
        return [(machete.STEP * first, machete.STEP * end) for first, end in found]

    return table_of(n, m, parts)


def orders(k: int) -> dict[str, Parts]:
    """Orders in which Machete might add, by name."""
    found = {"chain": [(0, k)]}
    for count in (2, 3, 4, 8):
        if count * machete.STEP <= k:
            found[f"split_{count}"] = machete.inputs_of(k, count)
            found[f"split_{count}_down"] = machete.inputs_of(k, count)[::-1]
    if k <= 128 * WIDTH:
        found["groups"] = [(first, first + 128) for first in range(0, k, 128)]
    return found


# ---- comparing -------------------------------------------------------------------------------------------------------


@jax.jit
def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(a == b)


def share(a: jax.Array, b: jax.Array) -> float:
    """Of equal elements."""
    return int(_equal(a, b)) / a.size


def relative(y: Any, exact: np.ndarray) -> float:
    """L2 error."""
    return float(np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact))


def product(x: jax.Array, w: jax.Array, precision: Any = None) -> jax.Array:
    """float32 [M, N], as XLA multiplies."""
    return lax.dot_general(x, w, CONTRACT_LAST, precision=precision, preferred_element_type=jnp.float32)


def bfloat16_of(torch: Any, tensor: Any) -> jax.Array:
    """The same values."""
    return jnp.asarray(from_torch(torch, tensor)).astype(jnp.bfloat16)


def say(record: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(record), flush=True)
    return record


# ---- w4a16 -----------------------------------------------------------------------------------------------------------


def tile_named(schedule: str) -> machete.Tile:
    """'128x16_1x1x1_...' -> its tile and cluster."""
    tile, cluster = schedule.split("_")[:2]
    weights, rows = (int(size) for size in tile.split("x"))
    return machete.Tile(weights, rows, int(cluster.split("x")[0]))


def w4a16(kernels: Kernels, k: int, n: int, rows: Sequence[int], seed: int, schedules: bool) -> list[dict[str, Any]]:
    """A record per number of rows."""
    torch = kernels.torch
    w_host, x_host, _ = inputs(k, n, MANY, seed)
    w, x = jnp.asarray(w_host), jnp.asarray(x_host)
    qtensor = quant.quantize(w, quant.on_engine(quant.parse_scheme("w4a16:g128"), NUMERICS))
    dequantized = quant.dequantize(qtensor).astype(jnp.bfloat16)
    layer = Machete(kernels, jax.tree.map(np.asarray, qtensor))
    x_torch, w_torch = to_torch(torch, x_host), to_torch(torch, np.asarray(dequantized))
    many = quant.dot(x, w, qtensor, numerics=NUMERICS)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    records = []
    for m in rows:
        padded, mine = x[: math.ceil(m / TILE_M) * TILE_M], x_torch[:m].contiguous()
        engine = bfloat16_of(torch, layer(mine))
        exact = mine.double() @ w_torch.double().T
        plan = machete.plan(m, n, k, multiprocessors=processors)

        def in_order(table: np.ndarray, m: int = m, padded: jax.Array = padded) -> jax.Array:
            return products(padded, dequantized, jnp.asarray(table))[:m]

        found = {
            "learner": quant.dot(x[:m], w, qtensor, numerics=NUMERICS),
            "learner_many": many[:m],
            "plan": in_order(planned(n, m, plan)),
            "torch": bfloat16_of(torch, mine @ w_torch.T),
            "exact": bfloat16_of(torch, exact.to(torch.bfloat16)),
        }
        if plan.mode == "split-K":
            numerics = dataclasses.replace(quant.resolve("cuda"), parts=plan.splits)
            found["learner_parts"] = quant.dot(x[:m], w, qtensor, numerics=numerics)
            found["learner_parts_many"] = quant.dot(x, w, qtensor, numerics=numerics)[:m]
        found |= {name: in_order(same_parts(n, m, parts)) for name, parts in orders(k).items()}
        record = {
            "k": k,
            "n": n,
            "m": m,
            "plan": f"{plan.mode} {plan.splits}",
            "tile": [plan.tile.weights, plan.tile.rows, plan.tile.cluster],
            "equal": {name: share(engine, y) for name, y in found.items()},
        }
        if schedules:
            record["schedules"] = {
                name: {
                    "engine": share(engine, y),
                    "chain": share(found["chain"], y),
                    "plan": share(in_order(planned(n, m, machete.plan(m, n, k, tile=tile_named(name)))), y),
                }
                for name, y in ((name, bfloat16_of(torch, layer(mine, name))) for name in layer.schedules())
            }
        records.append(say(record))
    return records


# ---- fp8 -------------------------------------------------------------------------------------------------------------


def fp8_case(kernels: Kernels, k: int, n: int, m: int, seed: int) -> dict[str, Any]:
    """The accumulator, and the whole layer."""
    torch, ops = kernels.torch, kernels.ops
    w_host, x_host, _ = inputs(k, n, m, seed)
    w, x = jnp.asarray(w_host), jnp.asarray(x_host)
    qtensor = quant.quantize(w, quant.on_engine(quant.parse_scheme("fp8"), NUMERICS))
    x_q, s_x = fp8.quantize_rows(x, NUMERICS)
    w_q, s_w = qtensor.qvalue, qtensor.scale
    x_torch, w_torch = to_torch(torch, np.asarray(x_q)), to_torch(torch, np.asarray(w_q))
    exact = x_torch.double() @ w_torch.double().T
    power = 2.0 ** math.floor(math.log2(30000 / float(exact.abs().max())))  # within float16's range
    scale_a = torch.full((m, 1), power, dtype=torch.float32, device=exact.device)
    scale_b = torch.ones((n, 1), dtype=torch.float32, device=exact.device)

    def engine(scale_a: Any, scale_b: Any, dtype: Any) -> Any:
        return ops.cutlass_scaled_mm(x_torch, w_torch.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)

    f16 = engine(scale_a, scale_b, torch.float16)
    bf16 = bfloat16_of(torch, engine(scale_a, scale_b, torch.bfloat16))
    exact_host = exact.cpu().numpy()
    padding = -m % TILE_M
    padded = jnp.pad(x_q.astype(jnp.float32), ((0, padding), (0, 0))).astype(x_q.dtype)
    table = jnp.asarray(same_parts(n, m + padding, [(0, k)]))
    in_order = functools.partial(products, padded, w_q, table, dtype=jnp.float32)
    preset = lax.DotAlgorithmPreset
    chain = in_order(step=128)[:m]
    sums = {
        "xla": jax.jit(product)(x_q, w_q),
        "xla_f32": jax.jit(functools.partial(product, precision=preset.ANY_F8_ANY_F8_F32))(x_q, w_q),
        "xla_fast": jax.jit(functools.partial(product, precision=preset.ANY_F8_ANY_F8_F32_FAST_ACCUM))(x_q, w_q),
        "chain": chain,
        **{f"promoted_{step}": in_order(step=step, promote=True)[:m] for step in (32, 64, 128)},
        "bf16": jax.jit(product)(x_q.astype(jnp.bfloat16), w_q.astype(jnp.bfloat16)),
        "exact": jnp.asarray(exact_host.astype(np.float32)),
    }
    error = {name: relative(y, exact_host) for name, y in sums.items() if name != "exact"}
    error["engine_f16"] = relative(f16.double().cpu().numpy() / power, exact_host)
    error["exact_f16"] = relative((exact * power).to(torch.float16).double().cpu().numpy() / power, exact_host)
    f16_host = jnp.asarray(f16.cpu().numpy())
    scales = (to_torch(torch, np.asarray(s_x)), to_torch(torch, np.asarray(s_w)))
    whole = bfloat16_of(torch, engine(*scales, torch.bfloat16))
    layers = {
        "learner": quant.dot(x, w, qtensor, numerics=NUMERICS),
        "w_then_x": (s_x * (s_w[:, 0] * chain)).astype(jnp.bfloat16),
        "x_then_w": (s_w[:, 0] * (s_x * chain)).astype(jnp.bfloat16),
    }
    return say(
        {
            "k": k,
            "n": n,
            "m": m,
            "equal": {name: share(bf16, (y * power).astype(jnp.bfloat16)) for name, y in sums.items()},
            "f16": {name: share(f16_host, (y * power).astype(jnp.float16)) for name, y in sums.items()},
            "error": error,
            "layer": {name: share(whole, y) for name, y in layers.items()},
        }
    )


# ---- command ---------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scheme", choices=("w4a16", "fp8"))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES], help="KxN")
    parser.add_argument("--schedules", action="store_true", help="w4a16: every schedule of Machete as well")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernel_order.json"))
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if jax.default_backend() != "gpu":
        print("error: this compares CUDA kernels: run it where JAX and torch both see a GPU", file=sys.stderr)
        return 2
    kernels = Kernels("machete")
    results: list[dict[str, Any]] = []
    for seed, shape in enumerate(args.shapes):
        k, n = (int(size) for size in shape.split("x"))
        if args.scheme == "w4a16":
            results += w4a16(kernels, k, n, args.rows, seed, args.schedules)
        else:
            results += [fp8_case(kernels, k, n, m, seed) for m in args.rows]
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "torch": kernels.torch.__version__,
        "scheme": args.scheme,
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
