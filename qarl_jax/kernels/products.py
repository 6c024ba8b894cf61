# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward of `w8a8` and `fp8` in kernels of their own on a Hopper GPU, and where they may be used.

**w8a8.** XLA writes the int32 product to memory and reads it back to multiply it by the scales. A kernel that rescales
its accumulator in registers writes two bytes per output instead of writing and reading four as well. It changes speed
alone: every form is equal to the bit. In a step of Qwen3-8B (16,384 tokens, one H200) the kernel's products take 153
ms of 1.41 s, 1,490 TFLOP/s; with XLA's it was 1.53 s, when more of the rest was in the way
(docs/operations/performance.md).

**bf16, and w4a16's bf16(q s).** By the contract alone: the kernel adds K up in its parts for any number of rows, where
XLA's library cuts K by a rule of its own when rows are few, and passes over memory once a part.

**fp8.** The kernel changes bits: it accumulates as the engine's does (`product_hopper.py`), which XLA's products of few
rows do not. Under `plain` it makes few and many rows alike, which XLA's are not.

`Numerics.kernels` says which kernels run. Everything else keeps XLA's form: other devices, float32 activations,
experts, a mesh that does not divide the layer; for w8a8 few rows and CPUs' profiles, for fp8 CPUs' profiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Int

from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.rows import quantize_rows
from qarl_jax.runtime.mesh import BATCH_AXES, is_hopper, on_one_device

# Of w8a8: below, reading the weight takes most of the time, and there is little to write.
LEAST_ROWS = 512
# vLLM gives other N and K than multiples of this to another kernel than CUTLASS'.
_CUTLASS = 16

Codes = tuple[Int[Array, "M K"], Float[Array, "M 1"]]

_BATCH = PartitionSpec(BATCH_AXES, None)
_WEIGHT = PartitionSpec("tensor", None)
_BIAS = PartitionSpec(None, "tensor")
_RESULT = PartitionSpec(BATCH_AXES, "tensor")


def serves(scheme: str, x: jax.Array, weight: tuple[int, ...], numerics: Numerics) -> bool:
    """Whether kernels are to take a layer on this host's devices.

    Args:
      scheme: "w8a8", "fp8" or "bf16" (unquantized weights, and w4a16's as bf16(q s)).
      x: activations [M, K] in compute dtype.
      weight: its shape, (N, K).
      numerics: the arithmetic in use.
    """
    if getattr(numerics.kernels, scheme) == "xla" or not is_hopper() or x.dtype != jnp.bfloat16:
        return False
    split = _split(x.shape[0], weight[0])
    if split is None:
        return False
    if scheme == "bf16":
        return numerics.contract_parts
    if scheme == "fp8":
        return numerics.fp8_on_tensor_cores and all(size % _CUTLASS == 0 for size in weight)
    if numerics.float64:
        return False
    return x.shape[0] // split[0] >= LEAST_ROWS


def _split(rows: int, outputs: int) -> tuple[int, int] | None:
    """Into how many parts the mesh in force cuts rows and outputs; None: it does not divide them, or is not known."""
    if on_one_device():
        return 1, 1
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return None
    shape = dict(mesh.shape)
    parts = 1
    for axis in BATCH_AXES:
        parts *= shape[axis]
    return (parts, shape["tensor"]) if rows % parts == 0 and outputs % shape["tensor"] == 0 else None


def _on_mesh(
    local: Callable[..., Any], operands: tuple[Any, ...], specs: tuple[Any, ...], out: Any, outputs: int
) -> Any:
    """`local` of each device's part. The partitioner cannot look into a kernel, so the mesh is cut by hand here.

    Args:
      local: the computation of one device.
      operands: arrays, the rows first, the last ones left out where there are none.
      specs: how each lies on the mesh.
      out: how the results lie.
      outputs: N of the whole layer.
    """
    if _split(operands[0].shape[0], outputs) in ((1, 1), None):
        return local(*operands)
    return jax.shard_map(local, in_specs=specs[: len(operands)], out_specs=out, check_vma=False)(*operands)


def _run_once(result: Any) -> Any:
    """What a kernel returns, behind a barrier: XLA runs a kernel whose result is stored in a stack of layers twice
    otherwise, the second time for the others who read it (its dynamic-slice fusion takes the kernel along)."""
    return jax.lax.optimization_barrier(result)


# ---- w8a8 ------------------------------------------------------------------------------------------------------------


def layer(
    x: Float[Array, "M K"],
    w_q: Int[Array, "N K"],
    s_w: Float[Array, "N 1"],
    bias: Float[Array, "1 N"] | None,
    *,
    numerics: Numerics,
    interpret: bool = False,
) -> tuple[Float[Array, "M N"], Codes]:
    """`w8a8.forward`, rounded to bfloat16.

    Args:
      x: bfloat16.
      w_q, s_w: the weight's codes and scales.
      bias: float32 or None.
      numerics: for its `kernels`.
      interpret: run the kernels on any backend, step by step (tests).

    Returns:
      y and the activations' codes and scales, for the backward.
    """
    local = functools.partial(_local, numerics=numerics, interpret=interpret)
    operands = (x, w_q, s_w) if bias is None else (x, w_q, s_w, bias)
    specs, out = (_BATCH, _WEIGHT, _WEIGHT, _BIAS), (_RESULT, (_BATCH, _BATCH))
    return _on_mesh(local, operands, specs, out, w_q.shape[0])


def _local(
    x: Float[Array, "M K"],
    w_q: Int[Array, "N K"],
    s_w: Float[Array, "N 1"],
    bias: Float[Array, "1 N"] | None = None,
    *,
    numerics: Numerics,
    interpret: bool,
) -> tuple[Float[Array, "M N"], Codes]:
    """One device's part of `layer`."""
    from qarl_jax.kernels import product_triton  # Pallas' Triton, which not every JAX has

    if numerics.kernels.w8a8_rows == "triton":
        x_q, s_x = _run_once(product_triton.quantize_rows(x, interpret=interpret))
    else:
        x_q, s_x = quantize_rows(x)  # no barrier: a backward that recomputes codes reads them dequantized
    if numerics.kernels.w8a8 == "hopper" and bias is None:
        from qarl_jax.kernels import product_hopper  # Pallas' Mosaic GPU, which not every JAX has

        n, k = w_q.shape
        if product_hopper.fits(x.shape[0], n, k):
            return _run_once(product_hopper.product(x_q, s_x, w_q, s_w[:, 0])), (x_q, s_x)
    b = None if bias is None else bias[0]
    y = product_triton.product(x_q, s_x, w_q, s_w[:, 0], b, interpret=interpret)
    return _run_once(y), (x_q, s_x)


# ---- bf16 ------------------------------------------------------------------------------------------------------------


def floating(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    bias: Float[Array, "1 N"] | None,
    *,
    parts: int,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """bf(acc + b) of bfloat16 operands and a float32 bias, acc in the contract's `parts` of K."""
    from qarl_jax.kernels import product_hopper

    def local(x, w, bias=None):
        b = None if bias is None else bias[0]
        return _run_once(product_hopper.float_product(x, w, b, parts=parts, interpret=interpret))

    operands = (x, w) if bias is None else (x, w, bias)
    return _on_mesh(local, operands, (_BATCH, _WEIGHT, _BIAS), _RESULT, w.shape[0])


# ---- fp8 -------------------------------------------------------------------------------------------------------------


def float8(
    x_q: Float[Array, "M K"],
    s_x: Float[Array, "M 1"],
    w_q: Float[Array, "N K"],
    s_w: Float[Array, "N 1"],
    bias: Float[Array, "1 N"] | None,
    *,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """bf(s_x * (s_w * acc)), or with a bias bf(fma(s_x, s_w * acc, b)), acc accumulated as the engine's.

    Args:
      x_q, w_q: float8_e4m3fn.
      s_x, s_w, bias: float32; the bias may be None.
      interpret: as in `product_hopper.product`.
    """
    from qarl_jax.kernels import product_hopper  # Pallas' Mosaic GPU, which not every JAX has

    def local(x_q, s_x, w_q, s_w, bias=None):
        b = None if bias is None else bias[0]
        return _run_once(product_hopper.product(x_q, s_x, w_q, s_w[:, 0], b, interpret=interpret))

    operands = (x_q, s_x, w_q, s_w) if bias is None else (x_q, s_x, w_q, s_w, bias)
    return _on_mesh(local, operands, (_BATCH, _BATCH, _WEIGHT, _WEIGHT, _BIAS), _RESULT, w_q.shape[0])
