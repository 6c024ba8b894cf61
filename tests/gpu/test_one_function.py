# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: on a GPU the learner is one function of the tokens, too, at the widths of Qwen3-1.7B (two layers) and
of a MoE model, under every scheme of the profile cuda. The ways are those of tests/learning/test_one_function.py, and
two GPUs where there are two."""

import functools
import math

import jax
import numpy as np
import pytest

from qarl_jax import models, quant
from tests.reference import one_function

pytestmark = pytest.mark.gpu

VOCABULARY = 32768
# Longer than attention's blocks and than a chunk of its queries, and shorter than a tile of a product.
LENGTHS = [(5, 700), (260, 300), (129, 1), (1, 120), (40, 40), (400, 90), (17, 255), (64, 64)]
DENSE = {
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_layers": 2,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "qk_norm": True,
    "tie_embeddings": True,
    "rope_theta": 1e6,
    "initializer_range": 0.03,
}
MIXTURE = DENSE | {
    "architecture": "Qwen3MoeForCausalLM",
    "num_heads": 32,
    "num_kv_heads": 4,
    "moe": models.MoEConfig(num_experts=32, num_experts_per_tok=8, intermediate_size=768, norm_topk_prob=True),
    "moe_layers": (0, 1),
}
SCHEMES = ("bf16", "w8a8", "fp8", "w4a16")
WAYS = one_function.WAYS | one_function.MORE_WAYS


@functools.cache
def policy(kind, scheme):
    config = models.ModelConfig(
        **(MIXTURE if kind == "mixture" else DENSE),
        compute_dtype="bfloat16",
        quant=models.parse_rules(scheme),
        numerics=quant.resolve("cuda"),
    )
    return one_function.moved(models.random_model(config, seed=7))


@functools.cache
def found(kind, scheme, way):
    way = one_function.REFERENCE if not way else WAYS[way]
    return one_function.logprobs(policy(kind, scheme), one_function.groups(VOCABULARY, LENGTHS), way, 0.7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "scheme"), [(kind, s) for kind in ("dense", "mixture") for s in SCHEMES])
def test_log_probs_do_not_depend_on_how_a_batch_is_cut(kind, scheme, way):
    if math.prod(WAYS[way].mesh.values()) > jax.device_count():
        pytest.skip("one GPU")
    wanted = found(kind, scheme, "")
    assert np.std(np.concatenate(wanted)) > 0.1
    assert one_function.differing(found(kind, scheme, way), wanted) == 0
