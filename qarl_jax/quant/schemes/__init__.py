# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The registry of quantization schemes, and functions that parse, quantize and dequantize under one.

A scheme is a subclass of `Scheme`, mostly in a file of its own. To add one, write the file and add one line here; the
tests in tests/quant and tests/bridge run for every scheme of the registry.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import round_to
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.scheme import Scheme
from qarl_jax.quant.schemes import (
    asym_grid,
    fp8,
    nested_grid,
    nvfp4,
    w2a2,
    w2a16,
    w2a16_asym,
    w3a16,
    w3a16_asym,
    w4a4,
    w4a8,
    w4a16,
    w4a16_asym,
    w8a8,
    w8a16_asym,
)
from qarl_jax.types import UserError, did_you_mean

SCHEMES: dict[str, type[Scheme]] = {
    config.name: config
    for config in (
        w8a8.Config,
        fp8.Config,
        w4a16.Config,
        w4a8.Config,
        w3a16.Config,
        w2a16.Config,
        nvfp4.Config,
        w8a16_asym.Config,
        w4a16_asym.Config,
        w3a16_asym.Config,
        w2a16_asym.Config,
        nested_grid.W4Midpoint,
        nested_grid.W2Midpoint,
        nested_grid.W4Shift,
        nested_grid.W2Shift,
        w4a4.Config,
        w2a2.Config,
    )
}


WIDTHS = (8, 4, 2)  # of the nested grid


def scheme_names() -> tuple[str, ...]:
    """Lists every name that `parse_scheme` accepts, "bf16" included."""
    return ("bf16", *SCHEMES)


@functools.lru_cache(maxsize=256)  # of a config, by every check of its values
def parse_scheme(text: str, group_size: int | None = None) -> Scheme | None:
    """Parses a scheme's name ("w4a16", "w4a16:g64", "w8a8") into its Config; "bf16", which has no QTensor, gives None.

    Args: text: name, optionally with ":g<group size>" (-1: per output channel). group_size: the group size where the
      text gives none; ignored by schemes without groups. None: the scheme's default.

    Raises:
      UserError: the name is unknown, or the group size is malformed or the scheme has none.
    """
    name, _, suffix = text.partition(":")
    if name == "bf16" and not suffix:
        return None
    if name not in SCHEMES:
        hint = did_you_mean(name, scheme_names())
        raise UserError(f"unknown quantization scheme {text!r}.{hint} Known: {', '.join(scheme_names())}")
    config_type: Any = SCHEMES[name]
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


def on_engine(scheme: Scheme | None, numerics: Numerics) -> Scheme | None:
    """Returns `scheme.on(numerics)`, or None for None (bf16)."""
    return None if scheme is None else scheme.on(numerics)


def quantizes_activations(scheme: Scheme | None) -> bool:
    """Tells whether activations are quantized before a product under this scheme. None (bf16): no."""
    return scheme is not None and scheme.low_bit_activations


def check_quantizable(shape: tuple[int, ...], scheme: Scheme, name: str = "") -> None:
    """Raises UserError, naming the weight, if a weight [..., N, K] of this shape cannot be quantized under `scheme`."""
    problem = scheme.check(tuple(shape))
    if problem:
        choice = getattr(scheme, "group_size", None) is not None
        raise UserError(
            f"cannot quantize {name or 'a weight'} {tuple(shape)} under {scheme}: {problem}. "
            "Choose another scheme or bf16 for this weight (quant.rules)"
            + (f" or, if the group does not divide it, another group size, as in {scheme.name}:g64." if choice else ".")
        )


def quantize(
    w: Float[Array | np.ndarray, "*L N K"],
    scheme: Scheme,
    name: str = "",
    beside: Sequence[Float[Array | np.ndarray, "*L _ K"]] = (),
) -> QTensor:
    """Quantizes a master weight to the codes and scales that are published. No other function does it.

    Args:
      w: [..., N, K] master, any leading dimensions, float32 or bfloat16. It is rounded to bfloat16 first, so that a
        float32 master and its bfloat16 export have the same codes.
      scheme: a Config of SCHEMES.
      name: the weight's path, for error messages.
      beside: the other weights that an engine fuses with this one; read only where `scheme.one_range` is true.

    Returns:
      A QTensor. Pure and jit-able; on a mesh, a sharding of the leading and N dimensions passes through.

    Raises:
      UserError: the scheme cannot quantize K inputs, for example because its group does not divide them.
    """
    check_quantizable(w.shape, scheme, name)
    return _quantize(w, tuple(beside) if scheme.one_range else (), scheme)


def blank(
    w: Float[Array | np.ndarray, "*L N K"], scheme: Scheme, name: str = "", beside: Sequence[Any] = ()
) -> QTensor:
    """Makes a QTensor of zeros with the shapes of `quantize`'s, which takes the same arguments. Where shapes alone are
    asked for, tracing zeros takes a hundredth of the time."""
    del beside
    check_quantizable(w.shape, scheme, name)
    *lead, n, k = w.shape
    return QTensor({a.name: jnp.zeros((*lead, *a.shape(n, k)), a.dtype) for a in scheme.wire.arrays}, scheme)


@functools.partial(jax.jit, static_argnames="scheme")
def _quantize(w: jax.Array, beside: tuple[jax.Array, ...], scheme: Scheme) -> QTensor:
    return scheme.quantize_beside(w, beside)


def at_width(scheme: Scheme | None, bits: int) -> Scheme | None:
    """Returns the scheme of the same 8-bit grid at another bit width (`nested_grid.py`); None (bf16) gives None.

    Raises:
      UserError: the scheme has only one bit width, or lacks this one.
    """
    if scheme is None:
        return None
    slices = getattr(scheme, "slices", "")
    if not slices:
        raise UserError(
            f"{scheme} has one width: train under w8a16_asym or one of its slices (w4a16_midpoint, w2a16_midpoint,"
            " w4a16_shift, w2a16_shift) for a model of several."
        )
    if bits not in WIDTHS:
        raise UserError(f"{scheme} has no slice of {bits} bits: choose {', '.join(map(str, WIDTHS))}.")
    assert isinstance(scheme, asym_grid.Config)
    return parse_scheme("w8a16_asym" if bits == 8 else f"w{bits}a16_{slices}", scheme.group_size)


def over_widths(loss: Callable[..., jax.Array], widths: Sequence[int], slices: str = "midpoint") -> Callable[..., Any]:
    """Makes a loss that is the mean of `loss` over several bit widths of one model.

    Args:
      loss: (params, qweights, *inputs) -> scalar.
      widths: bit widths, some of 8, 4 and 2.
      slices: "midpoint" or "shift": how narrower codes are cut out of 8 bits (`nested_grid.py`).

    Returns:
      A function like `loss` that takes `qweights` under w8a16_asym; it leaves QTensors of other schemes unchanged.
    """

    def cut(leaf: Any, bits: int) -> Any:
        if not isinstance(leaf, QTensor) or not isinstance(leaf.scheme, w8a16_asym.Config) or bits == 8:
            return leaf
        scheme = parse_scheme(f"w{bits}a16_{slices}", leaf.scheme.group_size)
        assert isinstance(scheme, asym_grid.Config)
        return nested_grid.sliced(leaf, scheme)

    def mean(params: Any, qweights: Any, *inputs: Any) -> jax.Array:
        def at(bits: int) -> Any:
            return jax.tree.map(lambda leaf: cut(leaf, bits), qweights, is_leaf=lambda x: isinstance(x, QTensor))

        total = functools.reduce(jnp.add, (loss(params, at(bits), *inputs) for bits in widths))
        return total / len(widths)

    return mean


def decoded(qt: QTensor, dtype: Any) -> Float[Array, "*L N K"]:
    """Computes the operand of a scheme without a layer of its own: the dequantized weight rounded to bfloat16, as
    `dtype`."""
    return round_to(qt.scheme.dequantize(qt), jnp.bfloat16).astype(dtype)


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize(qt: QTensor, dtype: Any = jnp.bfloat16) -> Float[Array, "*L N K"]:
    """Computes the weight that a QTensor stands for, [..., N, K] in `dtype`.

    The values are bf(code * scale) for the 4-bit schemes and the float32 product code * scale for the 8-bit ones.
    """
    return qt.scheme.dequantize(qt).astype(dtype)
