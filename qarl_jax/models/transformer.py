# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The decoder of the Qwen and Llama families: embedding, pre-norm layers of attention and MLP or MoE, final norm, head.

Equal layers are stacked ([L, N, K] kernels) and run by `lax.scan`; a model that mixes dense and MoE layers has one
stack per run of equal layers (`ModelConfig.stacks`). As in vLLM, two tensors in the compute dtype flow between layers:
the residual, and the last block's output `delta`. They are not yet added, because the next norm reads their unrounded
sum.

Suffixes: B batch, T time, D model, F ffn, N q-heads, K kv-heads, H head, V vocabulary, S cache slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from qarl_bridge.protocol import formats

from qarl_jax import quant
from qarl_jax.kernels.attention_vendor import can_decode, runs
from qarl_jax.models import sums as accumulators
from qarl_jax.models.attention import attention
from qarl_jax.models.config import ModelConfig
from qarl_jax.models.layers import (
    Linear,
    LowBitBackward,
    Quantized,
    RMSNorm,
    apply_rope,
    lookup,
    rope_table,
    silu_and_mul,
)
from qarl_jax.models.logprobs import logits_of, used
from qarl_jax.models.moe import MoE
from qarl_jax.quant.backward import of_layers
from qarl_jax.runtime import remat
from qarl_jax.runtime.mesh import constrain
from qarl_jax.runtime.remat import ATTENTION_INPUT, MIXER_OUTPUT
from qarl_jax.types import UserError

# (q, k, v) -> (attention output, whatever the caller keeps of k and v)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of every layer, one row per sequence.

    Attributes:
      k, v: [L, B, S, K, H] compute dtype.
      length: [B] int32, slots filled so far; the next token of row b goes to slot length[b].
    """

    k: Any
    v: Any
    length: Any


class Attention(nnx.Module):
    """Grouped-query attention with its four linear maps, optional biases and optional norms of q and k."""

    def __init__(self, *, config: ModelConfig, rngs: nnx.Rngs, stack: dict[str, int]):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        args: dict[str, Any] = {"config": config, "rngs": rngs, "stack": stack}
        fused: dict[str, Any] = {"use_bias": config.qkv_bias, "fused_features": (N + 2 * K) * H} | args
        self.q = Linear(N * H, D, axis="heads", **fused)
        self.k = Linear(K * H, D, axis="kv_heads", **fused)
        self.v = Linear(K * H, D, axis="kv_heads", **fused)
        self.o = Linear(D, N * H, axis="embed_out", use_bias=config.o_bias, spread_inputs=True, **args)
        self.q_norm = RMSNorm(H, config=config, stack=stack) if config.qk_norm else None
        self.k_norm = RMSNorm(H, config=config, stack=stack) if config.qk_norm else None
        self.head_dim = H
        self.numerics = config.numerics

    def __call__(
        self, x: Float[Array, "B T D"], rope: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, Any]:
        B, T, _ = x.shape

        def heads(linear: Linear, norm: RMSNorm | None) -> jax.Array:
            # Named before norm and rotation, whose backward starts from here: nothing of a saved q or k is recomputed
            # but elementwise work.
            projected = checkpoint_name(linear(x), ATTENTION_INPUT)
            y = constrain(projected.reshape(B, T, -1, self.head_dim), "batch", None, "tensor", None)
            return y if norm is None else norm(y)

        with jax.named_scope("qkv"):
            q, k, v = heads(self.q, self.q_norm), heads(self.k, self.k_norm), heads(self.v, None)
        with jax.named_scope("rope"):
            q, k = (apply_rope(x, rope, self.numerics) for x in (q, k))
        with jax.named_scope("softmax_attention"):
            out, kept = attend(q, k, v)
        with jax.named_scope("o"):
            mixed = constrain(self.o(out.reshape(B, T, -1)), "batch", None, None)
            return checkpoint_name(mixed, MIXER_OUTPUT), kept


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, *, config: ModelConfig, rngs: nnx.Rngs, stack: dict[str, int]):
        D, F = config.hidden_size, config.intermediate_size
        args: dict[str, Any] = {"config": config, "rngs": rngs, "stack": stack}
        self.gate = Linear(F, D, axis="mlp", fused_features=2 * F, **args)
        self.up = Linear(F, D, axis="mlp", fused_features=2 * F, **args)
        self.down = Linear(D, F, axis="embed_out", spread_inputs=True, **args)
        self.numerics = config.numerics

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        hidden = silu_and_mul(self.gate(x), self.up(x), self.numerics)
        hidden = constrain(hidden, "batch", None, "tensor")
        return constrain(self.down(hidden), "batch", None, None)


class Layer(nnx.Module):
    """One decoder layer, or a stack of layers, whose leading dims `stack` `lax.scan` must remove before a call."""

    def __init__(self, *, config: ModelConfig, rngs: nnx.Rngs, stack: dict[str, int], is_moe: bool):
        args: dict[str, Any] = {"config": config, "rngs": rngs, "stack": stack}
        self.attn_norm = RMSNorm(config.hidden_size, config=config, stack=stack)
        self.attn = Attention(**args)
        self.mlp_norm = RMSNorm(config.hidden_size, config=config, stack=stack)
        if is_moe:
            self.moe = MoE(**args)
        else:
            self.mlp = MLP(**args)
        self.is_moe = is_moe

    def __call__(
        self,
        delta: jax.Array,
        residual: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        attend: Attend,
        routed: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Runs the layer on (delta, residual) [B, T, D]; returns both, and what `attend` keeps of keys and values.
        `routed` [B, T, k]: the experts to which tokens are sent; None: the router chooses."""
        with jax.named_scope("attention"):
            x, residual = self.attn_norm.add(delta, residual)
            delta, kept = self.attn(x, rope, attend)
        with jax.named_scope("moe" if self.is_moe else "mlp"):
            x, residual = self.mlp_norm.add(delta, residual)
            delta = self.moe(x, routed) if self.is_moe else self.mlp(x)
        return delta, residual, kept


def attending(config: ModelConfig, **packing: Any) -> Attend:
    """Makes the `attend` of layers without a KV cache. packing: the arguments of `attention` for packed rows."""
    options: dict[str, Any] = {"implementation": config.attention, "numerics": config.numerics} | packing
    return lambda q, k, v: (attention(q, k, v, **options), None)


class Embedding(Linear):
    """A [V, D] table: the embedding, whose rows are looked up, or the head, which multiplies hidden states. It has a
    QTensor if a rule names it (`quant.Rules`)."""

    def __init__(self, *, config: ModelConfig, rngs: nnx.Rngs):
        whole = dataclasses.replace(config, splitting=None)
        super().__init__(config.vocab_size, config.hidden_size, axis="vocab", config=whole, rngs=rngs, stack={})

    @property
    def table(self) -> Float[Array, "V D"] | quant.Coded:
        """The master, with its codes if it has any."""
        master = self.kernel.get_value()
        return master if self.quantized is None else quant.Coded(master, self.quantized.get_value())


class Transformer(nnx.Module):
    """The whole decoder-only model. The constructor draws random weights; `load_hf` loads a folder's."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, quantize: Callable[..., quant.QTensor] = quant.quantize):
        """quantize: `quant.blank` where shapes alone are asked for."""
        self.config = config
        self.embed = Embedding(config=config, rngs=rngs)
        self.stacks = nnx.List(
            [
                Layer(config=config, rngs=rngs, stack={"layers": stack.length}, is_moe=stack.is_moe)
                for stack in config.stacks
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config=config, stack={})
        self.head = None if config.tie_embeddings else Embedding(config=config, rngs=rngs)
        if config.lora is not None:
            for path, linear in quantizable(self).items():
                if config.has_adapter(path):
                    linear.attach_adapter(config.lora, rngs)
        attach_quantized(self, quantize)

    def head_weight(self) -> Float[Array, "V D"] | quant.Coded:
        """Returns the output head's master, with its codes if it has any: the embedding's if the two are tied."""
        return (self.embed if self.head is None else self.head).table

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Computes float32 logits. Arguments as in `hidden_states`."""
        hidden = self.hidden_states(tokens, positions, segment_ids)
        with jax.named_scope("head"):
            return logits_of(hidden, used(self.head_weight(), self.config.compute_dtype))

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        max_segments: int | None = None,
        routed_experts: Int[Array, "B T L k"] | None = None,
        sums: nnx.State | None = None,
    ) -> Float[Array, "B T D"]:
        """Computes the output of the final norm, in the compute dtype.

        Args:
          positions: position within the sequence, for RoPE; None: 0 .. T-1 (restarted per segment by the caller).
          segment_ids: sequences packed in a row do not see each other; 0 = padding; None: one sequence per row.
          max_segments: static bound on the number of segments of a row, each contiguous; None: T.
          routed_experts: experts of each position and layer (-1: the router chooses); None: the router chooses all.
          sums: accumulators of gradients, shaped like masters; the backward adds to those of stacks (`sums.py`).
        """
        delta = self._embed(tokens)
        stream = self.through(
            delta,
            jnp.zeros_like(delta),
            positions,
            segment_ids,
            max_segments=max_segments,
            routed_experts=routed_experts,
            sums=sums,
        )
        return self.norm.add(*stream)[0]

    def through(
        self,
        delta: Float[Array, "B T D"],
        residual: Float[Array, "B T D"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        max_segments: int | None = None,
        routed_experts: Int[Array, "B T L k"] | None = None,
        sums: nnx.State | None = None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
        """Runs all layers on (delta, residual), and returns (delta, residual) after the last.

        After the embedding, `delta` is its output and `residual` is zero. With `sums`, gradients are right only if
        nothing but the result's sum is read (`models.sums.run`). Other arguments as in `hidden_states`.
        """
        B, T, _ = delta.shape
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        config = self.config
        rope = rope_table(config, positions)
        # The padding behind the last segment is a run of its own. Unread where the kernel has no use for
        # it; here and not in a layer, so that it is computed once.
        packed_runs = (
            None if segment_ids is None else runs(segment_ids, T if max_segments is None else max_segments + 1)
        )
        attend = attending(config, segment_ids=segment_ids, packed_runs=packed_runs)
        for number, (stack, layers) in enumerate(zip(config.stacks, self.stacks, strict=True)):
            structure, state = nnx.split(layers)
            routed = None
            if routed_experts is not None and stack.is_moe:
                routed = jnp.moveaxis(routed_experts[:, :, stack.start : stack.start + stack.length], 2, 0)

            def body(stream: tuple[jax.Array, jax.Array], layer: Any, structure: Any = structure) -> tuple[Any, None]:
                state, routed = layer
                delta, residual, _ = nnx.merge(structure, state)(*stream, rope, attend, routed)
                return (delta, residual), None

            layer = remat.checkpointed(body, config.remat)
            if totals := accumulators.of_stack(sums, number):
                own = {keys: leaf.get_value() for keys, leaf in nnx.to_flat_state(state) if keys in totals}
                delta, residual = accumulators.run(layer, (delta, residual), (state, routed), own, totals)
            else:
                (delta, residual), _ = jax.lax.scan(layer, (delta, residual), (state, routed))
        return delta, residual

    def init_cache(self, batch: int, max_len: int) -> KVCache:
        """An empty cache for `batch` rows of up to `max_len` tokens."""
        config = self.config
        shape = (config.num_layers, batch, max_len, config.num_kv_heads, config.head_dim)
        return KVCache(
            k=jnp.zeros(shape, config.compute_dtype),
            v=jnp.zeros(shape, config.compute_dtype),
            length=jnp.zeros((batch,), jnp.int32),
        )

    def decode(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Runs T more tokens of every row against the cache: a prefill, a part of a prefill, or (T = 1) a decode step.

        Args:
          positions: position within the sequence. A negative position marks an absent token (trailing positions of a
            short prompt, an idle row): it is not cached and does not advance the row; ignore its output.
          cache: earlier tokens. Token t of row b goes to slot cache.length[b] + t; past the last slot it is dropped.

        Returns:
          hidden states [B, T, D] after the final norm, and the cache with the new keys and values, `length` advanced.
        """
        B, T = tokens.shape
        config = self.config
        rope = rope_table(config, positions)
        present = positions >= 0
        slots = cache.length[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]
        # Absent tokens go out of range, where they are dropped; all targets of a row differ, so that no backend has to
        # sort them first (as a GPU does when told to be deterministic).
        write_slots = jnp.where(present, slots, slots + cache.k.shape[2])
        rows = jnp.arange(B, dtype=jnp.int32)[:, None]

        delta = self._embed(tokens)
        residual = jnp.zeros_like(delta)
        keys, values = cache.k, cache.v
        in_one_kernel = T == 1 and can_decode(config.attention, config.head_dim, config.numerics)
        for stack, layers in zip(config.stacks, self.stacks, strict=True):
            structure, state = nnx.split(layers)

            # The cache is carried whole and written in place; scanned in and out it would be copied every step.
            def body(carry: Any, layer: Any, structure: Any = structure) -> tuple[Any, None]:
                delta, residual, keys, values = carry
                index, state = layer

                def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
                    at = (index, rows, write_slots)
                    new_keys = keys.at[at].set(k, mode="drop", unique_indices=True)
                    new_values = values.at[at].set(v, mode="drop", unique_indices=True)
                    if in_one_kernel:
                        from qarl_jax.kernels.attention_decode import (
                            decode_attention,  # Pallas' Triton: only where used
                        )

                        out = decode_attention(q, new_keys, new_values, index, slots[:, 0])
                        return out, (new_keys, new_values)
                    k_BSKH = jax.lax.dynamic_index_in_dim(new_keys, index, keepdims=False)
                    v_BSKH = jax.lax.dynamic_index_in_dim(new_values, index, keepdims=False)
                    out = attention(q, k_BSKH, v_BSKH, q_slots=slots, numerics=config.numerics)
                    return out, (new_keys, new_values)

                delta, residual, (keys, values) = nnx.merge(structure, state)(delta, residual, rope, attend)
                return (delta, residual, keys, values), None

            indices = jnp.arange(stack.start, stack.start + stack.length, dtype=jnp.int32)
            (delta, residual, keys, values), _ = jax.lax.scan(body, (delta, residual, keys, values), (indices, state))
        length = cache.length + present.sum(axis=1, dtype=jnp.int32)
        return self.norm.add(delta, residual)[0], KVCache(k=keys, v=values, length=length)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            qtensor = None if self.embed.quantized is None else self.embed.quantized.get_value()
            rows = lookup(self.embed.kernel.get_value(), qtensor, tokens, self.config.compute_dtype)
            return constrain(rows, "batch", None, None)


BLOCK_NORMS = r"\.(attn_norm|mlp_norm)\.weight$"
"""Found in the paths of the gains before attention and MLP."""

FINAL_NORM = "norm.weight"
"""Path of the last norm's gains."""


def quantizable(model: Transformer, rules: quant.Rules | None = None) -> dict[str, Linear]:
    """Lists the linear maps that a scheme may cover, by their kernel's path ("stacks.0.attn.q.kernel"), in model order.

    Norms and router are not among them; embedding and head are if `rules` (None: the model's) give them a scheme.
    """
    nodes = sorted(
        ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, Linear)),
        key=lambda item: str(item[0]),
    )
    named = {".".join(map(str, (*path, "kernel"))): node for path, node in nodes}
    config, rules = model.config, model.config.quant if rules is None else rules
    return {
        path: node
        for path, node in named.items()
        if not isinstance(node, Embedding) or rules.scheme_for(config.module_of(path)) is not None
    }


def partners(config: ModelConfig, paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Finds for every quantizable kernel the kernels with which it shares a scale (`Scheme.one_range`), by path."""
    modules = {formats.module_name(config.describe(path)): path for path in paths}
    shared = {path for path in modules.values() if (scheme := config.scheme_of(path)) is not None and scheme.one_range}
    return {
        path: tuple(modules[other] for other in formats.fused_with(module)) if path in shared else ()
        for module, path in modules.items()
    }


def quantized(
    config: ModelConfig,
    masters: Mapping[str, jax.Array],
    paths: Iterable[str],
    quantize: Callable[..., quant.QTensor] = quant.quantize,
) -> dict[str, quant.QTensor]:
    """Quantizes the masters that the config's rules cover.

    Args:
      masters: masters [layers, ..., N, K] by path.
      paths: the paths of all quantizable kernels.
      quantize: `quant.quantize`, or `quant.blank` where shapes alone are asked for.

    Raises:
      UserError: a weight does not fit its scheme, or a weight with which it shares a scale has no master.
    """
    beside = partners(config, paths)
    out = {}
    for path, master in masters.items():
        scheme = config.scheme_of(path)
        if scheme is None:
            continue
        if missing := [config.describe(other) for other in beside[path] if other not in masters]:
            own = config.describe(path)
            raise UserError(f"{scheme} has one scale for {own} and {', '.join(missing)}: freeze all of them or none.")
        others = [masters[other] for other in beside[path]]
        out[path] = quantize(master, scheme, config.describe(path), others)
    return out


def attach_quantized(model: Transformer, quantize: Callable[..., quant.QTensor]) -> None:
    """Quantizes the master of every linear map that the config's rules cover, and attaches the QTensor."""
    linears = quantizable(model)
    masters = {path: linear.kernel.get_value() for path, linear in linears.items()}
    made = quantized(model.config, masters, linears, quantize)
    for path, qtensor in made.items():
        linears[path].quantized = Quantized(qtensor, axes=linears[path].kernel.get_metadata()["axes"])


def attach_backward(model: Transformer, form: Any, root: Any) -> None:
    """Gives every linear map a low-bit backward.

    Args:
      form: the format of `quant.Backward`, "int8" or "fp8".
      root: uint32 scalar (`backward.root_seed`).
    """
    linears = ((path, linear) for path, linear in quantizable(model).items() if not isinstance(linear, Embedding))
    for number, (path, linear) in enumerate(linears):
        stack = model.config.stacks[int(path.split(".")[1])]
        linear.backward = LowBitBackward(of_layers(form, root, number, stack.length, stack.start))
