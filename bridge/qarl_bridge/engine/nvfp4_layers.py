# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Base class of the bridge's nvfp4 linear layers, and their registration in vLLM (cpu/linear.py, cuda/nvfp4.py).

vLLM multiplies a fused layer's sums by one factor, the least 1 / g of its parts. Here each part (q, k, v) keeps its
factor, as in the learner, so a checkpoint with different global scales g is served exactly.

A layer that `GIVEN` names allocates no weights: it reads them in the trainer's memory (`protocol/one_base.py`).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import torch
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as schemes


@dataclasses.dataclass(frozen=True)
class Given:
    """The weights of one layer in the trainer's memory (`protocol/one_base.py`). words: int32 [K/128, N, 16]. scales:
    int32 [K/64, N]. divisors: float32 [parts]. bias: bfloat16 [N] or None. widths: each part's number of outputs."""

    words: torch.Tensor
    scales: torch.Tensor
    divisors: torch.Tensor
    bias: torch.Tensor | None
    widths: list[int]


GIVEN: dict[str, Given] = {}
"""Weights in the trainer's memory by the layer's live name; filled before vLLM makes the model."""


class NvFp4Layer(NvFp4LinearKernel):
    """An abstract vLLM kernel for nvfp4 weights with bfloat16 activations."""

    is_batch_invariant: ClassVar[bool] = True

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Accepts every layer, because vLLM's configuration has no shape; shapes are checked at load."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Converts weight_packed, weight_scale and weight_global_scale [parts] to the kernel's layout, at each load."""
        given = GIVEN.get(getattr(layer, "prefix", ""))
        if given is None:
            factor = factors(layer.weight_global_scale.data, layer.logical_widths)
            held = self.held(layer.weight_packed.data, layer.weight_scale.data)
        else:  # its memory may not be written yet
            factor = torch.ones(sum(given.widths), dtype=torch.float32, device=given.words.device)
            held = self.shared(given)
        del layer.weight_packed
        names = ("weight", "weight_scale", "weight_global_scale")
        for name, value in zip(names, (*held, factor), strict=True):
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def refresh(self, layer: torch.nn.Module, given: Given) -> None:
        """Recomputes factors, biases and converted copies from the trainer's memory, after a new version."""
        values = *self.shared(given), factors(given.divisors, given.widths)
        for name, value in zip(("weight", "weight_scale", "weight_global_scale"), values, strict=True):
            live = getattr(layer, name).data
            if live.data_ptr() != value.data_ptr():
                live.copy_(value)
        if given.bias is not None:
            layer.bias.data.copy_(given.bias)

    def shared(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weight and scales in the layout of `held`: views of the trainer's memory, or a converted copy."""
        return self.held(*packed(given.words, given.scales))

    @abc.abstractmethod
    def held(self, packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Converts codes uint8 [N, K/2] and scales e4m3 [N, K/16] to weight and scales in this kernel's layout."""


def factors(divisors: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Expands global scales g [..., parts] to float32 factors 1 / g of each output [..., N]. widths: parts' outputs."""
    reciprocal = torch.ones_like(divisors) / divisors
    parts = zip(reciprocal.unbind(-1), widths, strict=True)
    return torch.cat([part[..., None].expand(*part.shape, width) for part, width in parts], dim=-1)


def packed(words: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts words int32 [K/128, N, 16] and scales int32 [K/64, N] to published uint8 [N, K/2] and e4m3 [N, K/16]."""
    blocks, n, _ = words.shape
    w = words.view(blocks, n, 4, 2, 2)  # t f h
    pairs = (w, w >> 6 & 0x3FFFFFF | w << 26, w >> 3 & 0x1FFFFFFF | w << 29, (w & 0x1B001B) * 0x4108)
    bytes_ = [(p >> 6 & 7 | p >> 12 & 8 | p >> 18 & 0x70 | p >> 24 & 0x80).to(torch.uint8) for p in pairs]
    codes = torch.stack(bytes_, dim=-1).permute(1, 0, 4, 5, 3, 2)  # n block h i f t
    return codes.reshape(n, 64 * blocks), scales.t().contiguous().view(torch.float8_e4m3fn)


def serve(kernel: type[NvFp4Layer]) -> None:
    """Makes vLLM compute nvfp4 layers with bfloat16 activations by `kernel`; only the first call has an effect."""
    original, scheme = schemes.init_nvfp4_linear_kernel, schemes.CompressedTensorsW4A4Fp4
    if getattr(original, "is_own", False):
        return

    @functools.wraps(original)
    def choose(use_a16: bool = False) -> NvFp4LinearKernel:
        return kernel(NvFp4LinearLayerConfig()) if use_a16 else original(use_a16=use_a16)

    process, create = scheme.process_weights_after_loading, scheme.create_weights

    @functools.wraps(create)
    def create_weights(self: Any, layer: torch.nn.Module, *args: Any, **named: Any) -> None:
        create(self, layer, *args, **named)
        if getattr(layer, "prefix", "") in GIVEN:
            for name in ("weight_packed", "weight_scale"):
                parameter = getattr(layer, name)
                parameter.data = parameter.data.new_empty(0)

    @functools.wraps(process)
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        own = isinstance(self.kernel, NvFp4Layer)
        (self.kernel.process_weights_after_loading if own else functools.partial(process, self))(layer)

    choose.is_own = True  # type: ignore[attr-defined]
    schemes.init_nvfp4_linear_kernel = choose
    scheme.process_weights_after_loading = process_weights_after_loading
    scheme.create_weights = create_weights
