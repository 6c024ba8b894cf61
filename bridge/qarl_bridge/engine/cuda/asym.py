# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant linear layers with zero points for vLLM on CUDA: y = bf16(x . w + b), split along K.

w = bf16((q - z) s t). Interleaved codes and scales (`asym_ops.Words`) replace the loaded tensors, so the engine holds a
layer once, at its packed size. For many rows, w is first decoded into a buffer that all layers share (cuda/int4.py).
Under w4a4 and w2a2 a kernel of its own rounds x first.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.platforms import current_platform

from qarl_bridge.engine.asym_layers import AsymmetricLayer
from qarl_bridge.engine.cuda import asym_ops, int4
from qarl_bridge.protocol import formats, split_k
from qarl_bridge.protocol.errors import BridgeError

_OUTPUTS = 8  # outputs come by so many, for the tensor memory accelerator's rows of 16 bytes
GROUPS = (16, 32, 64)  # or whole blocks of 128 inputs


class BatchInvariantAsymmetricLinear(AsymmetricLayer):
    """vLLM layer for weights with zero points on Hopper GPUs; see the module docstring."""

    decodes_whole: ClassVar[bool] = True  # for many rows
    rounded = staticmethod(asym_ops.rounded_rows)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Converts published arrays to the kernel's layout (`asym_ops.Words`), at every load.

        Raises:
          BridgeError("setup"): the kernel does not support this GPU, shape or group size.
        """
        super().process_weights_after_loading(layer)
        scales, zeros = layer.weight_scale.data, getattr(layer, self.zeros).data
        n, k = scales.shape[0], scales.shape[1] * self.group_size
        if not current_platform.is_device_capability(90):
            raise BridgeError(
                "layers with zero points need a Hopper GPU (sm90) or a CPU: set quant.rollout=bf16, or use the "
                "embedded sampler (rollout.engine.name=jax)",
                "setup",
            )
        if k % split_k.STEP or n % _OUTPUTS or (self.group_size not in GROUPS and self.group_size % split_k.STEP):
            raise BridgeError(
                f"a layer with zero points, of {n} outputs and {k} inputs in groups of {self.group_size}: on CUDA "
                f"outputs are a multiple of {_OUTPUTS}, inputs of {split_k.STEP}, and groups 16, 32, 64 or 128; give "
                "this layer w8a8 or bf16 (quant.rules), or set quant.group_size",
                "setup",
            )
        for name, width in zip(self.codes, formats.LANES[self.bits], strict=True):
            self.keep(layer, name, asym_ops.interleaved(getattr(layer, name).data, width))
        self.keep(layer, "weight_scale", asym_ops.levels_of(scales, zeros, k))
        delattr(layer, self.zeros)
        self.keep(layer, "weight_tensor_scale", layer.weight_tensor_scale.data.bfloat16())
        if self.decodes_whole:
            int4.make_room(n * k, scales.device)

    def words(self, layer: torch.nn.Module) -> asym_ops.Words:
        """Returns the layer's weight in the kernel's layout."""
        codes = [getattr(layer, name) for name in self.codes] + [None]
        levels, steps = layer.weight_scale, layer.weight_tensor_scale
        return asym_ops.Words(codes[0], codes[1], levels, steps, self.bits, self.group_size, self.middle)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer's output [..., N] of inputs x [..., K]."""
        return int4.multiply(self.inputs(layer, x), self.words(layer), bias=bias)
