# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant w4a16 linear layers for vLLM on CUDA: y = bf16(x . bf16(q s) + b), split along K.

The weight is held as interleaved int4 words, made at each load. For few rows, where reading weights takes the time, the
kernel decodes words while it multiplies. For many rows the whole weight is first decoded to bf16(q s) in a buffer that
all layers share. Otherwise every tile of rows would decode it again. Both ways give equal bits.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from qarl_bridge.engine import versions
from qarl_bridge.engine.cuda import asym_ops, ops

PACKED_ROWS = 512  # the most that are multiplied with words
# bf16(q s) of one layer, for the largest: made at a load, since a CUDA graph keeps its place.
_rooms: dict[torch.device, torch.Tensor] = {}


def make_room(weights: int, device: torch.device) -> None:
    """Enlarges the shared buffer of decoded weights to `weights` elements, if needed; called at a layer's load."""
    held = _rooms.get(device)
    if held is None or held.numel() < weights:
        _rooms[device] = torch.empty(weights, dtype=torch.bfloat16, device=device)


def room(outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
    """Returns the shared buffer of decoded weights as bfloat16 [outputs, inputs]."""
    return _rooms[device][: outputs * inputs].view(outputs, inputs)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor | asym_ops.Words,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiplies x [..., K] by a layer's words; returns [..., N]. Other arguments are those of `ops.product`."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > PACKED_ROWS:
        if isinstance(weight, asym_ops.Words):
            weight = weight.decoded(room(weight.outputs, weight.inputs, rows.device))
        else:
            weight = ops.dequantized(weight, scales, room(weight.shape[1], rows.shape[1], rows.device))
        scales = None
    y = ops.product(rows, weight, scales, bias, factor=factor)
    return y.view(*x.shape[:-1], y.shape[-1])


class BatchInvariantInt4LinearKernel(MPLinearKernel):
    """vLLM linear kernel for w4a16 on Hopper GPUs; see the module docstring."""

    is_batch_invariant = True
    WEIGHT = "weight_interleaved"  # int32 [K/128, N, 16]
    SCALE = "weight_interleaved_scale"  # bfloat16 [K/G, N]

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns 90: the kernel needs Hopper's wgmma instructions."""
        return 90

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Accepts symmetric int4 without reordering, bfloat16 activations, K a multiple of 128 and N of 8."""
        k, n = c.partition_weight_shape
        group = k if c.group_size == -1 else c.group_size
        if not current_platform.is_device_capability(90) or c.has_g_idx or c.zero_points:
            return False, "not a Hopper GPU, or reordered or asymmetric weights"
        if c.weight_type != scalar_types.uint4b8 or c.act_type != torch.bfloat16:
            return False, "symmetric int4 weights and bfloat16 activations only"
        if k % 128 or k % group or (group % 128 and group not in (16, 32, 64)) or n % 8:
            return False, f"{n} outputs of {k} inputs in groups of {group}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Makes interleaved words and transposed scales; the loaded tensors stay as the target of the next load."""
        words = ops.interleaved(getattr(layer, self.w_q_name).data)
        scales = getattr(layer, self.w_s_name).data.t().contiguous()
        for name, value in ((self.WEIGHT, words), (self.SCALE, scales)):
            layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        make_room(8 * words.numel(), words.device)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer's output [..., N] of inputs x [..., K]."""
        return multiply(x, getattr(layer, self.WEIGHT), getattr(layer, self.SCALE), bias)


def register() -> None:
    """Makes vLLM prefer this kernel for w4a16 layers on CUDA (idempotent)."""
    versions.put_first(registry._POSSIBLE_KERNELS, PlatformEnum.CUDA, BatchInvariantInt4LinearKernel)
