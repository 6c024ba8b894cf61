# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tiny random policies and prompts for the rollout tests."""

import functools

import numpy as np

from qarl_jax import models
from qarl_jax.rollout import PolicyWeights
from qarl_jax.types import Prompt

VOCAB = 300  # more than two blocks of the sampler's search, and no multiple of one


@functools.lru_cache(maxsize=16)
def policy(
    scheme: str = "bf16", *, seed: int = 0, tied: bool = True, moe: bool = False, dtype: str = "float32"
) -> PolicyWeights:
    """A two-layer Qwen3 (or Qwen3-MoE, or, untied, one with QKV biases) with weights large enough to have opinions."""
    expert = models.MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True)
    config = models.ModelConfig(
        architecture="Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        initializer_range=0.2,
        tie_embeddings=tied,
        qkv_bias=not tied,
        qk_norm=True,
        moe=expert if moe else None,
        moe_layers=(0, 1) if moe else (),
        compute_dtype=dtype,
        quant=models.parse_rules(scheme, 32),
    )
    graphdef, params, qweights = models.split(models.random_model(config, seed))
    return PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)


def prompts(count: int, *, seed: int = 0, lengths: tuple[int, int] = (1, 12)) -> list[Prompt]:
    """`count` prompts of random tokens, lengths in [low, high)."""
    rng = np.random.default_rng(seed)
    return [
        Prompt(
            uid=f"random/{seed}/{i}",
            tokens=tuple(int(token) for token in rng.integers(0, VOCAB, rng.integers(*lengths))),
            text="",
            answer="",
        )
        for i in range(count)
    ]
