# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Muon's update direction for stacked weight matrices: momentum, orthogonalized by Newton-Schulz iterations.

Muon (K. Jordan, 2024; "Muon is scalable for LLM training", arXiv 2502.16982) replaces a weight matrix's momentum by
(nearly) the closest orthogonal matrix. For W [N, K] with gradient g, lr, momentum b and decay wd:

    M <- b M + (1 - b) g                       exponential average, no bias correction
    u  = b M + (1 - b) g                       Nesterov; u = M without
    X0 = u / (|u|_F + eps)
    X  <- a X + (b' A + c A^2) X, A = X X^T    five times, (a, b', c) = (3.4445, -4.7750, 2.0315)
    W <- W - lr (wd W + 0.2 sqrt(max(N, K)) X)

After five rounds every singular value of X is near 1 (0.7 .. 1.2): the quintic trades accuracy for speed at small
singular values. The scale is that of arXiv 2502.16982, eq. 4: an update's RMS is about 0.2 lr, as AdamW's, and QaRL's
lr of 1e-6 is an AdamW-scale lr. Jordan's own, sqrt(max(1, N / K)), needs an lr near 0.02: at 1e-6 a 4096-wide matrix
moves 1.6e-8 per step, which freezes a quantized policy.

Decisions, and their reasons:

  * A few matrices at a time. Weights are stacked [L, N, K] or [L, E, N, K]. A loop over the leading dimensions
    (`jax.lax.map`) takes up to `TOGETHER` elements in a step: a large matrix alone, or eight experts of Qwen3-30B-A3B,
    whose 18,432 matrices would leave a GPU idle one by one. optax.contrib.muon vmaps all: for 36 layers of
    [12288, 4096] its [36, 4096, 4096] Gram matrices would take 2.4 GB, three times over. Tests compare with it.
  * Float32 iterates. Products of bfloat16 (`matmul_precision`), which Muon's authors use, change the update by 1-2 %.
    A real 135M's KL ended at 0.219 with either (`experiments/qat/results/smollm2_135m_muon_cpu.jsonl`).

Left out: bias correction of the momentum (the iteration is scale-invariant; only the Nesterov mix of the first ~20
steps would change) and QK-clip (a pre-training remedy).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from qarl_jax.optim import eight_bit
from qarl_jax.optim.eight_bit import Blocks
from qarl_jax.runtime.mesh import AXIS_RULES

Precision = Literal["default", "high", "highest", "bfloat16"]
"""The precision of the iteration's products; see `build.Muon`."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Jordan's quintic: steepest slope at 0 that still keeps every singular value near 1."""

ROUNDS = 5

MATCH_RMS = 0.2
"""RMS of a typical AdamW update in units of lr (arXiv 2502.16982, sec. 2.2)."""


TOGETHER = 2**24
"""Elements of a stack's matrices that are iterated at once, at most; a larger matrix is alone. Whether matrices are
together decides speed and, in the last bits of a product, numbers."""


def orthogonalize(u: Float[Array, "N K"], *, precision: Precision = "highest") -> Array:
    """Orthogonalizes `u` [N, K] by Newton-Schulz: singular values become about 1, singular vectors stay. Float32.

    The iteration runs on the side with fewer rows, so that its Gram matrix is min(N, K) square. Zero stays zero.
    """
    a, b, c = NEWTON_SCHULZ
    x = u.astype(jnp.float32)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(ROUNDS):
        gram = _product(x, x.T, precision)
        poly = b * gram + c * _product(gram, gram, precision)
        x = a * x + _product(poly, x, precision)
    return x.T if tall else x


def _product(x: Array, y: Array, precision: Precision) -> Array:
    """Multiplies float32 matrices, rounded to bfloat16 first as `build.Muon` says; sums in float32."""
    if precision == "bfloat16" or (precision == "default" and jax.default_backend() == "gpu"):
        return jnp.matmul(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return jnp.matmul(x, y, precision=precision)


def _over_stacks(function: Callable[..., Any], *stacks: Any) -> Any:
    """Maps `function`, of matrices, over trees of stacks [*S, N, K], several matrices at a time (`TOGETHER`)."""
    *rest, count, n, k = jax.tree.leaves(stacks)[0].shape
    if rest:
        return jax.lax.map(lambda cut: _over_stacks(function, *cut), stacks)
    most = min(count, max(1, TOGETHER // (n * k)))
    together = max(size for size in range(1, most + 1) if count % size == 0)
    return jax.lax.map(lambda cut: function(*cut), stacks, batch_size=together if together > 1 else None)


def _on_own_experts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that loops over matrices. On a mesh that shards stacks of experts [L, E, N, K] by the expert,
    each device loops over its experts alone; XLA's partitioner would make every device loop over all."""

    def call(*stacks: Any) -> Any:
        shape, mesh = jax.tree.leaves(stacks)[0].shape, jax.sharding.get_abstract_mesh()
        over = AXIS_RULES.for_experts(shape[1], mesh.shape).expert if len(shape) > 3 and not mesh.empty else ()
        ways = math.prod(mesh.shape[axis] for axis in over)
        if ways == 1 or shape[1] % ways:
            return function(*stacks)
        place = PartitionSpec(None, over)
        return jax.shard_map(function, in_specs=place, out_specs=place, check_vma=False)(*stacks)

    return call


def step(
    grad: Float[Array, "*S N K"],
    stored: Any,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    precision: Precision = "highest",
) -> tuple[Float[Array, "*S N K"], Any]:
    """Computes Muon's step for a stack of matrices.

    Args:
      grad: float32, with any leading dimensions.
      stored: the momentum before the step, float32, bfloat16 or `Blocks`.
      momentum, nesterov, precision: as in `build.Muon`.

    Returns:
      The scaled orthogonal directions in float32, and the momentum after the step, in the format of `stored`.
    """

    def in_eight_bits(grad: Array, stored: Blocks) -> tuple[Array, Blocks]:
        # Decoded and encoded within the walk as well: no stack of float32 momenta.
        if grad.ndim > 2:
            return _over_stacks(in_eight_bits, grad, stored)
        average = momentum * eight_bit.decode(stored, eight_bit.LINEAR) + (1.0 - momentum) * grad
        return direction(average, grad), eight_bit.encode(average, eight_bit.LINEAR)

    def direction(average: Array, grad: Array) -> Array:
        if grad.ndim > 2:
            return _over_stacks(direction, average, grad)
        u = momentum * average + (1.0 - momentum) * grad if nesterov else average
        scale = MATCH_RMS * max(grad.shape) ** 0.5  # an orthogonal [N, K] matrix has RMS 1 / sqrt(max(N, K))
        return scale * orthogonalize(u, precision=precision)

    with jax.named_scope("newton_schulz"):
        if isinstance(stored, Blocks):
            return _on_own_experts(in_eight_bits)(grad, stored)
        average = momentum * stored.astype(jnp.float32) + (1.0 - momentum) * grad
        return _on_own_experts(direction)(average, grad), average.astype(stored.dtype)
