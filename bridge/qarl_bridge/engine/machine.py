# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Sets up vLLM on a CPU or a CUDA GPU, and replaces vLLM's operations by the bridge's batch-invariant ones.

Importing this module imports neither torch nor vLLM, which read their settings at import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from qarl_bridge.engine import versions
from qarl_bridge.engine.cpu import build
from qarl_bridge.protocol import formats, messages
from qarl_bridge.protocol.messages import BridgeError


class Machine(Protocol):
    """The interface of the device that an engine computes on.

    Attributes:
      profile: "cpu" or "cuda": the arithmetic that a learner must compute, and torch's name of the device.
      isa: vLLM's CPU build or the GPU's compute capability, for the facts.
      threads: CPU threads of the engine; 0 on a GPU.
      note: the replaced operations, for the facts; empty: none.
    """

    profile: str
    isa: str
    threads: int
    note: str

    def replace(self, config: Mapping[str, Any], options: messages.EngineOptions) -> list[str]:
        """Replaces vLLM's operations by the bridge's; lists what is not batch-invariant. Call it before vLLM starts.
        Raises BridgeError("setup") if this device cannot serve the model."""

    def left_to_vllm(self, modules: Mapping[str, Any]) -> list[str]:
        """Lists the layers of a live model that vLLM's kernels compute and that are not batch-invariant."""

    def after_load(self, modules: Mapping[str, Any]) -> None:
        """Rebuilds the bridge's copies of weights after a load."""


class Cpu:
    """The CPU: the bridge's operations compute everything; implements `Machine`."""

    profile = "cpu"
    note = (
        "linear layers, norms, SwiGLU, RoPE, attention, experts, logits and log-probs are qarl_bridge's own: sums in "
        "float64, one arithmetic for every CPU"
    )

    def __init__(self, torch: Any, options: messages.EngineOptions):
        self.threads = options.threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(self.threads)  # before vLLM, which forbids changing it later
        build.choose(torch)
        self.isa = build.own(torch)

    def replace(self, config: Mapping[str, Any], options: messages.EngineOptions) -> list[str]:
        """Registers the bridge's linear layers, norms, attention and experts; BridgeError("setup") for some models."""
        from qarl_bridge.engine.cpu import experts, layers, linear
        from qarl_bridge.engine.readback import experts as readback_experts

        readback_experts.check_format(config)
        readback_experts.check_shape(config, options.tensor_parallel_size)
        linear.register()
        layers.register()
        experts.register()
        return []

    def left_to_vllm(self, modules: Mapping[str, Any]) -> list[str]:
        """Returns an empty list: on a CPU every layer is batch-invariant."""
        return []

    def after_load(self, modules: Mapping[str, Any]) -> None:
        """Makes every unquantized linear layer convert its new weight, tied heads included, which no reload names."""
        from qarl_bridge.engine.cpu.linear import Float64Linear

        for module in modules.values():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = Float64Linear(module)


class Cuda:
    """A CUDA GPU; implements `Machine`."""

    profile = "cuda"
    threads = 0
    note = "batch-invariant: bf16 and int4 products, float32 logits, norms, log-probs, attention, routers, experts"

    def __init__(self, torch: Any, options: messages.EngineOptions):
        del options
        torch.set_num_threads(1)  # the host copies little, and one thread per core of a shared host waits for cores
        major, minor = torch.cuda.get_device_capability()
        self.isa = f"sm{major}{minor}"

    def replace(self, config: Mapping[str, Any], options: messages.EngineOptions) -> list[str]:
        """Installs the bridge's CUDA kernels, unless arithmetic=vllm; BridgeError("setup") for unsupported schemes."""
        from qarl_bridge.engine.readback import experts as readback_experts

        groups = formats.groups_of(config)
        if any(formats.is_int4(group) and group.get("input_activations") for group in groups):
            raise BridgeError(
                "vLLM on CUDA drops the int8 activations of w4a8: use w4a16 or fp8, or the embedded sampler", "setup"
            )
        self._invariant = options.arithmetic == "batch_invariant"
        readback_experts.check_format(config)
        shards = options.tensor_parallel_size
        readback_experts.check_groups(config, batch_invariant=self._invariant, shards=shards)
        if not self._invariant:
            self.note = ""
            if any(group["format"] in formats.ASYMMETRIC for group in groups):
                raise BridgeError("vLLM has no layer for weights with zero points: drop arithmetic=vllm", "setup")
            return ["vLLM's own kernels (rollout.engine.arithmetic=vllm)"]
        from qarl_bridge.engine.cuda import install

        departures = [versions.keep_sequences_whole(), install.install()]
        if any((group["weights"]["num_bits"], group["weights"]["type"]) == (8, "float") for group in groups):
            departures.append(versions.keep_fp8_scales_in_order())
        return [departure for departure in departures if departure]

    def left_to_vllm(self, modules: Mapping[str, Any]) -> list[str]:
        """Lists the live layers that vLLM's kernels compute, by `cuda.install.left_to_vllm`."""
        from qarl_bridge.engine.cuda import install

        return install.left_to_vllm(modules) if self._invariant else []

    def after_load(self, modules: Mapping[str, Any]) -> None:
        """Does nothing: on a GPU the bridge keeps no copies of weights."""
