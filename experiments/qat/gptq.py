# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python experiments/qat/gptq.py CONFIG [--folder DIR] [overrides]`: held-out perplexity of GPTQ.

GPTQ (arXiv 2210.17323) in PyTorch, on the rows of a training: Hessians in float64, a layer after the other, inputs from
the quantized prefix. Columns go by falling diagonal of the Hessian (`act_order`), or in their own order.

The grid is asymmetric, minimum to maximum of a group, with float32 scales and integer zero points. Rounding to nearest
on this grid stands beside GPTQ. Weights are not rounded to bfloat16, so that scales have more bits than the project's.
Each result is a JSON line of `--out` as soon as it is there; those that the file has are not made again.
"""

import argparse
import contextlib
import json
import math
import pathlib
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoModelForCausalLM

from qarl_jax import models
from qarl_jax.qat import command, text
from qarl_jax.typed_config import load

DAMP = 0.01
AT_ONCE = 64  # inputs whose errors reach the rest of the weight in one product
ORDER = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def grid(w: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes scales and zero points, each [N, K/G], of a weight [N, K]."""
    parts = w.reshape(w.shape[0], -1, group)
    high, low = parts.amax(-1).clamp(min=0), parts.amin(-1).clamp(max=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
    return scales, torch.round(-low / scales)


def on_grid(w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds a weight to the nearest values of its grid; all arguments have one shape."""
    return (torch.clamp(torch.round(w / scales) + zeros, 0, 2**bits - 1) - zeros) * scales


def nearest(w: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Rounds a weight [N, K] to nearest."""
    scales, zeros = (x.repeat_interleave(group, 1) for x in grid(w, bits, group))
    return on_grid(w, scales, zeros, bits)


def gptq(w: torch.Tensor, hessian: torch.Tensor, bits: int, group: int, act_order: bool) -> torch.Tensor:
    """Quantizes a weight [N, K] by GPTQ with a Hessian [K, K], in float64."""
    w, hessian = w.double(), hessian.clone()
    scales, zeros = (x.repeat_interleave(group, 1) for x in grid(w, bits, group))
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1
    hessian.diagonal().add_(DAMP * hessian.diagonal().mean())
    order = (
        torch.argsort(hessian.diagonal(), descending=True) if act_order else torch.arange(w.shape[1], device=w.device)
    )
    w, scales, zeros = (x[:, order].T.contiguous() for x in (w, scales, zeros))  # an input is a row
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    shares = upper / upper.diagonal()[:, None]
    out = torch.empty_like(w)
    for first in range(0, w.shape[0], AT_ONCE):
        part = slice(first, first + AT_ONCE)
        own, errors = w[part], torch.empty_like(w[part])
        for i in range(own.shape[0]):
            at = first + i
            out[at] = on_grid(own[i], scales[at], zeros[at], bits)
            errors[i] = own[i] - out[at]
            own[i + 1 :].addr_(shares[at, at + 1 : first + own.shape[0]], errors[i], alpha=-1)
        w[first + AT_ONCE :] -= shares[part, first + AT_ONCE :].T @ errors
    return out.T[:, torch.argsort(order)]


@torch.no_grad()
def perplexity(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Computes the perplexity of rows [H, T]: exp of the mean negative log-likelihood, without first tokens."""
    total = 0.0
    for row in rows.split(4):
        logps = torch.log_softmax(model(row, use_cache=False).logits[:, :-1].float(), -1)
        total -= logps.gather(-1, row[:, 1:, None]).double().sum().item()
    return math.exp(total / (rows.shape[0] * (rows.shape[1] - 1)))


class ReachedError(Exception):
    """Ends a forward pass at its first layer."""


@torch.no_grad()
def quantize(model: torch.nn.Module, rows: torch.Tensor, bits: int, group: int, act_order: bool) -> None:
    """Quantizes the weights of all layers by GPTQ, in place."""
    hidden, kept = [], {}

    def catch(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        hidden.append(args[0])
        kept.update(kwargs)
        raise ReachedError

    hook = model.model.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    for row in rows.split(4):
        with contextlib.suppress(ReachedError):
            model(row, use_cache=False)
    hook.remove()
    for layer in model.model.layers:
        for names in ORDER:
            modules = [layer.get_submodule(name) for name in names]
            size = modules[0].in_features
            hessian = torch.zeros(size, size, dtype=torch.float64, device=DEVICE)

            def add(module: torch.nn.Module, args: tuple, hessian: torch.Tensor = hessian) -> None:
                x = args[0].reshape(-1, args[0].shape[-1]).double()
                hessian.add_(x.T @ x)

            hook = modules[0].register_forward_pre_hook(add)
            for x in hidden:
                layer(x, **kept)
            hook.remove()
            whole = torch.cat([module.weight for module in modules])  # rows do not know of each other
            parts = gptq(whole, hessian, bits, group, act_order).split([module.out_features for module in modules])
            for module, part in zip(modules, parts, strict=True):
                module.weight.copy_(part)
        out = [layer(x, **kept) for x in hidden]
        hidden = [x[0] if isinstance(x, tuple) else x for x in out]


@torch.no_grad()
def round_all(model: torch.nn.Module, bits: int, group: int) -> None:
    """Rounds the weights of all layers to nearest, in place."""
    for layer in model.model.layers:
        for name in sum(ORDER, ()):
            module = layer.get_submodule(name)
            module.weight.copy_(nearest(module.weight, bits, group))


def main() -> None:
    """Writes one JSON line per width and method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--out", required=True, help="a file of JSON lines, which is gone on with")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--rows", type=int, default=512, help="of calibration, the first of the training's")
    args, overrides = parser.parse_known_args()
    cfg = load.load(command.Config, args.config, overrides)
    config = models.read_config(cfg.model.path)
    sizes = {"count": cfg.text.rows, "heldout": cfg.text.heldout, "length": cfg.text.row_len}
    found = text.rows(cfg.data, cfg.model.path, config, **sizes, seed=cfg.seed)
    train, heldout = (torch.tensor(rows, dtype=torch.long, device=DEVICE) for rows in found)
    train, out = train[: args.rows], pathlib.Path(args.out)
    lines = out.read_text().splitlines() if out.is_file() else []
    done = {(line["method"], line.get("bits")) for line in map(json.loads, lines)}

    def measure(method: str, change: Callable[[torch.nn.Module], None], **facts: int) -> None:
        if (method, facts.get("bits")) in done:
            return
        began = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32).to(DEVICE).eval()
        change(model)
        line = {"method": method} | facts | {"perplexity": perplexity(model, heldout), "heldout": list(heldout.shape)}
        with out.open("a") as file:
            file.write(json.dumps(line | {"s": round(time.perf_counter() - began, 1)}) + "\n")
        if DEVICE == "cuda":
            torch.cuda.empty_cache()  # for the trainings beside it

    measure("full", lambda model: None)
    for bits in args.bits:
        on = {"bits": bits, "group": args.group}
        measure("gptq_act_order", partial(quantize, rows=train, act_order=True, **on), **on, rows=len(train))
        measure("rounded", partial(round_all, **on), **on)
        measure("gptq", partial(quantize, rows=train, act_order=False, **on), **on, rows=len(train))


if __name__ == "__main__":
    main()
