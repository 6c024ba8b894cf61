# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""w4a8: int4 weights in groups along the input, int8 activations per token, int32 sums per group.

Rounded activations change a layer's output by 0.7-1.0 % against w4a16. vLLM's own CPU build with AMX rounds them for
every int4 checkpoint, w4a16 or w4a8; vLLM under the bridge rounds them under w4a8 alone.

**Grid.** Weights as in `w4a16`: s = bf16(absmax / 7.5) per group of G inputs, q in [-8, 7], the same tensors, bit for
bit.

**Activations.** Per token, as in `w8a8` on a CPU: am = max(max |x|, 1e-7), s_x = am / 127, x_q = RNE(x * (127 / am)).

**Product.** With p_g the exact int32 sum over group g, in the order g = 0, 1, ...:

    acc <- fma(float(p_g) * s_x, float(s_w[n, g]), acc)        starting at the float32 bias, or 0
    y = bf(acc)

With the bridge's CPU engine (`quant.engine=cpu`) all groups are one sum in float64, of x_q (q s_w), which is exact:

    y = bf(f32(s_x * sum_k x_q q s_w) + b)

**Backward.** Straight through: dX = dY bf(q * s), dMaster = dY^T (x_q * s_x).

**What vLLM does with the bytes.** The tensors of `w4a16`, with `input_activations` of 8 bits in the config
(`CompressedTensorsWNA8Int`, 0.32). On CUDA, the same config runs Machete and silently drops the activation
quantization, so learner and bridge refuse it there: on a GPU the embedded sampler alone has this scheme.

**Left out.** Marlin's int8-activation mode (int16 group scales, another grid again). int4 weights with e4m3
activations: Hopper's kernel for these adds in another order than ours. With `fp8`'s product instead, codes take a byte
each in addition to the words. Such a layer is larger than `fp8`'s, no faster, and on a coarser grid.

Sources: QaRL, arXiv 2604.07853; QQQ, arXiv 2406.09904; vLLM csrc/cpu.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from qarl_bridge.protocol import formats

from qarl_jax.numerics.engine import Numerics
from qarl_jax.numerics.float32 import fused_multiply_add, unpack_int4
from qarl_jax.numerics.rows import quantize_rows
from qarl_jax.quant.contractions import Product
from qarl_jax.quant.qtensor import QTensor
from qarl_jax.quant.schemes import int4_grid
from qarl_jax.types import UserError

_AMAX_FLOOR = 1e-7


@dataclasses.dataclass(frozen=True)
class Config(int4_grid.Config):
    """int4 weights, dynamic int8 activations per token. See `int4_grid.Config`."""

    name: ClassVar[str] = "w4a8"
    low_bit_activations: ClassVar[bool] = True
    rounded_activations: ClassVar[Mapping[str, Any] | None] = formats.arguments(8, "int", "token", dynamic=True)

    def on(self, numerics: Numerics) -> Config:
        """Returns the scheme; raises UserError for vLLM on CUDA, which has no such layer."""
        if numerics.profile == "cuda":
            raise UserError(
                "vLLM on CUDA has no layer with int4 weights and int8 activations (w4a8): set quant.forward and"
                " quant.rollout to w4a16 or fp8, or sample with the embedded sampler (rollout.engine.name=jax)"
            )
        return self

    def activations(self, x, *, numerics: Numerics):
        """Quantizes rows to int8 codes [M, K] and float32 scales [M, 1]."""
        del numerics
        return quantize_rows(x, amax_floor=_AMAX_FLOOR)

    def multiply(self, used, qt: QTensor, bias, *, numerics: Numerics, product: Product):
        """Computes the engine's layer with explicit fused multiply-adds, because compilers fuse some and not others."""
        x_q, s_x = used
        w_q = unpack_int4(qt.codes)
        if numerics.float64:
            y = product.rescaled(x_q, s_x, w_q, qt.scales)
            return y if bias is None else y + bias
        groups, k = qt.scales.shape[-1], x_q.shape[-1]
        size = k // groups

        def add_group(acc, g):
            x_g = jax.lax.dynamic_slice_in_dim(x_q, g * size, size, axis=-1)
            w_g = jax.lax.dynamic_slice_in_dim(w_q, g * size, size, axis=-1)
            s_g = jax.lax.dynamic_index_in_dim(qt.scales, g, axis=-1, keepdims=False).astype(jnp.float32)
            p = product.integer(x_g, w_g).astype(jnp.float32)
            return fused_multiply_add(p * s_x, product.per_output(s_g), acc, s_x), None

        start = jnp.zeros((x_q.shape[0], qt.shape[-2]), jnp.float32)
        if bias is not None:
            start = start + bias
        return jax.lax.scan(add_group, start, jnp.arange(groups))[0]
