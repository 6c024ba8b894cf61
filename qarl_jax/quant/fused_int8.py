# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`w8a8`'s forward in kernels of its own on a Hopper GPU, and where they may be used. Equal to XLA's form to the bit.

XLA writes the int32 product to memory and reads it back to multiply it by the scales. For Qwen3-8B at 16,384 tokens
that, and the codes of the activations, took 130 of the 240 ms that int8 products save in a step on an H200. A kernel
that rescales its accumulator in registers writes two bytes per output instead of writing and reading four as well.

`CHOSEN` says which kernels run. Everything else keeps XLA's form: other devices, float32 activations, few rows, the
profiles of CPUs, and a mesh that does not divide the layer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from qarl_jax.quant.int8 import quantize_rows
from qarl_jax.quant.numerics import Numerics
from qarl_jax.sharding import BATCH_AXES, is_hopper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Which kernels a layer takes.

    Attributes:
      product: the int8 product, its rescale, bias and rounding. "triton": `int8_kernels.product`; "hopper":
        `int8_hopper.product` where a layer has no bias and is made of whole tiles, otherwise as "triton".
      rows: the activations' codes and scales. "xla": fused with what comes before; behind an RMSNorm XLA computes the
        norm once for the maxima, once more for the codes and once more for its bfloat16 result, if that is used.
        "triton": `int8_kernels.quantize_rows`, which reads the stored result once, for all layers that share it.
    """

    product: Literal["triton", "hopper"] = "triton"
    rows: Literal["xla", "triton"] = "xla"


# None: XLA's form everywhere.
CHOSEN: Kernels | None = None
# Below, reading the weight takes most of the time, and there is little to write.
LEAST_ROWS = 512

Codes = tuple[Int[Array, "M K"], Float[Array, "M 1"]]


def serves(x: jax.Array, outputs: int, numerics: Numerics) -> bool:
    """Whether `layer` is to take a layer of activations [M, K] and that many outputs on this host's devices.

    Args:
      x: activations in compute dtype.
      outputs: N.
      numerics: the profile in use.
    """
    if CHOSEN is None or not is_hopper() or x.dtype != jnp.bfloat16:
        return False
    if numerics.amax_floor or numerics.code_from_rounded_scale or not numerics.bias_fused:
        return False
    split = _split(x.shape[0], outputs)
    return split is not None and x.shape[0] // split[0] >= LEAST_ROWS


def _split(rows: int, outputs: int) -> tuple[int, int] | None:
    """Into how many parts the mesh in force cuts rows and outputs; None: it does not divide them, or is not known."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return (1, 1) if jax.device_count() == 1 else None
    if mesh.size == 1 or set(mesh.axis_types) == {AxisType.Manual}:
        return 1, 1
    if set(mesh.axis_types) != {AxisType.Auto}:
        return None
    shape = dict(mesh.shape)
    parts = 1
    for axis in BATCH_AXES:
        parts *= shape[axis]
    return (parts, shape["tensor"]) if rows % parts == 0 and outputs % shape["tensor"] == 0 else None


def layer(
    x: Float[Array, "M K"],
    w_q: Int[Array, "N K"],
    s_w: Float[Array, "N 1"],
    bias: Float[Array, "1 N"] | None,
    *,
    numerics: Numerics,
    kernels: Kernels | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "M N"], Codes]:
    """`w8a8.forward`, rounded to bfloat16. The partitioner cannot look into a kernel, so the mesh is cut by hand here.

    Args:
      x: bfloat16.
      w_q, s_w: the weight's codes and scales.
      bias: float32 or None.
      numerics: for the order of the rescale.
      kernels: None: `CHOSEN`.
      interpret: run the kernels on any backend, step by step (tests).

    Returns:
      y and the activations' codes and scales, for the backward.
    """
    kernels = kernels or CHOSEN or Kernels()
    local = functools.partial(_local, numerics=numerics, kernels=kernels, interpret=interpret)
    operands = (x, w_q, s_w) if bias is None else (x, w_q, s_w, bias)
    if _split(x.shape[0], w_q.shape[0]) in ((1, 1), None):
        return local(*operands)
    batch, weight = PartitionSpec(BATCH_AXES, None), PartitionSpec("tensor", None)
    specs = (batch, weight, weight, PartitionSpec(None, "tensor"))[: len(operands)]
    out = PartitionSpec(BATCH_AXES, "tensor"), (batch, batch)
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(*operands)


def _local(
    x: Float[Array, "M K"],
    w_q: Int[Array, "N K"],
    s_w: Float[Array, "N 1"],
    bias: Float[Array, "1 N"] | None = None,
    *,
    numerics: Numerics,
    kernels: Kernels,
    interpret: bool,
) -> tuple[Float[Array, "M N"], Codes]:
    """One device's part of `layer`."""
    from qarl_jax.quant import int8_kernels  # Pallas' Triton, which not every JAX has

    if kernels.rows == "triton":
        x_q, s_x = int8_kernels.quantize_rows(x, interpret=interpret)
    else:
        x_q, s_x = quantize_rows(x)
    order = numerics.rescale_order
    if kernels.product == "hopper" and bias is None:
        from qarl_jax.quant import int8_hopper

        n, k = w_q.shape
        if int8_hopper.fits(x.shape[0], n, k):
            return int8_hopper.product(x_q, s_x, w_q, s_w[:, 0], rescale_order=order), (x_q, s_x)
    b = None if bias is None else bias[0]
    y = int8_kernels.product(x_q, s_x, w_q, s_w[:, 0], b, rescale_order=order, interpret=interpret)
    return y, (x_q, s_x)
