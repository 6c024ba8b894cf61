# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Defines EngineOptions, the options with which an engine is started."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import msgspec

from qarl_bridge.protocol.errors import BridgeError

_INTERNAL = {"internal": True}  # for the reader of configs (qarl_jax.typed_config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options with which an engine is started, sent as JSON to `python -m qarl_bridge --options`.

    The section `rollout.engine` of a run's config inherits these fields. A field with `_INTERNAL` is set by code, and
    cannot be set in a config.

    Attributes:
      engine: "vllm", or "fake", an engine without a model, to try a set-up.
      max_model_len: limit of prompt + response in tokens; 0: the model's limit.
      max_num_seqs: limit of sequences in one decoding batch.
      max_num_batched_tokens: limit of tokens computed in one step; longer prompts are cut into chunks. 0: vLLM decides
        (not from a config).
      kv_cache_gb: size of the KV cache in GiB; 0: vLLM decides from `gpu_memory_utilization`.
      gpu_memory_utilization: fraction of the device's memory that vLLM may use (on a CPU: of the host's).
      threads: CPU threads of the engine; 0: all that the process may use.
      arithmetic: "batch_invariant" computes with the bridge's kernels: a token's bits do not depend on its batch, and
        the learner can compute them (in CUDA graphs on a GPU). "vllm" computes with vLLM's compiled kernels on a CUDA
        GPU: roundings and orders of sums depend on the batch, and no learner computes them.
      eager: run a GPU's operations one by one, without graphs or compilation, to look for a fault.
      tensor_parallel_size: shards of the engine, 1, 2 or 4: processes that each hold a part of every weight. On GPUs
        each shard uses one of the first GPUs of `visible_gpus`. `kv_cache_gb` is for each shard.
      record_routing: return the experts that each token used (an MoE model, not compiled); a trainer sets it for
        `rollout.router_replay`. It disables the prefix cache.
      lora_rank, lora_targets: rank of the adapters, and last parts of their layers' names; rank 0: none. Only for a
        bridge that is started by hand on a folder of weights; a trainer lists adapters among the folder's tensors.
      profile: folder for profiles of every load and read-back, of a hundred steps, and of a GPU's kernels in the next
        32; empty: none.
    """

    engine: Literal["vllm", "fake"] = "vllm"
    max_model_len: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = dataclasses.field(default=0, metadata=_INTERNAL)
    kv_cache_gb: float = 0.0
    gpu_memory_utilization: float = 0.5
    threads: int = 0
    arithmetic: Literal["batch_invariant", "vllm"] = "batch_invariant"
    eager: bool = False
    tensor_parallel_size: int = 1
    record_routing: bool = dataclasses.field(default=False, metadata=_INTERNAL)
    lora_rank: int = dataclasses.field(default=0, metadata=_INTERNAL)
    lora_targets: tuple[str, ...] = dataclasses.field(default=(), metadata=_INTERNAL)
    profile: str = ""

    def __post_init__(self) -> None:
        """Validates the values; raises ValueError with a message that begins with the option's name."""
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_gb", "threads", "lora_rank"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_num_seqs <= 0:
            raise ValueError(f"max_num_seqs must be positive, got {self.max_num_seqs}")
        if bool(self.lora_rank) != bool(self.lora_targets):
            raise ValueError("lora_rank and lora_targets belong together: set both, or neither")
        if self.tensor_parallel_size not in (1, 2, 4):
            raise ValueError(f"tensor_parallel_size must be 1, 2 or 4, got {self.tensor_parallel_size}")
        if self.record_routing and self.arithmetic == "vllm" and not self.eager:
            raise ValueError(
                "arithmetic=vllm compiles the model, and cannot record routed experts: set it to batch_invariant, or "
                "rollout.router_replay to false"
            )

    def to_json(self) -> str:
        """Encodes the options as a JSON object, without fields of subclasses."""
        names = [field.name for field in dataclasses.fields(EngineOptions)]
        return json.dumps({name: getattr(self, name) for name in names})

    @staticmethod
    def from_json(text: str) -> EngineOptions:
        """Parses options from a JSON object; missing ones get their defaults.

        Raises:
          BridgeError("setup"): not JSON, an unknown option, or a wrong type or value.
        """
        try:
            given = msgspec.json.decode(text, type=dict[str, Any])
            known = [field.name for field in dataclasses.fields(EngineOptions)]
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"there is no {unknown[0]!r}; options are {', '.join(known)}")
            return msgspec.convert(given, EngineOptions)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BridgeError(f"engine options: {error}", "setup") from None
