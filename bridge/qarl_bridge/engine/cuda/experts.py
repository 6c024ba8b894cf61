# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant routers and MoE experts for a vLLM engine on CUDA (kernels: cuda/expert_ops.py).

Formats: bf16, int8 (w8a8), e4m3 (fp8), and int4 or e2m1 with bf16 activations (w4a16, nvfp4; widths a multiple of 128).
vLLM computes other experts. 4-bit experts are never decoded to a buffer: reading bf16(q s) for the few rows of a
decoding step would take four times as long, and a model's decoded experts would fill a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8 import (  # noqa: E501
    CompressedTensorsW8A8Fp8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8 import (  # noqa: E501
    CompressedTensorsW8A8Int8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
    CompressedTensorsWNA16MoEMethod,
)

from qarl_bridge.engine import expert_methods
from qarl_bridge.engine.cuda import expert_ops, nvfp4, ops
from qarl_bridge.engine.nvfp4_experts import NvFp4Experts
from qarl_bridge.engine.readback import experts as readback_experts
from qarl_bridge.engine.units import ROUTER


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Computes SwiGLU by vLLM's elementwise kernel, as in dense layers."""
    y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(y, x)
    return y


def _int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale, _ = _custom_ops.scaled_int8_quant(x)
    return codes, scale


def _fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)


class _BatchInvariant(FusedMoEMethodBase):
    """Base class of the CUDA MoE methods. rows: quantizes activations; None: bf16 activations."""

    rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
    is_batch_invariant = True
    names: tuple[str, ...] = "weight", "weight_scale"  # of what is multiplied, behind "w13_" and "w2_"

    is_monolithic = False  # type: ignore[assignment]  # the router chooses, and may be listened to
    supports_internal_mk = True  # type: ignore[assignment]  # no kernel of vLLM's is to be made

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None: no kernel of vLLM needs a config."""
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Does nothing: the kernel multiplies weights in their loaded layout."""

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the MoE layer's output [M, D] of x [M, D], routed by weights and expert ids [M, k]."""

        def held(which: str) -> expert_ops.Held:
            weight, scale, *factor = (getattr(layer, f"{which}_{name}", None) for name in self.names)
            return weight, scale, factor[0] if factor else None

        options: dict[str, Any] = {"align": moe_align_block_size, "activation": _silu_and_mul, "rows": self.rows}
        return expert_ops.experts(x, topk_weights, topk_ids, held("w13"), held("w2"), **options)


class BatchInvariantMoEMethod(_BatchInvariant, UnquantizedFusedMoEMethod):
    """vLLM MoE method for bf16 experts, batch-invariant."""

    def __init__(self, moe: Any):
        UnquantizedFusedMoEMethod.__init__(self, moe)
        if _lacks(moe):
            raise NotImplementedError("batch-invariant experts: no biases, no expert parallelism, SwiGLU only")


class _Quantized(_BatchInvariant):
    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any):
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self.static_input_scales, self.block_quant, self.weight_block_size = False, False, None


class BatchInvariantInt8MoEMethod(_Quantized, CompressedTensorsW8A8Int8MoEMethod):
    """vLLM MoE method for w8a8 experts, batch-invariant. It quantizes activations, which vLLM 0.25 does not."""

    rows = staticmethod(_int8_rows)


class BatchInvariantFp8MoEMethod(_Quantized, CompressedTensorsW8A8Fp8MoEMethod):
    """vLLM MoE method for fp8 experts, batch-invariant."""

    rows = staticmethod(_fp8_rows)


class BatchInvariantWNA16MoEMethod(_Quantized, CompressedTensorsWNA16MoEMethod):
    """vLLM MoE method for w4a16 experts, batch-invariant."""

    names = "weight_packed", "weight_scale"

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any):
        super().__init__(weight_quant, input_quant, moe)
        self.num_bits, self.symmetric, self.strategy = weight_quant.num_bits, True, weight_quant.strategy
        self.packed_factor = 32 // weight_quant.num_bits
        self.group_size = -1 if weight_quant.group_size is None else weight_quant.group_size

    def create_weights(self, layer: Any, *args: Any, **named: Any) -> None:
        """Creates vLLM's parameters in checkpoint layout, [N, K/8] and [N, K/G]; some vLLM versions transpose them."""
        super().create_weights(layer, *args, **named)
        for name in (f"{which}_{part}" for which in ("w13", "w2") for part in self.names):
            held = getattr(layer, name)
            if getattr(held, "is_transposed", False):
                as_stored = torch.nn.Parameter(held.data.transpose(1, 2).contiguous(), requires_grad=False)
                as_stored.__dict__.update(vars(held), is_transposed=False)
                setattr(layer, name, as_stored)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces loaded parameters by interleaved words [E, K/128, N, 16] and scales [E, K/G, N], at every load."""
        for which in ("w13", "w2"):
            words, scales = (getattr(layer, f"{which}_{name}").data for name in self.names)
            held = ops.interleaved(words), scales.transpose(1, 2).contiguous()
            for name, value in zip(self.names, held, strict=True):
                setattr(layer, f"{which}_{name}", torch.nn.Parameter(value, requires_grad=False))


class BatchInvariantNvFp4MoEMethod(_BatchInvariant, NvFp4Experts):
    """vLLM MoE method for nvfp4 experts, batch-invariant."""

    names = NvFp4Experts.names

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any):
        del weight_quant, input_quant
        FusedMoEMethodBase.__init__(self, moe)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replaces loaded parameters by words [E, K/128, N, 16], scales int32 [E, K/64, N] and factors [E, N]."""
        for which in ("w13", "w2"):
            packed, scale, factor = self.loaded(layer, which)
            self.keep(layer, which, *nvfp4.served(packed, scale), factor)


def _lacks(moe: Any) -> bool:
    return moe.has_bias or moe.moe_parallel_config.use_ep or moe.activation != MoEActivation.SILU


def _class_of(weights: Any, inputs: Any, layer: Any) -> type | None:
    moe = layer.moe_config
    if _lacks(moe) or not weights.symmetric or getattr(weights, "actorder", None):
        return None
    kind = str(getattr(weights.type, "value", weights.type))
    per_token = inputs is not None and weights.strategy == "channel" and inputs.strategy == "token" and inputs.dynamic
    if weights.num_bits == 8 and per_token:
        return BatchInvariantFp8MoEMethod if kind == "float" else BatchInvariantInt8MoEMethod
    served = readback_experts.in_whole_blocks(moe.hidden_dim, moe.intermediate_size_per_partition)
    if (weights.num_bits, kind, inputs) == (4, "int", None) and served and weights.group_size in (32, 64, 128):
        return BatchInvariantWNA16MoEMethod
    if (weights.num_bits, kind, inputs) == (4, "float", None) and served and weights.group_size == 16:
        return BatchInvariantNvFp4MoEMethod
    return None


def _router(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `apply` of an unquantized layer: routers compute float32 logits by float64 sums."""

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_router = type(layer).__name__ == "ReplicatedLinear" and layer.prefix.endswith(ROUTER)
        if not is_router or bias is not None or not x.is_cuda:
            return original(self, layer, x, bias)
        return expert_ops.router_logits(x, layer.weight)

    return apply


def _routing(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: Any, hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **named: Any) -> Any:
        if self.scoring_func != "softmax" or not router_logits.is_cuda or router_logits.dtype != torch.float32:
            return original(self, hidden_states, router_logits, *args, **named)
        return expert_ops.choose(router_logits, self.top_k, self.renormalize)

    return compute


def install(replace: Callable[[type, str, Callable[..., Any]], None]) -> None:
    """Installs routers and experts in vLLM's classes. Call it once in a process, before an engine is built."""
    linear = importlib.import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod
    router = importlib.import_module("vllm.model_executor.layers.fused_moe.router.fused_topk_router").FusedTopKRouter
    replace(linear, "apply", _router)
    replace(router, "_compute_routing", _routing)
    expert_methods.serve(BatchInvariantMoEMethod, _class_of)
