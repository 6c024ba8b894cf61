# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters of nvfp4 experts with bfloat16 activations; cpu/experts.py and cuda/experts.py compute with them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (  # noqa: E501
    CompressedTensorsW4A4Nvfp4MoEMethod,
)

from qarl_bridge.engine.nvfp4_layers import factors


class NvFp4Experts(CompressedTensorsW4A4Nvfp4MoEMethod):
    """vLLM's nvfp4 MoE method without scales of activations, which published versions do not have."""

    names = "weight_packed", "weight_scale", "weight_global_scale"
    group_size = 16

    def create_weights(self, layer: Any, *args: Any, **named: Any) -> None:
        """Creates vLLM's parameters, with the global scale g of `down` as [E, 1], its published shape."""
        super().create_weights(layer, *args, **named)
        for which in ("w13", "w2"):
            delattr(layer, f"{which}_input_global_scale")
        flat = layer.w2_weight_global_scale
        column = torch.nn.Parameter(flat.data[:, None].contiguous(), requires_grad=False)
        column.__dict__.update(vars(flat))
        layer.w2_weight_global_scale = column

    def loaded(self, layer: Any, which: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the loaded codes uint8 [E, N, K/2], e4m3 scales [E, N, K/16], f32(1 / g) [E, N] of "w13" or "w2"."""
        packed, scale, divisors = (getattr(layer, f"{which}_{name}").data for name in self.names)
        parts = divisors.shape[1]
        return packed, scale, factors(divisors, [packed.shape[1] // parts] * parts)

    def keep(self, layer: Any, which: str, *values: torch.Tensor) -> None:
        """Replaces the loaded parameters of matrix "w13" or "w2" by the values that the kernel multiplies."""
        for name, value in zip(self.names, values, strict=True):
            setattr(layer, f"{which}_{name}", torch.nn.Parameter(value, requires_grad=False))
