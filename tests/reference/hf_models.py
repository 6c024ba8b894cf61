# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Small random transformers models of every supported family, and their folders on disk."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

# What each shape is there for stands in its name. vocab sizes are odd; group sizes of 32 divide every K.
SHAPES = {
    "qwen2-gqa7-tied": {
        "model": "Qwen2",
        "vocab_size": 97,
        "hidden_size": 224,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    },
    "qwen2-gqa1-untied": {
        "model": "Qwen2",
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "rope_theta": 1e6,
    },
    "llama-gqa3-tied": {
        "model": "Llama",
        "vocab_size": 107,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_theta": 1e5,
    },
    "llama31-stretched-bias-untied": {
        "model": "Llama",
        "vocab_size": 109,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3-gqa2-headdim-tied": {
        "model": "Qwen3",
        "vocab_size": 113,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    "qwen3-bias-untied": {
        "model": "Qwen3",
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "moe-all-sparse": {
        "model": "Qwen3Moe",
        "vocab_size": 103,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "moe-mlp-only-layers": {
        "model": "Qwen3Moe",
        "vocab_size": 89,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "mlp_only_layers": [0, 3],
    },
    "moe-sparse-step-2": {
        "model": "Qwen3Moe",
        "vocab_size": 89,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 2,
    },
}


def make(name: str, seed: int = 0) -> torch.nn.Module:
    """The transformers model of a shape, float32, eager attention, every parameter random (norms and biases too)."""
    values = dict(SHAPES[name])
    family = values.pop("model")
    config = getattr(transformers, f"{family}Config")(max_position_embeddings=256, **values)
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in key else 0.08 * noise)
    return model


def save(model: torch.nn.Module, folder: pathlib.Path, **options) -> pathlib.Path:
    """Writes the model as transformers does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder


def tokens(model: torch.nn.Module, batch: int, length: int, seed: int = 1) -> np.ndarray:
    """Random token ids [batch, length] int32."""
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, (batch, length)).astype(np.int32)


def logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    """The reference logits [B, T, V]."""
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.numpy()


def relative(found, wanted) -> float:
    """Largest error, relative to the largest value."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def layer(model, index: int):
    """Layer `index` of a qarl_jax model, taken out of its stack."""
    for stack, layers in zip(model.config.stacks, model.stacks, strict=True):
        if stack.start <= index < stack.start + stack.length:
            structure, state = nnx.split(layers)
            own = index - stack.start
            return nnx.merge(structure, jax.tree.map(lambda x, own=own: x[own], state))
    raise IndexError(index)


def jnp_of(tensor: torch.Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy())
