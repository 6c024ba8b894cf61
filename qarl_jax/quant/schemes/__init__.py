# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The registry of schemes, and the operations that look a scheme up in it.

A scheme is one module: a `Scheme`. To add one, write the file and add one line here; the batteries in tests/quant and
tests/bridge pick it up from the registry.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qarl_jax.numerics.engine import Numerics
from qarl_jax.quant.contractions import Product
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.schemes import fp8, w2a16, w3a16, w4a8, w4a16, w8a8
from qarl_jax.types import UserError, did_you_mean


class Scheme(Protocol):
    """What a module of this folder defines, besides its frozen `Config`. NAME: as configs write it.

    With these alone a layer is the product of unquantized activations with the weight `dequantize`d to bfloat16.
    """

    NAME: str

    def check(self, shape: tuple[int, ...], config: Any) -> str | None:
        """Why a weight [..., N, K] cannot be quantized, or None."""

    def quantize(self, w: jax.Array, config: Any) -> QTensor:
        """Codes and scales of a master [..., N, K]."""

    def dequantize(self, qt: QTensor) -> jax.Array:
        """The weight they stand for, float32 [..., N, K]."""


@runtime_checkable
class OfLowBitActivations(Scheme, Protocol):
    """A scheme that quantizes activations, too."""

    def activations(self, x: jax.Array, *, numerics: Numerics) -> Any:
        """[M, K] as they meet the weight: codes, and float32 scales [M, 1] of rows."""

    def multiply(self, used: Any, qt: QTensor, bias: Any, *, numerics: Numerics, product: Product) -> jax.Array:
        """The engine's layer.

        Args:
          used: from `activations`. qt: the weight.
          bias: float32 [1, N], or None.
          numerics: the engine mirrored.
          product: contractions with one weight, or with those of experts.

        Returns:
          [M, N] in float32, not yet rounded to the compute dtype.
        """


SCHEMES: dict[type, Scheme | OfLowBitActivations] = {
    w8a8.Config: w8a8,
    fp8.Config: fp8,
    w4a16.Config: w4a16,
    w4a8.Config: w4a8,
    w3a16.Config: w3a16,
    w2a16.Config: w2a16,
}
SchemeConfig = Any  # one of the keys of SCHEMES, instantiated

_BY_NAME = {module.NAME: config for config, module in SCHEMES.items()}


def scheme_names() -> tuple[str, ...]:
    """Every name `parse_scheme` knows, "bf16" included."""
    return ("bf16", *_BY_NAME)


def parse_scheme(text: str, group_size: int | None = None) -> SchemeConfig | None:
    """ "w4a16", "w4a16:g64", "w8a8", "bf16" -> a scheme Config; None for "bf16", which has no QTensor.

    Args: text: name, optionally with ":g<group size>" (-1: per output channel). group_size: the group size where the
      text gives none; ignored by schemes without groups. None: the scheme's default.

    Raises:
      UserError: unknown name, malformed or contradictory group size.
    """
    name, _, suffix = text.partition(":")
    if name == "bf16" and not suffix:
        return None
    if name not in _BY_NAME:
        hint = did_you_mean(name, scheme_names())
        raise UserError(f"unknown quantization scheme {text!r}.{hint} Known: {', '.join(scheme_names())}")
    config_type = _BY_NAME[name]
    takes_group = "group_size" in inspect.signature(config_type).parameters
    if suffix:
        if not takes_group:
            raise UserError(f"scheme {name!r} has no groups: write {name!r} instead of {text!r}")
        try:
            if not suffix.startswith("g"):
                raise ValueError
            group_size = int(suffix[1:])
        except ValueError:
            raise UserError(f"scheme {text!r}: after the colon comes g<group size>, as in '{name}:g128'") from None
    return config_type(group_size=group_size) if takes_group and group_size is not None else config_type()


def on_engine(scheme: SchemeConfig | None, numerics: Numerics) -> SchemeConfig | None:
    """The scheme, where the mirrored engine serves it.

    Raises:
      UserError: vLLM on CUDA has no layer of this scheme.
    """
    if isinstance(scheme, w4a8.Config) and numerics.profile == "cuda":
        raise UserError(
            "vLLM on CUDA has no layer with int4 weights and int8 activations (w4a8): set quant.forward and"
            " quant.rollout to w4a16 or fp8, or sample with the embedded sampler (rollout.engine.name=jax)"
        )
    return scheme


def module_of(scheme: SchemeConfig) -> Scheme:
    """The module that implements a scheme."""
    try:
        return SCHEMES[type(scheme)]
    except KeyError:
        raise UserError(
            f"{scheme!r} is not a quantization scheme: use parse_scheme with one of {scheme_names()}"
        ) from None


def quantizes_activations(scheme: SchemeConfig | None) -> bool:
    """Whether activations are quantized before they meet a weight of this scheme. None (bf16): no."""
    return scheme is not None and isinstance(module_of(scheme), OfLowBitActivations)


def check_quantizable(shape: tuple[int, ...], scheme: SchemeConfig, name: str = "") -> None:
    """Raises UserError, naming the weight, if a weight [..., N, K] of this shape cannot be quantized under `scheme`."""
    problem = module_of(scheme).check(tuple(shape), scheme)
    if problem:
        raise UserError(
            f"cannot quantize {name or 'a weight'} {tuple(shape)} under {scheme}: {problem}. "
            "Choose another scheme or bf16 for this weight (quant.rules) or, if the group does not divide it, another "
            "group size (quant.group_size)."
        )


def quantize(w: Float[Array | np.ndarray, "*L N K"], scheme: SchemeConfig, name: str = "") -> QTensor:
    """The one function from a master weight to its published low-bit form.

    Args:
      w: [..., N, K] master, any leading dimensions, float32 or bfloat16. It is rounded to bfloat16 first, so that a
        float32 master and its bfloat16 export have the same codes.
      scheme: a Config of SCHEMES.
      name: the weight's path, for error messages.

    Returns:
      A QTensor. Pure and jit-able; on a mesh, a sharding of the leading and N dimensions passes through.

    Raises:
      UserError: K does not suit the scheme.
    """
    check_quantizable(w.shape, scheme, name)
    return _quantize(w, scheme)


@functools.partial(jax.jit, static_argnames="scheme")
def _quantize(w: jax.Array, scheme: SchemeConfig) -> QTensor:
    return module_of(scheme).quantize(w, scheme)


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize(qt: QTensor, dtype: Any = jnp.bfloat16) -> Float[Array, "*L N K"]:
    """The weight a QTensor stands for, [..., N, K] in `dtype`.

    The values are bf(code * scale) for the 4-bit schemes and the float32 product code * scale for the 8-bit ones.
    """
    return module_of(qt.scheme).dequantize(qt).astype(dtype)
