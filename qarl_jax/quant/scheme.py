# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The base class of quantization schemes: grid, published arrays, arithmetic of a layer, and properties.

Every file of `schemes/` defines one frozen, hashable subclass. Learner, publisher, memory plan, export and
`verify/alignment.py` read the fields of `Scheme`; they contain no code for single schemes.
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
    """A quantization scheme. `parse_scheme(str(scheme))` gives an equal scheme.

    By default a layer multiplies unquantized activations by the result of `dequantize`, rounded to bfloat16. Where
    `own_layer` is true, `activations` and `multiply` compute the layer instead. It is true wherever activations are
    quantized (`low_bit_activations`).

    Attributes:
      name: the scheme's name in configs.
      low_bit_activations: whether activations are quantized before they meet a weight.
      kernel: which kernel of `kernels/products.py` multiplies codes on a Hopper GPU: "int8", "e4m3", or none.
      sums_are_exact: whether the engine's sum has the same bits in every order.
      one_range: whether weights that an engine fuses (q, k and v; gate and up) share one scale, made of all of them.
      decoded: whether vLLM under the bridge, on CUDA, dequantizes a layer to bfloat16 when it multiplies many rows.
      held_twice: whether vLLM keeps a second copy of the arrays in its kernel's layout
        (`memory.engine.layer_copies`).
      of_tables: whether the embedding and the head can be held so.
      needs_training: whether rounding alone spoils a policy, so that `qarl_jax.qat` has to train it first.
      baseline_k3: the largest k3 measured between a bf16 learner and a sampler under this scheme, on random weights;
        None: not measured.
    """

    name: ClassVar[str]
    low_bit_activations: ClassVar[bool] = False
    kernel: ClassVar[str] = ""
    sums_are_exact: ClassVar[bool] = False
    one_range: ClassVar[bool] = False
    decoded: ClassVar[bool] = False
    held_twice: ClassVar[bool] = False
    of_tables: ClassVar[bool] = False
    needs_training: ClassVar[bool] = False
    baseline_k3: ClassVar[float | None] = None

    def __str__(self) -> str:
        group_size = getattr(self, "group_size", None)  # a field of schemes with a choice of groups
        return self.name if group_size is None else f"{self.name}:g{group_size}"

    @property
    def own_layer(self) -> bool:
        """True where `activations` and `multiply` compute a layer, and not the default product with `dequantize`."""
        return self.low_bit_activations

    @property
    def wire(self) -> Layout:
        """The layout in which a weight's arrays are published: their names, dtypes and packing."""
        raise NotImplementedError

    def shape(self, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        """Computes the weight's logical shape (..., N, K) from the shapes of a QTensor's arrays."""
        *leading, stored = arrays["codes"].shape
        return (*leading, stored * self.wire.codes.inputs)

    def check(self, shape: tuple[int, ...]) -> str | None:
        """Returns the reason why a weight [..., N, K] cannot be quantized, as text for a message, or None."""
        del shape
        return None

    def quantize(self, w: jax.Array) -> QTensor:
        """Quantizes a master [..., N, K]: rounds it to bf16 first, and makes every quotient with `float32.divide`."""
        raise NotImplementedError

    def quantize_beside(self, w: jax.Array, beside: Sequence[jax.Array]) -> QTensor:
        """Quantizes a master that an engine fuses with the masters `beside`, [..., N', K]; `one_range` reads these."""
        del beside
        return self.quantize(w)

    def dequantize(self, qt: QTensor) -> jax.Array:
        """Computes the weight that the QTensor stands for, float32 [..., N, K]."""
        raise NotImplementedError

    @property
    def exports(self) -> Scheme:
        """The scheme whose layout an exported folder has: this one, or one that stock engines can load."""
        return self

    def exported(self, qt: QTensor) -> QTensor:
        """Repacks a weight into the arrays of the scheme `exports`; its values do not change."""
        return qt

    def on(self, numerics: Numerics) -> Scheme:
        """Returns the scheme as the engine that `numerics` mirrors implements it; mostly the scheme itself.

        Raises:
          UserError: the engine has no layer for the scheme.
        """
        del numerics
        return self

    def activations(self, x: jax.Array, *, numerics: Numerics) -> Any:
        """Quantizes activations [M, K] for `multiply`, mostly to codes [M, K] and float32 scales [M, 1] of rows."""
        raise NotImplementedError

    def multiply(self, used: Any, qt: QTensor, bias: Any, *, numerics: Numerics, product: Product) -> jax.Array:
        """Computes a linear layer as the engine does.

        Args:
          used: what `activations` returned.
          qt: the weight.
          bias: float32 [1, N], or None.
          numerics: the arithmetic of the mirrored engine.
          product: the contractions: `Dense` with one weight, or `Ragged` with the weights of experts.

        Returns:
          [M, N] in float32, not yet rounded to the compute dtype; or in the compute dtype, rounded once.
        """
        raise NotImplementedError
