# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One shard of a tensor-parallel engine: which part of every weight it holds, and what of this the learner mirrors.

A shard holds rows of q, k, v, gate, up, embedding and head; columns of o and down, whose inputs it scales and whose
sums it rounds by itself. Then all shards add their sums, which two can do in one order alone (the learner's
`Numerics.shards`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

_SPREAD_INPUTS = ("o_proj", "down_proj")
_SPREAD_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_VOCABULARY = ("embed_tokens", "lm_head")
_VOCABULARY_UNIT = 64  # vLLM fills a vocabulary up to a multiple of it before it cuts


@dataclasses.dataclass(frozen=True)
class Shard:
    """Shard `rank` of an engine of `size`, whose first shard is the process `owner`; the default is a whole engine."""

    rank: int = 0
    size: int = 1
    owner: int = 0

    @property
    def is_whole(self) -> bool:
        """Tells whether there is no other shard."""
        return self.size == 1

    def check(self, config: Mapping[str, Any], options: messages.EngineOptions, *, on_gpu: bool) -> None:
        """Refuses what is not mirrored.

        Raises:
          BridgeError("setup")
        """
        if self.is_whole:
            return
        size, why = self.size, ""
        if on_gpu:
            why = "on a GPU a sharded engine is not mirrored"
        elif config.get("num_experts"):
            why = "the experts of a sharded engine are not mirrored"
        elif options.record_routing:
            why = "a sharded engine records no routing"
        elif config["num_key_value_heads"] % size or config["num_attention_heads"] % size:
            why = f"{config['num_key_value_heads']} heads of keys cannot be shared out evenly"
        if why:
            raise BridgeError(f"tensor_parallel_size={size}: {why}; set rollout.engine.tensor_parallel_size=1", "setup")

    def arguments(self) -> dict[str, Any]:
        """Returns the shard's EngineArgs; empty for a whole engine."""
        if self.is_whole:
            return {}
        return {"tensor_parallel_size": self.size, "distributed_executor_backend": "external_launcher"}

    def environment(self, port: int) -> dict[str, str]:
        """Returns the variables that tell vLLM, through torch, a process's shard and the port where all shards meet."""
        ranks = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_PORT": port}
        return {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}

    def part_of(self, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Cuts this shard's part out of the tensors of a version."""
        if self.is_whole:
            return tensors
        rank, size = self.rank, self.size

        def rows(array: np.ndarray, unit: int = 1) -> np.ndarray:
            each = -(-array.shape[0] // (unit * size)) * unit
            return array[rank * each : (rank + 1) * each]

        def columns(array: np.ndarray) -> np.ndarray:
            each = array.shape[1] // size
            return array[:, rank * each : (rank + 1) * each]

        out = {}
        for name, array in tensors.items():
            module, _, leaf = name.rpartition(".")
            kind = module.rpartition(".")[2]
            if leaf == "weight_shape" or array.shape in ((), (1,)):  # of a whole weight
                pass
            elif kind in _SPREAD_OUTPUTS:
                array = rows(array)
            elif kind in _VOCABULARY:
                array = rows(array, _VOCABULARY_UNIT)
            elif kind in _SPREAD_INPUTS and array.ndim == 2 and array.shape[1] > 1:
                array = columns(array)
            out[name] = np.ascontiguousarray(array)
        return out
