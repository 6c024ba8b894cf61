# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Base class of linear layers with zero points (format `qarl-asymmetric`), and their registration in vLLM.

cpu/linear.py and cuda/asym.py compute. vLLM has no layer for two and three bits, for e4m3 scales under a float32 scale,
or for zero points of bit slices. A layer's parameters here are the published arrays: packed codes q, scales s, zero
points z, and a float32 scale t of each part that vLLM fuses (q, k and v; gate and up). A weight is bf((q - z) s t),
where a code of b bits is scaled to eight: q = code 2^(8 - b).

Under w4a4 and w2a2 a layer first rounds each row of activations to such a grid, as the learner does, with one t per row
(`rounded_rows`, on a GPU `cuda/asym_ops.rounded_rows`). They are exact in bfloat16, so the product is the same.

With split outlier channels (see config.json) a layer has duplicated inputs, listed in `input_index`, behind its inputs.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from qarl_bridge.protocol import formats


class AsymmetricLayer(CompressedTensorsScheme):
    """An abstract vLLM scheme for layers with zero points, of one code width and group size.

    Args:
      bits: bits of a code: 2, 3, 4 or 8.
      group_size: inputs per scale and zero point.
      midpoint: whether q = code 2^(8 - b) + 2^(7 - b), the middle of the code's interval.
      share: fraction of a layer's inputs that are duplicated; 0: none.
      activation_bits: bits of an activation's code; 0: activations stay as they are.
    """

    is_batch_invariant: ClassVar[bool] = True

    def __init__(self, bits: int, group_size: int, midpoint: bool, share: float = 0.0, activation_bits: int = 0):
        self.bits, self.group_size, self.share, self.activation_bits = bits, group_size, share, activation_bits
        self.middle = 2 ** (7 - bits) if midpoint else 0
        self.codes = [f"weight_u{width}" for width in formats.LANES[bits]]
        self.zeros = formats.zero_points(midpoint, activation_bits)

    @classmethod
    def get_min_capability(cls) -> int:
        """Returns 0: the subclass of each device checks the GPU when it loads."""
        return 0

    def create_weights(
        self,
        layer: torch.nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        weight_loader: Callable[..., Any],
        **unused: Any,
    ) -> None:
        """Creates parameters in published layout: codes uint8 [N, K width/8] for each bit lane, scales e4m3 and zero
        points uint8 [N, K/G], and float32 scales [parts]."""
        twice = formats.places(input_size_per_partition, self.share, self.group_size)
        n, k = sum(output_partition_sizes), input_size_per_partition + twice
        layer.logical_widths = output_partition_sizes
        made = {"weight_loader": weight_loader}
        matrix = made | {"input_dim": 1, "output_dim": 0}
        for name, width in zip(self.codes, formats.LANES[self.bits], strict=True):
            codes = torch.empty(n, k * width // 8, dtype=torch.uint8)
            layer.register_parameter(name, ModelWeightParameter(data=codes, **matrix))
        groups = n, k // self.group_size
        zeros = ModelWeightParameter(data=torch.empty(groups, dtype=torch.uint8), **matrix)
        scales = GroupQuantScaleParameter(data=torch.empty(groups, dtype=torch.float8_e4m3fn), **matrix)
        parts = PerTensorScaleParameter(data=torch.empty(len(output_partition_sizes), dtype=torch.float32), **made)
        for name, value in ((self.zeros, zeros), ("weight_scale", scales), ("weight_tensor_scale", parts)):
            layer.register_parameter(name, value)
        if twice:
            index = torch.empty(len(output_partition_sizes), twice, dtype=torch.int32)
            layer.register_parameter(formats.INDEX, PerTensorScaleParameter(data=index, **made))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Expands, at every load, scales t from parts to outputs, float32 [N], and the index of duplicated inputs to
        all inputs, int32 [K]."""
        widths = torch.tensor(layer.logical_widths, device=layer.weight_tensor_scale.device)
        self.keep(layer, "weight_tensor_scale", layer.weight_tensor_scale.data.repeat_interleave(widths))

        if self.share and hasattr(layer, formats.INDEX):
            twice = getattr(layer, formats.INDEX).data[0]
            own = torch.arange(layer.weight_scale.shape[1] * self.group_size - len(twice), device=twice.device)
            self.keep(layer, formats.INDEX, torch.cat([own.to(twice.dtype), twice]))

    def inputs(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Gathers activations [..., K] for the weight's columns: duplicated inputs twice; index K selects a zero. Then
        rounds them, if the scheme does."""
        index = getattr(layer, formats.INDEX, None)
        x = x if index is None else torch.nn.functional.pad(x, (0, 1)).index_select(-1, index)
        return self.rounded(x, self.activation_bits, self.group_size) if self.activation_bits else x

    @staticmethod
    def rounded(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
        """Rounds activations [..., K] by `rounded_rows`, or by another function of equal bits."""
        return rounded_rows(x, bits, group)

    @staticmethod
    def keep(layer: torch.nn.Module, name: str, value: torch.Tensor) -> None:
        """Replaces a loaded parameter by the value that the kernel multiplies."""
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))

    @abc.abstractmethod
    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer's output [..., N], in x.dtype, of inputs x [..., K]."""


def rounded_rows(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Rounds rows of activations to codes of `bits` bits with zero points, with the learner's bits.

    `rounded` in qarl_jax/quant/schemes/asym_grid.py explains the formula. Each operation is one of float32. Quotients
    are correctly rounded, because both operands are tensors.

    Args:
      x: [..., K], K a multiple of `group`.

    Returns:
      (q - z) s t of each number, in x.dtype, which holds it exactly.
    """
    groups = x.float().unflatten(-1, (-1, group))
    high, low = groups.amax(-1, keepdim=True).clamp_min(0), groups.amin(-1, keepdim=True).clamp_max(0)
    top = torch.full_like(high, 2**bits - 1)
    exact = (high - low) / top
    carried = exact.amax(-2, keepdim=True).view(torch.int32) + 0x1FFFFF  # of a fraction above 1.75: 448 is 1.75 * 2^8
    exponent = ((carried >> 23) - 127 - 8).clamp_min(-104)
    t, ratio = _power_of_two(exponent), exact * _power_of_two(-exponent)
    last = ((ratio.view(torch.int32) >> 23) - 127).clamp(-6, 8) - 3
    units, place = ratio * _power_of_two(-last), _power_of_two(last)
    less, more = ((whole * place).clamp_min(2.0**-9) for whole in (units.floor(), units.ceil()))
    fits = _half_up(high / (less * t)) - _half_up(low / (less * t)) <= top
    step = torch.where(fits, less, more) * t
    zeros = -_half_up(low / step)
    codes = torch.minimum((_half_up(groups / step) + zeros).clamp_min(0), top)
    return ((codes - zeros) * step).flatten(-2).to(x.dtype)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Computes 2^exponent in float32, of int32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def _half_up(x: torch.Tensor) -> torch.Tensor:
    """Computes floor(x + 1/2) in float32, without rounding x + 1/2 first."""
    whole = x.floor()
    return whole + (x - whole >= 0.5)


def serve(kind: type[AsymmetricLayer]) -> None:
    """Makes vLLM compute every layer of format `qarl-asymmetric` by `kind`; only the first call has an effect."""
    config = compressed_tensors.CompressedTensorsConfig
    original = config.get_scheme
    if getattr(original, "is_own", False):
        return

    @functools.wraps(original)
    def get_scheme(self: Any, layer: torch.nn.Module, layer_name: str | None = None) -> Any:
        found = self.get_scheme_dict(layer, layer_name)
        format_ = (found or {}).get("format")
        if format_ not in formats.ASYMMETRIC:
            return original(self, layer, layer_name)
        weights, activations = found["weights"], found.get("input_activations")
        split = getattr(get_current_vllm_config().model_config.hf_config, formats.SPLITTING, {})
        midpoint = formats.ASYMMETRIC.index(format_) == 1
        return kind(
            weights.num_bits,
            weights.group_size,
            midpoint,
            split.get("share", 0.0),
            activations.num_bits if activations else 0,
        )

    get_scheme.is_own = True  # type: ignore[attr-defined]
    config.get_scheme = get_scheme
