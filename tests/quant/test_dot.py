# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The seam: engine arithmetic forward, straight-through gradients backward, one path for dense and expert weights."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.numerics.rows import quantize_rows
from qarl_jax.quant import PROFILES, resolve
from qarl_jax.quant.contractions import Dense
from qarl_jax.quant.schemes import asym_grid, fp8, nvfp4, w2a2, w2a16_asym, w4a4, w4a8, w4a16, w8a8
from qarl_jax.types import UserError
from tests.reference import quant_reference as ref
from tests.reference.cases import each_once, few, named

CONFIGS = [
    *(w8a8.Config(), fp8.Config(), w4a16.Config(32), w4a16.Config(-1), w4a8.Config(32), nvfp4.Config()),
    *(w2a16_asym.Config(), w4a4.Config()),
]
# Of rows, dtypes and programs, which a scheme shares with others.
FEW = [None, w8a8.Config(), nvfp4.Config(), w2a16_asym.Config()]
M, N, K = 24, 48, 128
as_a_run = pytest.mark.usefixtures("compiled_as_a_run")  # bits hang on the compiler


def data(seed=0, m=M, n=N, k=K):
    rng = np.random.default_rng(seed)
    x = ref.bf(rng.normal(size=(m, k)) * np.exp(rng.normal(size=(m, 1))))
    w = (rng.normal(size=(n, k)) * 0.1).astype(np.float32)
    b = ref.bf(rng.normal(size=n))
    return x, w, b


def ulps(a, b):
    """Distance in bfloat16 steps."""
    order = [np.asarray(v).astype(ref.BF16).view(np.int16).astype(np.int32) for v in (a, b)]
    order = [np.where(v < 0, -(v & 0x7FFF), v) for v in order]
    return np.abs(order[0] - order[1])


# ---- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "with_bias"), each_once(PROFILES, [True, False]))
@as_a_run
def test_w8a8_equals_the_engine_formula_bit_for_bit(profile, with_bias):
    x, w, b = data()
    codes, scale = ref.int8_weight(w)
    bias = b if with_bias else None
    qt = quant.quantize(w, w8a8.Config())
    for dtype in (jnp.bfloat16, jnp.float32):
        y = quant.dot(jnp.asarray(x, dtype), jnp.asarray(w), qt, bias, numerics=resolve(profile))
        assert y.dtype == dtype
        want = ref.w8a8_layer(x, codes, scale, profile, bias)
        np.testing.assert_array_equal(np.asarray(y, np.float32), ref.bf(want) if dtype == jnp.bfloat16 else want)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "profile", "with_bias"), each_once([32, 64, -1], ["plain", "cpu"], [True, False]))
@as_a_run
def test_w4a8_equals_the_engine_formula_bit_for_bit(profile, group, with_bias):
    x, w, b = data(1)
    codes, scale = ref.int4_weight(w, group)
    bias = b if with_bias else None
    qt = quant.quantize(w, w4a8.Config(group))
    if profile == "cpu":
        weight = codes * np.repeat(scale.astype(np.float64), K // scale.shape[-1], axis=-1)
        want = ref.rescaled(*ref.int8_rows(x, "cpu"), weight, bias)
    else:
        want = ref.w4a8_layer(x, codes, scale, bias)
    for dtype in (jnp.float32, jnp.bfloat16):
        y = np.asarray(quant.dot(jnp.asarray(x, dtype), w, qt, bias, numerics=resolve(profile)), np.float32)
        np.testing.assert_array_equal(y, ref.bf(want) if dtype == jnp.bfloat16 else want)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "group"), each_once(PROFILES, [32, -1]))
def test_w4a16_multiplies_the_bf16_rounded_weight(profile, group):
    x, w, b = data(2)
    value = ref.int4_value(*ref.int4_weight(w, group)).astype(np.float64)
    acc = x.astype(np.float64) @ value.T
    qt = quant.quantize(w, w4a16.Config(group))
    y = quant.dot(jnp.asarray(x), w, qt, b, numerics=resolve(profile))
    np.testing.assert_allclose(y, acc + b, rtol=2e-6, atol=2e-6 * np.abs(acc).max())
    y = np.asarray(quant.dot(jnp.asarray(x, jnp.bfloat16), w, qt, b, numerics=resolve(profile)))
    want = ref.bf(acc + b)
    off = ulps(y, want)
    assert (off > 0).mean() < 0.01  # float32 against float64 accumulation, next to a rounding boundary
    assert (np.abs(y.astype(np.float32) - want) <= 2.0**-7 * (np.abs(acc) + np.abs(b))).all()


def test_nvfp4_scales_the_sum_by_the_whole_weights_number_and_rounds_before_the_bias():
    x, w, b = data(2)
    w[5] *= 1e-5  # block scales that are flushed
    value, factor = ref.nvfp4_factors(*ref.nvfp4_weight(w))
    assert not value[5].any()
    np.testing.assert_array_equal(value, ref.bf(value))
    sums = (x.astype(np.float64) @ value.astype(np.float64).T).astype(np.float32)
    y = quant.dot(jnp.asarray(x, jnp.bfloat16), w, quant.quantize(w, nvfp4.Config()), b, numerics=resolve("cpu"))
    np.testing.assert_array_equal(np.asarray(y, np.float32), ref.bf(ref.bf(sums * factor) + b))


@pytest.mark.slow
@pytest.mark.parametrize("config", [w4a4.Config(32), w2a2.Config(64)], ids=str)
@as_a_run
def test_low_bit_rows_are_on_the_grid_of_weights_and_exact_in_bfloat16(config):
    x, w, b = data(4)
    x[5, :32], x[6] = 3, -np.abs(x[6])  # a group of one value, groups of one sign
    want = ref.asym_rows(x, config.activation_bits, config.group_size)
    np.testing.assert_array_equal(want, ref.bf(want))
    got = jax.jit(lambda x: config.activations(x, numerics=resolve("plain")))(jnp.asarray(x, jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(got, np.float32), want)
    value = ref.grid(config.name).value(ref.grid(config.name).arrays(w, config)).astype(np.float64)
    y = quant.dot(jnp.asarray(x), w, quant.quantize(w, config), b)
    np.testing.assert_allclose(y, want @ value.T + b, rtol=1e-5, atol=1e-5 * np.abs(want @ value.T).max())


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_fp8_equals_its_formula(profile):
    x, w, b = data(3)
    codes, s_w = ref.fp8_weight(w)
    x_q, s_x = ref.fp8_rows(x, profile)
    acc = x_q.astype(np.float64) @ codes.astype(np.float64).T
    want = s_x * (s_w[:, 0] * acc) + b
    y = quant.dot(jnp.asarray(x), w, quant.quantize(w, fp8.Config()), b, numerics=resolve(profile))
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
@as_a_run
def test_int8_rows_equal_numpy_ieee_under_jit(profile):
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(4000, 64)) * np.exp(3 * rng.normal(size=(4000, 1)))).astype(np.float32)
    x[7] = 0
    x[8] = 1e-9
    numerics = resolve(profile)
    for value in (x, ref.bf(x)):
        codes, scale = jax.jit(lambda x: quantize_rows(x, amax_floor=numerics.amax_floor))(value)
        want_codes, want_scale = ref.int8_rows(value, profile)
        np.testing.assert_array_equal(np.asarray(scale), want_scale)
        np.testing.assert_array_equal(np.asarray(codes), want_codes)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "profile"), each_once(CONFIGS, PROFILES), ids=named)
def test_zero_rows_give_the_bias_and_nothing_else(config, profile):
    x, w, b = data(6)
    x[3] = 0
    y = quant.dot(jnp.asarray(x), w, quant.quantize(w, config), b, numerics=resolve(profile))
    assert np.isfinite(np.asarray(y)).all()
    np.testing.assert_array_equal(np.asarray(y)[3], b)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_masters_value_is_never_read(config):
    x, w, b = data(7)
    qt = quant.quantize(w, config)
    nan = jnp.full_like(w, jnp.nan)

    def loss(x, master, bias):
        return jnp.sum(quant.dot(x, master, qt, bias) ** 2)

    x = jnp.asarray(x)
    np.testing.assert_array_equal(quant.dot(x, nan, qt, b), quant.dot(x, jnp.asarray(w), qt, b))
    for got, want in zip(
        jax.grad(loss, (0, 1, 2))(x, nan, jnp.asarray(b)),
        jax.grad(loss, (0, 1, 2))(x, jnp.asarray(w), jnp.asarray(b)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(np.asarray(got)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "lead"), few(each_once([None, *CONFIGS], [(), (5,), (2, 3), (2, 1, 3)]), FEW), ids=named
)
def test_leading_dims_of_any_rank_are_rows(config, lead):
    x, w, _ = data(8)
    x = jnp.asarray(x[: int(np.prod(lead, dtype=int))])
    qt = None if config is None else quant.quantize(w, config)
    flat = quant.dot(x, w, qt)
    y = quant.dot(x.reshape(*lead, K), w, qt)
    assert y.shape == (*lead, N)
    np.testing.assert_allclose(y.reshape(-1, N), flat, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "dtype"), few(each_once([None, *CONFIGS], [jnp.float32, jnp.bfloat16]), FEW), ids=named
)
@as_a_run
def test_jit_equals_eager(config, dtype):
    x, w, b = data(9)
    x = jnp.asarray(x, dtype)
    qt = None if config is None else quant.quantize(w, config)

    def run(x, w):
        return quant.dot(x, w, qt, b)

    np.testing.assert_array_equal(np.asarray(jax.jit(run)(x, w)), np.asarray(run(x, w)))


def test_bf16_dot_rounds_once_and_keeps_the_dtype():
    x, w, b = data(10)
    y = quant.dot(jnp.asarray(x, jnp.bfloat16), w, None, b)
    want = x.astype(np.float64) @ ref.bf(w).astype(np.float64).T + b
    assert y.dtype == jnp.bfloat16
    assert (ulps(y, ref.bf(want)) > 0).mean() < 0.01
    y = quant.dot(jnp.asarray(x), w, None, b)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.astype(np.float64).T + b, rtol=1e-5, atol=1e-5)


def test_a_qtensor_of_another_weight_is_refused():
    x, w, _ = data()
    with pytest.raises(ValueError, match="does not belong"):
        quant.dot(jnp.asarray(x), w[:8], quant.quantize(w, w8a8.Config()))


# ---- backward --------------------------------------------------------------------------------------------------------


def fake_quant_dot(x, master, config, bias, profile):
    """An independent QAT layer: round(x), round(w) with a straight-through gradient, in float32."""
    if isinstance(config, asym_grid.Config):
        grid = ref.grid(config.name)
        w_q = grid.value(grid.arrays(master, config))
    elif isinstance(config, nvfp4.Config):
        w_q = np.multiply(*ref.nvfp4_factors(*ref.nvfp4_weight(master)))
    else:
        codes, scale = (
            ref.int8_weight(master)
            if isinstance(config, w8a8.Config)
            else ref.fp8_weight(master)
            if isinstance(config, fp8.Config)
            else ref.int4_weight(master, config.group_size)
        )
        w_q = ref.int4_value(codes, scale) if codes.dtype == np.int8 and scale.dtype == ref.BF16 else codes * scale
    if isinstance(config, w4a4.Config):
        x_q = ref.asym_rows(x, 4, config.group_size).astype(np.float32)
    elif isinstance(config, w4a16.Config | nvfp4.Config | asym_grid.Config):
        x_q = np.asarray(x)
    else:
        rows = ref.fp8_rows if isinstance(config, fp8.Config) else ref.int8_rows
        x_codes, s_x = rows(x, "cpu" if isinstance(config, w4a8.Config) else profile)
        x_q = x_codes.astype(np.float32) * s_x

    def forward(x, master, bias):
        x_used = x + jax.lax.stop_gradient(x_q - x)
        w_used = master + jax.lax.stop_gradient(w_q.astype(np.float32) - master)
        return jnp.matmul(x_used, w_used.T, precision="highest") + bias[None, :]

    return forward


@pytest.mark.slow
@pytest.mark.parametrize(("config", "profile"), each_once(CONFIGS, ["plain", "cpu"]), ids=named)
def test_gradients_equal_an_explicit_fake_quant_layer(config, profile):
    x, w, b = (jnp.asarray(v) for v in data(11))
    reference = fake_quant_dot(np.asarray(x), np.asarray(w), config, b, profile)
    qt = quant.quantize(w, config)
    target = jnp.asarray(np.random.default_rng(0).normal(size=(M, N)), jnp.float32)

    def ours(x, w, b):
        return jnp.sum(quant.dot(x, w, qt, b, numerics=resolve(profile)) * target)

    def theirs(x, w, b):
        return jnp.sum(reference(x, w, b) * target)

    for got, want in zip(jax.grad(ours, (0, 1, 2))(x, w, b), jax.grad(theirs, (0, 1, 2))(x, w, b), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "master_dtype"), few(each_once([None, *CONFIGS], [jnp.float32, jnp.bfloat16]), FEW), ids=named
)
def test_gradients_have_the_dtype_of_what_they_belong_to(config, master_dtype):
    x, w, b = data(12)
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, master_dtype)
    qt = None if config is None else quant.quantize(w, config)

    def loss(x, w, b):
        return jnp.sum(quant.dot(x, w, qt, b).astype(jnp.float32))

    dx, dw, db = jax.grad(loss, (0, 1, 2))(x, w, jnp.asarray(b))
    assert (dx.dtype, dw.dtype, db.dtype) == (jnp.bfloat16, master_dtype, jnp.float32)
    # dY is all ones, so both have closed forms in the operands the forward used.
    weight = w if qt is None else quant.dequantize(qt)
    np.testing.assert_allclose(
        np.asarray(dx[0], np.float32), ref.bf(np.asarray(weight, np.float32)).sum(0), rtol=0.01, atol=0.01
    )
    np.testing.assert_array_equal(db, np.full(N, M, np.float32))


def test_master_gradients_of_bf16_activations_are_summed_in_float32():
    """4096 rows of 1 + 2**-7 sum exactly in float32; a bfloat16 accumulator would stop at 512 or so."""
    x = jnp.full((4096, 8), 1.0078125, jnp.bfloat16)
    w = jnp.ones((8, 8), jnp.float32)
    dw = jax.grad(lambda w: jnp.sum(quant.dot(x, w).astype(jnp.float32)))(w)
    np.testing.assert_array_equal(dw, np.full((8, 8), 4096 * 1.0078125, np.float32))


def test_what_is_kept_for_the_backward_of_w8a8_is_low_bit():
    x, w, _ = data(13)
    x = jnp.asarray(x, jnp.bfloat16)
    qt = quant.quantize(w, w8a8.Config())
    _, vjp = jax.vjp(lambda x, w: quant.dot(x, w, qt), x, jnp.asarray(w))
    kept = [leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "dtype")]
    sizes = {str(leaf.dtype): leaf.size for leaf in kept if leaf.size >= M * K}
    assert set(sizes) == {"int8"}, sizes


@pytest.mark.slow
def test_dot_works_inside_scan_remat_and_vmap():
    x, w, _ = data(14, n=K)
    x, w = jnp.asarray(x), jnp.stack([jnp.asarray(w)] * 3)
    qt = quant.quantize(w, w4a16.Config(32))

    def loss(w, x):
        @jax.checkpoint
        def layer(x, weights):
            return jnp.tanh(quant.dot(x, *weights)), None

        return jnp.sum(jax.lax.scan(layer, x, (w, qt))[0])

    grads = jax.jit(jax.grad(loss))(w, x)
    unrolled = jax.grad(
        lambda w: jnp.sum(
            jnp.tanh(
                quant.dot(
                    jnp.tanh(
                        quant.dot(jnp.tanh(quant.dot(x, w[0], _take(qt, 0))), w[1], _take(qt, 1)),
                    ),
                    w[2],
                    _take(qt, 2),
                )
            )
        )
    )(w)
    np.testing.assert_allclose(grads, unrolled, rtol=1e-5, atol=1e-5)
    batched = jax.vmap(lambda x: quant.dot(x, w[0], _take(qt, 0)))(x.reshape(4, -1, K))
    np.testing.assert_allclose(batched.reshape(-1, K), quant.dot(x, w[0], _take(qt, 0)), rtol=1e-6, atol=1e-5)


def _take(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


@pytest.mark.slow
@pytest.mark.parametrize("config", few(each_once([None, *CONFIGS]), FEW), ids=named)
@as_a_run
def test_in_float64_neither_the_order_of_inputs_nor_the_number_of_rows_can_be_seen(config):
    rng = np.random.default_rng(16)
    k = 4864  # the widest contraction of Qwen2.5-0.5B
    x, w = ref.bf(rng.normal(size=(17, k))), ref.bf(rng.normal(size=(48, k)) * 0.02)
    halves = [i * 32 + half for i in rng.permutation(k // 32) for half in (16, 0)]
    order = np.concatenate([first + rng.permutation(16) for first in halves])  # groups of 32 and 16 stay together
    b = jnp.asarray(ref.bf(rng.normal(size=48)))

    def layer(x, w, profile):
        qt = None if config is None else quant.quantize(jnp.asarray(w), config)
        y = quant.dot(jnp.asarray(x, jnp.bfloat16), jnp.asarray(w), qt, b, numerics=resolve(profile))
        return np.asarray(y, np.float32)

    y = layer(x, w, "cpu")
    np.testing.assert_array_equal(layer(x[:, order], w[:, order], "cpu"), y)
    np.testing.assert_array_equal(layer(x[3:4], w, "cpu"), y[3:4])


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "profile"), few(each_once([None, *CONFIGS], ["plain", "cpu"]), [*FEW, w4a8.Config(32)]), ids=named
)
def test_expert_dot_is_dot_per_expert_in_value_and_gradient(config, profile):
    numerics = resolve(profile)
    rng = np.random.default_rng(15)
    sizes = [5, 0, 11, 8]
    x = jnp.asarray(data(15)[0])
    w = jnp.asarray(rng.normal(size=(4, N, K)) * 0.1, jnp.float32)
    qt = None if config is None else quant.quantize(w, config)
    target = jnp.asarray(rng.normal(size=(M, N)), jnp.float32)

    def together(x, w):
        y = quant.expert_dot(x, w, qt, jnp.array(sizes, jnp.int32), numerics=numerics)
        return jnp.sum(y * target), y

    def apart(x, w):
        parts, start = [], 0
        for e, size in enumerate(sizes):
            rows = x[start : start + size]
            parts.append(quant.dot(rows, w[e], None if qt is None else _take(qt, e), numerics=numerics))
            start += size
        y = jnp.concatenate(parts)
        return jnp.sum(y * target), y

    (got_dx, got_dw), got = jax.jit(jax.grad(together, (0, 1), has_aux=True))(x, w)
    (want_dx, want_dw), want = jax.jit(jax.grad(apart, (0, 1), has_aux=True))(x, w)
    if isinstance(config, w8a8.Config | w4a8.Config):
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_dx, want_dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got_dw, want_dw, rtol=1e-5, atol=1e-5)
    assert not np.asarray(got_dw)[1].any()  # an expert nobody chose


@pytest.mark.slow
def test_int8_experts_on_cuda_are_dense_layers():
    x, w, _ = data(18)
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.stack([jnp.asarray(w), -2 * jnp.asarray(w)])
    qt = quant.quantize(w, w8a8.Config())
    cuda = resolve("cuda")
    got = quant.expert_dot(x, w, qt, jnp.array([3, M - 3], jnp.int32), numerics=cuda)
    for rows, expert in ((slice(0, 3), 0), (slice(3, M), 1)):
        own = jax.tree.map(lambda part, e=expert: part[e], qt)
        want = quant.dot(x[rows], w[expert], own, numerics=cuda)
        np.testing.assert_array_equal(np.asarray(got[rows], np.float32), np.asarray(want, np.float32))


@pytest.mark.slow
def test_experts_codes_keep_their_layout_on_a_gpu():
    """Otherwise XLA transposes a frozen stack's codes before its loop: 13.5 GiB of Qwen3-30B-A3B's."""
    weight = jax.eval_shape(w4a16.Config(group_size=32).quantize, jax.ShapeDtypeStruct((4, 64, 128), jnp.float32))
    x, master = jax.ShapeDtypeStruct((16, 128), jnp.bfloat16), jax.ShapeDtypeStruct((4, 64, 128), jnp.float32)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    lowered = quant.expert_dot.trace(x, master, weight, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert "LayoutConstraint" in lowered


def test_rows_beyond_the_last_group_give_zeros_and_no_gradient():
    x, w, _ = data(16)
    w = jnp.stack([jnp.asarray(w)] * 2)
    qt = quant.quantize(w, w8a8.Config())
    sizes = jnp.array([4, 6], jnp.int32)
    y = quant.expert_dot(jnp.asarray(x), w, qt, sizes)
    assert not np.asarray(y)[10:].any()
    dx = jax.grad(lambda x: jnp.sum(quant.expert_dot(x, w, qt, sizes)))(jnp.asarray(x))
    assert not np.asarray(dx)[10:].any()


# ---- AQT and lowering ------------------------------------------------------------------------------------------------


def test_the_integer_product_through_aqt_is_exact():
    rng = np.random.default_rng(17)
    for k in (8, 1024, 6144):
        x, w = rng.integers(-127, 128, (5, k), dtype=np.int8), rng.integers(-128, 128, (7, k), dtype=np.int8)
        x[0], w[0] = -127, -128  # the largest sum an int8 row can make
        got = jax.jit(Dense().integer)(x, w)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, x.astype(np.int64) @ w.astype(np.int64).T)


def lowered(config, platform, dtype=jnp.bfloat16, bias=None):
    w = jnp.zeros((N, K))
    qt = quant.quantize(w, config) if config else None
    x = jax.ShapeDtypeStruct((M, K), dtype)
    traced = jax.jit(lambda x: quant.dot(x, w, qt, bias, numerics=resolve("plain"))).trace(x)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_w8a8_lowers_to_one_integer_dot_general_and_no_float_product(platform):
    text = lowered(w8a8.Config(), platform)
    dots = re.findall(r"stablehlo\.dot_general.*", text)
    assert len(dots) == 1
    assert "xi8>" in dots[0]
    assert "xi32>" in dots[0].rsplit("->", 1)[1]
    # AQT's unused conversion of the codes must not survive: the only int32 tensor is the accumulator.
    assert not re.search(r"convert.*tensor<\d+x\d+xi8>\) -> tensor<\d+x\d+xi32>", text)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("config", [None, w4a16.Config(32)], ids=str)
def test_bf16_products_off_cpu_write_what_is_stored_behind_a_barrier(platform, config):
    """The kernel rounds its float32 sum as it writes; another pass over a float32 product would cost its bandwidth."""
    text = lowered(config, platform)
    (dot,) = re.findall(r"stablehlo\.dot_general.*", text)
    assert dot.count("xbf16>") == 3
    name = re.search(r"(%\S+) = stablehlo\.dot_general", text).group(1)
    assert re.search(rf"optimization_barrier {name} ", text)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("config", [None, w4a16.Config(32)], ids=str)
def test_a_bias_is_added_before_the_only_rounding(platform, config):
    (dot,) = re.findall(r"stablehlo\.dot_general.*", lowered(config, platform, bias=jnp.ones((N,))))
    assert dot.count("xbf16>") == 2
    assert "xf32>" in dot.rsplit("->", 1)[1]


def test_bf16_products_on_cpu_are_full_float32_products():
    (dot,) = re.findall(r"stablehlo\.dot_general.*", lowered(w4a16.Config(32), "cpu"))
    assert "bf16" not in dot
    assert "HIGHEST" in dot


@pytest.mark.slow
@pytest.mark.parametrize(("config", "platform"), few(each_once([None, *CONFIGS], ["cuda", "tpu"]), FEW), ids=named)
def test_gradients_lower_for_every_accelerator_from_a_cpu_host(platform, config):
    w = jnp.zeros((4, N, K))
    qt = None if config is None else quant.quantize(w, config)

    def loss(x, w):
        y = quant.dot(x, w[0], None if qt is None else _take(qt, 0))
        z = quant.expert_dot(x, w, qt, jnp.array([1, 2, 3, 4], jnp.int32))
        return jnp.sum((y + z).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    text = jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in text


# ---- tensor-parallel engines -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "config",
    [c if c in (w8a8.Config(), w4a16.Config(32)) else pytest.param(c, marks=pytest.mark.nightly) for c in CONFIGS],
    ids=named,
)
@as_a_run
def test_shards_scale_and_round_their_own_parts_of_a_layers_inputs(config, count):
    """Their sum is made by rank, in float32, and rounded once."""
    x, w, b = data(k=count * 128)
    size, alone = w.shape[1] // count, resolve("cpu")
    shards = dataclasses.replace(alone, shards=count)
    qt = quant.quantize(w, config)
    x = jnp.asarray(x, jnp.bfloat16)

    def part(array, shard):
        own = array.shape[-1] // count
        return array if array.shape[-1] == 1 else array[..., shard * own : (shard + 1) * own]

    parts = [
        quant.dot(
            x[:, shard * size : (shard + 1) * size],
            w[:, shard * size : (shard + 1) * size],
            quant.QTensor({name: part(array, shard) for name, array in qt.arrays.items()}, qt.scheme),
            None if shard else b,
            numerics=alone,
        )
        for shard in range(count)
    ]
    total = np.asarray(parts[0], np.float32)
    for own in parts[1:]:
        total = total + np.asarray(own, np.float32)
    found = quant.dot(x, w, qt, b, numerics=shards)
    np.testing.assert_array_equal(np.asarray(found, np.float32), ref.bf(total))
    assert (np.asarray(found) != np.asarray(quant.dot(x, w, qt, b, numerics=alone))).any()

    def loss(x, w):
        return (quant.dot(x, w, qt, b, numerics=shards).astype(jnp.float32) ** 2).sum()

    dx, dw = jax.grad(loss, argnums=(0, 1))(x, jnp.asarray(w))
    assert dx.shape == x.shape
    assert dw.shape == w.shape
    assert np.abs(np.asarray(dw)).min() > 0  # straight through, in all parts


@pytest.mark.parametrize("k", [96, 32], ids=["of_three", "the_only_one"])
def test_a_group_that_a_shard_would_cut_is_refused(k):
    x, w, b = data(k=k)
    qt = quant.quantize(w, w4a16.Config(32))
    with pytest.raises(UserError, match=rf"{k} inputs cannot be spread over 2 engine shards .* quant.group_size"):
        quant.dot(jnp.asarray(x, jnp.bfloat16), w, qt, b, numerics=dataclasses.replace(resolve("cpu"), shards=2))


def test_only_layers_whose_inputs_are_spread_have_shards():
    numerics = dataclasses.replace(resolve("cpu"), shards=2)
    assert numerics.of_layer(64, 64).shards == 1
    assert numerics.of_layer(64, 64, spread_inputs=True).shards == 2


def test_a_shards_part_of_a_layer_says_into_how_many_parts_its_inputs_are_cut():
    """On CUDA: Qwen3-1.7B's gate and up (12,288 outputs), o and down; alone, and as one of four shards."""
    alone = resolve("cuda")
    four = dataclasses.replace(alone, shards=4)
    assert (alone.of_layer(12288, 2048).splits, four.of_layer(12288, 2048).splits) == (1, 2)
    assert four.of_layer(12288, 2048) == alone.of_layer(3072, 2048)
    assert (alone.of_layer(2048, 2048, True).splits, four.of_layer(2048, 2048, True).splits) == (2, 1)
    assert four.of_layer(2048, 6144, True) == dataclasses.replace(alone.of_layer(2048, 1536), shards=4)
