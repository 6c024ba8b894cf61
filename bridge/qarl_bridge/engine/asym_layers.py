# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Base class of linear layers with zero points (format `qarl-asymmetric`), and their registration in vLLM.

cpu/linear.py and cuda/asym.py compute. vLLM has no layer for two and three bits, for e4m3 scales under a float32 scale,
or for zero points of bit slices. A layer's parameters here are the published arrays: packed codes q, scales s, zero
points z, and a float32 scale t of each part that vLLM fuses (q, k and v; gate and up). A weight is bf((q - z) s t),
where a code of b bits is scaled to eight: q = code 2^(8 - b).

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
    """

    is_batch_invariant: ClassVar[bool] = True

    def __init__(self, bits: int, group_size: int, midpoint: bool, share: float = 0.0):
        self.bits, self.group_size, self.share = bits, group_size, share
        self.middle = 2 ** (7 - bits) if midpoint else 0
        self.codes = [f"weight_u{width}" for width in formats.LANES[bits]]
        self.zeros = "weight_zero_point" + "_mid" * midpoint

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

    @staticmethod
    def inputs(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Gathers activations [..., K] for the weight's columns: duplicated inputs twice; index K selects a zero."""
        index = getattr(layer, formats.INDEX, None)
        return x if index is None else torch.nn.functional.pad(x, (0, 1)).index_select(-1, index)

    @staticmethod
    def keep(layer: torch.nn.Module, name: str, value: torch.Tensor) -> None:
        """Replaces a loaded parameter by the value that the kernel multiplies."""
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))

    def weight(self, layer: torch.nn.Module, outputs: torch.Tensor) -> torch.Tensor:
        """Decodes the weight of the outputs `outputs`, int64 [n], to bfloat16 [n, K]."""
        raise NotImplementedError

    @abc.abstractmethod
    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer's output [..., N], in x.dtype, of inputs x [..., K]."""


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
        weights = found["weights"]
        split = getattr(get_current_vllm_config().model_config.hf_config, formats.SPLITTING, {})
        midpoint = formats.ASYMMETRIC.index(format_) == 1
        return kind(weights.num_bits, weights.group_size, midpoint, split.get("share", 0.0))

    get_scheme.is_own = True  # type: ignore[attr-defined]
    config.get_scheme = get_scheme
