# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783), SmolLM2 (arXiv 2502.02737): Qwen2 without biases.

Llama 3.1 stretches the slow rotary frequencies (`layers.stretch_frequencies`), which its config.json calls rope type
"llama3".
"""

from __future__ import annotations

from typing import Any

from qarl_jax.models.families import qwen2
from qarl_jax.models.hf.config import HFConfig
from qarl_jax.types import UserError

MODEL_TYPE = "llama"  # in config.json
HF_NAMES = qwen2.HF_NAMES | {"attn.o.bias": "model.layers.{layer}.self_attn.o_proj.bias"}


def fields(hf: HFConfig) -> dict[str, Any]:
    """Reads the fields of ModelConfig from config.json; raises UserError for biases in the MLP."""
    if hf.get("mlp_bias", bool, False):
        raise UserError(f"config.json ({hf.architecture}): 'mlp_bias' is true; biases in the MLP are not supported")
    bias = hf.get("attention_bias", bool, False)
    return hf.common() | {"qkv_bias": bias, "o_bias": bias}
