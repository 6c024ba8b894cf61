# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Formulas that compute weights from published tensors, one for each format, found by tensor names and dtypes.

    bf16    weight bfloat16 [N, K]
    int8    weight int8 [N, K], weight_scale float32 [N, 1]                     activations int8
    fp8     weight float8_e4m3fn [N, K], weight_scale float32 [N, 1]            activations e4m3
    int4    weight_packed int32 [N, K/8], weight_scale bfloat16 [N, K/G]        activations bfloat16, or int8
    nvfp4   weight_packed uint8 [N, K/2], weight_scale float8_e4m3fn [N, K/16], weight_global_scale float32 [1]
    asym    weight_u2, _u4 or _u8 uint8 [N, K bits/8] (three bits: weight_u2 and weight_u1), weight_scale float8_e4m3fn
            [N, K/G], weight_zero_point uint8 [N, K/G], weight_tensor_scale float32 [1]; with weight_zero_point_mid a
            code stands for the middle of its interval, with weight_zero_point_a2 or _a4 activations have 2 or 4 bits

A new format needs one `Formula`: how to read codes and scales from its tensors, for some inputs and for all. The
read-backs of dense layers and of experts use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from qarl_bridge.protocol import formats
from qarl_bridge.protocol.errors import BridgeError

Tensors = Mapping[str, Any]  # of one weight, by leaf
NO_ARRAYS = ("weight_shape", "bias", formats.INDEX)


class Columns:
    """One-hot rows at some inputs, and the indices that pick these inputs' columns from staged tensors.

    Made once for all layers of a width, because a read-back on a GPU is bound by kernel launches.

    Attributes:
      picked: the inputs, int64 [R].
      width: K, the number of inputs.
      one_hot: bfloat16 [R, K], on the model's device.
      index: `picked` on the staged tensors' device.
    """

    def __init__(self, picked: np.ndarray, width: int, *, computing: Any, staged: Any):
        self.picked, self.width = picked, width
        self.index = torch.from_numpy(picked).to(staged)
        every = torch.arange(width, device=computing)
        self.one_hot = (every == self.index.to(computing)[:, None]).to(torch.bfloat16)
        self._columns: dict[int, Any] = {1: self.index}

    def of(self, tensors: Sequence[Any]) -> Any:
        """Picks the columns that hold `picked` inputs from staged matrices, and concatenates them: [R, sum of N_i].

        Args:
          tensors: matrices [N_i, K / g], each column of which holds g neighbouring inputs; g is equal for all matrices.
        """
        inputs = self.width // tensors[0].shape[1]
        if inputs not in self._columns:
            self._columns[inputs] = self.index // inputs
        return torch.cat([tensor.index_select(1, self._columns[inputs]) for tensor in tensors]).t()

    def places(self, inputs: int) -> Any:
        """Computes each read input's place in its group of `inputs` inputs, int32 [R, 1]."""
        return (self.index % inputs).to(torch.int32)[:, None]


@dataclasses.dataclass(frozen=True)
class Formula:
    """The formula of one format: how codes and scales, and from them weights and outputs, follow from its tensors.

    Attributes:
      leaves: names (leaves) and dtypes of a weight's tensors, codes first.
      columns: a function (tensors of fused weights, Columns) -> codes float32 [R, N], scales [R or 1, N] or None.
      whole: a function of a weight's tensors -> codes [..., N, K], scales [..., N, groups] or None.
      inputs: inputs in one column of the codes tensor.
      top: the largest code of quantized activations; None: activations are bfloat16.
      rounded: whether code times scale is rounded to bfloat16 before the product.
      one: the number to which a layer with zero points rounds the 1 of a one-hot row.
    """

    leaves: Mapping[str, torch.dtype]
    columns: Callable[[Sequence[Tensors], Columns], tuple[Any, Any]]
    whole: Callable[[Tensors], tuple[Any, Any]]
    inputs: int = 1
    top: float | None = None
    rounded: bool = False
    one: float = 1.0

    def served(self, tensors: Tensors, dtype: Any) -> Any:
        """Computes the weight that the kernel multiplies, [..., N, K] in `dtype`."""
        codes, scales = self.whole(tensors)
        codes = codes.float().to(dtype)
        if scales is None:
            return codes
        weight = (codes.unflatten(-1, (scales.shape[-1], -1)) * scales.to(dtype).unsqueeze(-1)).flatten(-2)
        return weight.float().bfloat16().to(dtype) if self.rounded else weight

    def expected(self, weights: Sequence[Tensors], columns: Columns) -> list[Any]:
        """Computes the expected outputs of one-hot rows for a layer of these weights, [R, N] float32. It returns one
        alternative, or two for the two orders in which a GPU kernel may multiply by scales."""
        codes, scales = self.columns(weights, columns)
        if self.top is None:
            return [_bf16(self._sums(codes, scales))]
        # A float32 tensor: a Python float would be multiplied in float64 on some backends. Both are exact as the kernel
        # has them: |acc| < 2^24.
        x_scale = torch.tensor(1 / self.top, dtype=torch.float32, device=codes.device)
        acc = codes * self.top
        if columns.one_hot.device.type == "cpu":  # the bridge's own layers
            return [_bf16((acc.double() * scales.double() * x_scale.double()).float())]
        return [_bf16((acc * x_scale) * scales), _bf16((acc * scales) * x_scale)]

    def _sums(self, codes: Any, scales: Any) -> Any:
        """Computes what one-hot rows give where `top` is None, before the last rounding: float32 [R, N]."""
        return _bf16(codes if scales is None else codes * scales) * self.one

    def expected_split(self, weights: Sequence[Tensors], columns: Columns, twice: Any | None) -> list[Any]:
        """Computes `expected` for a layer with duplicated inputs `twice` (int32 [M], or None): both columns' sum."""
        if twice is None:
            return self.expected(weights, columns)
        index, at = columns.index, columns.index[:, None] == twice
        width = columns.width + len(twice)
        again = torch.where(at.any(1), columns.width + at.int().argmax(1), index)
        where = {"computing": columns.one_hot.device, "staged": index.device}
        every = (Columns(picked.cpu().numpy(), width, **where) for picked in (index, again))
        own, second = (self._sums(*self.columns(weights, picked)) for picked in every)
        return [_bf16(own + torch.where(at.any(1)[:, None].to(own.device), second, 0.0))]


def find(tensors: Tensors, activations: str) -> Formula:
    """Finds the formula of a weight by its tensors' names and dtypes.

    Args:
      activations: how int4 layers take activations, "bf16" or "int8".

    Raises:
      BridgeError("engine"): no formula has these tensors.
    """
    given = {leaf: tensor.dtype for leaf, tensor in tensors.items() if leaf not in NO_ARRAYS}
    for formula in FORMULAS:
        if formula.leaves == given:
            return INT4_INT8 if formula is INT4 and activations == "int8" else formula
    said = ", ".join(f"{leaf} {dtype}" for leaf, dtype in given.items())
    raise BridgeError(f"read-back: no formula for a layer of {said} (engine/readback/formulas.py)", "engine")


def _bf16(x: Any) -> Any:
    return x.to(torch.bfloat16).float()


def _plain_columns(weights: Sequence[Tensors], columns: Columns) -> tuple[Any, Any]:
    return columns.of([tensors["weight"] for tensors in weights]).float(), None


def _channel_columns(weights: Sequence[Tensors], columns: Columns) -> tuple[Any, Any]:
    bytes_ = columns.of([tensors["weight"].view(torch.uint8) for tensors in weights])  # float8 cannot be indexed
    codes = bytes_.contiguous().view(weights[0]["weight"].dtype).float()
    return codes, torch.cat([tensors["weight_scale"].float().reshape(1, -1) for tensors in weights], dim=1)


def _int4_columns(weights: Sequence[Tensors], columns: Columns) -> tuple[Any, Any]:
    words = columns.of([tensors["weight_packed"] for tensors in weights])
    scales = columns.of([tensors["weight_scale"] for tensors in weights])
    return (((words >> 4 * columns.places(8)) & 0xF) - 8).float(), scales.float()


def _int4_whole(tensors: Tensors) -> tuple[Any, Any]:
    words = tensors["weight_packed"]
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (((words.unsqueeze(-1) >> shifts) & 0xF) - 8).flatten(-2), tensors["weight_scale"]


def _nvfp4_weight(codes: Any, scales: Any) -> Any:
    """Computes code times scale, float32, from one uint8 code for each weight; e4m3 scales below 2^-6 count as 0."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=codes.device)
    scales = torch.where(scales.float() < 2.0**-6, 0.0, scales.float())
    return torch.where(codes > 7, -1.0, 1.0) * values[(codes & 7).long()] * scales


def _nvfp4_columns(weights: Sequence[Tensors], columns: Columns) -> tuple[Any, Any]:
    pairs = columns.of([tensors["weight_packed"] for tensors in weights])
    scales = columns.of([tensors["weight_scale"].view(torch.uint8) for tensors in weights])  # as in _channel_columns
    codes = (pairs >> (4 * columns.places(2)).to(torch.uint8)) & 15
    factors = [1 / tensors["weight_global_scale"].float().expand(len(tensors["weight_packed"])) for tensors in weights]
    return _nvfp4_weight(codes, scales.contiguous().view(torch.float8_e4m3fn)), torch.cat(factors)[None]


def _nvfp4_whole(tensors: Tensors) -> tuple[Any, Any]:
    pairs = tensors["weight_packed"]
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    scales = tensors["weight_scale"].float().repeat_interleave(16, dim=-1)
    return _nvfp4_weight(codes, scales), 1 / tensors["weight_global_scale"].float()[..., None, :]


def _zeros(tensors: Tensors) -> Any:
    return next(tensor for leaf, tensor in tensors.items() if leaf.startswith("weight_zero_point"))


def _asym_scales(tensors: Tensors, codes: Any) -> Any:
    """Expands the float32 scale of a whole weight to its outputs, [..., N, 1]."""
    return tensors["weight_tensor_scale"].float()[..., None, :].expand(*codes.shape[:-1], 1)


def _asym_columns(bits: int, middle: int, weights: Sequence[Tensors], columns: Columns) -> tuple[Any, Any]:
    codes: Any = 0
    for width in formats.LANES[bits]:
        packed = columns.of([tensors[f"weight_u{width}"] for tensors in weights]).int()
        codes = codes << width | packed >> width * columns.places(8 // width) & 2**width - 1
    zeros = columns.of([_zeros(tensors) for tensors in weights]).int()
    scales = columns.of([tensors["weight_scale"].view(torch.uint8) for tensors in weights])  # as in _channel_columns
    whole = torch.cat([_asym_scales(tensors, _zeros(tensors)) for tensors in weights]).t()
    return ((codes << 8 - bits) + middle - zeros).float(), scales.contiguous().view(torch.float8_e4m3fn).float() * whole


def _asym_whole(bits: int, middle: int, tensors: Tensors) -> tuple[Any, Any]:
    codes: Any = 0
    for width in formats.LANES[bits]:
        packed = tensors[f"weight_u{width}"].int()
        shifts = torch.arange(0, 8, width, dtype=torch.int32, device=packed.device)
        codes = codes << width | ((packed.unsqueeze(-1) >> shifts) & 2**width - 1).flatten(-2)
    zeros = _zeros(tensors).int()
    steps = ((codes << 8 - bits) + middle).unflatten(-1, (zeros.shape[-1], -1)) - zeros.unsqueeze(-1)
    return steps.flatten(-2), tensors["weight_scale"].float() * _asym_scales(tensors, zeros)


# The numbers next to 1 on the grids of two and four bits: 3 * 5/16 and 14 * 9/128.
_ONES = {0: 1.0, 2: 0.9375, 4: 0.984375}


def _asym(bits: int, middle: int = 0, activation_bits: int = 0) -> Formula:
    """Makes the formula of a format with zero points: a code counts as code 2^(8 - bits) + middle."""
    codes = {f"weight_u{width}": torch.uint8 for width in formats.LANES[bits]}
    scales = {"weight_scale": torch.float8_e4m3fn, "weight_tensor_scale": torch.float32}
    return Formula(
        codes | scales | {formats.zero_points(bool(middle), activation_bits): torch.uint8},
        functools.partial(_asym_columns, bits, middle),
        functools.partial(_asym_whole, bits, middle),
        inputs=8 // formats.LANES[bits][0],
        rounded=True,
        one=_ONES[activation_bits],
    )


def _channel_whole(tensors: Tensors) -> tuple[Any, Any]:
    return tensors["weight"], tensors["weight_scale"]


INT4 = Formula(
    {"weight_packed": torch.int32, "weight_scale": torch.bfloat16}, _int4_columns, _int4_whole, inputs=8, rounded=True
)
INT4_INT8 = dataclasses.replace(INT4, top=127.0, rounded=False)
FORMULAS = (
    Formula({"weight": torch.bfloat16}, _plain_columns, lambda tensors: (tensors["weight"], None)),
    Formula({"weight": torch.int8, "weight_scale": torch.float32}, _channel_columns, _channel_whole, top=127.0),
    Formula(
        {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}, _channel_columns, _channel_whole, top=448.0
    ),
    INT4,
    Formula(
        {"weight_packed": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_global_scale": torch.float32},
        _nvfp4_columns,
        _nvfp4_whole,
        inputs=2,
    ),
    *map(_asym, formats.LANES),
    *(_asym(bits, 2 ** (7 - bits)) for bits in (4, 2)),
    *(_asym(bits, activation_bits=bits) for bits in (4, 2)),
)
