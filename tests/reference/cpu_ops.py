# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Every operation of the bridge's CPU engine on fixed inputs, under one of vLLM's builds.

`QARL_BRIDGE_CPU_BUILD=avx2 python cpu_ops.py FILE` writes the outputs, as float32 arrays; the inputs are `inputs()`.
The widths are those of Qwen2.5-0.5B: contractions of 896 and 4,864.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np

GROUP = 128
SHAPES = ((896, 96), (4864, 64))  # K, N
HEADS, KV_HEADS, HEAD_DIM, LENGTH, THETA = 14, 2, 64, 70, 1e6


def bf(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def inputs() -> dict[str, np.ndarray]:
    """float32 arrays that hold bfloat16 values."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, spread: float = 1.0) -> np.ndarray:
        return bf(rng.normal(size=shape) * spread)

    out = {}
    for k, n in SHAPES:
        out[f"x_{k}"] = bf(rng.normal(size=(33, k)) * np.exp(rng.normal(size=(33, 1))))
        out[f"w_{k}"], out[f"b_{k}"] = normal(n, k, spread=0.03), normal(n)
    out |= {"residual": normal(33, 896, spread=8.0), "norm": bf(1 + 0.3 * rng.normal(size=896))}
    out |= {"q": normal(LENGTH, HEADS, HEAD_DIM), "k": normal(LENGTH, KV_HEADS, HEAD_DIM)}
    out |= {"v": normal(LENGTH, KV_HEADS, HEAD_DIM), "logits": rng.normal(size=(5, 3000)).astype(np.float32) * 4}
    return out


def main(path: str) -> None:
    """Writes the outputs."""
    from qarl_bridge.engine.cpu import build as cpu_build

    cpu_build.prepare()
    import torch

    cpu_build.choose(torch)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qarl_bridge.engine.cpu import layers
        from qarl_bridge.engine.cpu import linear as kernels
    from tests.reference import quant_reference as ref

    given = inputs()

    def bf16(name: str) -> torch.Tensor:
        return torch.from_numpy(given[name]).bfloat16()

    out = {}
    for k, _ in SHAPES:
        x, w, b = bf16(f"x_{k}"), bf16(f"w_{k}"), bf16(f"b_{k}")
        int8, int8_scale = (torch.from_numpy(a) for a in ref.int8_weight(given[f"w_{k}"]))
        int4, int4_scale = ref.int4_weight(given[f"w_{k}"], GROUP)
        words, int4_scale = torch.from_numpy(ref.pack(int4)), torch.from_numpy(int4_scale.astype(np.float32))
        fp8, fp8_scale = ref.fp8_weight(given[f"w_{k}"])
        fp8 = torch.from_numpy(fp8.view(np.uint8)).view(torch.float8_e4m3fn)
        channel = kernels.channel_weight
        layer = kernels.product
        out |= {
            f"bf16_{k}": layer(x, w.double(), b),
            f"head_{k}": layer(x, w.double(), None, wide=True),
            f"w4a16_{k}": layer(x, kernels.int4_weight(words, int4_scale, False), b),
            f"w4a8_{k}": layer(x, kernels.int4_weight(words, int4_scale, True), b, kernels.int8_rows),
            f"w8a8_{k}": layer(x, channel(int8, int8_scale), b, kernels.int8_rows),
            f"fp8_{k}": layer(x, channel(fp8, torch.from_numpy(fp8_scale)), b, kernels.fp8_rows),
        }
    x = bf16("x_896")
    total = x.float() + bf16("residual").float()
    out["norm"] = layers.rms_norm(x.float(), bf16("norm"), 1e-6, torch.bfloat16)
    out["added"] = layers.rms_norm(total, bf16("norm"), 1e-6, torch.bfloat16)
    out["swiglu"] = layers.silu_and_mul(bf16("x_4864"))
    table = layers.rope_table(layers.rope_frequencies(THETA, HEAD_DIM), LENGTH)
    q, k, v = (layers.rotate(bf16("q"), table), layers.rotate(bf16("k"), table), bf16("v"))
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None]
    keys, values = (part.transpose(0, 1)[None] for part in (k, v))
    out["rope"] = q
    out["attention"] = layers.attend(q[None], keys, values, seen, HEAD_DIM**-0.5, torch.bfloat16)[0]
    out["logprobs"] = layers.log_softmax(torch.from_numpy(given["logits"]))
    np.savez(path, **{name: value.float().numpy() for name, value in out.items()})


if __name__ == "__main__":
    main(sys.argv[1])
