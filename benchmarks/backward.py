# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the low-bit backward (`quant.backward`): its products against cuBLAS' bfloat16, and its gradients.

    python -m benchmarks.backward products --model 8b --tokens 16384 --out FILE
    python -m benchmarks.backward gradients --model models/qwen25-coder-0.5b --tokens 512 --out FILE

`products`: per layer of a model's shapes, microseconds of dX and dW together, rounding of dY included, and the speed
against two plain bfloat16 products of XLA's (cuBLAS on a GPU). Kinds: `xla/bf16`; `bf16`, the learner's own under a
scheme; `int8` and `fp8`. `alone` is the two products of codes that are there already.

`gradients`: a policy gradient of some text under a scheme, in every format, beside bf16's: cosine and norm by layer and
linear map, of the whole, and of gradients of one format under two seeds.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import gemm
from qarl_jax import models, quant
from qarl_jax.data import load_tokenizer
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loss import get_loss
from qarl_jax.optim import build, leafwise
from qarl_jax.quant.backward import GRIDS, Backward
from qarl_jax.quant.contractions import codes_product
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import TrainBatch

FORMATS = ("bf16", "int8", "fp8")
TEXT = pathlib.Path(__file__).parents[1] / "docs" / "algorithms.md"


def both_of(scheme: str, form: str, x: Any, w: Any, dy: Any) -> Any:
    """Returns a jitted call that computes dX and dW of one linear layer from the residuals of its forward pass."""
    config = quant.parse_scheme(scheme)
    qt = None if config is None else quant.quantize(w, config)
    low = None if form == "bf16" else Backward(form, jnp.uint32(1), jnp.uint32(2))

    @jax.jit
    def run(vjp: Any, dy: Any) -> Any:
        return vjp(dy)

    _, vjp = jax.vjp(lambda x, w: quant.dot(x, w, qt, backward=low), x, w)
    return functools.partial(run, vjp, dy)


def products_of(form: str, m: int, n: int, k: int) -> Any:
    """Returns a jitted call of dX's and dW's matrix products on random codes, without quantization."""
    rng, dtype = np.random.default_rng(0), GRIDS[form].dtype
    draw = lambda *shape: jnp.asarray(rng.integers(-100, 100, shape, np.int8), dtype)  # noqa: E731
    one = lambda size: jnp.ones((size,), jnp.float32)  # noqa: E731
    pairs = (draw(m, n), draw(k, n)), (draw(n, m), draw(k, m))

    @jax.jit
    def run(pairs: Any) -> Any:
        return [
            codes_product(x, one(len(x))[:, None], w, one(len(w)), jnp.bfloat16, quant.resolve("plain"))
            for x, w in pairs
        ]

    return functools.partial(run, pairs)


def products(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Times the backward of every layer; returns a row for every layer and kind."""
    out = []
    for layer, (n, k) in gemm.products(args.model).items():
        rng = np.random.default_rng(0)
        draw = lambda *shape, rng=rng: jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)  # noqa: E731
        x, w, dy = draw(args.tokens, k), draw(n, k) * jnp.bfloat16(0.02), draw(args.tokens, n)

        @jax.jit
        def plain(x: Any, w: Any, dy: Any) -> Any:
            return lax.dot(dy, w), lax.dot_general(dy, x, (((0,), (0,)), ((), ())))

        calls = {"xla/bf16": functools.partial(plain, x, w, dy)}
        for form in FORMATS:
            calls |= {f"{form}/{scheme}": both_of(scheme, form, x, w, dy) for scheme in args.schemes}
        calls |= {f"{form}/alone": products_of(form, args.tokens, n, k) for form in FORMATS[1:]}
        for kind, call in calls.items():
            took = gemm.seconds(call, args.repeats)
            base = took if kind == "xla/bf16" else out[-1]["xla_us"] / 1e6
            row = {"layer": layer, "shape": [args.tokens, n, k], "kind": kind, "us": took * 1e6, "xla_us": base * 1e6}
            out.append(row | {"tflops": 4 * args.tokens * n * k / took / 1e12, "times_bf16": base / took})
            print(json.dumps(out[-1]), flush=True)
    return out


def text_batch(folder: str, tokens: int, rows: int) -> TrainBatch:
    """Makes a batch of rows from this repository's pages; each row is one response behind a prompt of 16 tokens."""
    ids = load_tokenizer(folder).encode(TEXT.read_text())
    if len(ids) < rows * tokens:
        raise SystemExit(f"{TEXT} has {len(ids)} tokens: ask for fewer than {rows} x {tokens}")
    grid = np.asarray(ids[: rows * tokens], np.int32).reshape(rows, tokens)
    place = np.broadcast_to(np.arange(tokens, dtype=np.int32), grid.shape)
    mask = place >= 16
    advantages = np.where(mask, np.linspace(-1, 1, rows)[:, None], 0).astype(np.float32)
    ones = np.ones_like(grid)
    zeros = np.zeros(grid.shape, np.float32)
    return TrainBatch(
        tokens=grid,
        positions=place.copy(),
        segment_ids=ones,
        loss_mask=mask,
        rollout_logprobs=zeros,
        advantages=advantages,
    )


def sums(a: Any, b: Any) -> np.ndarray:
    """Returns the sums of a b, a a and b b over two arrays, in float64 [3]."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return np.array([a @ b, a @ a, b @ b])


def compared(found: np.ndarray) -> dict[str, float]:
    """Returns, from their `sums`, the cosine of two arrays, and the norm of the first divided by the second's."""
    both, first, second = (float(one) for one in found)
    return {"cosine": both / math.sqrt(first * second), "norm": math.sqrt(first / second)}


def gradients(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares low-bit gradients with bf16's; returns a row for every format, scheme, linear map and layer."""
    out = []
    for scheme in args.schemes:
        config = models.read_config(
            args.model,
            compute_dtype="bfloat16",
            param_dtype="bfloat16",  # the files hold no more
            quant=models.parse_rules(scheme, args.group_size),
            numerics=quant.resolve("auto"),
        )
        _, params = models.load_masters(args.model, config)
        find = functools.partial(gradient, config, params, batch=text_batch(args.model, args.tokens, args.rows))
        base = find("bf16", 0)
        for form in FORMATS[1:]:
            out += twice(scheme, form, find, base)
    return out


def twice(scheme: str, form: str, find: Any, base: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Compares a format's gradients under two seeds with bf16's and with each other; holds three gradients at most."""
    first = find(form, 0)
    rows = rows_of(scheme, f"{form}.0", "bf16.0", first, base)
    second = find(form, 1)
    rows += rows_of(scheme, f"{form}.1", "bf16.0", second, base)
    return rows + rows_of(scheme, f"{form}.1", f"{form}.0", second, first)


def gradient(config: Any, params: Any, form: Any, updates: int, batch: TrainBatch) -> dict[str, np.ndarray]:
    """Computes a GRPO gradient of all linear maps, by path, bfloat16 on the host; old log-probs are the policy's."""
    graphdef = models.split(models.abstract_model(config))[0]
    learner = Learner(
        graphdef,
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.AdamW(lr=1e-6)),
        mesh=make_mesh(),
        options=Options(logprob_chunk=256, grad_dtype="bfloat16", backward=form),
    )
    counts = float(batch.loss_mask.sum()), float(len(batch.tokens))
    micro, qweights = learner.put(batch), learner.quantize(params)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, learner.grad_dtype), params)
    grads, _ = learner.accumulate_grads(zeros, params, qweights, micro, None, *counts, updates=updates)
    of_layers = {path for path in models.by_path(grads) if path.startswith("stacks.") and path.endswith(".kernel")}
    return {path: jax.device_get(leaf) for path, leaf in models.by_path(grads).items() if path in of_layers}


def rows_of(scheme: str, name: str, other: str, found: Any, wanted: Any) -> list[dict[str, Any]]:
    """Returns `compared` of two gradients by linear map and layer, and of all linear maps together."""
    base = {"scheme": scheme, "backward": name, "against": other}
    rows, whole = [], np.zeros(3)
    for path in wanted:
        for layer in range(len(wanted[path])):
            part = sums(found[path][layer], wanted[path][layer])
            rows.append(base | {"path": path, "layer": layer} | compared(part))
            whole += part
    rows.append(base | {"path": "all", "layer": -1} | compared(whole))
    worst = min(rows, key=lambda row: row["cosine"])
    print(json.dumps(rows[-1]), "worst:", json.dumps(worst), flush=True)
    return rows


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    timed = verbs.add_parser("products")
    timed.add_argument("--model", choices=gemm.SIZES, default="8b")
    timed.add_argument("--tokens", type=int, default=16384)
    timed.add_argument("--repeats", type=int, default=20)
    real = verbs.add_parser("gradients")
    real.add_argument("--model", required=True, help="a model folder")
    real.add_argument("--tokens", type=int, default=512)
    real.add_argument("--rows", type=int, default=2)
    real.add_argument("--group-size", type=int, default=128)
    for one in (timed, real):
        one.add_argument("--schemes", nargs="+", default=["w8a8", "fp8", "w4a16"])
        one.add_argument("--out", default="")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    rows = {"products": products, "gradients": gradients}[args.verb](args)
    if args.out:
        record = {
            "command": " ".join(["python -m benchmarks.backward", *(sys.argv[1:] if argv is None else argv)]),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "results": rows,
        }
        pathlib.Path(args.out).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
