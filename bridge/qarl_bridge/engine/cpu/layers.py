# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms, RoPE, attention, routers and log-probs of vLLM's CPU engine, with equal bits on every CPU build.

Each operation is computed in float64, rounded to float32 and then to the compute dtype (bf). So neither the order of a
sum nor a library's exp or cos changes the result.

    RMSNorm       r = f32(1 / sqrt(mean(x^2) + eps));  y = bf((x r) w), two float32 multiplications
                  x: the residual sum in float32, which is stored rounded
    SwiGLU        y = bf(f32(g / (1 + exp(-g)) u))
    RoPE          c, s = f32(cos(p f)), f32(sin(p f)), f = 1 / f32(theta^(2i/H));  y = bf(f32(a c - b s)), ...
    attention     y = bf(f32(sum_s p_s v_s)), p = softmax(q . k H^-1/2)
    router        f32(softmax of the chosen logits)
    log-probs     f32(log softmax(z)), z = logits / temperature in float32

Norms and SwiGLU are registered as vLLM custom ops, attention as a vLLM backend. A token's keys and values lie side by
side in vLLM's paged cache, in the cache's dtype. Not supported, and refused: sliding windows, sinks, ALiBi, soft caps,
quantized caches, encoders.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import InputBatch

from qarl_bridge.engine.units import units_per_one

_QUERIES = 256  # of a prompt handled at once, which bounds the memory of the scores


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Computes RMSNorm of x [..., D] float32, with gains `weight` [D] (None: ones); returns [..., D] in `dtype`."""
    # An exact sum, in every order: see `qarl_bridge.engine.cuda.norm_ops`.
    scale = units_per_one(x, 18)
    total = (x.double() * scale).square().round().sum(dim=-1, keepdim=True)
    mean = total / (x.shape[-1] * scale * scale) + float(np.float32(eps))
    r = (1 / torch.from_numpy(np.sqrt(mean.numpy()))).float()  # torch's float64 root is not always the nearest
    y = x * r
    return (y if weight is None else y * weight.float()).to(dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes SwiGLU, silu(gate) up, of x [..., 2 F] with gate and up side by side; returns [..., F]."""
    gate, up = x.double().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).float().to(x.dtype)


def rope_frequencies(theta: float, width: int) -> torch.Tensor:
    """Computes RoPE frequencies 1 / theta^(2i/width), [width / 2] float32, with equal bits on every build."""
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    return torch.from_numpy(np.float32(1.0) / power)


def rope_table(frequencies: torch.Tensor, positions: int) -> torch.Tensor:
    """Computes the RoPE table, cos and sin of every position: [positions, 2 * frequencies] float32."""
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequencies.numpy().astype(np.float64)
    return torch.from_numpy(np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32))


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to x [T, N, H] with the positions' rows of the table, [T, H]; returns [T, N, H]."""
    cos, sin = table.double().unsqueeze(1).chunk(2, dim=-1)
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).float().to(x.dtype)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Computes attention of q [B, T, N, H] over k and v [B, K, S, H]; returns [B, T, N, H] in `dtype`.

    seen: mask, bool [B, T, S]. Masked keys and values may be NaN.
    """
    B, T, N, H = q.shape
    K = k.shape[1]
    scores = q.double().view(B, T, K, N // K, H).permute(0, 2, 3, 1, 4).reshape(B, K, -1, H) @ k.double().mT
    scores = (scores * scale).view(B, K, N // K, T, -1).masked_fill_(~seen[:, None, None], -torch.inf)
    p = torch.softmax(scores, dim=-1).view(B, K, N // K * T, -1)
    out = p @ v.masked_fill(~seen.any(dim=1)[:, None, :, None], 0).double()
    return out.float().to(dtype).view(B, K, N // K, T, H).permute(0, 3, 1, 2, 4).reshape(B, T, N, H)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Computes log-probs [..., V] float32 of logits in float64, as `qarl_bridge.engine.cuda.sampling` does, but by
    torch's exponential and logarithm: one in some 10^9 differs from the learner's."""
    z = logits.double()
    z = z - z.amax(dim=-1, keepdim=True)
    largest = z == 0
    x, sums = z.exp().masked_fill_(largest, 0) * 2.0**35, []
    for _ in range(3):
        whole = x.round()
        sums.append(whole.sum(dim=-1, keepdim=True))
        x = (x - whole) * 2.0**36
    high, middle, low = sums
    rest = (high + (middle + low * 2.0**-36) * 2.0**-36) * 2.0**-35 + (largest.sum(dim=-1, keepdim=True) - 1)
    total = 1 + rest
    return (z - torch.where(total == 1, rest, total.log() * rest / (total - 1))).float()


class Float64RMSNorm(RMSNorm):
    """vLLM's RMSNorm layer, computed by `rms_norm`."""

    def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Returns the norm of x, or, with a residual, the norm of x + residual and the sum."""
        assert self.variance_size_override is None
        weight = self.weight if self.has_weight else None
        if residual is None:
            return rms_norm(x.float(), weight, self.variance_epsilon, x.dtype)
        total = x.float() + residual.float()
        return rms_norm(total, weight, self.variance_epsilon, x.dtype), total.to(x.dtype)

    forward_native = forward_cpu


class Float64SiluAndMul(SiluAndMul):
    """vLLM's SwiGLU layer, computed by `silu_and_mul`."""

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """Computes SwiGLU of x [..., 2 F]; returns [..., F]."""
        return silu_and_mul(x)

    forward_native = forward_cpu  # type: ignore[assignment]


def _rotary(
    self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> Any:
    """Applies RoPE to query and key [T, heads * H]; replaces `RotaryEmbedding.forward_cpu`, also in subclasses."""
    if not hasattr(self, "float_table") or not self.is_neox_style or self.rotary_dim != self.head_size:
        raise NotImplementedError(f"float64 RoPE: whole heads rotated by halves, not {type(self).__name__}")
    table = self.float_table[positions.flatten()]

    def of(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.reshape(len(table), -1, self.head_size), table).view(x.shape)

    return of(query), None if key is None else of(key)


def _cos_sin_cache(self: Any) -> torch.Tensor:
    """Computes and keeps the float32 RoPE table when vLLM makes a layer. vLLM rounds the returned table for its kernel.
    Subclasses with another table do not call it."""
    self.float_table = rope_table(self._compute_inv_freq(self.base), self.max_position_embeddings)
    return self.float_table


def _inverse_frequencies(self: RotaryEmbedding, base: float) -> torch.Tensor:
    return rope_frequencies(base, self.rotary_dim)


def llama3_frequencies(self: Any, base: float) -> torch.Tensor:
    """Computes Llama 3.1's scaled RoPE frequencies by vLLM's formula: float32 [rotary_dim / 2], radians per position.

    Computes them in numpy: torch would divide a scalar through a reciprocal, which rounds differently.

    Args:
      self: vLLM's Llama3RotaryEmbedding, whose method this function replaces. base: RoPE's theta.
    """
    frequency = rope_frequencies(base, self.rotary_dim).numpy()
    length, low, high = self.orig_max_position, self.low_freq_factor, self.high_freq_factor
    wavelength = (2 * math.pi) / frequency
    smooth = (length / wavelength - low) / (high - low) if high != low else 0.0 * frequency
    mixed = (1 - smooth) * frequency / self.scaling_factor + smooth * frequency
    slow = np.where(wavelength > length / low, frequency / self.scaling_factor, mixed)
    return torch.from_numpy(np.where(wavelength < length / high, frequency, slow))


class Float64AttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention layer, computed by `attend`; NotImplementedError for unsupported kinds of attention."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        plain = (self.logits_soft_cap, self.alibi_slopes, self.sinks) == (0, None, None)
        if not plain or self.sliding_window != -1 or self.is_fp8_kv_cache or self.attn_type != "decoder":
            raise NotImplementedError("float64 attention: causal, whole sequences, no soft cap, no sinks, no ALiBi")

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        """Writes keys and values [T, K, H] into their slots of the cache [blocks, K, block size, 2 H]."""
        slots = slot_mapping[slot_mapping >= 0].long()
        both = torch.cat([key, value], dim=-1)[slot_mapping >= 0]
        kv_cache[slots // kv_cache.shape[2], :, slots % kv_cache.shape[2]] = both

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of queries [T, N, H] of several sequences over cached keys and values, into `output`."""
        if attn_metadata is None:  # vLLM warms up
            return output
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        queries = [end - start for start, end in itertools.pairwise(starts)]
        decoding = [i for i, count in enumerate(queries) if count == 1]
        groups = [decoding] if decoding else []
        groups += [[i] for i, count in enumerate(queries) if count > 1]
        for sequences in groups:
            first, count = starts[sequences[0]], queries[sequences[0]]
            rows = torch.tensor([starts[i] for i in sequences]) if count == 1 else slice(first, first + count)
            size = max(lengths[i] for i in sequences)
            blocks = attn_metadata.block_table[sequences, : -(-size // kv_cache.shape[2])].long()
            kv = kv_cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, :size]  # [B, K, S, 2 H]
            keys, values = kv.chunk(2, dim=-1)
            own = query[rows].view(len(sequences), count, *query.shape[1:])
            ends = torch.tensor([lengths[i] - count + 1 for i in sequences])
            parts = []
            for start in range(0, count, _QUERIES):
                stop = min(start + _QUERIES, count)
                last = ends[:, None] + torch.arange(start, stop)  # keys that each query sees
                most = int(last.max())
                seen = torch.arange(most) < last[..., None]
                parts.append(
                    attend(own[:, start:stop], keys[:, :, :most], values[:, :, :most], seen, self.scale, output.dtype)
                )
            output.view_as(query)[rows] = torch.cat(parts, dim=1).flatten(0, 1)
        return output


class Float64AttentionBackend(CPUAttentionBackend):
    """vLLM's CPU attention backend (metadata and cache) with `Float64AttentionImpl` as its layer."""

    @staticmethod
    def get_impl_cls() -> type[Float64AttentionImpl]:
        """Returns `Float64AttentionImpl`."""
        return Float64AttentionImpl


def _softmax_topk(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts by logits [T, E]: weights float32 [T, k], experts int32 [T, k]; replaces vLLM's function."""
    # Of equal logits the lower expert comes first, as in the learner; torch.topk leaves their order open.
    ordered = torch.sort(router_logits, dim=-1, descending=True, stable=True)
    chosen, experts = ordered.values[..., :top_k], ordered.indices[..., :top_k]
    among = (chosen if renormalize else router_logits).double()
    top = among.amax(dim=-1, keepdim=True)
    total = (torch.exp(among - top) * 2.0**43).round().sum(dim=-1, keepdim=True) * 2.0**-43
    return torch.exp(chosen.double() - (top + total.log())).float(), experts.to(torch.int32)


class Rewound(torch.Generator):
    """A CPU random generator whose last draw can be undone.

    In a step that ends within a request's prompt vLLM draws a token and undoes the draw by the generator's offset. CPU
    generators have no offset, so vLLM 0.32 fails. With the undo, chunked prefill does not change a request's draws.
    """

    @classmethod
    def of(cls, generator: torch.Generator) -> Rewound:
        """Makes a `Rewound` generator with the state of `generator`."""
        own = cls()
        own.set_state(generator.get_state())
        return own

    def mark(self) -> None:
        """Saves the state before a draw, so that `set_offset(0)` can restore it."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Returns 4, from which vLLM subtracts 4 to undo a draw."""
        return 4

    def set_offset(self, offset: int) -> None:
        """Restores the state before the last draw; `offset` must be 0."""
        assert offset == 0, offset
        self.set_state(self._before)


def _add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_request(self: Any, request: Any) -> Any:
        if type(request.generator) is torch.Generator:
            request.generator = Rewound.of(request.generator)
        return original(self, request)

    return add_request


def register() -> None:
    """Registers these operations in vLLM in place of its own (idempotent). Call it before an engine starts."""
    for name, op in (
        ("RMSNorm", Float64RMSNorm),
        ("SiluAndMul", Float64SiluAndMul),
    ):
        if name not in op_registry_oot:
            CustomOp.register_oot(op, name=name)
    register_backend(
        AttentionBackendEnum.CPU_ATTN, f"{Float64AttentionBackend.__module__}.{Float64AttentionBackend.__qualname__}"
    )
    RotaryEmbeddingBase._compute_inv_freq = _inverse_frequencies
    RotaryEmbeddingBase._compute_cos_sin_cache = _cos_sin_cache
    Llama3RotaryEmbedding._compute_inv_freq = llama3_frequencies
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native = _rotary
    cpu_router._softmax_topk = _softmax_topk
    Sampler.compute_logprobs = staticmethod(log_softmax)
    draw = TopKTopPSampler.forward_cpu
    if getattr(draw, "is_float64", False):
        return
    InputBatch.add_request = _add_request(InputBatch.add_request)

    @functools.wraps(draw)
    def forward_cpu(self: Any, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        logits = apply_top_k_top_p(logits, k, p)
        for generator in generators.values():
            if isinstance(generator, Rewound):  # others are vLLM's, when it warms up
                generator.mark()
        mode, self.logprobs_mode = self.logprobs_mode, "raw_logprobs"  # none are computed by vLLM
        try:
            tokens, _ = draw(self, logits, generators, None, None)
        finally:
            self.logprobs_mode = mode
        return tokens, log_softmax(logits) if mode == "processed_logprobs" else None

    forward_cpu.is_float64 = True  # type: ignore[attr-defined]
    TopKTopPSampler.forward_cpu = forward_cpu
