# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's linear layer for nvfp4 on CUDA, batch-invariant: y = bf16(bf16((x . q s) f) + b), split along K.

q s is exact in bfloat16, with block scales below 2^-6 taken for 0; f = f32(1 / g) of each output. Words, e4m3 scales
and factors take the place of what was loaded, so the engine holds a layer once. Rows are multiplied as for w4a16
(cuda/int4.py): many of them with q s decoded into the room that all layers share.
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
    """As loaded, uint8 [..., N, K/2] and e4m3 [..., N, K/16] -> words int32 [..., K/128, N, 16], e4m3 [..., K/16, N].

    A checkpoint's bytes are int4's words: nibble i of word j is element 8 j + i.
    """
    kept = torch.where(scale.float() < _FLUSHED, 0.0, scale.float()).to(scale.dtype)
    turned = kept.view(torch.uint8).transpose(-2, -1).contiguous().view(scale.dtype)
    return ops.interleaved(packed.view(torch.int32)), turned


class BatchInvariantNvFp4LinearKernel(NvFp4Layer):
    """See the module docstring."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """On Hopper GPUs, for wgmma."""
        return current_platform.is_device_capability(90), "the bridge's nvfp4 layers need a Hopper GPU (sm90)"

    def held(self, packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and turned scales. Raises as `_check`."""
        self._check(packed.shape[0], 2 * packed.shape[1], packed.device)
        return served(packed, scale)

    def shared(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """The trainer's memory. Raises as `_check`."""
        blocks, n, _ = given.words.shape
        self._check(n, blocks * split_k.STEP, given.words.device)
        return given.words, given.scales.view(torch.float8_e4m3fn)

    def _check(self, n: int, k: int, device: torch.device) -> None:
        """Makes room for the layer.

        Raises:
          BridgeError("setup"): a shape that the product does not serve.
        """
        if k % split_k.STEP or n % _OUTPUTS:
            raise BridgeError(
                f"an nvfp4 layer of {n} outputs and {k} inputs: on CUDA outputs are a multiple of {_OUTPUTS} and "
                f"inputs of {split_k.STEP}; give this layer w8a8 or bf16 (quant.rules)",
                "setup",
            )
        int4.make_room(n * k, device)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        return int4.multiply(x, layer.weight, layer.weight_scale, bias, layer.weight_global_scale)
