# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A vLLM worker class that adds adapters and a routing recorder to the model before CUDA graphs are captured.

Operations that run inside a replayed graph must be added before its capture, and vLLM captures graphs while it starts.
`versions.engine_arguments` sets vLLM's `worker_cls` to this class if routed experts are recorded or layers have
adapters. Importing this module imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather
from vllm.platforms import current_platform

from qarl_bridge.engine import versions
from qarl_bridge.engine.adapters import Adapters, Product
from qarl_bridge.engine.routing_recorder import Recorder

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


def _product() -> tuple[Product, torch.dtype]:
    """Returns the device's batch-invariant matrix product, and the dtype that it takes weights in."""
    if current_platform.is_cpu():
        from qarl_bridge.engine.cpu import linear

        def in_float64(x: torch.Tensor, weight: torch.Tensor, splits: int, added: torch.Tensor | None) -> torch.Tensor:
            d = linear.product(x, weight, None)
            return d if added is None else added - (0.0 - d)  # the addend itself, and not +0 for -0, where d is 0

        return in_float64, torch.float64
    from qarl_bridge.engine.cuda import ops

    def product(x: torch.Tensor, weight: torch.Tensor, splits: int, added: torch.Tensor | None) -> torch.Tensor:
        added = None if added is None else added.reshape(-1, added.shape[-1])
        y = ops.product(x.reshape(-1, x.shape[-1]), weight, splits=splits, added=added)
        return y.view(*x.shape[:-1], y.shape[-1])

    return product, torch.bfloat16


class BridgeWorker(_Worker):
    """A vLLM worker whose model has a `recorder` of routed experts, `adapters`, or both, as configured."""

    recorder: Recorder | None = None
    adapters: Adapters | None = None

    def load_model(self, **named: Any) -> None:
        """Loads the model as vLLM does, then adds adapters and the recorder."""
        super().load_model(**named)
        asked = self.vllm_config.additional_config[versions.ASKED]
        modules = dict(self.model_runner.get_model().named_modules())
        if asked["adapters"]:
            product, dtype = _product()
            device = self.model_runner.device
            self.adapters = Adapters(
                modules,
                asked["adapters"],
                product=product,
                dtype=dtype,
                device=device,
                rank=get_tensor_model_parallel_rank(),
                gather=tensor_model_parallel_all_gather,
            )
        if asked["record_routing"]:
            config = self.model_config.hf_text_config
            self.recorder = Recorder(
                modules,
                self.model_runner,
                num_layers=config.num_hidden_layers,
                num_chosen=getattr(config, "num_experts_per_tok", 0),
                max_rows=self.scheduler_config.max_num_batched_tokens,
            )
