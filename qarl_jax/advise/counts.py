# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts what one step of a run does, from shapes alone: bytes and FLOP, in seconds at a machine's peaks.

    of_step(cfg, MACHINES["h200"])      # {"rollout": {"step": 1024, "read": 3.9, ...}, "update": {...}, ...}

A phase is a sum of terms. A term is either seconds at a peak (`read`: bytes over bandwidth, `product`: FLOP over the
peak of their precision) or a count (`layer`: layers that an engine launches). `forecast.RATES` has a factor for each.

Prompts are counted at their full length, and responses at a mean length. An engine decodes until the longest response
ends. Rewards, data and the time that a phase hides under another are not counted.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from qarl_jax import models
from qarl_jax.advise.machines import Machine
from qarl_jax.memory import costs, learner
from qarl_jax.memory.engine import kv_bytes, published_bytes
from qarl_jax.memory.learner import GIB
from qarl_jax.optim import muon
from qarl_jax.optim.build import Muon, labels
from qarl_jax.quant.backward import KERNELS
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run.config import RunConfig
from qarl_jax.verify import alignment

Terms = dict[str, float]
ACTIVATION_BYTES = 2  # of an element of the compute dtype
# Of an element of Muon's iterate, or of its Gram matrix, in a round: cast and read for each product, the product
# written and read, the sum written (`muon.orthogonalize`).
ITERATE_BYTES = 28
# Launches of an engine for a layer's adapters, in those of the layer (step_lora_8b_h100.json).
ADAPTERS_LAUNCHES = 1.6


@dataclasses.dataclass(frozen=True)
class Weights:
    """Counts of a policy's parameters by kind of layer, and the bytes that an engine reads of each.

    Attributes:
      dense: number of parameters of layers' matrices that every token meets.
      experts: number of parameters of experts, all of them.
      head: number of parameters of the output head.
      dense_bytes, expert_bytes, head_bytes: their bytes as published.
      decoded: number of dense parameters whose scheme is `Scheme.decoded`: the engine decodes them to bfloat16.
      kernel: `Scheme.kernel` of the dense layers; "" for bfloat16.
    """

    dense: int = 0
    experts: int = 0
    head: int = 0
    dense_bytes: int = 0
    expert_bytes: int = 0
    head_bytes: int = 0
    decoded: int = 0
    kernel: str = ""


def weights_of(cfg: RunConfig, *, rollout: bool) -> Weights:
    """Counts the weights of the sampler (`rollout`), or of the learner's forward."""
    made = learner.shapes(cfg)
    low = models.by_path(made.published if rollout else made.qweights)
    found: dict[str, int] = dict.fromkeys((f.name for f in dataclasses.fields(Weights) if f.name != "kernel"), 0)
    kernel = ""
    for path, leaf in models.by_path(made.params).items():
        is_head = path == ("embed.kernel" if learner.model_of(cfg).tie_embeddings else "head.kernel")
        if not path.endswith(".kernel") or (path == "embed.kernel" and not is_head):
            continue  # norms are few, and an embedding is looked up
        where = "head" if is_head else "experts" if ".moe." in path and ".router." not in path else "dense"
        size = math.prod(leaf.shape)
        quantized = low.get(path)
        found[where] += size
        found[f"{where.rstrip('s')}_bytes"] += 2 * size if quantized is None else learner.nbytes(quantized)
        if quantized is not None:
            kernel = quantized.scheme.kernel
            found["decoded"] += size if where == "dense" and quantized.scheme.decoded else 0
    return Weights(**found, kernel=kernel)


def of_step(cfg: RunConfig, machine: Machine, mean_len: float = 0.0) -> dict[str, Terms]:
    """Counts the terms of a step by phase: rollout, old_logprobs, update, publish, other.

    Args:
      cfg: a run whose "auto" settings are settled (`memory.choose.settle`).
      mean_len: mean tokens of a response; 0: all have the most.
    """
    mean_len = mean_len or cfg.rollout.max_response_len
    passed, share = _learned(cfg, machine, mean_len, backward=False), scored(cfg)
    return {
        "rollout": _rollout(cfg, machine, mean_len),
        "old_logprobs": {name: share * value for name, value in passed.items()},
        "update": _learned(cfg, machine, mean_len, backward=True) | _optimizer(cfg, machine),
        "publish": _publish(cfg, machine),
        "other": {"other": 1.0},
    }


# ---- sampling --------------------------------------------------------------------------------------------------------


def engines(cfg: RunConfig) -> int:
    """Number of samplers: vLLM engines, or one."""
    engine = cfg.rollout.engine
    return max(1, engine.started + len(engine.endpoints)) if isinstance(engine, VllmConfig) else 1


def token(model: models.ModelConfig, machine: Machine, sequences: float, context: float, weights: Weights) -> Terms:
    """Counts one decoding step of an engine: one token for each of `sequences`, with `context` tokens before it."""
    cache = 2 * ACTIVATION_BYTES * model.num_layers * model.num_kv_heads * model.head_dim
    active = _active(model)
    touched = 1.0 - (1.0 - active) ** sequences  # share of the experts, where every token takes any
    # A product takes as long as its weights take to be read, or as its arithmetic takes.
    dense = (weights.dense_bytes + weights.head_bytes) / machine.bandwidth
    experts = touched * weights.expert_bytes / machine.bandwidth
    alone = dataclasses.replace(weights, dense=0, head=0)
    return {
        "layer": model.num_layers * (1.0 if model.lora is None else 1.0 + ADAPTERS_LAUNCHES),
        "routed_layer": 0.0 if model.moe is None else float(model.num_layers),
        "sequence": sequences,
        "read": max(dense, _product(machine, dataclasses.replace(weights, experts=0), sequences, sequences, active))
        + sequences * context * cache / machine.bandwidth,
        "read_experts": max(experts, _product(machine, alone, sequences, 0.0, active)),
        "decode": ACTIVATION_BYTES * weights.decoded / machine.bandwidth,
    }


def _active(model: models.ModelConfig) -> float:
    """Share of a layer's experts that a token is routed to; 1: there are none."""
    return 1.0 if model.moe is None else model.moe.num_experts_per_tok / model.moe.num_experts


def _product(machine: Machine, weights: Weights, tokens: float, scored: float, active: float) -> float:
    """Seconds at the peak of one forward's products: `tokens` through the layers, `scored` of them through the head."""
    layers = 2.0 * tokens * (weights.dense + active * weights.experts) / machine.speed_of(weights.kernel)
    return layers + 2.0 * scored * weights.head / machine.product


def _rollout(cfg: RunConfig, machine: Machine, mean_len: float) -> Terms:
    weights, model = weights_of(cfg, rollout=True), learner.model_of(cfg)
    total = -(-cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt // engines(cfg))
    length, prompt = cfg.rollout.max_response_len, cfg.data.prompt_limit
    at_once, cached = float(total), float(total)
    engine = cfg.rollout.engine
    if isinstance(engine, VllmConfig):
        at_once = min(total, engine.max_num_seqs)
        if engine.kv_cache_gb:
            cached = engine.kv_cache_gb * GIB / kv_bytes(cfg, 1) * (prompt + length) / (prompt + mean_len)
    # Sequences grow until the cache is full; then the engine preempts, and finishes the rest a cacheful at a time.
    share = min(1.0, cached / at_once)
    steps = length * (total / at_once) * (share + (1.0 - share) / share)
    living = at_once * mean_len / length * min(1.0, share * 1.5)
    one = token(model, machine, living, prompt + mean_len / 2, weights)
    prompts = prompt * total / cfg.rollout.num_samples_per_prompt
    prefill = _product(machine, weights, prompts, total, _active(model))
    return {name: value * steps for name, value in one.items()} | {"prefill": prefill}


# ---- the learner -----------------------------------------------------------------------------------------------------


def _rows(cfg: RunConfig, length: float) -> tuple[int, int]:
    """(micro-batches, rows of one on one device) of one pass over a step's samples, which have `length` tokens."""
    responses = cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt
    fit = cfg.row_len / length if length < cfg.row_len / 4 else cfg.row_len // length  # short ones fill a row
    per_row = max(1.0, min(fit, cfg.train.max_segments))
    updates = cfg.train.updates_per_step // cfg.train.update_epochs
    rows_of_an_update = math.ceil(responses / (per_row * updates))
    micro_batches = updates * -(-rows_of_an_update // cfg.micro_batch_rows)
    sizes = dataclasses.asdict(cfg.mesh)
    return micro_batches, max(1, cfg.micro_batch_rows // max(1, sizes["data"] * sizes["fsdp"]))


def scored(cfg: RunConfig) -> float:
    """Share of a step's samples that a pass of the learner scores before the updates."""
    updates = cfg.train.updates_per_step
    one_version = not (cfg.rollout.partial.is_on or cfg.train.asynchronous.is_on)
    if updates > 1 and not (one_version and alignment.takes_samplers(cfg)):
        return 1.0
    return alignment.CHECKED * (1.0 - cfg.train.update_epochs / updates)  # the first update of a pass checks itself


FASTER = {"bf16": 1.0, "int8": 1.73, "fp8": 1.19}
"""Speed of an 8B layer's dX and dW over cuBLAS' in bfloat16, rounding included (`backward_products_8b_h200.json`)."""


def _learned(cfg: RunConfig, machine: Machine, mean_len: float, *, backward: bool) -> Terms:
    """Counts passes over a step's samples: the forward that scores them, or the updates' forward and backward."""
    weights, model = weights_of(cfg, rollout=False), learner.model_of(cfg)
    length = min(float(cfg.row_len), cfg.data.prompt_limit + mean_len)
    micro_batches, rows = _rows(cfg, length)
    gradients = 0.0
    if backward:
        micro_batches *= cfg.train.update_epochs
        gradients = micro_batches * costs.gradient_bytes(cfg)
    tokens = float(micro_batches * rows * cfg.row_len)  # padding is multiplied, too
    shapes = dataclasses.replace(weights, experts=0)
    experts = 2.0 * tokens * _active(model) * weights.experts
    repeated = 1.0 + costs.REPEATED[cfg.model.remat_or_full] if backward else 1.0
    forward = _product(machine, shapes, tokens, tokens, 1.0)
    head = 2.0 * tokens * weights.head / machine.product
    grouped = experts / machine.speed_of(weights.kernel) * repeated
    product = (forward - head) * repeated + head
    attention = 2.0 * model.num_layers * model.num_heads * model.head_dim * length * tokens / machine.product
    passes = repeated
    if backward:
        form = cfg.quant.backward
        low_bit = min(machine.product * FASTER[form], machine.speed_of(KERNELS[form]))
        sides = 2.0 if cfg.lora is None else 1.0  # gradients of inputs, and of weights that learn
        product += sides * 2.0 * tokens * weights.dense / low_bit
        product += (1.0 + sides) * head  # its logits are made again
        grouped += sides * experts / machine.product
        attention *= repeated + 2.0
        passes += 2.0
    inner = model.intermediate_size
    if model.moe is not None:
        inner = model.moe.num_experts_per_tok * (model.moe.intermediate_size + model.hidden_size)
    width = 8 * model.hidden_size + 4 * inner
    return {
        "product": product,
        "grouped": grouped,
        "attention": attention,
        "stream": passes * tokens * model.num_layers * width * ACTIVATION_BYTES / machine.bandwidth,
        "stream_gradients": gradients / machine.bandwidth,
        "exchange": micro_batches * costs.exchanged_bytes(cfg, backward=backward) / machine.link,
        "micro_batch": float(micro_batches * model.num_layers),
    }


def _optimizer(cfg: RunConfig, machine: Machine) -> Terms:
    """Counts a step's optimizer updates on one device."""
    made, mesh, updates = learner.shapes(cfg), learner.planned_mesh(cfg), cfg.train.updates_per_step
    state, masters = learner.nbytes(made.opt_state, mesh), learner.nbytes(made.learned, mesh)
    gradients = learner.nbytes(made.learned, mesh, cfg.train.grad_dtype_or_float32)
    precision = getattr(cfg.optimizer, "matmul_precision", "default")
    speed = machine.float32.get(precision, machine.product)
    product = iterates = 0.0  # of Muon's iteration: FLOP, and bytes of what is float32 between its products
    if isinstance(cfg.optimizer, Muon):
        for leaf, name in zip(jax.tree.leaves(made.learned), jax.tree.leaves(labels(made.learned)), strict=True):
            if name == "muon":
                *stack, n, k = leaf.shape
                few, many = min(n, k), max(n, k)
                rounds = updates * math.prod(stack) * muon.ROUNDS / mesh.size
                product += rounds * (4.0 * few * few * many + 2.0 * few**3)
                iterates += rounds * ITERATE_BYTES * few * (many + few)
    return {
        "orthogonalize": product / speed,
        "stream_iterates": iterates / machine.bandwidth,
        "stream_optimizer": updates * (2 * state + 2 * masters + 2 * gradients) / machine.bandwidth,
        "offload": updates * 2 * state / machine.host_link if cfg.optimizer.offload is True else 0.0,
    }


# ---- publishing ------------------------------------------------------------------------------------------------------


def _publish(cfg: RunConfig, machine: Machine) -> Terms:
    engine, size = cfg.rollout.engine, published_bytes(cfg)
    if not isinstance(engine, VllmConfig):
        return {"publish": size / machine.bandwidth}
    if cfg.lora is not None:
        return {"publish": learner.nbytes(learner.shapes(cfg).learned, None, cfg.model.dtype) / costs.SHARED_BYTES}
    if not engine.stages_on_gpu:
        return {"publish_host": costs.staging_seconds(cfg, None)}
    chunked = engine.staging_buffers == 0
    return {"publish_chunked" if chunked else "publish_staged": size / machine.host_link}
