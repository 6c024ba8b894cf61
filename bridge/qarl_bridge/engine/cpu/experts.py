# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""MoE experts for vLLM's CPU engine that give equal bits on every CPU build (see `cpu/linear.py`).

vLLM 0.32 multiplies quantized experts on x86 through AMX tiles only, and refuses such a model elsewhere. Its kernels
for bf16 experts round differently from build to build. These methods compute expert by expert, with the products of the
linear layers:

    h = product(x[rows of e], w13[e])            bf16: gate and up, side by side
    a = bf16(f32(silu(gate) * up))               as `cpu/layers.py`
    o = product(a, w2[e])                        bf16
    y = bf16(f32(sum over a token's experts of weight * o))      in float64

The learner computes equal numbers (`qarl_jax/models/moe.py`). Formats: bf16, int8 (w8a8), int4 with bf16 (w4a16) or
int8 activations (w4a8), and nvfp4, whose sums have a factor. The loaded tensors stay; products use a float64 copy.

It is slow (a loop over experts), and takes 8 more bytes per weight. Not supported: expert parallelism, biases.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8 import (  # noqa: E501
    CompressedTensorsW8A8Int8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
    CompressedTensorsWNA16MoEMethod,
)

from qarl_bridge.engine import expert_methods
from qarl_bridge.engine.cpu.layers import silu_and_mul
from qarl_bridge.engine.cpu.linear import Rows, channel_weight, int4_weight, int8_rows, nvfp4_weight, product
from qarl_bridge.engine.nvfp4_experts import NvFp4Experts


class _Float64(FusedMoEMethodBase):
    """Base class of the CPU's MoE methods. rows: quantizes activations; None: bf16 activations."""

    rows: Rows | None = None

    def _start(self, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        if moe.has_bias or moe.moe_parallel_config.use_ep or moe.activation != MoEActivation.SILU:
            raise NotImplementedError("float64 experts: no biases, no expert parallelism, SwiGLU only")

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None: no kernel of vLLM needs a config."""
        return None

    def _hold(self, layer: Any, name: str, weights: list[torch.Tensor]) -> None:
        """Stores the float64 matrix `name` ("w13" or "w2") of every expert as a parameter."""
        layer.register_parameter(f"{name}_float64", torch.nn.Parameter(torch.stack(weights), requires_grad=False))

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
        outputs = torch.zeros((*topk_ids.shape, x.shape[1]), dtype=torch.float64)
        for expert in torch.unique(topk_ids).tolist():
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            hidden = silu_and_mul(self._product(layer, "w13", expert, x[rows]))
            outputs[rows, places] = self._product(layer, "w2", expert, hidden).double()
        terms = (outputs * topk_weights.double().unsqueeze(-1)).unbind(1)
        return functools.reduce(torch.add, terms).float().to(x.dtype)

    def _product(self, layer: Any, which: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        factors = getattr(layer, f"{which}_weight_global_scale", None)
        factor = None if factors is None else factors[expert]
        return product(x, getattr(layer, f"{which}_float64")[expert], None, self.rows, factor=factor)


class Float64MoEMethod(_Float64, UnquantizedFusedMoEMethod):
    """vLLM MoE method for bf16 experts on a CPU; see the module docstring."""

    def __init__(self, moe: Any):
        UnquantizedFusedMoEMethod.__init__(self, moe)
        self._start(moe)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Copies the weights to float64, at every load."""
        for name in ("w13", "w2"):
            self._hold(layer, name, list(getattr(layer, f"{name}_weight").data.double()))


class Float64Int8MoEMethod(_Float64, CompressedTensorsW8A8Int8MoEMethod):
    """vLLM MoE method for w8a8 experts on a CPU; see the module docstring."""

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any):
        self._start(moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self.static_input_scales = False
        self.rows = int8_rows

    def process_weights_after_loading(self, layer: Any) -> None:
        """Builds the float64 weights from int8 codes and scales, at every load."""
        for name in ("w13", "w2"):
            codes, scales = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
            self._hold(layer, name, [channel_weight(q, s) for q, s in zip(codes, scales, strict=True)])


class Float64WNA16MoEMethod(_Float64, CompressedTensorsWNA16MoEMethod):
    """vLLM MoE method for w4a16 and w4a8 experts on a CPU; see the module docstring."""

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any):
        self._start(moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self.num_bits, self.symmetric, self.strategy = weight_quant.num_bits, True, weight_quant.strategy
        self.packed_factor = 32 // weight_quant.num_bits
        self.group_size = -1 if weight_quant.group_size is None else weight_quant.group_size
        self.rows = int8_rows if envs.VLLM_CPU_INT4_W4A8 else None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Builds the float64 weights from packed codes and scales, at every load."""
        for name in ("w13", "w2"):
            packed = getattr(layer, f"{name}_weight_packed").data
            scales = getattr(layer, f"{name}_weight_scale").data
            int8 = self.rows is not None
            self._hold(layer, name, [int4_weight(p, s, int8) for p, s in zip(packed, scales, strict=True)])


class Float64NvFp4MoEMethod(_Float64, NvFp4Experts):
    """vLLM MoE method for nvfp4 experts on a CPU; see the module docstring."""

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any):
        del weight_quant, input_quant
        self._start(moe)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Builds the float64 weights and each output's factor, at every load."""
        for name in ("w13", "w2"):
            packed, scales, factor = self.loaded(layer, name)
            self._hold(layer, name, [nvfp4_weight(p, s) for p, s in zip(packed, scales, strict=True)])
            self.keep(layer, name, packed, scales, factor)


def register() -> None:
    """Makes vLLM compute every MoE layer on a CPU by these methods (idempotent)."""
    expert_methods.serve(Float64MoEMethod, _class_of)


def _class_of(weights: Any, inputs: Any, layer: Any) -> type | None:
    del layer
    if weights.num_bits == 8 and inputs is not None:
        return Float64Int8MoEMethod
    if weights.num_bits == 4 and weights.symmetric:
        return Float64NvFp4MoEMethod if str(weights.type).endswith("float") else Float64WNA16MoEMethod
    return None
