# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The base of a scheme: its grid, its bytes, its arithmetic, and what is known and promised of it.

A scheme is one file of `schemes/` with one frozen, hashable subclass. Nothing else in the project asks which scheme a
weight has: learner, publisher, memory plan, export and verdicts read these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from qarl_bridge.protocol.formats import Layout

from qarl_jax.numerics.engine import Numerics
from qarl_jax.quant.contractions import Product
from qarl_jax.quant.qtensor import QTensor


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A quantization scheme. `str(scheme)` is what `parse_scheme` reads back.

    With the first four methods a layer is the product of unquantized activations with the weight `dequantize`d and
    rounded to bfloat16. Where activations are quantized, too, `low_bit_activations` says so, and `activations` and
    `multiply` compute the layer; so they do where `own_layer` says so.

    Attributes:
      name: as configs write it.
      low_bit_activations: whether activations are quantized before they meet a weight.
      kernel: which kernel of `kernels/products.py` multiplies codes on a Hopper GPU: "int8", "e4m3", or none.
      sums_are_exact: whether the engine's sum has the same bits in every order.
      one_range: whether weights that an engine fuses (q, k and v; gate and up) share a number that depends on all.
      decoded: whether the bridge's CUDA engine decodes one layer at a time to bfloat16 for many rows.
      held_twice: whether it multiplies a copy of the arrays in a layout of its own, beside the loaded ones
        (`memory.engine.layer_copies`).
      baseline_k3: the largest k3 measured of a bf16 learner beside a sampler of this scheme, on random weights, which
        show every difference; None: not measured.
    """

    name: ClassVar[str]
    low_bit_activations: ClassVar[bool] = False
    kernel: ClassVar[str] = ""
    sums_are_exact: ClassVar[bool] = False
    one_range: ClassVar[bool] = False
    decoded: ClassVar[bool] = False
    held_twice: ClassVar[bool] = False
    baseline_k3: ClassVar[float | None] = None

    def __str__(self) -> str:
        group_size = getattr(self, "group_size", None)  # a field of schemes with a choice of groups
        return self.name if group_size is None else f"{self.name}:g{group_size}"

    @property
    def own_layer(self) -> bool:
        """Whether `activations` and `multiply` compute a layer."""
        return self.low_bit_activations

    @property
    def wire(self) -> Layout:
        """The arrays of a weight, and how they travel to an engine."""
        raise NotImplementedError

    def shape(self, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        """Computes (..., N, K) of a QTensor's arrays."""
        *leading, stored = arrays["codes"].shape
        return (*leading, stored * self.wire.codes.inputs)

    def check(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight [..., N, K] cannot be quantized, or None."""
        del shape
        return None

    def quantize(self, w: jax.Array) -> QTensor:
        """The arrays of a master [..., N, K]: of its bf16 rounding, with `float32.divide` for every quotient."""
        raise NotImplementedError

    def quantize_beside(self, w: jax.Array, beside: Sequence[jax.Array]) -> QTensor:
        """`quantize` of a master that an engine fuses with others, [..., N', K]; with `one_range` they matter."""
        del beside
        return self.quantize(w)

    def dequantize(self, qt: QTensor) -> jax.Array:
        """The weight they stand for, float32 [..., N, K]."""
        raise NotImplementedError

    @property
    def exports(self) -> Scheme:
        """The scheme whose layout an exported folder has; another one where engines in general do not know `wire`."""
        return self

    def exported(self, qt: QTensor) -> QTensor:
        """The weight under `exports`: the same values."""
        return qt

    def on(self, numerics: Numerics) -> Scheme:
        """The scheme as the engine that `numerics` mirrors has it.

        Raises:
          UserError: this engine has no layer of the scheme.
        """
        del numerics
        return self

    def activations(self, x: jax.Array, *, numerics: Numerics) -> Any:
        """[M, K] as they meet the weight: codes, and float32 scales [M, 1] of rows."""
        raise NotImplementedError

    def multiply(self, used: Any, qt: QTensor, bias: Any, *, numerics: Numerics, product: Product) -> jax.Array:
        """The engine's layer.

        Args:
          used: from `activations`.
          qt: the weight.
          bias: float32 [1, N], or None.
          numerics: the engine mirrored.
          product: contractions with one weight, or with those of experts.

        Returns:
          [M, N] in float32, not yet rounded to the compute dtype.
        """
        raise NotImplementedError
