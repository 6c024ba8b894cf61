# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant nvfp4 linear layers for vLLM on CUDA: y = bf16(bf16((x . q s) f) + b), split along K.

q s is exact in bfloat16; block scales below 2^-6 count as 0; f = f32(1 / g) of each output. Interleaved words, e4m3
scales and factors replace the loaded tensors, so the engine holds a layer once. For many rows, q s is decoded first, to
a buffer that all layers share (cuda/int4.py).
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

from qarl_bridge.engine.cuda import int4, ops
from qarl_bridge.engine.nvfp4_layers import Given, NvFp4Layer
from qarl_bridge.protocol import split_k
from qarl_bridge.protocol.errors import BridgeError

_FLUSHED = 2.0**-6
_OUTPUTS = 16  # outputs come by so many, for the tensor memory accelerator's rows of 16 bytes


def served(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts checkpoint codes and scales to the layout that the CUDA kernel multiplies.

    uint8 [..., N, K/2] becomes words int32 [..., K/128, N, 16]; e4m3 [..., N, K/16] becomes int32 [..., K/64, N].
    """
    kept = torch.where(scale.float() < _FLUSHED, 0.0, scale.float()).to(scale.dtype)
    turned = kept.contiguous().view(torch.int32).transpose(-2, -1).contiguous()
    return ops.interleaved(packed.view(torch.int32), floats=True), turned


class BatchInvariantNvFp4LinearKernel(NvFp4Layer):
    """vLLM linear kernel for nvfp4 on Hopper GPUs; see the module docstring."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Accepts Hopper GPUs, whose wgmma instructions the kernel needs."""
        return current_platform.is_device_capability(90), "the bridge's nvfp4 layers need a Hopper GPU (sm90)"

    def held(self, packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns interleaved words and transposed scales; BridgeError("setup") for an unsupported shape."""
        self._check(packed.shape[0], 2 * packed.shape[1], packed.device)
        return served(packed, scale)

    def shared(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the trainer's memory; BridgeError("setup") for an unsupported shape."""
        blocks, n, _ = given.words.shape
        self._check(n, blocks * split_k.STEP, given.words.device)
        return given.words, given.scales

    def _check(self, n: int, k: int, device: torch.device) -> None:
        """Checks the layer's shape, and enlarges the shared buffer of decoded weights.

        Raises:
          BridgeError("setup"): the kernel does not support the shape.
        """
        if k % split_k.STEP or n % _OUTPUTS:
            raise BridgeError(
                f"an nvfp4 layer of {n} outputs and {k} inputs: on CUDA outputs are a multiple of {_OUTPUTS} and "
                f"inputs of {split_k.STEP}; give this layer w8a8 or bf16 (quant.rules)",
                "setup",
            )
        int4.make_room(n * k, device)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer's output [..., N] of inputs x [..., K]."""
        return int4.multiply(x, layer.weight, layer.weight_scale, bias, layer.weight_global_scale)
