# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The MoE (mixture-of-experts) layer: token-choice top-k routing, dropless, with shapes independent of the routing.

Every token is copied to its k experts, and the [M * k] copies are sorted by expert. Each expert multiplies its
contiguous run of rows (`quant.expert_dot`, a ragged product). No copy is dropped: there is no capacity limit. Padding
tokens are routed too; they do not change other tokens' outputs.

On a mesh each device works by itself (`jax.shard_map`). It routes and sorts the tokens of its batch rows (devices along
`expert` have the same rows) and multiplies the copies for the experts that it holds. Other copies are sorted behind all
groups, where a product gives zeros. Weights are gathered over `fsdp` as codes before. As in dense layers no contraction
is split: along `tensor` the inner activations are gathered before `down`. Then the copies' outputs are summed along
`expert`, where one device has a value and all others zeros, and only then weighted. So the sum over a token's k experts
has one order on every mesh. A device allocates room for all copies of its tokens, because all may go to its experts.

A shard of a tensor-parallel engine has some inner features of every expert. It quantizes these by itself, and rounds
its own weighted sum over a token's experts. The layer returns the sum over all shards (`Numerics.shards`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from qarl_jax import quant
from qarl_jax.models.config import ModelConfig
from qarl_jax.models.layers import Linear, normal, silu_and_mul
from qarl_jax.numerics.float32 import in_float64, round_to, units_per_one
from qarl_jax.runtime.mesh import constrain, spec_in_use


class Router(nnx.Module):
    """The router: chooses experts by softmax(x W^T) in float32; it is never quantized. kernel: [*stack, E, D]."""

    def __init__(self, *, config: ModelConfig, rngs: nnx.Rngs, stack: dict[str, int]):
        assert config.moe is not None
        shape = (*stack.values(), config.moe.num_experts, config.hidden_size)
        self.kernel = nnx.Param(normal(rngs, shape, config), axes=(*stack, None, "embed"))
        self.moe = config.moe
        self.dtype = config.compute_dtype
        self.numerics = config.numerics

    def __call__(
        self, x: Float[Array, "M D"], replayed: Int[Array, "M k"] | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Chooses k experts for each row of x [M, D]: their numbers [M, k] int32, and their weights [M, k] float32.

        `replayed`: experts that the sampler chose (-1: unknown, chosen here). They are used as given, and only their
        weights are computed and differentiated.

        The kernel is rounded to the compute dtype, as in the engine. The product is exact to float32, because another
        choice of experts is the largest possible mismatch between sampler and learner.
        """
        weight = round_to(self.kernel.get_value(), self.dtype).astype(jnp.float32)
        product, softmax_among = arithmetic(self.numerics)
        logits = product(x.astype(jnp.float32), weight)
        chosen, experts = jax.lax.top_k(logits, self.moe.num_experts_per_tok)
        if replayed is not None:
            experts = jnp.where(replayed < 0, experts, replayed.astype(experts.dtype))
            chosen = jnp.take_along_axis(logits, experts, axis=-1)
        # The softmax of the chosen logits is that of all, divided by its sum over the chosen.
        among = chosen if self.moe.norm_topk_prob else logits
        return experts, softmax_among(chosen, among)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


def _exact_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies float64 [M, D] and [E, D], D up to 8,192. Rows are rounded to 24 and 16 bits of their maximum, so that
    sums are exact in every order."""
    x_units, units = units_per_one(x, 24), units_per_one(weight, 16)
    return _product(jnp.round(x * x_units) / x_units, jnp.round(weight * units) / units)


def _softmax_among(chosen: jax.Array, among: jax.Array) -> jax.Array:
    return jnp.exp(chosen - jax.nn.logsumexp(among, axis=-1, keepdims=True))


def _exact_softmax_among(chosen: jax.Array, among: jax.Array) -> jax.Array:
    """Computes `_softmax_among` in float64 over up to 1,024 experts; the sum is exact in every order."""
    top = among.max(axis=-1, keepdims=True)
    total = jnp.round(jnp.exp(among - top) * 2.0**43).sum(axis=-1, keepdims=True) * 2.0**-43
    return jnp.exp(chosen - (top + jnp.log(total)))


def arithmetic(numerics: Any) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Returns a router's product, ([M, D], [E, D]) -> [M, E], and its softmax among experts, as `numerics` has them."""
    if not numerics.float64_experts:
        return _product, _softmax_among
    exact_product = in_float64(_exact_product, gradient_of=_product)
    return exact_product, in_float64(_exact_softmax_among, gradient_of=_softmax_among)


def _weighted_sum(outputs: jax.Array, weights: jax.Array) -> jax.Array:
    """[M, k, D], [M, k] -> [M, D]; adds the experts one after the other, as engines do."""
    return functools.reduce(jnp.add, (outputs[:, i] * weights[:, i, None] for i in range(outputs.shape[1])))


class MoE(nnx.Module):
    """A MoE layer: a router, and E experts with SwiGLU. The experts' kernels are [*stack, E, N, K]."""

    def __init__(self, *, config: ModelConfig, rngs: nnx.Rngs, stack: dict[str, int]):
        assert config.moe is not None
        D, F, E = config.hidden_size, config.moe.intermediate_size, config.moe.num_experts
        experts = {**stack, "expert": E}
        self.router = Router(config=config, rngs=rngs, stack=stack)
        self.gate = Linear(F, D, axis="mlp", config=config, rngs=rngs, stack=experts)
        self.up = Linear(F, D, axis="mlp", config=config, rngs=rngs, stack=experts)
        self.down = Linear(D, F, axis="embed_out", config=config, rngs=rngs, stack=experts)
        self.moe = config.moe
        self.numerics = config.numerics

    def __call__(self, x: Float[Array, "B T D"], routed: Int[Array, "B T k"] | None = None) -> Float[Array, "B T D"]:
        """Computes the weighted sum of experts' outputs; `routed`: experts to replay (`Router`), or None."""
        structure, router = nnx.split(self.router)
        held = tuple(linear.held(x.dtype) for linear in (self.gate, self.up, self.down))
        cut = _Cut.of(x.shape, self.gate.kernel.get_value().shape)
        local = functools.partial(self._on_device, structure, cut)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return local(x, routed, router, held)
        y = jax.shard_map(
            local,
            in_specs=(cut.rows, cut.rows, PartitionSpec(), (cut.inner, cut.inner, cut.outer)),
            out_specs=cut.result,
            check_vma=False,  # the kernels and the schemes' scans do not say along which axes they vary
        )(x, routed, router, held)
        return constrain(y, "batch", None, None)

    def _on_device(
        self,
        structure: nnx.GraphDef,
        cut: _Cut,
        x: Float[Array, "B T D"],
        routed: Int[Array, "B T k"] | None,
        router: nnx.State,
        held: tuple[tuple[jax.Array, Any], ...],
    ) -> jax.Array:
        """One device's part: its rows of x, and its part of each weight."""
        B, T, D = x.shape
        M, k, E = B * T, self.moe.num_experts_per_tok, self.moe.num_experts
        x_MD = x.reshape(M, D)
        with jax.named_scope("router"):
            replayed = None if routed is None else routed.reshape(M, k)
            experts_Mk, weights_Mk = nnx.merge(structure, router)(x_MD, replayed)
        with jax.named_scope("experts"):
            gate_held, up_held, down_held = held
            expert, own = experts_Mk.reshape(M * k), gate_held[0].shape[0]
            if cut.inner[0]:
                expert = expert - own * jax.lax.axis_index("expert")
                expert = jnp.where((expert >= 0) & (expert < own), expert, own)
            order = jnp.argsort(expert, stable=True)  # copies, sorted by expert; those of other devices' experts last
            group_sizes = jnp.bincount(expert, length=E + 1)[:own].astype(jnp.int32)
            rows = x_MD[order // k]
            gate = self.gate.of_experts(rows, gate_held, group_sizes)
            up = self.up.of_experts(rows, up_held, group_sizes)
            hidden = silu_and_mul(gate, up, self.numerics)
            if cut.inner[1]:  # a contraction is never split
                hidden = jax.lax.all_gather(hidden, "tensor", axis=1, tiled=True)

            def of_shard(hidden: jax.Array, *held: Any) -> jax.Array:
                """One engine shard's sum over the experts, of its own inner features."""
                out = self.down.of_experts(hidden, held, group_sizes)
                out_MkD = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(M, k, -1)
                # Of each copy one device has an output and all others zeros, so that these sums are exact.
                if cut.scattered:
                    out_MkD = jax.lax.psum_scatter(out_MkD, "expert", scatter_dimension=2, tiled=True)
                elif cut.inner[0]:
                    out_MkD = jax.lax.psum(out_MkD, "expert")
                weigh = in_float64(_weighted_sum) if self.numerics.float64_experts else _weighted_sum
                return round_to(weigh(out_MkD.astype(jnp.float32), weights_Mk), x.dtype)

            shards, whole = self.numerics.shards, (hidden, *down_held)
            sums = [of_shard(*(quant.inputs_of(a, i, shards) for a in whole)) for i in range(shards)]
            y = quant.sum_of_shards(sums)
        return y.reshape(B, T, -1)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The cuts of a layer by the mesh in force.

    Attributes:
      rows: of [B, T, ...].
      inner: of gate and up [E, F, D]. outer: of down [E, D, F].
      result: of the layer's output [B, T, D]: features as `down` has them, and these once more among the devices that
        share tokens and have other experts, where they divide them (`scattered`).
    """

    rows: PartitionSpec
    inner: PartitionSpec
    outer: PartitionSpec
    result: PartitionSpec
    scattered: bool

    @classmethod
    def of(cls, x: tuple[int, ...], gate: tuple[int, ...]) -> _Cut:
        """Makes the cuts from the shapes of the layer's input [B, T, D] and of the gate's kernel [E, F, D]."""
        E, F, D = gate
        rows, outer = spec_in_use(x, "batch", None, None), spec_in_use((E, D, F), "expert", "tensor", None)
        names: tuple[str, ...] = ("tensor",) if outer[1] else ()
        sizes = jax.sharding.get_abstract_mesh().shape
        scattered = outer[0] is not None and D % math.prod(sizes[name] for name in (*names, "expert")) == 0
        names += ("expert",) if scattered else ()
        return cls(
            rows=rows,
            inner=spec_in_use(gate, "expert", "tensor", None),
            outer=outer,
            result=PartitionSpec(rows[0], None, names or None),
            scattered=scattered,
        )
