# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear kernel interface for w4a16 on CUDA by the contract: y = bf16(x . bf16(q s) + b), in fixed parts.

The weight is held as bf16(q s), made from the loaded codes and scales at each load: from 64 rows on a product of bf16
weights is faster than one that decodes int4 (Machete's, too), and it is the same number to the bit. It costs the memory
of an unquantized layer; where that is too much, the packed words are multiplied as they are (`packed`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from qarl_bridge.engine import fixed_order


class FixedOrderInt4LinearKernel(MPLinearKernel):
    """See the module docstring."""

    WEIGHT = "weight_fixed_order"  # bfloat16 [N, K], or int32 [N, K/8] with scales beside it
    packed: ClassVar[bool] = False

    @classmethod
    def get_min_capability(cls) -> int:
        """wgmma."""
        return 90

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Symmetric int4 without reordering, bfloat16, inputs in whole blocks."""
        k = c.partition_weight_shape[0]
        group = k if c.group_size == -1 else c.group_size
        if not current_platform.is_device_capability(90) or c.has_g_idx or c.zero_points:
            return False, "not a Hopper GPU, or reordered or asymmetric weights"
        if c.weight_type != scalar_types.uint4b8 or c.act_type != torch.bfloat16:
            return False, "symmetric int4 weights and bfloat16 activations only"
        if k % 128 or k % group or (group % 128 and group not in (16, 32, 64)):
            return False, f"{k} inputs in groups of {group}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Codes and scales -> what is multiplied; the loaded tensors stay, for the next load to be copied into."""
        packed, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        words, scales = packed.data, scale.data.t().contiguous()
        if self.packed:
            held = {self.WEIGHT: fixed_order.interleaved(words), self.WEIGHT + "_scale": scales}
        else:
            held = {self.WEIGHT: fixed_order.dequantized(words, scales)}
        for name, value in held.items():
            layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        y = fixed_order.product(rows, getattr(layer, self.WEIGHT), getattr(layer, self.WEIGHT + "_scale", None), bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def register(packed: bool) -> None:
    """Put it first among the GPU's candidates (idempotent)."""
    FixedOrderInt4LinearKernel.packed = packed
    kernels = registry._POSSIBLE_KERNELS.setdefault(PlatformEnum.CUDA, [])
    if FixedOrderInt4LinearKernel not in kernels:
        kernels.insert(0, FixedOrderInt4LinearKernel)
