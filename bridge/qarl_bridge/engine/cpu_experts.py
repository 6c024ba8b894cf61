# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized mixtures of experts for vLLM's CPU build.

vLLM 0.32 multiplies quantized experts on x86 through AMX tiles only; without them it refuses such a model at start
("No WNA16 MoE backend supports the deployment configuration"). With them int4 experts are w4a8, whatever
VLLM_CPU_INT4_W4A8 says, and its int8 kernel leaves gates unrounded and takes their SiLU through a 14-bit reciprocal:
against the learner's arithmetic k3 was 2.4e-3 on a random mixture. These methods take their place, expert by expert,
with the products of `portable_kernels`, so that experts and dense layers have one arithmetic:

    h = product(x[rows of e], w13[e])            bf16: gate and up, side by side
    a = bf16(bf16(silu(gate)) * up)              as vLLM's own activation on a CPU
    o = product(a, w2[e])                        bf16
    y = bf16(sum over a token's experts of weight * o)      in float32, rounded once

which is also what the learner computes (`qarl_jax/models/moe.py`). int8 experts (w8a8), int4 experts with bf16 (w4a16)
or int8 activations (w4a8). The tensors stay as loaded; a copy beside them, float32 (or bf16, for w4a16 with AMX), is
what is multiplied with.

What we left out: speed (a loop over experts) and small memory (4 bytes per weight), expert parallelism, biases.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe as chooser,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8 import (  # noqa: E501
    CompressedTensorsW8A8Int8MoEMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16 import (  # noqa: E501
    CompressedTensorsWNA16MoEMethod,
)
from vllm.platforms import current_platform

from qarl_bridge.engine.cpu_kernels import float_product, int8_product, portable_int4, w4a8_product


class _Portable(FusedMoEMethodBase):
    """The part that does not depend on the format."""

    def _start(self, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        if moe.has_bias or moe.moe_parallel_config.use_ep or moe.activation != MoEActivation.SILU:
            raise NotImplementedError("portable experts: no biases, no expert parallelism, SwiGLU only")

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """No kernel of vLLM's reads one."""
        return None

    def product(self, layer: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """[M, K] -> [M, N] through matrix `name` ("w13" or "w2") of one expert."""
        raise NotImplementedError

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[M, D], weights and ids [M, k] -> [M, D] in x.dtype."""
        outputs = torch.zeros((*topk_ids.shape, x.shape[1]), dtype=torch.float32)
        for expert in torch.unique(topk_ids).tolist():
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = self.product(layer, "w13", expert, x[rows]).chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate) * up
            outputs[rows, places] = self.product(layer, "w2", expert, hidden).float()
        return (outputs * topk_weights.float().unsqueeze(-1)).sum(dim=1).to(x.dtype)


class PortableInt8MoEMethod(_Portable, CompressedTensorsW8A8Int8MoEMethod):
    """w8a8 experts; see the module docstring."""

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any):
        self._start(moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self.static_input_scales = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Copy the codes to float32, at load and at every reload."""
        for name in ("w13", "w2"):
            codes = getattr(layer, f"{name}_weight").data.float().contiguous()
            layer.register_parameter(f"{name}_portable", torch.nn.Parameter(codes, requires_grad=False))

    def product(self, layer: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Exact integer products, rescaled as vLLM's dense layers are on this CPU."""
        scale = getattr(layer, f"{name}_weight_scale")[expert]
        like_amx = torch.cpu._is_amx_tile_supported()
        return int8_product(x, getattr(layer, f"{name}_portable")[expert], scale, None, like_amx)


class PortableWNA16MoEMethod(_Portable, CompressedTensorsWNA16MoEMethod):
    """w4a16 and w4a8 experts; see the module docstring."""

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any):
        self._start(moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self.num_bits, self.symmetric, self.strategy = weight_quant.num_bits, True, weight_quant.strategy
        self.packed_factor = 32 // weight_quant.num_bits
        self.group_size = -1 if weight_quant.group_size is None else weight_quant.group_size
        self.int8_activations = bool(envs.VLLM_CPU_INT4_W4A8)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Build the float32 weights (or codes) from the packed ones, at load and at every reload."""
        for name in ("w13", "w2"):
            packed = getattr(layer, f"{name}_weight_packed").data
            scale = getattr(layer, f"{name}_weight_scale").data
            weights = torch.stack(
                [portable_int4(p, s, self.int8_activations) for p, s in zip(packed, scale, strict=True)]
            )
            if torch.cpu._is_amx_tile_supported() and not self.int8_activations:
                weights = weights.to(torch.bfloat16)  # as which they are exact
            layer.register_parameter(f"{name}_portable", torch.nn.Parameter(weights, requires_grad=False))

    def product(self, layer: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """bf16(x @ bf16(q*s)), or w4a8's formula."""
        weight = getattr(layer, f"{name}_portable")[expert]
        if self.int8_activations:
            return w4a8_product(x, weight, getattr(layer, f"{name}_weight_scale")[expert], None)
        return float_product(x, weight, None)


def register() -> None:
    """Let these serve every quantized mixture of experts on a CPU (idempotent)."""
    original = chooser.CompressedTensorsMoEMethod.get_moe_method
    if getattr(original, "is_portable", False):
        return

    def portable_class(quant_config: Any, layer: Any, layer_name: str) -> tuple[Any, tuple[Any, Any]] | None:
        if not current_platform.is_cpu():
            return None
        quant_config._add_fused_moe_to_target_scheme_map()  # "Linear" means experts, too; vLLM's chooser begins so
        scheme = quant_config.get_scheme_dict(layer, f"{layer_name}.0.{layer.ckpt_gate_proj_name}")
        if not scheme:
            return None
        weights, inputs = scheme["weights"], scheme["input_activations"]
        if weights.num_bits == 8 and inputs is not None:
            return PortableInt8MoEMethod, (weights, inputs)
        if weights.num_bits == 4 and weights.symmetric and str(weights.type).endswith("int"):
            return PortableWNA16MoEMethod, (weights, inputs)
        return None

    @functools.wraps(original)
    def get_moe_method(quant_config: Any, layer: Any, layer_name: str) -> FusedMoEMethodBase:
        found = portable_class(quant_config, layer, layer_name)
        if found is None:
            return original(quant_config, layer, layer_name)
        kind, quant = found
        return kind(*quant, layer.moe_config)

    get_moe_method.is_portable = True  # type: ignore[attr-defined]
    chooser.CompressedTensorsMoEMethod.get_moe_method = staticmethod(get_moe_method)
