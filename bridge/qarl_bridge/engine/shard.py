# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Describes one shard of a tensor-parallel engine: the part of every weight that it holds, and its vLLM settings.

A shard holds rows of q, k, v, gate, up, embedding and head, and columns of o and down, of every expert too. It
quantizes its inputs of o and down and rounds its sums by itself; of experts it rounds the weighted sum. Then all
shards add their sums in the order of ranks (`all_reduce.py`, and the learner's `Numerics.shards`).
Every shard has the whole routers, so all choose the same experts, and the engine returns the first shard's record.

Not supported: expert parallelism, numbers of heads that the shards do not divide.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qarl_bridge.protocol import expert_stacks, messages
from qarl_bridge.protocol.formats import FUSED, TABLES
from qarl_bridge.protocol.messages import BridgeError

_SPREAD_INPUTS = ("o_proj", "down_proj")
_SPREAD_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_VOCABULARY_UNIT = 64  # vLLM fills a vocabulary up to a multiple of it before it cuts


@dataclasses.dataclass(frozen=True)
class Shard:
    """Shard `rank` of `size` shards; `owner` is the first shard's process id. The default is a whole engine."""

    rank: int = 0
    size: int = 1
    owner: int = 0

    @property
    def is_whole(self) -> bool:
        """Tells whether the engine has one shard only."""
        return self.size == 1

    def check(self, config: Mapping[str, Any]) -> None:
        """Checks that the shards divide a model's attention heads and key-value heads evenly.

        Raises:
          BridgeError("setup"): they do not.
        """
        if self.is_whole:
            return
        size, heads = self.size, config["num_key_value_heads"]
        if heads % size or config["num_attention_heads"] % size:
            raise BridgeError(
                f"tensor_parallel_size={size}: {heads} heads of keys cannot be shared out evenly; set"
                " rollout.engine.tensor_parallel_size=1",
                "setup",
            )

    def take_gpu(self, torch: Any) -> None:
        """Sets torch's current GPU to GPU number `rank`.

        Raises:
          BridgeError("setup"): the process sees fewer GPUs than shards.
        """
        if self.is_whole:
            return
        count = torch.cuda.device_count()
        if count < self.size:
            raise BridgeError(
                f"tensor_parallel_size={self.size}: the engine sees {count} GPU(s), and each shard needs one: name "
                "them in rollout.engine.visible_gpus, or lower rollout.engine.tensor_parallel_size",
                "setup",
            )
        torch.cuda.set_device(self.rank)

    def arguments(self, *, batch_invariant: bool = True) -> dict[str, Any]:
        """Returns the additional keyword arguments of vLLM's EngineArgs; empty for a whole engine."""
        if self.is_whole:
            return {}
        arguments = {"tensor_parallel_size": self.size, "distributed_executor_backend": "external_launcher"}
        return arguments | ({"disable_custom_all_reduce": True} if batch_invariant else {})

    def environment(self, port: int) -> dict[str, str]:
        """Returns torch.distributed's environment variables for this shard. port: of the store at which all meet."""
        ranks = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_PORT": port}
        here = {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        # Multicast memory, which vLLM would set up for an all-reduce that is not used.
        here |= {"MASTER_ADDR": "127.0.0.1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
        here |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is there: the first shard makes none
        return {name: str(value) for name, value in ranks.items()} | here

    def part_of(self, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Cuts this shard's part out of a version's tensors (numpy or torch), by name."""
        if self.is_whole:
            return tensors
        rank, size = self.rank, self.size

        def own(array: Any, axis: int, unit: int = 1) -> Any:
            each = -(-array.shape[axis] // unit) * unit // size
            return array[(slice(None),) * axis + (slice(rank * each, (rank + 1) * each),)]

        out = {}
        for name, array in tensors.items():
            module, _, leaf = name.rpartition(".")
            kind, first = module.rpartition(".")[2], int(expert_stacks.is_stack(name))  # the axis of its rows
            if leaf == "weight_shape" or tuple(array.shape[first:]) in ((), (1,)):  # of a whole weight
                pass
            elif kind in _SPREAD_OUTPUTS:
                array = own(array, first)
            elif kind in TABLES:
                array = own(array, first, _VOCABULARY_UNIT)
            elif kind in _SPREAD_INPUTS and array.ndim == first + 2 and array.shape[-1] > 1:
                array = own(array, first + 1)
            out[name] = np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()
        return out


def whole_record(parts: Sequence[messages.Recorded], sizes: Sequence[int]) -> messages.Recorded:
    """Joins the shards' records of one module's inputs and outputs into the record of the whole module.

    Args:
      parts: a record from each shard, by rank.
      sizes: number of outputs that one shard has of each linear layer that the module fuses.
    """
    first, leaf = parts[0], parts[0].module.rpartition(".")[2]

    def beside(arrays: Sequence[np.ndarray]) -> messages.Array:
        return messages.Array.of(np.concatenate(arrays, axis=-1))

    if leaf in _SPREAD_INPUTS:
        inputs = [beside([part.inputs[0].numpy() for part in parts]), *first.inputs[1:]]
        return messages.Recorded(module=first.module, inputs=inputs, outputs=first.outputs)
    if leaf in FUSED or leaf in _SPREAD_OUTPUTS:
        cuts = np.cumsum(sizes)[:-1]
        cut = [np.split(part.outputs[0].numpy(), cuts, axis=-1) for part in parts]  # by shard, then by layer
        outputs = [beside([own for layer in zip(*cut, strict=True) for own in layer]), *first.outputs[1:]]
        return messages.Recorded(module=first.module, inputs=first.inputs, outputs=outputs)
    return first
