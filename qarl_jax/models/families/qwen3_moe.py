# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with many small experts in place of the MLP of some or all layers."""

from __future__ import annotations

from typing import Any

from qarl_jax.models.families import qwen3
from qarl_jax.models.hf.config import HFConfig, MoEConfig
from qarl_jax.types import UserError

# On disk every expert is a tensor of its own; in memory they are stacked: [layers, experts, N, K].
MODEL_TYPE = "qwen3_moe"  # in config.json
HF_NAMES = qwen3.HF_NAMES | {
    "moe.router.kernel": "model.layers.{layer}.mlp.gate.weight",
    "moe.gate.kernel": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "moe.up.kernel": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "moe.down.kernel": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}


def fields(hf: HFConfig) -> dict[str, Any]:
    """Reads the fields of ModelConfig from config.json; UserError if experts per token exceed the experts."""
    out = qwen3.fields(hf)
    if hf.get("head_dim", int, None) is None:  # unlike dense Qwen3, this family defaults to hidden / heads
        out["head_dim"] = out["hidden_size"] // out["num_heads"]
    num_experts = hf.get("num_experts", int, None) or hf.get("num_local_experts", int, 0)
    step = hf.get("decoder_sparse_step", int, 1)
    dense = set(hf.get("mlp_only_layers", list, []))
    moe_layers = tuple(
        layer
        for layer in range(out["num_layers"])
        if layer not in dense and num_experts > 0 and (layer + 1) % step == 0
    )
    if not moe_layers:
        return out
    top_k = hf.get("num_experts_per_tok", int, 8)
    if not 1 <= top_k <= num_experts:
        raise UserError(f"config.json ({hf.architecture}): 'num_experts_per_tok' {top_k} of {num_experts} experts")
    moe = MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        intermediate_size=hf.require("moe_intermediate_size"),
        norm_topk_prob=hf.get("norm_topk_prob", bool, False),
    )
    return out | {"moe": moe, "moe_layers": moe_layers}
