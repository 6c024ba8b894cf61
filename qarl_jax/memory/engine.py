# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes of a vLLM engine on a GPU, and of the published versions that are staged for it, from shapes alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from qarl_bridge.protocol import adapters, formats

from qarl_jax import models
from qarl_jax.memory.learner import GIB, Shapes, held_once, nbytes, shapes
from qarl_jax.rollout import PolicyWeights
from qarl_jax.rollout.vllm import gpu_staging
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime import processes

CONTEXT = 1.5 * GIB  # of a Hopper GPU, an estimate: vLLM's CUDA context, its programs and libraries' workspaces
GRAPHS = 1.5 * GIB  # of all captured batch sizes together; they share one pool
STEP_TOKENS = 16384  # most tokens of an engine's step (vLLM's max_num_batched_tokens on a large GPU, or fewer)
COLLECTIVES = 1.0 * GIB  # NCCL's buffers between the shards of a tensor-parallel engine
BLOCK = 16  # tokens of a block of the KV cache


def _of_a_version(count: Callable[[PolicyWeights], int]) -> Callable[[RunConfig], int]:
    """A function of a run's config that counts once for all runs whose versions have the same shapes."""

    @functools.cache
    def counted(made: Shapes, elsewhere: frozenset[str]) -> int:
        weights = PolicyWeights(graphdef=made.served, params=made.params, qweights=made.published, elsewhere=elsewhere)
        return count(weights)

    return functools.wraps(count)(lambda cfg: counted(shapes(cfg), held_once(cfg)))


@_of_a_version
def chunk_bytes(weights: PolicyWeights) -> int:
    """Bytes of the buffer of a chunked weight transfer (`rollout.engine.staging_buffers=0`)."""
    places = gpu_staging.layout(weights)
    return max(size for _, size in gpu_staging.spans_of(places, gpu_staging.parts_of(places)))


@_of_a_version
def published_bytes(weights: PolicyWeights) -> int:
    """Bytes of one published version: QTensors, and all other weights in bfloat16. A base that the engine reads in the
    trainer's memory is left out."""
    covered, elsewhere = models.by_path(weights.qweights), weights.elsewhere
    own = {path: leaf for path, leaf in covered.items() if path not in elsewhere}
    rest = {p: leaf for p, leaf in models.by_path(weights.params).items() if p not in covered and p not in elsewhere}
    return nbytes(own) + nbytes(rest, dtype=jnp.bfloat16)


@_of_a_version
def layer_copies(weights: PolicyWeights) -> int:
    """Bytes that vLLM on CUDA needs for dense layers in addition to the published tensors. Embedding and head are held
    once, and multiplied as they are.

    Under `Scheme.held_twice` the bridge's kernels multiply reordered copies of the tensors, made at each load. Under
    `Scheme.decoded` there is room for the largest layer, gate and up, in bfloat16.
    """
    codes = models.by_path(weights.qweights).items()
    layers = [q for path, q in codes if path.startswith("stacks.") and ".moe." not in path]
    largest = max((2 * q.shape[-2] * q.shape[-1] for q in layers if q.scheme.decoded), default=0)
    return nbytes([q for q in layers if q.scheme.held_twice]) + 2 * largest


@_of_a_version
def adapter_copies(weights: PolicyWeights) -> int:
    """Bytes of an engine's adapters in addition to the published ones.

    Layers that vLLM fuses have one adapter, whose B is block diagonal. The engine holds a live and a staged version
    (`qarl_bridge.engine.adapters`), and checks 32 MiB of the staged one at a time.
    """
    shapes = {place.name: place.shape for place in gpu_staging.layout(weights) if adapters.is_adapter(place.name)}
    layers: dict[str, list[str]] = {}
    for name in shapes:
        if name.endswith(adapters.A):
            module = adapters.module_of(name)
            layers.setdefault(formats.live_module(f"{module}.weight"), []).append(module)
    fused = 0
    for modules in layers.values():
        a, b = ([shapes[module + end] for module in modules] for end in (adapters.A, adapters.B))
        ranks = sum(rank for rank, _ in a)
        fused += ranks * (a[0][1] + sum(outputs for outputs, _ in b))
    published = sum(math.prod(shape) for shape in shapes.values())
    return 2 * (2 * fused - published) + (32 << 20) * bool(fused)


def staging_bytes(cfg: RunConfig) -> int:
    """Bytes of staging buffers on the learner's GPU. With NCCL the engine's GPU holds as many.

    A frozen base is staged once; later versions are adapters, which go through host memory. Nothing is staged if
    learner and engine share one copy of the base.
    """
    engine = cfg.rollout.engine
    if not isinstance(engine, VllmConfig) or not engine.stages_on_gpu or held_once(cfg):
        return 0
    buffers = engine.staging_buffers if cfg.lora is None else min(1, engine.staging_buffers)
    return buffers * published_bytes(cfg) or chunk_bytes(cfg)


def kv_bytes(cfg: RunConfig, sequences: int) -> int:
    """Bytes of a bfloat16 KV cache for that many sequences at their full length, on each GPU of an engine."""
    model = models.read_config(cfg.model.path)
    engine = cfg.rollout.engine
    assert isinstance(engine, VllmConfig)
    length = cfg.data.prompt_limit + cfg.rollout.max_response_len
    if engine.max_model_len:
        length = min(length, engine.max_model_len)
    blocks = -(-length // BLOCK)
    heads = model.num_kv_heads // engine.tensor_parallel_size
    return sequences * blocks * BLOCK * model.num_layers * 2 * heads * model.head_dim * 2


def share(cfg: RunConfig) -> int:
    """Sequences of a step that one engine samples; the engines of all processes share them."""
    engine = cfg.rollout.engine
    assert isinstance(engine, VllmConfig)
    sequences = cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt
    engines = processes.planned(cfg.distributed) * max(1, engine.started + len(engine.endpoints))
    return -(-sequences // engines)


def at_once(cfg: RunConfig) -> int:
    """The most sequences that one engine decodes at once."""
    engine = cfg.rollout.engine
    assert isinstance(engine, VllmConfig)
    return min(engine.max_num_seqs, share(cfg))


def engine_parts(cfg: RunConfig) -> dict[str, int]:
    """Bytes of a vLLM engine on one GPU (of one shard if it is tensor-parallel), by part. Without `kv_cache_gb` the KV
    cache takes what is left, so only one sequence is counted."""
    engine, model = cfg.rollout.engine, models.read_config(cfg.model.path)
    assert isinstance(engine, VllmConfig)
    inner = model.intermediate_size
    if model.moe is not None:
        inner = max(inner, model.moe.intermediate_size * model.moe.num_experts_per_tok)
    logits = engine.max_num_seqs * model.vocab_size * 4
    invariant, shards = engine.arithmetic == "batch_invariant", engine.tensor_parallel_size
    parts = {
        "weights": published_bytes(cfg) // shards + adapter_copies(cfg),
        "layers as multiplied": layer_copies(cfg) // shards if invariant else 0,
        "KV cache": int(engine.kv_cache_gb * GIB) if engine.kv_cache_gb else kv_bytes(cfg, 1),
        # Of a step: gate, up and their product, six residuals; and five float32 copies of all sequences' logits.
        "activations (estimate)": STEP_TOKENS * (4 * inner // shards + 6 * model.hidden_size) * 2 + 5 * logits,
        "CUDA graphs (estimate)": 0 if engine.eager else int(GRAPHS),
        "context (estimate)": int(CONTEXT),
    }
    if shards > 1:  # the sums of all shards, and NCCL's buffers
        parts["shards meet (estimate)"] = STEP_TOKENS * shards * model.hidden_size * 2 + int(COLLECTIVES)
    return parts
