# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The supported architectures. Each file reads its config.json (`fields`) and names its tensors (`HF_NAMES`)."""

from __future__ import annotations

from qarl_bridge.protocol import formats

from qarl_jax.models.families import llama, qwen2, qwen3, qwen3_moe

MODELS = {
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}

ADAPTER = {"lora_a": "lora_A", "lora_b": "lora_B"}
"""Leaves of an adapter, and their names at Hugging Face (PEFT)."""


INDEX = "index"
"""Leaf of the inputs that a split linear map duplicates (`formats.INDEX` at Hugging Face)."""


def hf_template(own_path: str, architecture: str) -> str:
    """Returns the Hugging Face name of a parameter whose path within its stack is `own_path`, with open fields:
    "attn.q.kernel" -> "model.layers.{layer}.self_attn.q_proj.weight"."""
    names, (module, _, leaf) = MODELS[architecture].HF_NAMES, own_path.rpartition(".")
    if leaf in ADAPTER:
        return f"{names[f'{module}.kernel'].removesuffix('weight')}{ADAPTER[leaf]}.weight"
    if leaf == INDEX:
        return f"{names[f'{module}.kernel'].removesuffix('weight')}{formats.INDEX}"
    return names[own_path]
