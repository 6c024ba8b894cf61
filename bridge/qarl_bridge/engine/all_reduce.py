# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""All-reduce of a tensor-parallel engine in the order of ranks: y = bf16(((x_0 + x_1) + x_2) + ...) in float32.

x_r is shard r's partial sum in bfloat16. vLLM has several all-reduces (a custom kernel, NCCL, symmetric memory) whose
orders and roundings depend on sizes and topology. Here every shard all-gathers the x_r, which changes no bits, and adds
them by rank, as the learner does with `Numerics.shards`. A CUDA graph captures both steps; vLLM's NCCL communicator
gathers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

_COMMUNICATORS = (("cuda_communicator", "CudaCommunicator"), ("cpu_communicator", "CpuCommunicator"))


def pin(folder: str = "vllm.distributed.device_communicators") -> None:
    """Replaces vLLM's all-reduce by the sum in rank order (idempotent). Call it before an engine starts."""
    for module, name in _COMMUNICATORS:
        kind = getattr(importlib.import_module(f"{folder}.{module}"), name)
        if not getattr(kind.all_reduce, "in_rank_order", False):
            kind.all_reduce = _in_rank_order(kind.all_reduce)


def _in_rank_order(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_reduce(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in (torch.bfloat16, torch.float32):
            return original(self, x)
        y = added(_gathered(self, x.contiguous()))
        return y if y.is_cuda else x.copy_(y)  # vLLM's CPU communicator adds in place

    all_reduce.in_rank_order = True  # type: ignore[attr-defined]
    return all_reduce


def _gathered(communicator: Any, x: torch.Tensor) -> torch.Tensor:
    """All-gathers x over a vLLM communicator; returns [shards, *x.shape], by rank."""
    every = x.new_empty((communicator.world_size, *x.shape))
    nccl = getattr(communicator, "pynccl_comm", None)
    if nccl is not None and not nccl.disabled:
        nccl.all_gather(every, x)
    else:
        gather = getattr(communicator, "dist_module", torch.distributed).all_gather_into_tensor
        gather(every.view(-1, *x.shape[1:]), x, group=communicator.device_group)
    return every


def added(every: torch.Tensor) -> torch.Tensor:
    """Sums [shards, ...] over shards in float32, by rank, and rounds once to the dtype of `every`."""
    if every.is_cuda:
        from qarl_bridge.engine.cuda import ops

        return ops.sum_of_shards(every)
    total = every[0].float()
    for own in every[1:]:
        total = total + own.float()
    return total.to(every.dtype)
