# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Invariances of the forward: packing, padding, caching, rematerialization, chunking; and its gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.models import (
    REMAT,
    ModelConfig,
    MoEConfig,
    Transformer,
    abstract_model,
    by_path,
    merge,
    parse_rules,
    quantize_params,
    random_model,
    split,
)
from qarl_jax.models import attention as attention_module
from qarl_jax.models.attention import attention
from qarl_jax.models.params import part_of
from qarl_jax.quant import resolve
from qarl_jax.quant.schemes import nvfp4, w4a16
from qarl_jax.types import UserError
from tests.reference.hf_models import relative

pytestmark = pytest.mark.usefixtures("compiled_programs")

DENSE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=67,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e6,
    tie_embeddings=True,
    qk_norm=True,
    initializer_range=0.2,
)
MOE = dataclasses.replace(
    DENSE,
    architecture="Qwen3MoeForCausalLM",
    tie_embeddings=False,
    moe=MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True),
    moe_layers=(1, 2),
)
QWEN2 = dataclasses.replace(DENSE, architecture="Qwen2ForCausalLM", qk_norm=False, qkv_bias=True)
CONFIGS = {"dense": DENSE, "moe": MOE, "qwen2": QWEN2}
COMBINATIONS = [
    ("dense", "bf16"),
    ("qwen2", "w8a8"),
    ("moe", "w4a16:g32"),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in [("moe", "bf16"), ("moe", "w8a8"), ("qwen2", "w4a16:g32"), ("dense", "w8a8")]
    ),
]


@functools.lru_cache
def model_of(name: str, scheme: str = "bf16", **overrides) -> Transformer:
    config = dataclasses.replace(CONFIGS[name], quant=parse_rules(scheme), **overrides)
    return random_model(config, 3)


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, params, qweights, tokens, positions, segment_ids):
    return merge(graphdef, params, qweights)(tokens, positions, segment_ids)


def logits(model, tokens, positions=None, segment_ids=None):
    return np.asarray(forward(*split(model), tokens, positions, segment_ids))


def tokens_of(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, DENSE.vocab_size, shape), jnp.int32)


def test_an_abstract_model_has_the_shapes_of_a_quantized_one_and_quantizes_nothing(monkeypatch):
    config = dataclasses.replace(MOE, vocab_size=43, quant=parse_rules("w4a16:g32"))  # of no other test: cached
    with monkeypatch.context() as patch:
        patch.setattr(w4a16.Config, "quantize_beside", None)
        graphdef, params, qweights = split(abstract_model(config))
    wanted = jax.eval_shape(functools.partial(quantize_params, graphdef), params)
    assert jax.tree.leaves(qweights) == jax.tree.leaves(wanted)
    assert jax.tree.structure(qweights) == jax.tree.structure(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), COMBINATIONS)
def test_packed_rows_equal_separate_rows_and_padding_is_inert(name, scheme):
    a, b, junk = tokens_of(7, seed=1), tokens_of(4, seed=2), tokens_of(9, seed=3)
    rows = jnp.stack(
        [
            jnp.concatenate([a, b, junk[:2]]),  # packed, with two tokens of padding
            jnp.concatenate([a, b, junk[2:4]]),  # other padding
            jnp.concatenate([a, junk[:6]]),  # alone
            jnp.concatenate([b, junk]),
        ]
    )
    packed, tail = [*range(7), *range(4), 0, 0], [0] * 6
    positions = jnp.asarray([packed, packed, [*range(7), *tail], [*range(4), *([0] * 9)]], jnp.int32)
    packed = [1] * 7 + [2] * 4 + [0] * 2
    segments = jnp.asarray([packed, packed, [1] * 7 + tail, [1] * 4 + [0] * 9], jnp.int32)
    found = logits(model_of(name, scheme), rows, positions, segments)
    assert np.isfinite(found).all()
    for row in (0, 1):
        assert relative(found[row, :7], found[2, :7]) < 1e-5
        assert relative(found[row, 7:11], found[3, :4]) < 1e-5


@pytest.mark.slow
def test_a_token_never_sees_the_future():
    model = model_of("moe")
    tokens = tokens_of(2, 9)
    changed = tokens.at[:, 6:].set((tokens[:, 6:] + 1) % DENSE.vocab_size)
    before, after = logits(model, tokens), logits(model, changed)
    assert relative(after[:, :6], before[:, :6]) < 1e-6
    assert relative(after[:, 6:], before[:, 6:]) > 1e-2


@functools.partial(jax.jit, static_argnums=0)
def decode(graphdef, params, qweights, tokens, positions, cache):
    return merge(graphdef, params, qweights).decode(tokens, positions, cache)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), COMBINATIONS)
def test_prefill_and_decode_equal_the_full_forward_for_rows_of_unequal_length(name, scheme):
    model = model_of(name, scheme)
    parts = split(model)
    lengths, T, S = np.array([5, 3, 6]), 6, 12
    tokens = tokens_of(3, S)
    full = np.asarray(jax.jit(lambda *parts: merge(*parts).hidden_states(tokens), static_argnums=0)(*parts))
    # Prompts of 5, 3 and 6 tokens, right-padded; position -1 marks what is not there.
    steps = np.arange(T)[None, :]
    positions = jnp.asarray(np.where(steps < lengths[:, None], steps, -1), jnp.int32)
    hidden, cache = decode(*parts, tokens[:, :T], positions, model.init_cache(3, S))
    np.testing.assert_array_equal(cache.length, lengths)
    for row, length in enumerate(lengths):
        assert relative(np.asarray(hidden)[row, :length], full[row, :length]) < 1e-5
    for step in range(4):
        at = lengths + step
        position = jnp.asarray(at[:, None], jnp.int32).at[2].set(-1 if step == 3 else at[2])  # row 2 idles at the end
        hidden, cache = decode(*parts, tokens[np.arange(3), at][:, None], position, cache)
        rows = range(2 if step == 3 else 3)
        for row in rows:
            assert relative(np.asarray(hidden)[row, 0], full[row, at[row]]) < 1e-5, (row, step)
    np.testing.assert_array_equal(cache.length, lengths + np.array([4, 4, 3]))


def test_a_token_past_the_last_slot_changes_nothing_in_the_cache():
    model = model_of("dense")
    tokens, positions = tokens_of(1, 4), jnp.arange(4, dtype=jnp.int32)[None]
    _, cache = decode(*split(model), tokens, positions, model.init_cache(1, 4))
    _, after = decode(*split(model), tokens, positions + 4, cache)
    np.testing.assert_array_equal(after.k, cache.k)
    np.testing.assert_array_equal(after.v, cache.v)


def loss(graphdef, params, qweights, tokens):
    out = merge(graphdef, params, qweights)(tokens)
    return jnp.square(jax.nn.log_softmax(out)).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policies"),
    [
        ("dense", ["full", "dots"]),
        *(pytest.param(name, REMAT[:-1], marks=pytest.mark.nightly) for name in ("dense", "moe")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}",
)
def test_rematerialization_changes_no_gradient(name, policies):
    tokens = tokens_of(2, 8)
    _, params, qweights = split(model_of(name, "w8a8"))

    def gradient(remat):
        graphdef = split(model_of(name, "w8a8", remat=remat))[0]
        return jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(graphdef, params, qweights, tokens)

    wanted = gradient("none")
    for remat in policies:
        for found, want in zip(jax.tree.leaves(gradient(remat)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("qwen2", marks=pytest.mark.nightly), "moe"])
def test_gradient_equals_finite_differences(name):
    model = model_of(name)
    graphdef, params, qweights = split(model)
    tokens = tokens_of(1, 6)
    grads = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(graphdef, params, qweights, tokens)
    evaluate = jax.jit(loss, static_argnums=0)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    direction = [jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32) for leaf in leaves]
    slope = sum(float((g * d).sum()) for g, d in zip(jax.tree.leaves(grads), direction, strict=True))
    eps = 1e-3

    def at(step):
        moved = jax.tree.unflatten(tree, [p + step * d for p, d in zip(leaves, direction, strict=True)])
        return float(evaluate(graphdef, moved, qweights, tokens))

    # Central difference: O(eps^2) truncation and 1e-7/eps rounding, both about 1e-3 of the slope.
    assert (at(eps) - at(-eps)) / (2 * eps) == pytest.approx(slope, rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme"),
    [*(pytest.param(name, "w8a8", marks=pytest.mark.nightly) for name in ("dense", "moe")), ("moe", "w4a16:g32")],
)
def test_every_master_gets_a_gradient_through_the_quantized_forward(name, scheme):
    graphdef, params, qweights = split(model_of(name, scheme))
    grads = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)(graphdef, params, qweights, tokens_of(4, 16))
    for path, value in jax.tree.leaves_with_path(grads):
        assert np.isfinite(value).all(), path
        assert np.abs(value).max() > 0, path


@pytest.mark.slow
def test_query_chunks_do_not_change_attention(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 23, n, 8)), jnp.float32) for n in (6, 2, 2))
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0]], [9, 5, 6, 3], axis=1).repeat(2, axis=0), jnp.int32)

    def run():
        return jax.jit(lambda *qkv: attention(*qkv, segment_ids=segments))(q, k, v)

    whole = run()
    monkeypatch.setattr(attention_module, "_QUERY_CHUNK", 4)
    np.testing.assert_allclose(run(), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 7, 14])
def test_attention_equals_the_float64_formula(kv_heads):
    B, T, N, H = 2, 9, 14, 6
    rng = np.random.default_rng(kv_heads)
    q, k, v = (rng.standard_normal((B, T, n, H)) for n in (N, kv_heads, kv_heads))
    segments = np.array([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2])
    wanted = np.zeros((B, T, N, H))
    for b in range(B):
        for n in range(N):
            group = n // (N // kv_heads)
            for t in range(T):
                keys = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
                score = np.array([q[b, t, n] @ k[b, s, group] for s in keys]) / np.sqrt(H)
                p = np.exp(score - score.max())
                wanted[b, t, n] = (p / p.sum()) @ v[b, keys, group]
    q32, k32, v32 = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    found = attention(q32, k32, v32, segment_ids=jnp.asarray(segments, jnp.int32))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["plain", "cpu", "cuda"])
def test_bfloat16_forward_stays_near_float32_under_every_profile(profile):
    model = model_of("dense")
    graphdef, params, qweights = split(model)
    config = dataclasses.replace(DENSE, compute_dtype="bfloat16", numerics=resolve(profile))
    low = split(abstract_model(config))[0]
    tokens = tokens_of(2, 12)
    run = jax.jit(lambda *parts: merge(*parts).hidden_states(tokens), static_argnums=0)
    hidden = run(low, params, qweights)
    assert hidden.dtype == jnp.bfloat16
    # 3 layers of bf16 (2^-9 each rounding): percent level.
    assert relative(hidden.astype(jnp.float32), run(graphdef, params, qweights)) < 0.05


@pytest.mark.slow
def test_weights_that_an_engine_fuses_share_the_number_that_nvfp4_has_of_all_of_them():
    model = random_model(dataclasses.replace(MOE, quant=parse_rules("nvfp4")), 0)
    graphdef, params, qweights = split(model)
    masters, found = by_path(params), {path: qt.arrays["divisor"] for path, qt in by_path(qweights).items()}
    for fused in (("1.attn.q", "1.attn.k", "1.attn.v"), ("0.mlp.gate", "0.mlp.up"), ("1.moe.gate", "1.moe.up")):
        paths = [f"stacks.{own}.kernel" for own in fused]
        together = quant.quantize(jnp.concatenate([masters[path] for path in paths], axis=-2), nvfp4.Config())
        for path in paths:  # of every layer and expert
            assert found[path].shape == (*masters[path].shape[:-2], 1, 1)
            np.testing.assert_array_equal(found[path], together.arrays["divisor"])
    alone = part_of(params, lambda path: "attn.k." not in path)
    with pytest.raises(UserError, match=r"nvfp4 has one scale for .*q_proj.* and .*k_proj.*: freeze all of them"):
        quantize_params(graphdef, alone)
