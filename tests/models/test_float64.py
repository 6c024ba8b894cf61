# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Under `cpu` every layer is its formula in float64, rounded once: against numpy, and with the gradient of `plain`."""

import functools
import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.models import layers, moe
from qarl_jax.models.attention import attention
from qarl_jax.models.logprobs import statistics, token_logprobs
from qarl_jax.quant import PLAIN, resolve
from tests.reference.logits import logits_beside_a_midpoint
from tests.reference.quant_reference import bf

CPU = resolve("cpu")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def wide(x):
    return np.asarray(x, np.float64)


def once(x):
    """float64 -> float32 -> bfloat16."""
    return bf(np.asarray(x, np.float64).astype(np.float32))


def softmax_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(wide(x), group, axis=1) for x in (k, v))
    scores = np.einsum("tnh,snh->nts", wide(q), k) * q.shape[-1] ** -0.5
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), v)


@pytest.mark.slow
def test_attention_is_softmax_attention_rounded_once_in_any_packing():
    q, k, v = normal(2, 1, 90, 4, 64), normal(3, 1, 90, 2, 64), normal(4, 1, 90, 2, 64)
    run = jax.jit(functools.partial(attention, numerics=CPU))
    got = np.asarray(run(q, k, v), np.float32)[0]
    np.testing.assert_array_equal(got, once(softmax_attention(q[0], k[0], v[0])))
    packed = np.asarray(run(q, k, v, segment_ids=jnp.asarray([[1] * 50 + [2] * 40])), np.float32)[0]
    np.testing.assert_array_equal(packed[:50], got[:50])
    np.testing.assert_array_equal(packed[50:], once(softmax_attention(q[0, 50:], k[0, 50:], v[0, 50:])))
    decoded = run(q[:, -1:], k, v, q_slots=jnp.asarray([[89]]))
    np.testing.assert_array_equal(np.asarray(decoded, np.float32)[0, 0], got[-1])


@pytest.mark.slow
def test_swiglu_rope_and_norm_are_rounded_once():
    gate, up = normal(0, 64, 96) * 3, normal(1, 64, 96)
    got = jax.jit(functools.partial(layers.silu_and_mul, numerics=CPU))(gate, up)
    want = once(wide(gate) / (1 + np.exp(-wide(gate))) * wide(up))
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)
    r = jax.jit(functools.partial(layers.inverse_rms, eps=1e-6, order="float64"))(gate)
    exact = 1 / np.sqrt(np.mean(wide(gate) ** 2, axis=-1, keepdims=True) + 1e-6)
    np.testing.assert_array_equal(r, exact.astype(np.float32))
    config = types.SimpleNamespace(
        head_dim=64, rope_theta=1e6, rope_scaling=None, numerics=CPU, compute_dtype=jnp.bfloat16
    )
    table = jax.jit(lambda p: layers.rope_table(config, p))(jnp.arange(3000, dtype=jnp.int32)[None])
    angle = np.arange(3000)[:, None] * wide(layers.rope_frequencies(config))
    for mine, theirs in zip(table, (np.cos(angle), np.sin(angle)), strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[0, :, 0], theirs.astype(np.float32))
    x = normal(5, 1, 3000, 2, 64)
    cos, sin = (wide(part) for part in table)
    first, second = np.split(wide(x), 2, axis=-1)
    want = once(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))
    got = jax.jit(functools.partial(layers.apply_rope, numerics=CPU))(x, table)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@pytest.mark.slow
def test_float64_changes_no_gradient():
    q, k, v, g = (jax.random.normal(jax.random.key(i), (2, 9, n, 16), jnp.float32) for i, n in enumerate((4, 2, 2, 4)))
    segments = jnp.asarray([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2], jnp.int32)
    angle = jnp.arange(9 * 8, dtype=jnp.float32).reshape(1, 9, 1, 8)

    def value(numerics):
        def run(q, k, v):
            q = layers.apply_rope(q, (jnp.cos(angle), jnp.sin(angle)), numerics)
            out = attention(q, k, v, segment_ids=segments, numerics=numerics)
            return (layers.silu_and_mul(out, g, numerics) * g).sum()

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(q, k, v)

    for a, b in zip(jax.tree.leaves(value(CPU)), jax.tree.leaves(value(PLAIN)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_float64_sums_in_any_chunks(temperature):
    hidden, head = normal(6, 2, 33, 64), normal(7, 500, 64)
    tokens = jax.random.randint(jax.random.key(8), (2, 33), 0, 500)
    ones = jnp.ones((2, 33), jnp.int32)
    of = functools.partial(token_logprobs, hidden, head, tokens, ones, temperature=temperature, numerics=CPU)
    got, entropy = of()
    z = (wide(hidden) @ wide(head).T).astype(np.float32)
    z = wide(z / np.float32(temperature))
    logp = z - (np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) + z.max(-1, keepdims=True))
    want = np.take_along_axis(logp[:, :-1], np.asarray(tokens)[:, 1:, None], -1)[..., 0].astype(np.float32)
    np.testing.assert_array_equal(got[:, 1:], want)
    np.testing.assert_array_equal(of(chunk=7)[0], got)
    np.testing.assert_allclose(entropy[:, 1:], -(np.exp(logp) * logp).sum(-1)[:, :-1], rtol=1e-6)
    plain = jax.grad(lambda h: token_logprobs(h, head, tokens, ones, temperature=temperature)[0].sum())(hidden)
    mine = jax.grad(lambda h: token_logprobs(h, head, tokens, ones, temperature=temperature, numerics=CPU)[0].sum())(
        hidden
    )
    np.testing.assert_allclose(wide(mine), wide(plain), rtol=2**-6, atol=1e-3)


def test_no_order_of_the_vocabulary_changes_a_log_prob():
    z, order = logits_beside_a_midpoint(100, 5000), np.append(0, 5000 - np.arange(1, 5000))
    first = jnp.zeros(100, jnp.int32)
    of = jax.jit(functools.partial(statistics, numerics=CPU))
    np.testing.assert_array_equal(of(z[:, order], first)[0], of(z, first)[0])

    def plain(z):
        return (-np.log1p(np.exp(wide(z[:, 1:])).sum(-1))).astype(np.float32)

    assert (plain(z[:, order]) != plain(z)).mean() > 0.1


def test_a_routers_sums_are_exact():
    x, w = normal(11, 5, 600).at[:, 3].mul(300), normal(12, 8, 600)

    def integers(x, bits):
        units = 2.0 ** (bits - np.frexp(np.abs(wide(x)).max(-1, keepdims=True))[1])
        return np.rint(wide(x) * units).astype(np.int64).astype(object), units

    (a, x_units), (b, units) = integers(x, 24), integers(w, 16)
    want = (a @ b.T).astype(float) / x_units / units.T
    product, weights = map(jax.jit, moe.arithmetic(CPU))
    np.testing.assert_array_equal(product(x, w), want.astype(np.float32))
    np.testing.assert_array_equal(product(x[:, ::-1], w[:, ::-1]), want.astype(np.float32))
    np.testing.assert_allclose(want, wide(x) @ wide(w).T, rtol=1e-4, atol=1e-3)
    among = (want / 100).astype(np.float32)
    chosen = among[:, :2]
    got = weights(chosen, among)
    np.testing.assert_array_equal(weights(chosen, among[:, ::-1]), got)
    np.testing.assert_allclose(got, np.exp(wide(chosen)) / np.exp(wide(among)).sum(-1, keepdims=True), rtol=1e-6)


def test_an_h200_stores_no_exponentials():
    if not os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        pytest.skip("needs jax's CUDA plugin, and JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 where there is no GPU")
    from benchmarks.memory import absent_gpus

    where = jax.sharding.NamedSharding(absent_gpus(), jax.sharding.PartitionSpec())
    z, tokens = (jax.ShapeDtypeStruct(*one, sharding=where) for one in (((256, 151_936), "float32"), ((256,), "int32")))
    of = jax.jit(functools.partial(statistics, numerics=resolve("cuda")))
    compiled = of.trace(z, tokens).lower(lowering_platforms=("cuda",)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < z.size


def test_no_two_sums_over_the_vocabulary_share_an_exponential():
    """XLA stores what two reductions share; one reduction has all sums."""
    z, tokens = 4 * normal(9, 8, 500), jax.random.randint(jax.random.key(10), (8,), 0, 500)
    of = functools.partial(statistics, numerics=CPU)
    reductions = re.findall(r"= (reduce\w*)\[", str(jax.make_jaxpr(of)(z, tokens)))
    assert [name for name in reductions if name != "reduce_precision"] == ["reduce_max", "reduce"]
    below = wide(z) - wide(z).max(-1, keepdims=True)
    exps = np.exp(below)
    entropy = np.log(exps.sum(-1)) - (exps * below).sum(-1) / exps.sum(-1)
    own = np.take_along_axis(below, np.asarray(tokens)[:, None], -1)[:, 0]
    got = jax.jit(of)(z, tokens)
    np.testing.assert_array_equal(got[0], (own - np.log(exps.sum(-1))).astype(np.float32))
    np.testing.assert_allclose(got[1], entropy, rtol=1e-7)


@pytest.mark.slow
def test_log_probs_of_all_but_certain_tokens_keep_every_digit():
    """A sum of exponentials that holds a 1 forgets what the logarithm is of: the order of the sum would show."""
    vocab = 3000
    hidden = jnp.eye(64, dtype=jnp.float32)[None]
    z = np.array(normal(9, 64, vocab))
    z[:, 5] += np.linspace(15, 40, 64)
    tokens = jnp.full((1, 65), 5).at[0, 0].set(1)
    hidden = jnp.concatenate([hidden, hidden[:, :1]], axis=1)
    segments = jnp.ones((1, 65), jnp.int32)

    def of(order):
        head = jnp.asarray(z.T[order])
        place = int(np.flatnonzero(order == 5)[0])
        run = jax.jit(functools.partial(token_logprobs, numerics=CPU))
        return np.asarray(run(hidden, head, jnp.where(tokens == 5, place, 0), segments)[0])[0, 1:]

    others = wide(z) - wide(z).max(-1, keepdims=True)
    others[:, 5] = -np.inf
    want = -np.log1p(np.exp(others).sum(-1)).astype(np.float32)
    assert want.max() > -1e-12
    assert want.min() < -1e-3
    np.testing.assert_array_equal(of(np.arange(vocab)), want)
    np.testing.assert_array_equal(of(np.random.default_rng(0).permutation(vocab)), want)
