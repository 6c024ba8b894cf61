# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense (arXiv 2505.09388): Qwen2.5 with RMSNorm on q and k instead of biases, and an explicit head width."""

from __future__ import annotations

from typing import Any

from qarl_jax.models.families import qwen2
from qarl_jax.models.hf.config import HFConfig

MODEL_TYPE = "qwen3"  # in config.json
HF_NAMES = qwen2.HF_NAMES | {
    "attn.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "attn.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
    "attn.o.bias": "model.layers.{layer}.self_attn.o_proj.bias",
}


def fields(hf: HFConfig) -> dict[str, Any]:
    """Reads the fields of ModelConfig from config.json."""
    bias = hf.get("attention_bias", bool, False)
    # transformers' default; every published Qwen3 config says 128 too.
    head_dim = hf.get("head_dim", int, 128)
    return hf.common() | {"qk_norm": True, "qkv_bias": bias, "o_bias": bias, "head_dim": head_dim}
