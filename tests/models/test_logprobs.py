# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""token_logprobs against float64 formulas: values, gradients, packing, chunking, sharding and memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qarl_jax.models.logprobs import logits_of, preceding, scored_mask, token_logprobs
from qarl_jax.quant import resolve
from qarl_jax.types import UserError
from tests.reference.cases import each_once

pytestmark = pytest.mark.usefixtures("compiled_programs")

# Two packed segments and padding; one segment that fills the row; a row of padding; a segment of one token.
SEGMENTS = np.array(
    [[1, 1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1], [0] * 9, [1, 2, 2, 3, 3, 3, 4, 5, 5]], np.int32
)
B, T = SEGMENTS.shape
D, V = 6, 11


def example(seed=0, scale=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden = (rng.normal(size=(B, T, D)) * scale).astype(dtype)
    head = rng.normal(size=(V, D)).astype(dtype)
    return hidden, head, rng.integers(0, V, (B, T)).astype(np.int32)


def scores(hidden, head, tokens, segments, **options):
    """`token_logprobs` of numpy or JAX arrays."""
    return token_logprobs(*map(jnp.asarray, (hidden, head, tokens, segments)), **options)


def reference(hidden, head, tokens, segments, temperature=1.0):
    """One token at a time in float64, straight from the definition."""
    logprobs, entropy = np.zeros((2, *tokens.shape))
    for b, t in np.ndindex(tokens.shape):
        if t == 0 or segments[b, t] == 0 or segments[b, t] != segments[b, t - 1]:
            continue
        z = head.astype(np.float64) @ hidden[b, t - 1].astype(np.float64) / temperature
        logp = z - z.max() - np.log(np.exp(z - z.max()).sum())
        logprobs[b, t] = logp[tokens[b, t]]
        entropy[b, t] = -(np.exp(logp) * np.where(np.isfinite(logp), logp, 0)).sum()
    return logprobs, entropy


def reference_grads(hidden, head, tokens, segments, d_logprobs, d_entropy, temperature=1.0):
    """d/dz log p_y = onehot - p and d/dz H = -p (log p + H), written out in float64."""
    d_hidden, d_head = np.zeros(hidden.shape), np.zeros(head.shape)
    _, entropy = reference(hidden, head, tokens, segments, temperature)
    for b, t in np.ndindex(tokens.shape):
        if t == 0 or segments[b, t] == 0 or segments[b, t] != segments[b, t - 1]:
            continue
        h, w = hidden[b, t - 1].astype(np.float64), head.astype(np.float64)
        z = w @ h / temperature
        logp = z - z.max() - np.log(np.exp(z - z.max()).sum())
        p = np.exp(logp)
        dz = (np.eye(V)[tokens[b, t]] - p) * d_logprobs[b, t] - p * (logp + entropy[b, t]) * d_entropy[b, t]
        d_hidden[b, t - 1] += dz @ w / temperature
        d_head += np.outer(dz, h) / temperature
    return d_hidden, d_head


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "temperature"), each_once([1, 12, 13, 1024], [1.0, 0.6]))
def test_values_equal_float64_for_every_chunk_size(chunk, temperature):
    hidden, head, tokens = example()
    got = scores(hidden, head, tokens, SEGMENTS, chunk=chunk, temperature=temperature)
    want = reference(hidden, head, tokens, SEGMENTS, temperature)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "entropy_gradient"), each_once([1, 7, 12, 1024], [False, True]))
def test_gradients_equal_float64(chunk, entropy_gradient):
    hidden, head, tokens = example(1)
    rng = np.random.default_rng(2)
    d_logprobs, d_entropy = rng.normal(size=(2, B, T)).astype(np.float32)
    fn = functools.partial(scores, chunk=chunk, temperature=0.7, entropy_gradient=entropy_gradient)
    _, vjp = jax.vjp(lambda h, w: fn(h, w, tokens, SEGMENTS), hidden, head)
    got = vjp((jnp.asarray(d_logprobs), jnp.asarray(d_entropy)))
    want = reference_grads(hidden, head, tokens, SEGMENTS, d_logprobs, d_entropy * entropy_gradient, 0.7)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_chunking_does_not_change_a_logprob():
    hidden, head, tokens = example(3)
    whole = scores(hidden, head, tokens, SEGMENTS)
    for chunk in (1, 5, 16):
        for a, b in zip(whole, scores(hidden, head, tokens, SEGMENTS, chunk=chunk), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_logprob_at_t_scores_token_t_from_the_state_before_it():
    _, head, tokens = example()
    segments = np.ones((1, 3), np.int32)
    hidden = np.zeros((1, 3, D), np.float32)
    hidden[0, 1] = 3.0 * head[5]  # only the state at position 1 knows anything
    tokens = np.array([[2, 4, 5]], np.int32)
    logprobs, entropy = scores(hidden, head, tokens, segments)
    z = head.astype(np.float64) @ hidden[0, 1]
    np.testing.assert_allclose(logprobs[0], [0.0, -np.log(V), z[5] - np.log(np.exp(z).sum())], rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(entropy[0, :2], [0.0, np.log(V)], rtol=1e-6)


@pytest.mark.slow
def test_first_token_of_each_segment_and_padding_score_zero():
    want = np.zeros((B, T), bool)
    for b, t in np.ndindex(B, T):
        want[b, t] = t > 0 and SEGMENTS[b, t] != 0 and SEGMENTS[b, t] == SEGMENTS[b, t - 1]
    np.testing.assert_array_equal(scored_mask(jnp.asarray(SEGMENTS)), want)
    hidden, head, tokens = example()
    logprobs, entropy = scores(hidden, head, tokens, SEGMENTS)
    assert (np.asarray(logprobs)[~want] == 0).all()
    assert (np.asarray(entropy)[~want] == 0).all()
    assert (np.asarray(logprobs)[want] < 0).all()


@pytest.mark.slow
def test_packed_rows_equal_separate_rows():
    hidden, head, tokens = example(4)
    packed, _ = scores(hidden, head, tokens, SEGMENTS)
    alone, _ = scores(hidden[:1, 3:7], head, tokens[:1, 3:7], np.ones((1, 4), np.int32))
    np.testing.assert_allclose(packed[0, 3:7], alone[0], atol=1e-6)


@pytest.mark.slow
def test_unscored_positions_may_hold_nan_and_get_exactly_zero_gradient():
    hidden, head, tokens = example(5)
    scored = np.asarray(scored_mask(jnp.asarray(SEGMENTS)))
    source = np.pad(scored[:, 1:], ((0, 0), (0, 1)))  # states that predict something
    dirty = np.where(source[..., None], hidden, np.nan)

    def total(h, w):
        logprobs, entropy = scores(h, w, tokens, SEGMENTS, chunk=8, entropy_gradient=True)
        return (logprobs + entropy).sum()

    clean_value, clean = jax.value_and_grad(total, (0, 1))(jnp.where(source[..., None], hidden, 0.0), head)
    value, (d_hidden, d_head) = jax.value_and_grad(total, (0, 1))(jnp.asarray(dirty), jnp.asarray(head))
    assert value == clean_value
    np.testing.assert_array_equal(d_head, clean[1])
    assert (np.asarray(d_hidden)[~source] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-6, 1e3, 1e6])
def test_extreme_logits_stay_finite_and_exact(scale):
    hidden, head, tokens = example(6, scale=scale)
    got = scores(hidden, head, tokens, SEGMENTS)
    want = reference(hidden, head, tokens, SEGMENTS)
    for g, w in zip(got, want, strict=True):
        # A float32 logit of size |z| is known to |z| 2^-23 times a few operations.
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=2e-6 + 40 * scale * 2.0**-23)
    grads = jax.grad(lambda h: sum(x.sum() for x in scores(h, head, tokens, SEGMENTS)))(jnp.asarray(hidden))
    assert np.isfinite(grads).all()


def test_equal_logits_give_log_vocab_entropy_and_logprob():
    logprobs, entropy = scores(
        np.zeros((1, 4, D), np.float32), np.ones((V, D), np.float32), *np.ones((2, 1, 4), np.int32)
    )
    np.testing.assert_allclose(logprobs[0, 1:], -np.log(V), rtol=1e-6)
    np.testing.assert_allclose(entropy[0, 1:], np.log(V), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "tensor")])
def test_sharded_batch_and_vocabulary_give_the_same_numbers(axes):
    rng = np.random.default_rng(7)
    hidden = rng.normal(size=(8, 10, 16)).astype(np.float32)
    head = rng.normal(size=(64, 16)).astype(np.float32)
    tokens = rng.integers(0, 64, (8, 10)).astype(np.int32)
    segments = np.ones((8, 10), np.int32)
    shape = {("data",): (8, 1), ("tensor",): (1, 8), ("data", "tensor"): (2, 4)}[axes]
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "tensor"))
    row, vocab = NamedSharding(mesh, P("data")), NamedSharding(mesh, P("tensor"))

    @jax.jit
    def step(hidden, head, tokens, segments):
        def total(h, w):
            logprobs, entropy = scores(h, w, tokens, segments, chunk=24)
            return logprobs.sum(), (logprobs, entropy)

        return jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, head)

    one = step(hidden, head, tokens, segments)
    args = [jax.device_put(x, s) for x, s in ((hidden, row), (head, vocab), (tokens, row), (segments, row))]
    many = step(*args)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    if "tensor" in axes:
        # No device ever holds the logits of a chunk over the whole vocabulary: [rows, 3 columns, 64].
        hlo = step.lower(*args).compile().as_text()
        rows = 8 // shape[0]
        assert f"f32[{rows},3,{64 // shape[1]}]" in hlo
        assert f"f32[{rows},3,64]" not in hlo


@pytest.mark.slow
@pytest.mark.parametrize("differentiate", [False, True])
@pytest.mark.usefixtures("compiled_as_a_run")
def test_peak_memory_holds_one_chunk_of_logits(differentiate):
    rows, length, width, vocab, chunk = 8, 128, 16, 2048, 64
    shapes = [
        jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        *[jax.ShapeDtypeStruct((rows, length), jnp.int32)] * 2,
    ]

    def peak(chunk):
        def total(h, w, tokens, segments):
            return scores(h, w, tokens, segments, chunk=chunk)[0].sum()

        fn = jax.grad(total, (0, 1)) if differentiate else total
        return jax.jit(fn).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = rows * length * vocab * 4
    assert peak(rows * length) > logits // 2  # the measure sees the buffer when it is there
    # Under a chunked run: a few buffers of one chunk, plus the float32 gradient of the head.
    assert peak(chunk) < logits // 3
    assert peak(chunk) < 6 * chunk * vocab * 4 + 8 * vocab * width * 4 + 8 * rows * length * width * 4


@pytest.mark.slow
def test_bfloat16_states_give_float32_logprobs_and_a_float32_head_gradient():
    hidden, head, tokens = example(8)
    hidden16 = jnp.asarray(hidden, jnp.bfloat16)
    logprobs, _ = scores(hidden16, head, tokens, SEGMENTS)
    head16 = np.asarray(jnp.asarray(head, jnp.bfloat16).astype(jnp.float32))
    want, _ = reference(np.asarray(hidden16.astype(jnp.float32)), head16, tokens, SEGMENTS)
    np.testing.assert_allclose(logprobs, want, rtol=1e-5, atol=2e-6)  # bf16 products are exact in float32
    d_hidden, d_head = jax.grad(lambda h, w: scores(h, w, tokens, SEGMENTS)[0].sum(), (0, 1))(
        hidden16, jnp.asarray(head)
    )
    assert d_hidden.dtype == jnp.bfloat16
    assert d_head.dtype == jnp.float32
    ref_hidden, ref_head = reference_grads(
        np.asarray(hidden16.astype(jnp.float32)), head16, tokens, SEGMENTS, np.ones((B, T)), np.zeros((B, T))
    )
    # dz is rounded to bf16 (relative 2^-9) before each product.
    np.testing.assert_allclose(d_head, ref_head, atol=2**-8 * np.abs(ref_head).max())
    np.testing.assert_allclose(d_hidden.astype(jnp.float32), ref_hidden, atol=2**-7 * np.abs(ref_hidden).max())


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 1)])
def test_degenerate_batches_return_zeros(shape):
    logprobs, entropy = scores(jnp.zeros((*shape, D)), jnp.ones((V, D)), *np.ones((2, *shape), np.int32))
    assert logprobs.shape == entropy.shape == shape
    assert not np.asarray(logprobs).any()
    assert not np.asarray(entropy).any()


def test_bad_temperature_and_chunk_are_refused():
    hidden, head, tokens = example()
    with pytest.raises(UserError, match="temperature must be positive"):
        scores(hidden, head, tokens, SEGMENTS, temperature=0.0)
    with pytest.raises(UserError, match="chunk must be at least 1"):
        scores(hidden, head, tokens, SEGMENTS, chunk=0)


def test_what_precedes_a_token_is_found_one_position_before_it_in_its_own_segment():
    segment_ids = jnp.asarray([[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0]], jnp.int32)
    x = jnp.arange(1, 13, dtype=jnp.float32).reshape(2, 6)
    np.testing.assert_array_equal(preceding(x, segment_ids), [[0, 1, 2, 0, 4, 0], [0, 0, 0, 0, 0, 0]])
    wide = jnp.stack([x, -x], axis=-1)
    np.testing.assert_array_equal(preceding(wide, segment_ids)[..., 1], -preceding(x, segment_ids))
    # What stands where nothing is scored from reaches neither value nor gradient.
    broken = jnp.where(segment_ids > 0, x, jnp.nan).at[0, 2].set(jnp.inf).at[1, 0].set(jnp.nan)
    gradient = jax.grad(lambda w: (w * preceding(broken, segment_ids)).sum())(jnp.float32(1.0))
    assert float(gradient) == 1 + 2 + 4


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_as_a_run")
def test_log_probs_by_the_contract_are_float64s_rounded_once_and_the_same_in_every_order():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((2, 40, 16)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((500, 16)) * 2, jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 500, (2, 40)), jnp.int32)
    segments = jnp.ones_like(tokens)

    def scored(order, **options):
        return np.asarray(
            token_logprobs(hidden, head[order], jnp.asarray(np.argsort(order))[tokens], segments, **options)[0]
        )

    cuda = resolve("cuda")
    mine = scored(np.arange(500), numerics=cuda, temperature=0.7)
    z = np.asarray(logits_of(hidden[:, :-1], head.astype(jnp.bfloat16))) / np.float32(0.7)
    wide = z.astype(np.float64)
    lse = wide.max(-1) + np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1))
    chosen = np.take_along_axis(wide, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    np.testing.assert_array_equal(mine[:, 1:], (chosen - lse).astype(np.float32))
    np.testing.assert_array_equal(mine, scored(rng.permutation(500), numerics=cuda, temperature=0.7, chunk=8))
    assert np.mean(mine == scored(np.arange(500), temperature=0.7)) < 1
