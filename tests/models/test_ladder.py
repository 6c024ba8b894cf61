# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The ladder against transformers (float32, eager): norm, rope, attention, mlp, router, experts, layer, logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qarl_jax.models import MODELS, load_hf, merge, split
from qarl_jax.models.attention import attention
from qarl_jax.models.layers import apply_rope, rope_table
from tests.reference import hf_models
from tests.reference.hf_models import SHAPES, jnp_of, relative

pytestmark = pytest.mark.usefixtures("compiled_programs")
TOL = 1e-5  # float32, relative to the largest value: a few hundred ulps over at most 4 layers
B, T = 2, 11


def load_pair(name, folder):
    """(transformers model, ours loaded from its folder)."""
    reference = hf_models.make(name)
    return reference, load_hf(hf_models.save(reference, folder / name))


@pytest.fixture(
    scope="module",
    params=["qwen2-gqa7-tied", "llama31-stretched-bias-untied", "qwen3-gqa2-headdim-tied", "moe-mlp-only-layers"],
)
def pair(request, tmp_path_factory):
    return load_pair(request.param, tmp_path_factory.mktemp("hf"))


@pytest.fixture
def x(pair):
    """[B, T, D] random activations."""
    return torch.tensor(
        np.random.default_rng(5).standard_normal((B, T, pair[0].config.hidden_size)), dtype=torch.float32
    )


def causal_attend(q, k, v):
    return attention(q, k, v), None


def hf_rope_and_mask(reference, x):
    positions = torch.arange(T)[None].expand(B, T)
    mask = torch.full((T, T), torch.finfo(torch.float32).min).triu(1)[None, None].expand(B, 1, T, T)
    return reference.model.rotary_emb(x, positions), mask


def ours_rope(model):
    return rope_table(model.config, jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)))


@torch.no_grad()
def test_norm_equals_transformers(pair, x):
    reference, model = pair
    wanted = reference.model.layers[-1].input_layernorm(x)
    found = hf_models.layer(model, len(reference.model.layers) - 1).attn_norm(jnp_of(x))
    assert relative(found, wanted) < 1e-6


@torch.no_grad()
def test_rope_equals_transformers_at_far_positions(pair):
    reference, model = pair
    heads, H = model.config.num_heads, model.config.head_dim
    rng = np.random.default_rng(2)
    q = torch.tensor(rng.standard_normal((B, heads, T, H)), dtype=torch.float32)
    positions = torch.tensor(rng.integers(0, 40_000, (B, T)))
    cos, sin = reference.model.rotary_emb(q, positions)
    half = torch.cat([-q[..., H // 2 :], q[..., : H // 2]], dim=-1)
    wanted = (q * cos[:, None] + half * sin[:, None]).transpose(1, 2)
    table = rope_table(model.config, jnp.asarray(positions.numpy(), jnp.int32))
    found = apply_rope(jnp_of(q.transpose(1, 2).contiguous()), table)
    # Same float32 angle (up to 4e4 rad), two libraries' range reductions.
    assert relative(found, wanted) < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_attention_block_equals_transformers(pair, x):
    reference, model = pair
    rope, mask = hf_rope_and_mask(reference, x)
    wanted = reference.model.layers[0].self_attn(x, position_embeddings=rope, attention_mask=mask)[0]
    found, _ = hf_models.layer(model, 0).attn(jnp_of(x), ours_rope(model), causal_attend)
    assert relative(found, wanted) < TOL


@pytest.mark.slow
@torch.no_grad()
def test_every_mlp_equals_transformers(pair, x):
    reference, model = pair
    for index, block in enumerate(reference.model.layers):
        ours = hf_models.layer(model, index)
        found = ours.moe(jnp_of(x)) if ours.is_moe else ours.mlp(jnp_of(x))
        assert relative(found, block.mlp(x)) < TOL, index


@torch.no_grad()
def test_router_chooses_and_weighs_as_transformers(pair, x):
    reference, model = pair
    sparse = model.config.moe_layers
    for index in sparse:
        _, wanted_probs, wanted_experts = reference.model.layers[index].mlp.gate(x)
        experts, probs = hf_models.layer(model, index).moe.router(jnp_of(x.reshape(B * T, -1)))
        np.testing.assert_array_equal(np.asarray(experts), wanted_experts.numpy())
        assert relative(probs, wanted_probs) < TOL


@pytest.mark.slow
@torch.no_grad()
def test_layer_equals_transformers(pair, x):
    reference, model = pair
    rope, mask = hf_rope_and_mask(reference, x)
    for index, block in enumerate(reference.model.layers):
        wanted = block(x, position_embeddings=rope, attention_mask=mask)
        delta, residual, _ = hf_models.layer(model, index)(
            jnp_of(x), jnp.zeros_like(jnp_of(x)), ours_rope(model), causal_attend
        )
        assert relative(delta + residual, wanted) < TOL, index


@pytest.mark.parametrize("architecture", MODELS)
def test_every_family_has_a_shape(architecture):
    shapes = {f"{values['model']}ForCausalLM" for values in SHAPES.values()}
    assert architecture in shapes, f"{architecture} has no shape: add one to SHAPES in tests/reference/hf_models.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name, tmp_path):
    reference, model = load_pair(name, tmp_path)
    ids = hf_models.tokens(reference, 3, 19)
    found = jax.jit(lambda *parts: merge(*parts)(jnp.asarray(ids)), static_argnums=0)(*split(model))
    assert found.dtype == jnp.float32
    assert relative(found, hf_models.logits(reference, ids)) < TOL
