# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares single layers and blocks of a live engine with the learner's, on the engine's own activations.

The engine prefills a prompt and records what goes into and comes out of some of its modules (`VllmEngine.probe`). The
learner computes the same modules from the same inputs, under its `numerics` profile, jitted as in training. So errors
do not propagate: a difference comes from the module itself.

The linear layers of a block are the four that vLLM fuses: q, k and v; o; gate and up; down. A whole block has both
norms, RoPE, attention, and MLP or experts. The first, the middle and the last block are compared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.formats import FUSED

from qarl_jax import models
from qarl_jax.models.layers import rope_table
from qarl_jax.models.transformer import attending
from qarl_jax.rollout import PolicyWeights

# vLLM's module in a block -> the learner's linear maps whose outputs it concatenates.
LINEARS = {
    f"{theirs}.{module}": tuple(f"{ours}.{part.removesuffix('_proj')}" for part in FUSED.get(module, (module,)))
    for theirs, ours, modules in (
        ("self_attn", "attn", ("qkv_proj", "o_proj")),
        ("mlp", "mlp", ("gate_up_proj", "down_proj")),
    )
    for module in modules
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between learner and engine in one module's outputs.

    Attributes:
      module: the engine's name.
      equal: share of outputs equal to the last bit.
      max_abs: largest difference. max_ulp: the largest in bfloat16 units in the last place, of the larger of the two.
      relative: L2 norm of the differences over that of the outputs.
      count: outputs compared.
    """

    module: str
    equal: float
    max_abs: float
    max_ulp: float
    relative: float
    count: int

    @staticmethod
    def of(module: str, mine: Any, theirs: np.ndarray) -> Difference:
        """Compares a module's outputs: the learner's and the engine's, arrays of one size in any float dtype."""
        a, b = (np.asarray(x).astype(np.float64).reshape(-1) for x in (mine, theirs))
        difference = np.abs(a - b)
        largest = np.maximum(np.abs(a), np.abs(b))
        # bfloat16 has 8 significant bits: the ulp of 2^e <= x < 2^(e+1) is 2^(e-7).
        ulp = np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))) - 7)
        norm = float(np.linalg.norm(b))
        return Difference(
            module=module,
            equal=float((a == b).mean()),
            max_abs=float(difference.max()),
            max_ulp=float((difference / ulp).max()),
            relative=float(np.linalg.norm(a - b)) / norm if norm else float(difference.max()),
            count=len(a),
        )


def judge(found: Sequence[Difference], aligned: bool) -> tuple[bool | None, str]:
    """Judges whether every output of these modules is equal, as `aligned` learners and engines promise.

    Returns:
      (True, False, or None where nothing is promised; a sentence with the largest differences).
    """
    outputs = sum(d.count for d in found)
    share = sum(d.equal * d.count for d in found) / outputs
    worst = max(found, key=lambda d: d.relative)
    return (share == 1.0 if aligned else None), (
        f"{len(found)} modules, {share:.3%} of {outputs} outputs equal, largest difference "
        f"{max(d.max_abs for d in found):.1e} ({max(d.max_ulp for d in found):.0f} ulp), relative error "
        f"{worst.relative:.1e} in {worst.module}"
    )


def picked_layers(num_layers: int) -> list[int]:
    """Returns the indices of the first, the middle and the last layer."""
    return sorted({0, num_layers // 2, num_layers - 1})


def _split_layer(model: models.Transformer, number: int) -> tuple[Any, Any]:
    """(structure, state) of a block.

    Raises:
      IndexError: there is no such block.
    """
    for stack, layers in zip(model.config.stacks, model.stacks, strict=True):
        if stack.start <= number < stack.start + stack.length:
            structure, state = nnx.split(layers)
            index = number - stack.start
            return structure, jax.tree.map(lambda x, index=index: x[index], state)
    raise IndexError(f"no layer {number}")


def compare(weights: PolicyWeights, records: Sequence[messages.Recorded], linear: bool) -> list[Difference]:
    """Compares the learner's outputs with recorded ones; `linear`: of linear layers, otherwise of whole blocks.

    Tokens are routed to the experts that the engine recorded, if it did.
    """
    model = models.merge(weights.graphdef, weights.params, weights.qweights)
    modules, routing = _apart(records)
    return [_linear(model, record) if linear else _block(model, record, routing) for record in modules]


def _apart(records: Sequence[messages.Recorded]) -> tuple[list[messages.Recorded], np.ndarray | None]:
    """The modules of a probe, and the experts its tokens were sent to, where they were recorded."""
    routing = next((r.outputs[0].numpy() for r in records if r.module == messages.ROUTING), None)
    return [r for r in records if r.module != messages.ROUTING], routing


def first_difference(
    probe: Callable[[Sequence[int], Sequence[str]], Sequence[messages.Recorded]],
    weights: PolicyWeights,
    sequence: Sequence[int],
) -> str:
    """Finds the first block whose outputs differ from the engine's in any bit, on the engine's own inputs in a prefill.
    Returns block, first token that differs and differing linear layers, as text; "": no block differs.

    Args:
      probe: `VllmEngine.probe` of an engine that holds `weights`.
      sequence: token ids of the prefill.
    """
    model = models.merge(weights.graphdef, weights.params, weights.qweights)
    for number in range(model.config.num_layers):
        (record,), routing = _apart(probe(sequence, [f"model.layers.{number}"]))
        mine, theirs = block_outputs(model, record, routing)
        tokens = np.flatnonzero((mine != theirs).any(axis=(0, 2)))
        if len(tokens):
            linear = compare(weights, probe(sequence, linear_names(model.config, [number])), linear=True)
            wrong = [found.module.split(".", 3)[3] for found in linear if found.equal < 1]
            return (
                f"block {number}, from token {tokens[0]} on ({len(tokens)} of {len(sequence)} tokens); of its linear"
                f" layers {', '.join(wrong) or 'none'} by itself"
            )
    return ""


def linear_names(config: models.ModelConfig, numbers: Sequence[int] = ()) -> list[str]:
    """Lists the engine's linear layers to probe, in blocks `numbers`, else in `picked_layers`. Experts are left out:
    they are one module, which is compared with its block."""
    return [
        f"model.layers.{layer}.{own}"
        for layer in numbers or picked_layers(config.num_layers)
        for own in LINEARS
        if not (own.startswith("mlp.") and _is_moe(config, layer))
    ]


def block_names(config: models.ModelConfig) -> list[str]:
    """Lists the engine's blocks to probe: those of `picked_layers`."""
    return [f"model.layers.{layer}" for layer in picked_layers(config.num_layers)]


def _is_moe(config: models.ModelConfig, layer: int) -> bool:
    return any(s.is_moe and s.start <= layer < s.start + s.length for s in config.stacks)


@functools.partial(jax.jit, static_argnames=("structure", "paths"))
def _apply_linear(structure: Any, state: Any, x: jax.Array, paths: tuple[str, ...]) -> jax.Array:
    """The outputs [T, N] of some linear maps of a block, side by side."""
    layer, parts = nnx.merge(structure, state), []
    for path in paths:
        module = layer
        for name in path.split("."):
            module = getattr(module, name)
        parts.append(module(x))
    return jnp.concatenate(parts, axis=-1)


@functools.partial(jax.jit, static_argnames=("structure", "config"))
def _apply_block(
    structure: Any,
    state: Any,
    delta: jax.Array,
    residual: jax.Array,
    positions: jax.Array,
    routed: jax.Array | None,
    config: models.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """(delta, residual) [1, T, D] after a block."""
    rope = rope_table(config, positions)
    return nnx.merge(structure, state)(delta, residual, rope, attending(config), routed)[:2]


def _linear(model: models.Transformer, record: messages.Recorded) -> Difference:
    _, _, number, own = record.module.split(".", 3)
    x = jnp.asarray(record.inputs[0].numpy())

    theirs = record.outputs[0].numpy()
    mine = np.asarray(_apply_linear(*_split_layer(model, int(number)), x, LINEARS[own]))
    return Difference.of(record.module, mine, theirs[:, : mine.shape[-1]])


def block_outputs(
    model: models.Transformer, record: messages.Recorded, routing: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a block's outputs (delta, residual), the learner's and the engine's, each float32 [2, T, D].

    `routing` [T, layers, k]: the experts the engine sent tokens to.
    """
    config = model.config
    number = int(record.module.rsplit(".", 1)[1])
    block = _split_layer(model, number)
    arrays = [array.numpy() for array in record.inputs]
    (positions,) = [a for a in arrays if a.ndim == 1]
    stream = [jnp.asarray(a)[None] for a in arrays if a.ndim == 2]
    delta, residual = stream if len(stream) == 2 else (stream[0], jnp.zeros_like(stream[0]))

    routed = None if routing is None or not _is_moe(config, number) else jnp.asarray(routing[:, number])[None]
    mine = _apply_block(*block, delta, residual, jnp.asarray(positions.astype(np.int32))[None], routed, config)
    theirs = [array.numpy() for array in record.outputs]
    return (
        np.stack([np.asarray(part[0]).astype(np.float32) for part in mine]),
        np.stack([part.astype(np.float32) for part in theirs]),
    )


def _block(model: models.Transformer, record: messages.Recorded, routing: np.ndarray | None) -> Difference:
    return Difference.of(record.module, *block_outputs(model, record, routing))
