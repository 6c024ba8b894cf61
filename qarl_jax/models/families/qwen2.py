# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 (arXiv 2412.15115): grouped-query attention with a bias on q, k and v; SwiGLU; pre-RMSNorm."""

from __future__ import annotations

from typing import Any

from qarl_jax.models.hf.config import HFConfig

MODEL_TYPE = "qwen2"  # in config.json
# Parameter path (without its segment) <-> Hugging Face name. `{layer}` is the layer's number in the whole model.
HF_NAMES = {
    "embed.kernel": "model.embed_tokens.weight",
    "attn_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "attn.q.kernel": "model.layers.{layer}.self_attn.q_proj.weight",
    "attn.q.bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "attn.k.kernel": "model.layers.{layer}.self_attn.k_proj.weight",
    "attn.k.bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "attn.v.kernel": "model.layers.{layer}.self_attn.v_proj.weight",
    "attn.v.bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "attn.o.kernel": "model.layers.{layer}.self_attn.o_proj.weight",
    "mlp_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "mlp.gate.kernel": "model.layers.{layer}.mlp.gate_proj.weight",
    "mlp.up.kernel": "model.layers.{layer}.mlp.up_proj.weight",
    "mlp.down.kernel": "model.layers.{layer}.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}


def fields(hf: HFConfig) -> dict[str, Any]:
    """Reads the fields of ModelConfig from config.json."""
    return hf.common() | {"qkv_bias": True}
