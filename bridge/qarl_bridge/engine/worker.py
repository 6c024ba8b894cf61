# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker with something to do between the loading of the model and the capture of its CUDA graphs.

What is to run inside a replayed graph must be in place when the graph is captured, and vLLM captures while it starts.
Its `worker_cls` names the class of its worker; this one is asked for where routed experts are recorded. Importing this
module imports vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from qarl_bridge.engine.routing_recorder import Recorder

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class RecordingWorker(_Worker):
    """A worker whose model's routers tell `recorder` every choice."""

    recorder: Recorder

    def load_model(self, **named: Any) -> None:
        """vLLM's, and the recorder's buffer in the model's routers."""
        super().load_model(**named)
        config = self.model_config.hf_text_config
        self.recorder = Recorder(
            dict(self.model_runner.get_model().named_modules()),
            self.model_runner,
            num_layers=config.num_hidden_layers,
            num_chosen=getattr(config, "num_experts_per_tok", 0),
            max_rows=self.scheduler_config.max_num_batched_tokens,
        )
