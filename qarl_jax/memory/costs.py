# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Estimates costs of memory settings: seconds per step on a Hopper GPU, or changed rounding of the result.

The estimates order the choices of `choose.py`; they are no forecast. The rates are round numbers under those of dense
models in docs/operations/performance.md and steps.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax

from qarl_jax import quant
from qarl_jax.memory import learner
from qarl_jax.memory.engine import at_once, published_bytes, share
from qarl_jax.models import by_path
from qarl_jax.models.params import part_of
from qarl_jax.observe import flops
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run.config import RunConfig
from qarl_jax.runtime.mesh import batch_shards

LEARNER_FLOPS = 600e12  # per second and GPU, of products; whole updates of a MoE model have 67e12 to 342e12
LOW_BIT = 1.7  # times as fast is a forward whose products are of eight bits
HOST_BYTES = 40e9  # per second between a GPU and pinned host memory
SHARED_BYTES = 0.1e9  # per second of a version through host memory, checks included (recipes_h100.json)
SHARED_EXPERTS = 0.3e9  # of a MoE model's version, whose tensors are many and small (step_30b_a3b_two_h200.json)
ROUNDING_S = 3600.0  # a step, for the least of the choices that round otherwise
DECODE_BYTES = 2.5e12  # per second of weights read for a token
LAUNCH_S = 0.005  # of an engine's step, whatever it reads
LINK_BYTES = 260e9  # per second between GPUs of a host; as fitted in advise/forecast.py
MICRO_LAYER_S = 0.05e-3  # of a layer in a micro-batch, whatever its rows; as fitted in advise/forecast.py
GRADIENT_BYTES = 1.2e12  # per second of `gradient_bytes`; likewise
# Share of the forward that the backward repeats, by `model.remat`.
REPEATED = {"none": 0.0, "dots": 0.05, "mixer": 0.6, "attention": 0.9, "full": 1.0}


@functools.total_ordering
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a choice: seconds per step, and changed rounding, which counts as hours (`ROUNDING_S`).

    Attributes:
      bits: how much of the result the choice changes: 0, nothing; 1, the rounding of gradients; 2, of moments; 8, of
        masters.
      seconds: estimated seconds per step.
    """

    bits: int = 0
    seconds: float = 0.0

    @property
    def price(self) -> float:
        """The cost in seconds per step with rounding included; choices are ordered by it."""
        return self.seconds + self.bits * ROUNDING_S

    def __lt__(self, other: Cost) -> bool:
        return self.price < other.price

    def __add__(self, other: Cost) -> Cost:
        return Cost(bits=self.bits + other.bits, seconds=self.seconds + other.seconds)


def update_seconds(cfg: RunConfig, *, of_layers: bool = False) -> float:
    """Estimates the seconds of a step's updates without recomputation, for responses of full length.

    of_layers: those of the layers alone, without embedding and head.
    """
    params, model = learner.shapes(cfg).params, learner.model_of(cfg)
    if of_layers:
        params = part_of(params, lambda path: path.startswith("stacks."))
    responses = cfg.train.prompts_per_step * cfg.rollout.num_samples_per_prompt * cfg.train.update_epochs
    lengths = [cfg.data.prompt_limit + cfg.rollout.max_response_len]
    total = responses * flops.training(model, flops.active_parameters(model, params), lengths)
    return total / LEARNER_FLOPS / learner.planned_mesh(cfg).size


def step_seconds(cfg: RunConfig) -> float:
    """Estimates the seconds of a step without the costs of its memory settings: its updates, and vLLM's tokens."""
    if not isinstance(cfg.rollout.engine, VllmConfig):
        return update_seconds(cfg)
    rounds = -(-share(cfg) // at_once(cfg))
    return update_seconds(cfg) + rounds * cfg.rollout.max_response_len * _token_seconds(cfg)


def _token_seconds(cfg: RunConfig) -> float:
    """Estimates the seconds of an engine's step, which reads all weights, those of a base held once too."""
    return (published_bytes(cfg) + learner.one_base_bytes(cfg)) / DECODE_BYTES + LAUNCH_S


def remat_seconds(cfg: RunConfig) -> dict[str, float]:
    """Estimates the seconds per step that each policy's recomputation of layers adds; their forward is a third of a
    bf16 update."""
    scheme = quant.parse_scheme(cfg.quant.forward)
    forward = update_seconds(cfg, of_layers=True) / 3 / (LOW_BIT if scheme is not None and scheme.kernel else 1.0)
    return {policy: forward * repeated for policy, repeated in REPEATED.items()}


def rows_of_an_update(cfg: RunConfig) -> int:
    """Returns the rows of an update whose responses all have full length."""
    responses = cfg.train.mini_batch_prompts * cfg.rollout.num_samples_per_prompt
    fit = cfg.row_len // (cfg.data.prompt_limit + cfg.rollout.max_response_len)
    return -(-responses // max(1, min(fit, cfg.train.max_segments)))


def exchanged_bytes(cfg: RunConfig, *, backward: bool) -> float:
    """Returns the bytes that a device receives for a micro-batch: weights, and with the backward also gradients.

    A forward gathers the other devices' weights. A backward gathers them again, and scatters bfloat16 gradients.
    """
    made, shards = learner.shapes(cfg), learner.planned_mesh(cfg).size
    quantized = by_path(made.qweights)
    rest = sum(2 * math.prod(leaf.shape) for path, leaf in by_path(made.params).items() if path not in quantized)
    gathered = learner.nbytes(made.qweights) + rest
    gradients = 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.learned))
    return (gathered + backward * (gathered + gradients)) * (1.0 - 1.0 / shards)


def gradient_bytes(cfg: RunConfig) -> float:
    """Returns the bytes that a device moves to add a micro-batch's gradients to their sum.

    A gradient is written in bfloat16 and read again; the sum is read and written. Only tensor and expert shards divide
    them: shards of a batch compute whole gradients first.
    """
    learned, mesh = learner.shapes(cfg).learned, learner.planned_mesh(cfg)
    summed = learner.nbytes(learned, None, cfg.train.grad_dtype_or_float32)
    return 2.0 * (learner.nbytes(learned, None, "bfloat16") + summed) * batch_shards(mesh) / mesh.size


def micro_batch_seconds(cfg: RunConfig) -> float:
    """Estimates the seconds per step of the division into micro-batches: launches, gradients, exchange, and padding."""
    rows, updates = rows_of_an_update(cfg), cfg.train.updates_per_step
    micro_batches = -(-rows // cfg.micro_batch_rows)
    padding = update_seconds(cfg) * (micro_batches * cfg.micro_batch_rows - rows) / rows
    each = MICRO_LAYER_S * learner.model_of(cfg).num_layers + gradient_bytes(cfg) / GRADIENT_BYTES
    each += exchanged_bytes(cfg, backward=True) / LINK_BYTES
    return updates * micro_batches * each + padding


def offload_seconds(cfg: RunConfig, owner: str) -> float:
    """Estimates the seconds per step of an offloaded optimizer state's transfers; owner: see `optimizer_states`."""
    state = learner.nbytes(learner.optimizer_states(cfg)[owner][0], learner.planned_mesh(cfg))
    return 2 * state * cfg.train.updates_per_step / HOST_BYTES


def waiting_seconds(cfg: RunConfig, cached: int) -> float:
    """Estimates the seconds per step that sequences wait, if the KV cache holds `cached` of full length."""
    if cached >= at_once(cfg):
        return 0.0
    return (at_once(cfg) / cached - 1) * cfg.rollout.max_response_len * _token_seconds(cfg)


def staging_seconds(cfg: RunConfig, buffers: int | None) -> float:
    """Estimates the seconds per step of publishing through `buffers` staging buffers; None: through host memory."""
    if buffers is None:
        return published_bytes(cfg) / (SHARED_BYTES if learner.model_of(cfg).moe is None else SHARED_EXPERTS)
    return 0.0 if buffers else published_bytes(cfg) / HOST_BYTES


def in_words(cost: Cost) -> tuple[str, ...]:
    """Returns a cost as phrases: seconds over the setting's fastest value, then changed rounding."""
    words = [f"{cost.seconds:+.1f} s a step over its fastest value (estimate)"] if cost.seconds >= 0.05 else []
    words += ["rounds otherwise"] if cost.bits else []
    return tuple(words) or ("costs no time",)
