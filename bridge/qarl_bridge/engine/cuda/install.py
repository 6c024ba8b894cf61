# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces vLLM's operations on CUDA by batch-invariant ones, and some by faster ones of equal bits.

Kernels: `cuda/ops.py`, `cuda/norm_ops.py`, `cuda/sampling.py`.

    layer                                  vLLM                                  here
    q|k|v, o, gate|up, down in bf16        cuBLAS, order by the number of rows   ops.product
    these in int4 (w4a16), nvfp4           Machete or Marlin, as in bf16         ops.product
    these with zero points                 none                                  ops.product, of rounded x (w2a2, w4a4)
    head                                   cuBLAS, logits rounded to bf16        ops.product, float32 logits
    RMSNorm                                threads by the number of rows         norm_ops.rms_norm, with int8 codes
    heads' RMSNorm and rotary embedding    three kernels                         norm_ops.rotated_norms
    log-probs                              float32 sums in torch's order         sampling.log_softmax
    drawing                                a kernel for each request             sampling.draw
    ranks of sampled tokens                all logits once more                  none, in the second model runner
    routers, experts                       cuBLAS; Triton, CUTLASS or Marlin     cuda/experts.py

`install` replaces methods of vLLM's classes before an engine is built. A replacement calls vLLM's method for tensors
that are not bfloat16, and on GPUs without wgmma.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel

from qarl_bridge.engine.cuda import int8, norm_ops, ops, sampling
from qarl_bridge.engine.readback import experts as readback_experts

# vLLM's dense layers; of others that are not quantized, routers have a rule of their own (`cuda/experts.py`).
_DENSE = ("QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear", "ColumnParallelLinear")
# vLLM's second model runner has a sampler of its own.
_OF_THE_SECOND_RUNNER = (
    ("vllm.v1.worker.gpu.sample.logprob", "compute_token_logprobs", sampling.token_logprobs),
    ("vllm.v1.worker.gpu.sample.logprob", "_ranks_kernel", sampling.NoRanks()),
    ("vllm.v1.worker.gpu.sample.states", "apply_temperature", sampling.apply_temperature),
)
# Attention whose heads have norms of their own.
_WITH_HEAD_NORMS = (
    ("vllm.model_executor.models.qwen3", "Qwen3Attention"),
    ("vllm.model_executor.models.qwen3_moe", "Qwen3MoeAttention"),
)
_OFFSET = 4  # of a generator, for each draw
UNKNOWN = "products and norms are vLLM's own: this version's classes are not the ones known here"


def install() -> str:
    """Installs the batch-invariant operations in vLLM's classes. Call it before an engine is built.

    Returns:
      A sentence that says what is not batch-invariant, or "".
    """
    try:
        linear = importlib.import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod
        head = importlib.import_module("vllm.model_executor.layers.vocab_parallel_embedding").UnquantizedEmbeddingMethod
        norm = importlib.import_module("vllm.model_executor.layers.layernorm").RMSNorm
        sampler = importlib.import_module("vllm.v1.sample.sampler").Sampler
        top = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").TopKTopPSampler
        originals = [linear.apply, head.apply, norm.forward_cuda, sampler.compute_logprobs, top.forward_native]
    except (ImportError, AttributeError):
        return UNKNOWN
    if getattr(originals[0], "batch_invariant", False):
        return _without_wgmma()
    _replace(linear, "apply", functools.partial(_product, only=_DENSE))
    _replace(head, "apply", functools.partial(_product, out_dtype=torch.float32, splits=1))
    _replace(norm, "forward_cuda", _norm)
    sampler.compute_logprobs = staticmethod(sampling.log_softmax)
    _replace(top, "forward_native", _top)
    for module, name, own in _OF_THE_SECOND_RUNNER:
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue  # a version without it
        if hasattr(found, name):
            setattr(found, name, own)
    if torch.cuda.is_available():
        from qarl_bridge.engine.cuda import experts

        experts.install(_replace)
        _install_faster()
    from qarl_bridge.engine import asym_layers, nvfp4_layers
    from qarl_bridge.engine.cuda import asym, int4, nvfp4

    int4.register()
    asym_layers.serve(asym.BatchInvariantAsymmetricLinear)
    if _has_wgmma():
        nvfp4_layers.serve(nvfp4.BatchInvariantNvFp4LinearKernel)
    return _without_wgmma()


def _install_faster() -> None:
    """Installs kernels that give the bits of vLLM's in less time, where this version's classes are known."""
    int8.install()
    for module, name in _WITH_HEAD_NORMS:
        with contextlib.suppress(ImportError, AttributeError):
            _replace(getattr(importlib.import_module(module), name), "forward", _attention)


def _without_wgmma() -> str:
    if torch.cuda.is_available() and not _has_wgmma():
        return "linear layers and logits are vLLM's own: the bridge's products need a Hopper GPU (sm90)"
    return ""


def left_to_vllm(modules: Mapping[str, Any]) -> list[str]:
    """Lists which kinds of layers of a live model vLLM's kernels compute, each with its first layer's name."""
    kinds: dict[str, str] = {}
    for name, module in modules.items():
        method = getattr(module, "quant_method", None)
        kernel = getattr(getattr(module, "scheme", None), "kernel", None)
        if readback_experts.is_experts(module) and not getattr(method, "is_batch_invariant", False):
            kinds.setdefault(f"experts are vLLM's own ({type(method).__name__})", name)
        elif isinstance(kernel, MPLinearKernel | NvFp4LinearKernel) and not getattr(
            kernel, "is_batch_invariant", False
        ):
            kinds.setdefault(f"4-bit layers are vLLM's own ({type(kernel).__name__})", name)
    return [f"{kind}, first: {name}" for kind, name in kinds.items()]


def _replace(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    replacement = functools.wraps(original)(make(original))
    replacement.batch_invariant = True  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


@functools.cache
def _has_wgmma() -> bool:
    """Tells whether this is a Hopper GPU (sm90), which the kernels need."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def _serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0


def _product(original: Callable[..., Any], only: tuple[str, ...] = (), **options: Any) -> Callable[..., Any]:
    """Wraps `apply` of an unquantized layer. only: served class names; empty: all. options: for `ops.product`."""

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        theirs = only and type(layer).__name__ not in only
        if theirs or not _serves(x, layer.weight) or not _has_wgmma():
            return original(self, layer, x, bias)
        y = ops.product(x.reshape(-1, x.shape[-1]), layer.weight, bias=bias, **options)
        return y.view(*x.shape[:-1], y.shape[-1])

    return apply


def _norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_cuda(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if not self.pass_weight or self.variance_size_override is not None or not _serves(x, self.weight):
            return original(self, x, residual)
        codes = int8.room(self, x)
        y = norm_ops.rms_norm(x, self.weight.data, self.variance_epsilon, residual, codes)
        int8.offer(self, y if isinstance(y, torch.Tensor) else y[0], codes)
        return y

    return forward_cuda


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps attention with norms of heads: norm and rotary embedding are one kernel, where both are the plain ones."""

    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        rotary, norms = self.rotary_emb, (self.q_norm, self.k_norm)
        plain = type(rotary).__name__ == "RotaryEmbedding" and rotary.is_neox_style and positions.dim() == 1
        size, table = self.head_dim, getattr(rotary, "cos_sin_cache", None)
        plain = plain and norms[0].variance_epsilon == norms[1].variance_epsilon
        if not plain or size & (size - 1) or rotary.rotary_dim != size or table is None:
            return original(self, positions, hidden_states)
        if not all(n.pass_weight and n.variance_size_override is None and _serves(table, n.weight) for n in norms):
            return original(self, positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        both, v = qkv.split([self.q_size + self.kv_size, self.kv_size], dim=-1)
        gains = norms[0].weight.data, norms[1].weight.data
        both = norm_ops.rotated_norms(both, self.q_size // size, gains, norms[0].variance_epsilon, positions, table)
        q, k = both.split([self.q_size, self.kv_size], dim=-1)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output

    return forward


def _top(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps vLLM's top-k and top-p sampler: batch-invariant log-probs of the kept tokens, and draws from them."""

    def forward_native(self: Any, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        if self.logprobs_mode != "processed_logprobs" or not logits.is_cuda:
            return original(self, logits, generators, k, p)
        kept = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p(logits, k, p)
        logprobs = sampling.log_softmax(kept)
        if len(generators) == logits.shape[0]:
            return _drawn(logprobs, generators), logprobs
        mode, self.logprobs_mode = self.logprobs_mode, "raw_logprobs"  # vLLM's own would be computed for nothing
        try:
            return original(self, kept, generators, None, None)[0], logprobs
        finally:
            self.logprobs_mode = mode

    return forward_native


def _drawn(logprobs: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """Samples a token for each row by its generator's seed and offset, in one launch for all rows.

    vLLM would call every generator, with noise for the whole vocabulary. The offset grows as in vLLM, which subtracts a
    step where it discards a draw.
    """
    rows = [generators[row] for row in range(len(generators))]
    offsets = [generator.get_offset() for generator in rows]
    for generator, offset in zip(rows, offsets, strict=True):
        generator.set_offset(offset + _OFFSET)
    # From pinned memory, so that the host does not wait for the device.
    signed = [ctypes.c_int64(generator.initial_seed()).value for generator in rows]
    seeds, draws = (
        torch.tensor(values, dtype=dtype, pin_memory=True).to(logprobs.device, non_blocking=True)
        for values, dtype in ((signed, torch.int64), ([offset // _OFFSET for offset in offsets], torch.int32))
    )
    return sampling.draw(logprobs, seeds, draws)
