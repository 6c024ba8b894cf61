# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear kernel interface for w4a16 on CUDA, batch-invariant: y = bf16(x . bf16(q s) + b), split along K.

The weight is held in words, made from the loaded codes at each load. Few rows are multiplied with the words as they
are, since reading weights is what takes time there. Many are multiplied with bf16(q s), the same numbers to the bit,
decoded anew for each product into a room that all layers share: a tile of rows would otherwise decode all it reads.
"""

from __future__ import annotations

import torch
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from qarl_bridge.engine import versions
from qarl_bridge.engine.cuda import ops

PACKED_ROWS = 512  # the most that are multiplied with words
# bf16(q s) of one layer, for the largest: made at a load, since a CUDA graph keeps its place.
_rooms: dict[torch.device, torch.Tensor] = {}


def make_room(weights: int, device: torch.device) -> None:
    """Let a layer of so many weights be decoded; called at its load."""
    held = _rooms.get(device)
    if held is None or held.numel() < weights:
        _rooms[device] = torch.empty(weights, dtype=torch.bfloat16, device=device)


def room(outputs: int, inputs: int, device: torch.device) -> torch.Tensor:
    """The place for a decoded layer, [outputs, inputs] bfloat16."""
    return _rooms[device][: outputs * inputs].view(outputs, inputs)


def multiply(
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """[..., K] -> [..., N] by a layer's words; scales and factor as in `ops.product`."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= PACKED_ROWS:
        y = ops.product(rows, words, scales, bias, factor=factor)
    else:
        decoded = ops.dequantized(words, scales, out=room(words.shape[1], rows.shape[1], words.device))
        y = ops.product(rows, decoded, bias=bias, factor=factor)
    return y.view(*x.shape[:-1], y.shape[-1])


class BatchInvariantInt4LinearKernel(MPLinearKernel):
    """See the module docstring."""

    is_batch_invariant = True
    WEIGHT = "weight_interleaved"  # int32 [K/128, N, 16]
    SCALE = "weight_interleaved_scale"  # bfloat16 [K/G, N]

    @classmethod
    def get_min_capability(cls) -> int:
        """wgmma."""
        return 90

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Symmetric int4 without reordering, bfloat16, inputs in whole blocks, outputs by eight."""
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
        """Codes and scales -> what is multiplied; the loaded tensors stay, for the next load to be copied into."""
        words = ops.interleaved(getattr(layer, self.w_q_name).data)
        scales = getattr(layer, self.w_s_name).data.t().contiguous()
        for name, value in ((self.WEIGHT, words), (self.SCALE, scales)):
            layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        make_room(8 * words.numel(), words.device)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        return multiply(x, getattr(layer, self.WEIGHT), getattr(layer, self.SCALE), bias)


def register() -> None:
    """Put it first among the GPU's candidates (idempotent)."""
    versions.put_first(registry._POSSIBLE_KERNELS, PlatformEnum.CUDA, BatchInvariantInt4LinearKernel)
