# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Registers the bridge's MoE experts in vLLM in place of vLLM's: cpu/experts.py on a CPU, cuda/experts.py on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe as chooser,
)

# (weights' and inputs' quantization, layer) -> the class that computes with them, or None: vLLM's.
Choose = Callable[[Any, Any, Any], type | None]


def serve(unquantized: type, choose: Choose) -> None:
    """Makes vLLM compute the experts of every MoE layer with these classes; only the first call has an effect.

    Args:
      unquantized: class for bf16 experts, constructed with vLLM's FusedMoEConfig.
      choose: returns the class for quantized experts, made with (weights, inputs, FusedMoEConfig); None keeps vLLM's.
    """
    if "UnquantizedFusedMoEMethod" not in op_registry_oot:
        CustomOp.register_oot(unquantized, name="UnquantizedFusedMoEMethod")
    original = chooser.CompressedTensorsMoEMethod.get_moe_method
    if getattr(original, "is_own", False):
        return

    @functools.wraps(original)
    def get_moe_method(quant_config: Any, layer: Any, layer_name: str) -> FusedMoEMethodBase:
        quant_config._add_fused_moe_to_target_scheme_map()  # "Linear" means experts, too; vLLM's chooser begins so
        scheme = quant_config.get_scheme_dict(layer, f"{layer_name}.0.{layer.ckpt_gate_proj_name}")
        if scheme:
            quant = scheme["weights"], scheme["input_activations"]
            kind = choose(*quant, layer)
            if kind is not None:
                return kind(*quant, layer.moe_config)
        return original(quant_config, layer, layer_name)

    get_moe_method.is_own = True  # type: ignore[attr-defined]
    chooser.CompressedTensorsMoEMethod.get_moe_method = staticmethod(get_moe_method)
