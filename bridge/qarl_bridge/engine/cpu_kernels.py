# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU linear kernels for vLLM 0.32 that fill gaps of its x86 build, most of them on machines without AMX.

`PortableWNA16LinearKernel`, int4 weights. vLLM's own kernel calls `torch.ops._C.cpu_gemm_wna16`, which its AVX2 build
does not contain: a W4A16 model loads, then dies with AttributeError at the first token. This one computes

    w = bf16(q * s)          once, at load, kept as float32 (exact)
    y = bf16(x_f32 @ w_f32^T (+ b))     accumulated in float32, rounded once

which is the arithmetic of vLLM's kernel where it exists (`VLLM_CPU_INT4_W4A8=0`: bf16(q*s) weights, float32
accumulation, bias added before the one rounding). float32 because it is what AVX2 does fast: 10x the speed of a bf16
matmul there at 16 rows and more. It is chosen when the C++ op is missing; the packed tensors stay as loaded. For a
model whose int4 layers take int8 activations (w4a8; the engine then sets VLLM_CPU_INT4_W4A8=1) on a CPU without AMX,
where vLLM would silently drop the activation quantisation, it computes the AMX kernel's formula instead:

    am = max(max|x|, 1e-7), s_x = am/127, x_q = RNE(x * (127/am))
    acc <- fma(float(p_g) * s_x, s_w[g], acc)      group by group, p_g exact, from the bias or 0;     y = bf16(acc)

`PortableInt8LinearKernel`, int8 weights and activations. Without VNNI instructions oneDNN multiplies through
`vpmaddubsw`, which adds two u8*s8 products into a *saturating* int16: 127*86 next to a zero activation (stored as 128)
already overflows, and the int32 "product" is silently wrong (one-hot rows come back up to 28 % short). This kernel
computes the product exactly,

    x_q, s_x     vLLM's own dynamic per-token quantisation: s_x = am/127, x_q = clamp(RNE(x * (1/s_x)))
    acc          sum of integer products, in float32 over at most 1,024 inputs at a time (127*128*1024 < 2^24: exact),
                 the parts added as int32
    y = bf16((float32(acc) * s_w) * s_x (+ b))        oneDNN's own order where its product is right

It is chosen only when a self-test at start shows oneDNN's product to be wrong on this CPU; it is also the faster of the
two there.

`portable_linear`, bf16 weights. oneDNN has no bf16 matmul for AVX2 and vLLM falls back to torch's slow one; this is
y = bf16(x_f32 @ w_f32^T (+ b)), as above. The head is where it matters.

`same_for_few_rows`, bf16 weights up to 1 MiB (small layers, routers, heads of small vocabularies) with AMX. vLLM takes
sgl's kernel for them, which adds in one order for one to four rows (VDPBF16PS) and in another above (tiles): the last
sequences of a batch would have other log-probs than the rest. Few rows are padded to five, with zeros.

`HeldScaleInt8LinearKernel`, int8, where oneDNN is right. vLLM's oneDNN path keeps a raw pointer to the weight scales it
was built with. During an in-place reload those are a temporary, freed as soon as its values are copied into the live
parameter: the kernel then reads freed memory. This subclass changes no arithmetic; it keeps that temporary alive next
to the pointer, until the next reload replaces both.

All are put first in vLLM's own kernel registry by `register()`, and reported in the engine's facts. What we left out:
any attempt to be small (4 bytes per weight beside the packed one), tensor parallelism, static activation scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.model_executor.kernels import linear as registry
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types


def unpack_uint4b8(packed: torch.Tensor) -> torch.Tensor:
    """[N, K/8] int32 -> [N, K] int32 codes in [-8, 7]; nibble i of word j is element 8j+i, stored +8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 0xF  # arithmetic shift: the mask drops the sign's copies
    return nibbles.reshape(packed.shape[0], -1) - 8


def portable_int4(packed: torch.Tensor, scale: torch.Tensor, int8_activations: bool) -> torch.Tensor:
    """[N, K/8] int32, [N, K/G] -> [N, K] float32: bf16(q*s), or the codes themselves for w4a8."""
    codes = unpack_uint4b8(packed).float()
    if int8_activations:
        return codes.contiguous()
    groups = scale.float()
    weight = codes * groups.repeat_interleave(codes.shape[1] // groups.shape[1], dim=1)
    return weight.to(torch.bfloat16).float().contiguous()


def float_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., K] x [N, K] float32 -> [..., N] in x.dtype, accumulated in float32, rounded once. A bf16 weight
    is multiplied by oneDNN's tiles, in the order of vLLM's own layers on CPUs that have them."""
    if weight.dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def w4a8_product(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[M, K] x codes [N, K] float32, scales [N, K/G] -> [M, N] in x.dtype, by the AMX kernel's formula."""
    groups = scale.float()
    x_q, x_s = int8_rows(x)
    size = codes.shape[1] // groups.shape[1]
    acc = torch.zeros(len(x_q), codes.shape[0], dtype=torch.float32) if bias is None else bias.float()
    for g in range(groups.shape[1]):
        inputs = slice(g * size, (g + 1) * size)
        product = (x_q[:, inputs] @ codes[:, inputs].t()) * x_s  # exact while 127*8*size < 2^24: size <= 16,384
        # float64 holds the product exactly, so the sum is rounded as one fma rounds it.
        acc = (product.double() * groups[:, g].double() + acc.double()).float()
    return acc.to(x.dtype)


class PortableWNA16LinearKernel(MPLinearKernel):
    """See the module docstring."""

    WEIGHT = "weight_portable"  # [N, K] float32 parameter: vLLM's reload copies new values into its storage

    @classmethod
    def get_min_capability(cls) -> int:
        """CPU: no capability."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Symmetric int4, any group that divides K, only where vLLM has no kernel of its own."""
        if not current_platform.is_cpu():
            return False, "PortableWNA16 is for CPUs"
        if torch.cpu._is_amx_tile_supported():
            return False, "vLLM's own kernels do both int4 schemes with AMX"
        if hasattr(torch.ops._C, "cpu_gemm_wna16") and not envs.VLLM_CPU_INT4_W4A8:
            return False, "vLLM's own cpu_gemm_wna16 exists here"
        if c.weight_type != scalar_types.uint4b8 or c.zero_points:
            return False, f"PortableWNA16 supports symmetric uint4b8 only, not {c.weight_type}"
        if c.partition_weight_shape[0] % 8 or (c.group_size > 0 and c.partition_weight_shape[0] % c.group_size):
            return False, f"input size {c.partition_weight_shape[0]} is not a multiple of 8 and of the group size"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Build w = bf16(q*s), or the codes for w4a8, from the packed parameters (at load and at every reload)."""
        packed, scale, _ = self._get_weight_params(layer)
        self.int8_activations = envs.VLLM_CPU_INT4_W4A8
        weight = portable_int4(packed.data, scale.data, self.int8_activations)
        layer.register_parameter(self.WEIGHT, torch.nn.Parameter(weight, requires_grad=False))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] -> [..., N] in x.dtype."""
        weight = getattr(layer, self.WEIGHT)
        if not self.int8_activations:
            return float_product(x, weight, bias)
        y = w4a8_product(x.reshape(-1, x.shape[-1]), weight, getattr(layer, self.w_s_name), bias)
        return y.reshape(*x.shape[:-1], weight.shape[0])


def portable_linear() -> Callable[..., torch.Tensor]:
    """A `cpu_linear` for one unquantized layer; it converts the weight when first called, so make one per load."""
    held: list[torch.Tensor] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not held:
            held.append(weight.detach().float())
        bias_f32 = None if bias is None else bias.float()
        return torch.nn.functional.linear(x.float(), held[0], bias_f32).to(x.dtype)

    return linear


_TILE_ROWS = 5  # from here on sgl's bf16 kernel multiplies with AMX tiles


def same_for_few_rows(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's `cpu_linear` of one unquantized layer, the same for every batch; see the module docstring."""
    if getattr(linear, "is_same_for_few_rows", False):
        return linear

    def padded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) >= _TILE_ROWS:
            return linear(x, weight, bias)
        y = linear(torch.nn.functional.pad(rows, (0, 0, 0, _TILE_ROWS - len(rows))), weight, bias)
        return y[: len(rows)].reshape(*x.shape[:-1], y.shape[-1])

    padded.is_same_for_few_rows = True  # type: ignore[attr-defined]
    return padded


_EXACT_INPUTS = 1024  # the longest run of int8 products whose float32 sum is exact in any order


@functools.cache
def onednn_int8_is_exact() -> bool:
    """Whether oneDNN's int8 product is right on this CPU, tried on the values that saturate int16 pairs."""
    if not hasattr(torch.ops._C, "create_onednn_scaled_mm_handler"):
        return False
    rows, inputs, outputs = 4, 64, 32
    weight = torch.full((outputs, inputs), 127, dtype=torch.int8)
    weight[::2] = -128
    scale = torch.ones(outputs, 1, dtype=torch.float32)
    handler = ops.create_onednn_scaled_mm(weight.t(), scale, torch.float32, True, False, 32)
    x = torch.full((rows, inputs), 127, dtype=torch.int8)
    out = torch.empty(rows, outputs, dtype=torch.float32)
    ops.onednn_scaled_mm(handler, x, out, torch.ones_like(out[:, :1]), None, torch.zeros_like(out[:1]), None)
    return bool(torch.equal(out, x.float() @ weight.float().t()))


def int8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] -> int8 codes as float32 [M, K], and scales [M, 1], as vLLM's kernels for AMX (sgl, `w4a8`) make them."""
    rows = x.float()
    amax = rows.abs().amax(dim=1, keepdim=True).clamp_min(1e-7)
    top = torch.full_like(amax, 127)  # a tensor: torch computes scalar / tensor as reciprocal times scalar
    return torch.round(rows * (top / amax)), amax / top


def int8_product(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, like_amx: bool = False
) -> torch.Tensor:
    """[M, K] x codes [N, K] float32, N scales -> [M, N] in x.dtype: exact products; codes and order of rescaling are
    oneDNN's, or those of vLLM's kernel for AMX."""
    if like_amx:
        x_f32, x_s = int8_rows(x)
    else:
        x_q, x_s, _ = ops.onednn_scaled_int8_quant(x.contiguous(), None, None, True)
        x_f32 = x_q.float()
    if codes.shape[1] <= _EXACT_INPUTS:
        acc = x_f32 @ codes.t()
    else:
        parts = zip(x_f32.split(_EXACT_INPUTS, dim=1), codes.split(_EXACT_INPUTS, dim=1), strict=True)
        acc = sum((a @ b.t()).to(torch.int32) for a, b in parts).float()  # type: ignore[union-attr]
    w_s, x_s = scale.view(1, -1), x_s.view(-1, 1)
    y = acc.mul_(x_s).mul_(w_s) if like_amx else acc.mul_(w_s).mul_(x_s)
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype)


class PortableInt8LinearKernel(Int8ScaledMMLinearKernel):
    """See the module docstring."""

    WEIGHT = "weight_portable"  # [N, K] float32 copy of the codes

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Where vLLM would use oneDNN and oneDNN is wrong."""
        if not current_platform.is_cpu():
            return False, "PortableInt8 is for CPUs"
        if torch.cpu._is_amx_tile_supported() or onednn_int8_is_exact():
            return False, "vLLM's own int8 kernel is right here"
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Channel weights with dynamic symmetric activations."""
        if c.is_static_input_scheme or not c.input_symmetric or not c.is_channelwise:
            return False, "PortableInt8 supports channel weights with dynamic symmetric activations only"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Copy the codes to float32 (each at load and at every reload)."""
        weight = getattr(layer, self.layer_param_names[0]).data.float().contiguous()
        layer.register_parameter(self.WEIGHT, torch.nn.Parameter(weight, requires_grad=False))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] -> [..., N] in x.dtype."""
        weight, scale = getattr(layer, self.WEIGHT), getattr(layer, self.layer_param_names[1])
        y = int8_product(x.reshape(-1, x.shape[-1]), weight, scale, bias)
        return y.reshape(*x.shape[:-1], weight.shape[0])


class HeldScaleInt8LinearKernel(CPUInt8ScaledMMLinearKernel):
    """See the module docstring."""

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        """Build the oneDNN primitive and keep what it points at."""
        super().process_weights_for_onednn(layer)
        self._held_scale = getattr(layer, self.layer_param_names[1]).data


def register() -> None:
    """Put these kernels first among the CPU's candidates (idempotent)."""
    for table, kernel in (
        (registry._POSSIBLE_KERNELS, PortableWNA16LinearKernel),
        (registry._POSSIBLE_INT8_KERNELS, HeldScaleInt8LinearKernel),
        (registry._POSSIBLE_INT8_KERNELS, PortableInt8LinearKernel),  # inserted last, so asked first
    ):
        kernels = table.setdefault(PlatformEnum.CPU, [])
        if kernel not in kernels:
            kernels.insert(0, kernel)  # register_linear_kernel() can only append, after kernels that claim the layer
