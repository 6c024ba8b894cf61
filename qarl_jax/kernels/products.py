# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products by our kernels on a Hopper GPU (`w8a8`, `fp8` and bfloat16), and the conditions for their use.

**w8a8.** XLA writes the int32 product to memory and reads it back to multiply it by the scales. The kernel rescales its
accumulator in registers, and writes two bytes per output instead of writing and reading four as well. Both have the
same bits. In a step of Qwen3-8B (16,384 tokens, one H200) the kernel's products take 153 ms of 1.41 s, 1,490 TFLOP/s;
a step with XLA's took 1.53 s, when other parts were slower too (docs/operations/performance.md).

**bf16, w4a16's bf16(q s) and nvfp4's q s.** For batch-invariant engines alone: the kernel splits K in one way for any
number of rows. XLA's library splits K only when rows are few, by another rule, with one pass over memory per part.

**fp8.** The kernel changes bits: it accumulates as the engine's kernel does (`product_hopper.py`); XLA's products of
few rows do not. Under `plain` a row's bits do not depend on the number of rows; with XLA they do.

`Numerics.own_kernels` turns the kernels on. XLA computes everything else: other devices, float32 activations, experts,
a mesh that does not divide the layer, profiles of CPUs (w8a8 and fp8), and w8a8 with few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float, Num

from qarl_jax.numerics.engine import Numerics
from qarl_jax.runtime.mesh import BATCH_AXES, batch_shards, is_hopper, on_one_device

# Of w8a8: below, reading the weight takes most of the time, and there is little to write.
LEAST_ROWS = 512
# vLLM gives other N and K than multiples of this to another kernel than CUTLASS'.
_CUTLASS = 16
SERVED = ("int8", "e4m3", "bf16")

_BATCH = PartitionSpec(BATCH_AXES, None)
_WEIGHT = PartitionSpec("tensor", None)


def serves(kind: str, x: jax.Array, weight: tuple[int, ...], numerics: Numerics) -> bool:
    """Tells whether our kernels compute a layer's forward on this host's devices.

    Args:
      kind: the operands' kind: "int8" or "e4m3" codes (`Scheme.kernel`), or "bf16".
      x: activations [M, K] in compute dtype.
      weight: the weight's shape, (N, K).
    """
    if kind not in SERVED or not numerics.own_kernels or not is_hopper() or x.dtype != jnp.bfloat16:
        return False
    split = _split(x.shape[0], weight[0])
    if split is None:
        return False
    if kind == "bf16":
        return numerics.split_k
    if numerics.float64:
        return False
    if kind == "e4m3":
        return all(size % _CUTLASS == 0 for size in weight)
    return x.shape[0] // split[0] >= LEAST_ROWS


def serves_gradient(codes: jax.Array, dtype: Any, numerics: Numerics) -> bool:
    """Tells whether our kernel computes a low-bit backward's product of `codes` [M, K], rounded to `dtype`.

    It does so on one device alone, because a mesh would split the contraction.
    """
    is_eight_bit = codes.dtype in (jnp.int8, jnp.float8_e4m3fn) and dtype == jnp.bfloat16
    return is_eight_bit and numerics.own_kernels and is_hopper() and on_one_device()


def _split(rows: int, outputs: int) -> tuple[int, int] | None:
    """Into how many parts the mesh in force cuts rows and outputs; None: it does not divide them, or is not known."""
    if on_one_device():
        return 1, 1
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return None
    parts, tensor = batch_shards(mesh), mesh.shape["tensor"]
    return (parts, tensor) if rows % parts == 0 and outputs % tensor == 0 else None


def _on_mesh(
    kernel: Callable[..., Any], operands: tuple[Any, ...], specs: tuple[Any, ...], bias: Any, outputs: int
) -> Any:
    """The kernel of each device's part. The partitioner cannot look into one, so the mesh is cut by hand here.

    Args:
      kernel: of the operands, and a bias [N] where there is one.
      operands: arrays, the rows first. specs: how each lies on the mesh.
      bias: [1, N] or None.
      outputs: N of the whole layer.
    """
    count = len(operands)
    if bias is not None:
        operands, specs = (*operands, bias), (*specs, PartitionSpec(None, "tensor"))

    def local(*own: Any) -> Any:
        y = kernel(*own[:count], *(b[0] for b in own[count:]))
        # Behind a barrier: XLA runs a kernel whose result is stored in a stack of layers twice otherwise, the second
        # time for the others who read it (its dynamic-slice fusion takes the kernel along).
        return jax.lax.optimization_barrier(y)

    if _split(operands[0].shape[0], outputs) in ((1, 1), None):
        return local(*operands)
    out = PartitionSpec(BATCH_AXES, "tensor")
    return jax.shard_map(local, in_specs=specs, out_specs=out, check_vma=False)(*operands)


def eight_bit(
    x_q: Num[Array, "M K"],
    s_x: Float[Array, "M 1"],
    w_q: Num[Array, "N K"],
    s_w: Float[Array, "N 1"],
    bias: Float[Array, "1 N"] | None,
    *,
    promoted: bool = False,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """Computes bf16(s_x * (s_w * acc)) of 8-bit codes, or with a bias bf16(fma(s_x, s_w * acc, b)), on any mesh.

    acc is x_q w_q^T: exact for int8, accumulated as in vLLM's CUTLASS kernel for e4m3.

    Args:
      x_q, w_q: int8, or both float8_e4m3fn.
      s_x, s_w, bias: float32; the bias may be None.
      promoted, interpret: as in `product_hopper.product`.
    """
    from qarl_jax.kernels import product_hopper  # Pallas' Mosaic GPU, which not every JAX has

    def kernel(x_q: Any, s_x: Any, w_q: Any, s_w: Any, *bias: Any) -> Any:
        return product_hopper.product(x_q, s_x, w_q, s_w[:, 0], *bias, promoted=promoted, interpret=interpret)

    return _on_mesh(kernel, (x_q, s_x, w_q, s_w), (_BATCH, _BATCH, _WEIGHT, _WEIGHT), bias, w_q.shape[0])


def floating(
    x: Float[Array, "M K"],
    w: Float[Array, "N K"],
    bias: Float[Array, "1 N"] | None,
    factor: Float[Array, ""] | None = None,
    *,
    splits: int,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """Computes bf16(acc + b), or with a factor f bf16(bf16(acc f) + b), on any mesh. x and w are bfloat16, b and f
    float32; acc is x w^T, summed in `splits` parts of K."""
    from qarl_jax.kernels import product_hopper

    factors = () if factor is None else (jnp.broadcast_to(factor, w.shape[:1]),)

    def kernel(x: Any, w: Any, *rest: Any) -> Any:
        named = dict(zip(("factor", "bias")[not factors :], rest, strict=False))
        return product_hopper.float_product(x, w, **named, splits=splits, interpret=interpret)

    specs = (_BATCH, _WEIGHT, *[PartitionSpec("tensor")] * len(factors))
    return _on_mesh(kernel, (x, w, *factors), specs, bias, w.shape[0])
