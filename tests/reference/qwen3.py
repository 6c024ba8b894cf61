# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.json of a small Qwen3, as Hugging Face writes it."""


def qwen3(*, vocab, hidden, intermediate, layers, heads, kv_heads, head_dim, **fields):
    """Sizes as named, `fields` besides: of 128 positions and with tied embeddings, unless they say otherwise."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    } | fields


# A dense policy that vLLM's CPU kernels take.
SMALL = qwen3(vocab=96, hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1, head_dim=64, attention_bias=False)
