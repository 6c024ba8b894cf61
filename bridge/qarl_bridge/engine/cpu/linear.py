# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers for vLLM's CPU engine that give equal bits on every CPU build, x86 or Arm.

vLLM's CPU wheel holds several builds that multiply, round and add differently: with AMX tiles, with oneDNN, with
kernels that truncate instead of rounding. Here torch's generic operations replace every linear layer, and the learner
computes equal numbers (profile `cpu` of `docs/concepts/engines.md`). bf rounds to bfloat16, f32 to float32:

    S(x, w) = f32(sum_k x_k w_k)                   the sum in float64, in any order, rounded to float32 once
    bf16, w4a16   y = bf(S(x, w) + b)              w as held, or bf(q s)
    w8a8, w4a8    y = bf(f32(s_x sum x_q w) + b)   w = q s, exact; am = max(max|x|, 1e-7), s_x = am / 127,
                                                   x_q = RNE(x * (127 / am)), each one float32 operation
    fp8           as w8a8, with s_x = max(max|x| / 448, 1 / (448 * 512)) and x_q = e4m3(x * (1 / s_x))
    nvfp4         y = bf(bf(S(x, q s) f) + b)      q s exact, s below 2^-6 taken for 0; f = f32(1 / g)
    w*a16_asym    y = bf(S(x, w) + b)              w = bf((q - z) s t), decoded at each product from the published
                                                   arrays, a few outputs at a time
    w4a4, w2a2    y = bf(S(x_q, w) + b)            the same; x_q of `asym_layers.rounded_rows`, exact
    head, router  S(x, w), left in float32; of a head with codes w = bf(q s), or bf((q - z) s t); a router's x and w
                  are rounded first (`units.in_units`)

Why float64. A product of two bfloat16 values (or of a code and a weight) is exact in float64. A sum of thousands of
products has a relative error of 1e-13 in any order. Rounded to float32 it is equal in any library, unless it lies that
close to the middle between two floats, about once in 10^6. Of such sums one in 65,000 changes a bfloat16 output. So
learner and engine may use different libraries, and rows, threads, blocks or vector widths change nothing.

The cost is memory, eight bytes per weight in addition to the loaded one (except weights with zero points), and about
half of float32's speed. Not supported: static activation scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers import utils as dispatch
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from qarl_bridge.engine import asym_layers, nvfp4_layers, table_layers, versions
from qarl_bridge.engine.units import in_units
from qarl_bridge.protocol import formats

Rows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: Rows | None = None,
    wide: bool = False,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes a linear layer's output with float64 sums; see the module docstring.

    Args:
      x: [..., K] in the compute dtype.
      weight: [N, K] float64.
      bias: [N] or None.
      rows: quantizes x to codes and scales; None: x is not quantized.
      wide: return float32.
      factor: float32 [N], multiplies the sum, which is then rounded before the bias is added; None: no factor.

    Returns:
      [..., N] in x.dtype, or float32.
    """
    codes, scale = (x, None) if rows is None else rows(x)
    y = codes.double() @ weight.t()
    if scale is not None:
        y *= scale
    y = y.float()
    if factor is not None:
        y = (y * factor).to(x.dtype).float()
    if bias is not None:
        y += bias.float()
    return y if wide else y.to(x.dtype)


def int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row of x [..., K] to int8: returns codes as float32 [..., K], and float32 scales [..., 1]."""
    rows = x.float()
    amax = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-7)
    top = torch.full_like(amax, 127)  # a tensor: torch computes scalar / tensor as reciprocal times scalar
    return torch.round(rows * (top / amax)), amax / top


def fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row of x [..., K] to e4m3: returns codes as float32 [..., K], and float32 scales [..., 1]."""
    rows = x.float()
    amax = rows.abs().amax(dim=-1, keepdim=True)
    scale = (amax / torch.full_like(amax, 448)).clamp_min(1 / (448 * 512))
    return (rows * (torch.ones_like(scale) / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scale


def unpack_uint4b8(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks int32 words [N, K/8] to int32 codes [N, K] in [-8, 7]; nibble i of word j is element 8j+i, plus 8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF  # arithmetic shift: the mask drops the sign's copies
    return nibbles.reshape(packed.shape[0], -1) - 8


def int4_weight(packed: torch.Tensor, scale: torch.Tensor, int8_activations: bool) -> torch.Tensor:
    """Dequantizes int4 words [N, K/8] with scales [N, K/G] to float64 [N, K]: bf(q s), or for w4a8 the exact q s."""
    codes = unpack_uint4b8(packed).float()
    groups = scale.float()
    weight = codes * groups.repeat_interleave(codes.shape[1] // groups.shape[1], dim=1)
    return (weight if int8_activations else weight.to(torch.bfloat16)).double()


def channel_weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantizes int8 or e4m3 codes [N, K] with N float32 scales to the exact q s, float64 [N, K]."""
    return codes.float().double() * scale.double().view(-1, 1)


def nvfp4_weight(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantizes nvfp4 codes uint8 [N, K/2] with e4m3 scales [N, K/16], those below 2^-6 as 0, to float64 [N, K]."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    groups = scale.double()
    groups[groups < 2.0**-6] = 0
    return torch.cat([values, -values])[codes] * groups.repeat_interleave(16, dim=1)


_DECODED = 2**18  # weights with zero points that are decoded at once: they stay in a core's cache
_WEIGHT = "weight_float64"  # [N, K] float64 parameter: vLLM's reload copies new values into its storage


def _hold(layer: torch.nn.Module, weight: torch.Tensor) -> None:
    layer.register_parameter(_WEIGHT, torch.nn.Parameter(weight.contiguous(), requires_grad=False))


class _Float64:
    """The base of CPU kernels that multiply with a float64 weight. rows: quantizes activations; None: not quantized."""

    rows: Rows | None = None

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Accepts every CPU, and no other platform."""
        return current_platform.is_cpu(), f"{cls.__name__.removesuffix('LinearKernel')} is for CPUs"

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer's output [..., N], in x.dtype, of inputs x [..., K]."""
        return product(x, getattr(layer, _WEIGHT), bias, self.rows)


class Float64WNA16LinearKernel(_Float64, MPLinearKernel):
    """vLLM linear kernel for w4a16 and w4a8 on a CPU; see the module docstring."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns -1: a CPU needs no CUDA capability."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Accepts symmetric int4 on a CPU, with any group size that divides K."""
        if not current_platform.is_cpu():
            return False, "Float64WNA16 is for CPUs"
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return False, f"Float64WNA16 supports symmetric uint4b8 only, not {c.weight_type}"
        if c.partition_weight_shape[0] % 8 or (c.group_size > 0 and c.partition_weight_shape[0] % c.group_size):
            return False, f"input size {c.partition_weight_shape[0]} is not a multiple of 8 and of the group size"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Builds the float64 weight from the packed parameters, at every load."""
        packed, scale, _ = self._get_weight_params(layer)
        self.rows = int8_rows if envs.VLLM_CPU_INT4_W4A8 else None
        _hold(layer, int4_weight(packed.data, scale.data, bool(envs.VLLM_CPU_INT4_W4A8)))


class Float64Int8LinearKernel(_Float64, Int8ScaledMMLinearKernel):
    """vLLM linear kernel for w8a8 on a CPU; see the module docstring."""

    rows = staticmethod(int8_rows)

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Accepts weights with channel scales and symmetric activations quantized per token."""
        if c.is_static_input_scheme or not c.input_symmetric or not c.is_channelwise:
            return False, "Float64Int8 supports channel weights with dynamic symmetric activations only"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Builds the float64 weight from int8 codes and scales, at every load."""
        codes, scale = (getattr(layer, name).data for name in self.layer_param_names[:2])
        _hold(layer, channel_weight(codes, scale))


class Float64FP8LinearKernel(_Float64, FP8ScaledMMLinearKernel):
    """vLLM linear kernel for fp8 on a CPU; see the module docstring."""

    rows = staticmethod(fp8_rows)

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Accepts weights with channel scales and activations quantized per token."""
        weight, activation = c.weight_quant_key.scale.group_shape, c.activation_quant_key.scale
        if activation.static or not activation.group_shape.is_per_token() or not weight.is_per_channel():
            return False, "Float64FP8 supports channel weights with dynamic activations per token only"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Builds the float64 weight from e4m3 codes, which vLLM has transposed, and scales, at every load."""
        codes, scale = (getattr(layer, name).data for name in self.layer_param_names[:2])
        _hold(layer, channel_weight(codes.t(), scale))

    def apply_scaled_mm(self, **named: Any) -> torch.Tensor:
        """Raises NotImplementedError: `apply_weights` computes the whole layer."""
        raise NotImplementedError


class Float64NvFp4LinearKernel(_Float64, nvfp4_layers.NvFp4Layer):
    """vLLM linear kernel for nvfp4 on a CPU; see the module docstring."""

    def held(self, packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the float64 weight [N, K], and the scales unchanged."""
        return nvfp4_weight(packed, scale), scale

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer's output [..., N], in x.dtype, of inputs x [..., K]."""
        return product(x, layer.weight, bias, factor=layer.weight_global_scale)


class Float64AsymmetricLinear(asym_layers.AsymmetricLayer):
    """vLLM layer for w2a16_asym, w3a16_asym, w4a16_asym, w8a16_asym, their bit slices, w4a4 and w2a2 on
    a CPU."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer's output [..., N], in x.dtype, of inputs x [..., K]."""
        outputs, wide = sum(layer.logical_widths), self.inputs(layer, x).double()
        step = max(1, _DECODED // wide.shape[-1])
        blocks = (slice(first, first + step) for first in range(0, outputs, step))
        y = torch.cat([wide @ self.weight(layer, block).double().t() for block in blocks], dim=-1).float()
        if bias is not None:
            y += bias.float()
        return y.to(x.dtype)

    def weight(self, layer: torch.nn.Module, outputs: slice | torch.Tensor) -> torch.Tensor:
        """Decodes the weight of some outputs (a slice, or int64 [n]), bf((q - z) s t), to bfloat16 [n, K]."""
        codes: Any = 0
        for name, width in zip(self.codes, formats.LANES[self.bits], strict=True):
            shifts = torch.arange(0, 8, width, dtype=torch.uint8)
            lanes = (getattr(layer, name)[outputs].unsqueeze(-1) >> shifts) & (2**width - 1)
            codes = codes << width | lanes.flatten(1)
        scales = layer.weight_scale.view(torch.uint8)[outputs].view(torch.float8_e4m3fn).float()  # cannot be indexed
        zeros = getattr(layer, self.zeros)[outputs].float()
        steps = (codes << 8 - self.bits | self.middle).unflatten(1, (zeros.shape[1], -1)).float()
        steps -= zeros.unsqueeze(-1)
        steps *= (scales * layer.weight_tensor_scale[outputs].unsqueeze(1)).unsqueeze(-1)
        return steps.flatten(1).bfloat16()


class Float64Linear:
    """Computes one unquantized layer or a head, as vLLM's `cpu_linear`. It caches the float64 weight at its first
    call."""

    def __init__(self, layer: torch.nn.Module):
        # Heads and routers: what they return is a distribution's logits, which are not rounded.
        self.wide = isinstance(layer, (VocabParallelEmbedding, GateLinear))
        self.is_router = isinstance(layer, GateLinear)
        self._held: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor | Callable[[], torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes outputs [..., N] of inputs x [..., K]; `weight` [N, K] is read, or made, at the first call only."""
        if self._held is None:
            made = (weight if isinstance(weight, torch.Tensor) else weight()).detach()
            self._held = in_units(made, 16) if self.is_router else made.double()
        return product(in_units(x, 24) if self.is_router else x, self._held, bias, wide=self.wide)


class Float64Table(table_layers.Table):
    """vLLM method of embeddings and heads with codes on a CPU. A head keeps its decoded weight, as an unquantized one
    does (`Float64Linear`)."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Makes the head decode its new codes, at every load."""
        if self.layer is not None:
            self.layer.process_weights_after_loading(layer)
        layer.cpu_linear = Float64Linear(layer)

    def rows(self, layer: torch.nn.Module, index: torch.Tensor) -> torch.Tensor:
        """Decodes the rows `index`, int64 [R], to bfloat16 [R, K]."""
        if self.layer is not None:
            assert isinstance(self.layer, Float64AsymmetricLinear)
            return self.layer.weight(layer, index)
        return int4_weight(layer.weight_packed[index], layer.weight_scale[index], False).bfloat16()

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes float32 logits [..., V] of hidden states x [..., K]."""

        def decoded() -> torch.Tensor:
            every = torch.arange(layer.weight_scale.shape[0])
            return torch.cat([self.rows(layer, index) for index in every.split(max(1, _DECODED // x.shape[-1]))])

        return layer.cpu_linear(x, decoded, bias)


def _dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Sets the matrix product of an unquantized layer; replaces vLLM's function, which would pack the weight."""
    del remove_weight  # kept: the product is made from it anew after every load
    layer.cpu_linear = torch.nn.functional.linear if layer.weight.ndim != 2 else Float64Linear(layer)


def register() -> None:
    """Makes vLLM choose these kernels for linear layers on a CPU (idempotent)."""
    for table, kernel in (
        (registry._POSSIBLE_KERNELS, Float64WNA16LinearKernel),
        (registry._POSSIBLE_INT8_KERNELS, Float64Int8LinearKernel),
        (registry._POSSIBLE_FP8_KERNELS, Float64FP8LinearKernel),
    ):
        versions.put_first(table, PlatformEnum.CPU, kernel)
    dispatch.dispatch_cpu_unquantized_gemm = _dispatch
    nvfp4_layers.serve(Float64NvFp4LinearKernel)
    asym_layers.serve(Float64AsymmetricLinear)
    table_layers.serve(Float64Table, Float64AsymmetricLinear)
