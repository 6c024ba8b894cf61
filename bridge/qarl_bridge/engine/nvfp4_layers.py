# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The place where the bridge's own nvfp4 layers replace vLLM's: on a CPU cpu/linear.py, on CUDA cuda/nvfp4.py.

vLLM multiplies the sums of all that a layer fuses by one number, the least 1 / g of its parts. Here each part keeps its
own, as in the learner. So a released folder whose q, k and v have different ones is served as it was written.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, ClassVar

import torch
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as schemes


class NvFp4Layer(NvFp4LinearKernel):
    """A kernel of nvfp4 with bfloat16 activations that is given a layer as it was loaded."""

    is_batch_invariant: ClassVar[bool] = True

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Accepts every layer: the configuration has no shape."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Take weight_packed, weight_scale and weight_global_scale [parts], at load and at every reload."""
        factor = factors(layer.weight_global_scale.data, layer.logical_widths)
        held = self.held(layer.weight_packed.data, layer.weight_scale.data)
        del layer.weight_packed
        names = ("weight", "weight_scale", "weight_global_scale")
        for name, value in zip(names, (*held, factor), strict=True):
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))

    @abc.abstractmethod
    def held(self, packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [N, K/2] and e4m3 [N, K/16] -> weight and scales as this kernel multiplies them."""


def factors(divisors: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """g of each part, or of each part of every expert, and the parts' outputs -> f32(1 / g) of each output [..., N]."""
    reciprocal = torch.ones_like(divisors) / divisors
    parts = zip(reciprocal.unbind(-1), widths, strict=True)
    return torch.cat([part[..., None].expand(*part.shape, width) for part, width in parts], dim=-1)


def serve(kernel: type[NvFp4Layer]) -> None:
    """Let it compute every nvfp4 layer with bfloat16 activations from now on (the first call decides)."""
    original, scheme = schemes.init_nvfp4_linear_kernel, schemes.CompressedTensorsW4A4Fp4
    if getattr(original, "is_own", False):
        return

    @functools.wraps(original)
    def choose(use_a16: bool = False) -> NvFp4LinearKernel:
        return kernel(NvFp4LinearLayerConfig()) if use_a16 else original(use_a16=use_a16)

    process = scheme.process_weights_after_loading

    @functools.wraps(process)
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        own = isinstance(self.kernel, NvFp4Layer)
        (self.kernel.process_weights_after_loading if own else functools.partial(process, self))(layer)

    choose.is_own = True  # type: ignore[attr-defined]
    schemes.init_nvfp4_linear_kernel = choose
    scheme.process_weights_after_loading = process_weights_after_loading
