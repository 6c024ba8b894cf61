# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One attention: every implementation against the formula in float64, gradients included; none holds a [T, T] array."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.kernels import attention_vendor
from qarl_jax.kernels.attention_vendor import runs, splash_attention
from qarl_jax.models.attention import attention, choose
from qarl_jax.quant import resolve
from qarl_jax.runtime import mesh
from qarl_jax.types import UserError

B, T, N, K, H = 2, 128, 4, 2, 128
SEGMENTS = np.zeros((B, T), np.int32)
SEGMENTS[0, :50], SEGMENTS[0, 50:97], SEGMENTS[1] = 1, 2, 1  # three runs with the padding, and a row that is full


@functools.cache
def operands():
    """q, k, v and the cotangent of the output, float64."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((B, T, n, H)) for n in (N, K, K, N))


@functools.cache
def reference(packed=True):
    """Output and gradients (dq, dk, dv) of `formula`; without `packed` of one run per row."""
    return formula(*operands(), SEGMENTS if packed else np.ones_like(SEGMENTS))


def formula(q, k, v, g, segments):
    """Output and gradients (dq, dk, dv) of q, k, v and the output's cotangent g, written out in float64.

    p = softmax(s) with s = q k / sqrt(H); dv = p^T g; dp = g v^T; ds = p (dp - sum p dp); dq = ds k, dk = ds^T q.
    """
    length, heads, width = q.shape[1:]
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    seen = np.tril(np.ones((length, length), bool)) & (segments[:, :, None] == segments[:, None, :])
    for b in range(len(q)):
        for n in range(heads):
            kv = n // (heads // k.shape[2])
            s = np.where(seen[b], q[b, :, n] @ k[b, :, kv].T / np.sqrt(width), -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            out[b, :, n] = p @ v[b, :, kv]
            dv[b, :, kv] += p.T @ g[b, :, n]
            dp = g[b, :, n] @ v[b, :, kv].T
            ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / np.sqrt(width)
            dq[b, :, n] = ds @ k[b, :, kv]
            dk[b, :, kv] += ds.T @ q[b, :, n]
    return out, dq, dk, dv


def value_and_gradients(attend, dtype):
    q, k, v, g = (jnp.asarray(x, dtype) for x in operands())
    out, vjp = jax.vjp(attend, q, k, v)
    return out, *vjp(g)


def check(found, tol, packed=True):
    """Per array, the largest error against the largest value."""
    for got, want in zip(found, reference(packed), strict=True):
        assert np.abs(np.asarray(got, np.float64) - want).max() <= tol * np.abs(want).max()


@pytest.mark.slow
def test_xla_attention_and_its_gradients_equal_float64():
    ids = jnp.asarray(SEGMENTS)
    check(value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ids=ids), jnp.float32), 1e-5)
    check(value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ids=ids), jnp.bfloat16), 2e-2)


@pytest.mark.slow
def test_splash_attention_and_its_gradients_equal_float64():
    ids = jnp.asarray(SEGMENTS)
    check(value_and_gradients(lambda q, k, v: splash_attention(q, k, v, ids, interpret=True), jnp.float32), 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs JAX on a GPU (JAX_PLATFORMS=cuda,cpu)")
@pytest.mark.parametrize("at_once", [None, 2])
def test_cudnn_attention_and_its_gradients_equal_float64(at_once, monkeypatch):
    if at_once:
        monkeypatch.setattr(attention_vendor, "runs_at_once", lambda *_: at_once)
    ids = jnp.asarray(SEGMENTS)
    for segments in (None, runs(ids, 3), runs(ids, 17)):  # a tighter or looser bound on the runs changes nothing
        attend = functools.partial(attention, segment_ids=ids, packed_runs=segments, implementation="cudnn")
        check(jax.jit(lambda: value_and_gradients(attend, jnp.bfloat16))(), 2e-2)  # noqa: B023
    whole = functools.partial(attention, implementation="cudnn")
    check(jax.jit(lambda: value_and_gradients(whole, jnp.bfloat16))(), 2e-2, packed=False)


# Rows of an odd length: three responses, one of them a single token, and padding; one response; padding alone.
LAYOUT = np.stack([np.repeat([1, 2, 3, 0], [37, 1, 200, 63]), np.ones(301, int), np.zeros(301, int)]).astype(np.int32)


def check_layout(implementation, head_dim, segments, most, dtype, tol):
    """Checks value and gradients of rows of `segments`, seven query heads to a kv head, with room for `most` runs."""
    rng = np.random.default_rng(head_dim)
    q, k, v, g = (jnp.asarray(rng.standard_normal((*segments.shape, n, head_dim)), dtype) for n in (7, 1, 1, 7))
    want = formula(*(np.asarray(x, np.float64) for x in (q, k, v, g)), segments)
    ids = jnp.asarray(segments)
    attend = functools.partial(attention, segment_ids=ids, packed_runs=runs(ids, most), implementation=implementation)

    def value_and_gradients():
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(g)

    for got, exact in zip(jax.jit(value_and_gradients)(), want, strict=True):
        assert np.abs(np.asarray(got, np.float64) - exact).max() <= tol * np.abs(exact).max()


@pytest.mark.parametrize(("segments", "most"), [(LAYOUT, 4), (LAYOUT[1:2], 1)], ids=["packed", "single"])
def test_rows_of_odd_lengths_one_token_and_padding_equal_float64(segments, most):
    check_layout("xla", 64, segments, most, jnp.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs JAX on a GPU (JAX_PLATFORMS=cuda,cpu)")
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
@pytest.mark.parametrize("at_once", [None, 2, 3])
def test_cudnn_takes_odd_lengths_one_token_padding_and_other_widths(head_dim, at_once, monkeypatch):
    if at_once:
        monkeypatch.setattr(attention_vendor, "runs_at_once", lambda positions, heads, width, most: min(at_once, most))
    for segments, most in ((LAYOUT, 4), (LAYOUT, 17), (LAYOUT[1:2], 2), (LAYOUT[1:2], 1)):
        check_layout("cudnn", head_dim, segments, most, jnp.bfloat16, 2e-2)


@jax.custom_vjp
def as_cudnn(q, k, v, packed_runs):
    """Attention within the runs that are given; every other position, and its gradient, is NaN."""
    ids, out = unset(packed_runs, q.shape[1]), jnp.zeros_like(q)
    out = attention(q, k, v, segment_ids=ids, implementation="xla")
    return jnp.where((ids > 0)[..., None, None], out, jnp.nan)


def unset(packed_runs, length):
    starts, lengths = packed_runs
    starts = starts if lengths.shape[1] > 1 else jnp.zeros_like(starts)  # as JAX does
    slots = jnp.arange(length)[None, None]
    begins = starts[:, : lengths.shape[1], None]
    inside = (slots >= begins) & (slots < begins + lengths[..., None]) & (lengths >= 0)[..., None]
    return jnp.where(inside.any(1), inside.argmax(1) + 1, 0).astype(jnp.int32)


def as_cudnn_bwd(saved, g):
    q, k, v, packed_runs = saved
    ids = unset(packed_runs, q.shape[1])
    pull = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids=ids, implementation="xla"), q, k, v)[1]
    return *(jnp.where((ids > 0)[..., None, None], x, jnp.nan) for x in pull(g)), None


as_cudnn.defvjp(lambda *args: (as_cudnn(*args), args), as_cudnn_bwd)


@pytest.mark.parametrize("at_once", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))])
def test_gradients_of_a_few_runs_at_a_time_are_those_of_all(at_once, monkeypatch):
    """With cuDNN replaced by a function that sets no position outside of its runs, and begins a single run at 0."""
    monkeypatch.setattr(attention_vendor, "_packed", as_cudnn)
    monkeypatch.setattr(attention_vendor, "runs_at_once", lambda *_: at_once)
    ids = jnp.asarray(SEGMENTS)
    for most in (3, 17):
        attend = lambda q, k, v: attention_vendor.cudnn_attention(q, k, v, runs(ids, most))  # noqa: B023, E731
        check(jax.jit(lambda: value_and_gradients(attend, jnp.float32))(), 1e-5)  # noqa: B023


def test_rows_without_segments_are_a_run_each(monkeypatch):
    monkeypatch.setattr(attention_vendor, "_packed", as_cudnn)
    whole = functools.partial(attention, implementation="cudnn")
    check(jax.jit(lambda: value_and_gradients(whole, jnp.float32))(), 1e-5, packed=False)


def test_the_workspace_of_the_backward_stays_within_its_bytes():
    """Rows of 2,048 tokens are taken at once; long rows with many runs would exceed 2^32 elements of float32."""
    assert attention_vendor.runs_at_once(8 * 2048, 12, 128, 17) == 17
    for most in (17, 65):
        few = attention_vendor.runs_at_once(18432, 32, 128, most)
        assert few == 7
        assert attention_vendor.cudnn_workspace(18432, 32, 128, few) <= attention_vendor.WORKSPACE_BYTES
    assert attention_vendor.runs_at_once(2**20, 32, 128, 1) == 1
    assert attention_vendor.runs_at_once(2**20, 32, 128, 17) == 2  # JAX drops the offsets of one


@pytest.mark.slow
def test_every_packed_call_carries_offsets_or_a_run_from_the_start(monkeypatch):
    """At the lengths where 2 GiB hold one run alone, the calls of cuDNN in the gradient have room for two."""
    seen = []
    monkeypatch.setattr(attention_vendor, "_packed", lambda q, k, v, packed: seen.append(packed[1].shape[1]) or q)
    rows = jax.ShapeDtypeStruct((1, 2**17, 32, 128), jnp.bfloat16)
    attend = lambda q, ids: attention_vendor.cudnn_attention(q, q, q, runs(ids, 17)).astype(jnp.float32).sum()  # noqa: E731
    jax.eval_shape(jax.grad(attend), rows, jax.ShapeDtypeStruct((1, 2**17), jnp.int32))
    assert set(seen) == {2, 17}


def test_more_positions_than_int32_offsets_reach_are_refused():
    """JAX multiplies a run's first position by heads and head_dim in int32."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    first, length = (jnp.tile(jnp.array([x], jnp.int32), (9, 1)) for x in ([0, 2**15, -1], [2**15, 2**15]))
    rows = jax.ShapeDtypeStruct((9, 2**16, 32, 128), jnp.bfloat16)
    assert fused._fix_seqlen_offsets(length, length, first, first, rows, rows)[2].min() < 0
    attend = lambda q, ids: attention_vendor.cudnn_attention(q, q, q, runs(ids, 2))  # noqa: E731
    with pytest.raises(UserError, match=r"516222 positions of 32 heads of 128 at most, got 589824: .*micro_batch_rows"):
        jax.eval_shape(attend, rows, jax.ShapeDtypeStruct(rows.shape[:2], jnp.int32))


# ---- where segments begin --------------------------------------------------------------------------------------------


def test_runs_are_found_in_order_with_the_padding_as_the_last():
    ids = jnp.array([[1, 1, 2, 0], [1, 1, 1, 1], [0, 0, 0, 0]], jnp.int32)
    starts, lengths = runs(ids, 4)
    np.testing.assert_array_equal(starts, [[0, 2, 3, -1, -1], [0, -1, -1, -1, -1], [0, -1, -1, -1, -1]])
    np.testing.assert_array_equal(lengths, [[2, 1, 1, -1], [4, -1, -1, -1], [4, -1, -1, -1]])


@pytest.mark.parametrize("seed", range(5))
def test_runs_cover_every_position_once(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.multinomial(64, np.ones(7) / 7)
    ids = np.repeat(np.r_[1:7, 0], sizes)[None].astype(np.int32)
    starts, lengths = (np.asarray(x[0]) for x in runs(jnp.asarray(ids), 7))
    kept = lengths >= 0
    assert lengths[kept].sum() == 64
    assert kept.sum() == len(set(ids[0]))
    for start, length in zip(starts[:-1][kept], lengths[kept], strict=True):
        assert len(set(ids[0, start : start + length])) == 1


# ---- what is compiled for whom ---------------------------------------------------------------------------------------


def lowered(implementation, platform, length=1024):
    """Value and gradients of packed attention, bfloat16, as StableHLO."""
    q, k = (jax.ShapeDtypeStruct((2, length, n, 128), jnp.bfloat16) for n in (N, K))

    def loss(q, k, v, ids):
        segments = runs(ids, 5)
        out = attention(q, k, v, segment_ids=ids, packed_runs=segments, implementation=implementation)
        return out.astype(jnp.float32).sum()

    trace = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, jax.ShapeDtypeStruct((2, length), jnp.int32))
    return trace.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("implementation", "platform"), [("cudnn", "cuda"), ("splash", "tpu"), ("xla", "cuda")])
def test_packed_rows_need_no_mask_and_no_scores_in_memory(implementation, platform, monkeypatch):
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)  # of a GPU that is not here
    monkeypatch.setattr(fused, "check_compute_capability", lambda version: True)
    text = lowered(implementation, platform)
    assert not re.search(r"tensor<[\dx]*1024x1024x", text)
    wanted = {"cudnn": "__cudnn$fmhaSoftmaxBackward", "splash": "tpu_custom_call", "xla": "dot_general"}
    assert wanted[implementation] in text
    if implementation == "cudnn":
        assert "max_seg_per_batch" in text
        assert re.search(r"tensor<2x5xi32>.*tensor<2x6xi32>", text)  # lengths and starts reach the kernel


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
def test_splash_attention_splits_rows_and_heads_by_hand_on_a_mesh():
    with jax.set_mesh(mesh.make_mesh(fsdp=2, tensor=2)):
        text = lowered("splash", "tpu")
    (inside,) = re.findall(r"sdy\.manual_computation.*?tpu_custom_call", text, re.S)[:1]
    assert re.search(r"tensor<1x1024x2x128xbf16>", inside)  # of 2 rows and 4 heads


def test_auto_takes_the_kernel_of_the_backend(monkeypatch):
    auto = functools.partial(choose, "auto", jnp.dtype("bfloat16"), 128, 1024)
    assert auto() == "xla"
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert auto() == "splash"
    assert choose("auto", jnp.dtype("bfloat16"), 128, 1000) == "xla"  # not in blocks of 128
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for hopper in (False, True):
        monkeypatch.setattr("qarl_jax.models.attention.cudnn_packs", lambda: hopper)  # noqa: B023
        assert auto() == ("cudnn" if hopper else "xla")
        assert auto(numerics=resolve("cuda")) == auto()  # not a Hopper GPU, by its device
    monkeypatch.setattr("qarl_jax.models.attention.flash3_lacks", lambda dtype, head_dim: None)
    assert auto(numerics=resolve("cuda")) == "flash3"
    assert auto(numerics=resolve("plain")) == "cudnn"
    assert choose("auto", jnp.dtype("float32"), 128, 1024) == "xla"
    assert choose("xla", jnp.dtype("bfloat16"), 128, 1024) == "xla"


def test_a_row_that_splash_cannot_take_is_refused_with_what_to_do():
    q = jnp.zeros((1, 100, 2, 128), jnp.bfloat16)
    with pytest.raises(UserError, match=r"train\.row_len"):
        attention_vendor.splash_attention(q, q, q, None)


@pytest.mark.slow
def test_cudnn_is_given_rows_of_even_length_and_the_result_is_that_of_the_row(monkeypatch):
    """Its backward refuses others; rows of a data set's longest response may have any length."""
    q, k, v, _ = (jnp.asarray(x[:, :37], jnp.float32) for x in operands())
    lengths = []

    def recorded(q, k, v, packed_runs):
        lengths.append(q.shape[1])
        return as_cudnn(q, k, v, packed_runs)

    monkeypatch.setattr(attention_vendor, "_packed", recorded)
    got = attention(q, k, v, implementation="cudnn")
    assert lengths == [38]
    want = attention(q, k, v)
    assert got.shape == want.shape
    assert np.allclose(got, want, atol=1e-6)
    attention(q[:, :36], k[:, :36], v[:, :36], implementation="cudnn")
    assert lengths == [38, 36]
