# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: token-choice top-k routing, dropless, with shapes that do not depend on the routing.

Every token is copied to its k experts, the [M * k] copies are sorted by expert, and each expert multiplies its
contiguous run of rows (`quant.expert_dot`, a ragged product). Nothing is dropped and no capacity is chosen. Padding
tokens are routed like any other: they cost their rows and touch nobody else's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from qarl_jax.models.config import ModelConfig
from qarl_jax.models.layers import Linear, normal, silu_and_mul, store
from qarl_jax.quant.arithmetic import tile_matmul
from qarl_jax.sharding import constrain


class Router(nnx.Module):
    """Probabilities of the experts: softmax(x W^T) in float32, never quantized. kernel: [*stack, E, D]."""

    def __init__(self, *, config: ModelConfig, rngs: nnx.Rngs, stack: dict[str, int]):
        assert config.moe is not None
        shape = (*stack.values(), config.moe.num_experts, config.hidden_size)
        self.kernel = nnx.Param(normal(rngs, shape, config), axes=(*stack, None, "embed"))
        self.moe = config.moe
        self.dtype = config.compute_dtype
        self.rounded = config.numerics.mirrors_engine
        self.round_weights = config.numerics.round_routing
        self.tiles = config.numerics.tile_sums and config.moe.num_experts >= 16  # vLLM multiplies fewer in float32

    def __call__(
        self, x: Float[Array, "M D"], replayed: Int[Array, "M k"] | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """[M, D] -> chosen experts [M, k] int32 and their weights [M, k] float32.

        `replayed` are the experts a sampler chose (-1: not known, the choice is made here): they are taken as they are,
        and only their weights are computed (and differentiated).

        The weight enters as the engine holds it (in the compute dtype), the product is exact to float32: a flipped
        choice is the largest mismatch a sampler and a learner can have.
        """
        weight = store(self.kernel.get_value(), self.dtype).astype(jnp.float32)
        if self.tiles and x.dtype == jnp.bfloat16:
            logits = tile_matmul(x, weight)
        else:
            logits = jax.lax.dot_general(
                x.astype(jnp.float32), weight, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
            )
        if self.rounded:
            logits = store(logits, self.dtype).astype(jnp.float32)
        chosen, experts = jax.lax.top_k(logits, self.moe.num_experts_per_tok)
        if replayed is not None:
            experts = jnp.where(replayed < 0, experts, replayed.astype(experts.dtype))
            chosen = jnp.take_along_axis(logits, experts, axis=-1)
        # The softmax of the chosen logits is that of all, divided by its sum over the chosen.
        among = chosen if self.moe.norm_topk_prob else logits
        weights = jnp.exp(chosen - jax.nn.logsumexp(among, axis=-1, keepdims=True))
        return experts, store(weights, self.dtype).astype(jnp.float32) if self.round_weights else weights


class MoE(nnx.Module):
    """Router and experts. Kernels are [*stack, E, N, K]."""

    def __init__(self, *, config: ModelConfig, rngs: nnx.Rngs, stack: dict[str, int]):
        assert config.moe is not None
        D, F, E = config.hidden_size, config.moe.intermediate_size, config.moe.num_experts
        experts = {**stack, "expert": E}
        self.router = Router(config=config, rngs=rngs, stack=stack)
        self.gate = Linear(F, D, axis="mlp", config=config, rngs=rngs, stack=experts)
        self.up = Linear(F, D, axis="mlp", config=config, rngs=rngs, stack=experts)
        self.down = Linear(D, F, axis="embed_out", config=config, rngs=rngs, stack=experts)
        self.moe = config.moe
        self.silu_rounded = config.numerics.round_silu
        self.silu_divided = config.numerics.divided_silu
        self.float_inside = config.numerics.float_experts

    def __call__(self, x: Float[Array, "B T D"], routed: Int[Array, "B T k"] | None = None) -> Float[Array, "B T D"]:
        """The experts' weighted sum; `routed`: experts to send each token to (see `Router`)."""
        B, T, D = x.shape
        M, k, E = B * T, self.moe.num_experts_per_tok, self.moe.num_experts
        x_MD = x.reshape(M, D)
        with jax.named_scope("router"):
            experts_Mk, weights_Mk = self.router(x_MD, None if routed is None else routed.reshape(M, k))
        with jax.named_scope("experts"):
            order = jnp.argsort(experts_Mk.reshape(M * k), stable=True)  # copies, sorted by expert
            group_sizes = jnp.bincount(experts_Mk.reshape(M * k), length=E).astype(jnp.int32)
            rows = constrain(x_MD, None, None)[order // k]
            plain = all(linear.quantized is None for linear in (self.gate, self.up, self.down))
            exact = jnp.float32 if self.float_inside and plain else None
            gate, up = (linear(rows, group_sizes, dtype=exact) for linear in (self.gate, self.up))
            hidden = store(silu_and_mul(gate, up, self.silu_rounded, divided=self.silu_divided), x.dtype)
            out = self.down(hidden, group_sizes, dtype=exact)
            out_MkD = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(M, k, D)
            # Weighted and summed in float32, rounded once.
            y = (out_MkD.astype(jnp.float32) * weights_Mk[..., None]).sum(axis=1)
        return constrain(store(y, x.dtype).reshape(B, T, D), "batch", None, None)
