# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear kernel interface for w4a8_fp8 on CUDA by the contract: an fp8 layer, whose codes int4 words stand for.

vLLM multiplies e4m3 activations with C e4m3(q v), where q is an int4 code and the factors C and v come from the scales
(`readback.factors`), by a mixed-input kernel with an order of sums of its own. Here the codes e4m3(q v) are made at
each load and multiplied as an fp8 layer's, which the learner equals to the bit. That costs a byte per weight.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear.mixed_precision.cutlass import CutlassW4A8LinearKernel
from vllm.platforms import PlatformEnum

from qarl_bridge.engine import readback, versions


class Fp8CodesLinearKernel(CutlassW4A8LinearKernel):
    """See the module docstring. What it can implement, and how it quantizes activations, are vLLM's kernel's."""

    WEIGHT = "weight_codes"  # float8_e4m3fn [N, K], with float32 scales [N, 1] beside it

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Words and scales -> codes and scales; the loaded tensors stay, for the next load to be copied into."""
        packed, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        codes, channel = fp8_codes(packed.data, scale.data)
        for name, value in {self.WEIGHT: codes, self.WEIGHT + "_scale": channel}.items():
            layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        weight, channel = getattr(layer, self.WEIGHT), getattr(layer, self.WEIGHT + "_scale")
        codes, scales = self.quant_fp8(x.reshape(-1, x.shape[-1]))
        rows = codes.shape[0]
        codes, scales = versions.filled_up(codes, scales)
        y = ops.cutlass_scaled_mm(
            codes, weight.t(), out_dtype=self.config.out_type, scale_a=scales, scale_b=channel, bias=bias
        )
        return y[:rows].view(*x.shape[:-1], y.shape[-1])


def fp8_codes(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [N, K/8] as a checkpoint has it, bfloat16 [N, K/G] -> codes float8_e4m3fn [N, K], scales float32 [N, 1]."""
    channel, group = readback.factors(scale)
    n, groups = group.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    codes = ((packed[..., None] >> shifts) & 15) - 8
    levels = codes.reshape(n, groups, -1).float() * group[..., None]
    return levels.reshape(n, -1).to(torch.float8_e4m3fn), channel


def register() -> None:
    """Put it first among the GPU's candidates (idempotent)."""
    versions.put_first(registry._POSSIBLE_KERNELS, PlatformEnum.CUDA, Fp8CodesLinearKernel)
