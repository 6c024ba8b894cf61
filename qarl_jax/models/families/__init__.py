# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The supported architectures: one file each, reading its config.json (`fields`), naming its tensors (`HF_NAMES`)."""

from __future__ import annotations

from qarl_jax.models.families import llama, qwen2, qwen3, qwen3_moe

MODELS = {
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}


def hf_template(own_path: str, architecture: str) -> str:
    """ "attn.q.kernel" (a path inside its segment) -> "model.layers.{layer}.self_attn.q_proj.weight"."""
    return MODELS[architecture].HF_NAMES[own_path]
