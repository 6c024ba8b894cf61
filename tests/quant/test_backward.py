# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The low-bit backward: its rounding, its products beside float64, and the same bits on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qarl_jax import quant
from qarl_jax.kernels import products, rounding_triton
from qarl_jax.quant import backward
from qarl_jax.quant.backward import GRIDS, Backward
from qarl_jax.quant.contractions import codes_product
from tests.reference.one_layer import assert_equal_bits, interpreted, on_hopper

FORMATS = ("int8", "fp8")
M, N, K = 48, 32, 64


@functools.cache
def data():
    """x [M, K], master [N, K], dy [M, N]: magnitudes over three decades, a row and a column of zeros."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 0, (shape[0], 1))  # noqa: E731
    x, w, dy = draw(M, K), draw(N, K), draw(M, N) * 1e-4
    dy[3], dy[:, 5] = 0, 0
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, w, dy))


def layer(scheme, form, seed=jnp.uint32(7)):
    """A function of (x, master, dy): the layer's dX and dMaster."""
    config = quant.parse_scheme(scheme)

    def run(x, master, dy):
        qt = None if config is None else quant.quantize(master, config)
        low = None if form == "bf16" else Backward(form, seed, seed + 1)
        _, vjp = jax.vjp(lambda x, w: quant.dot(x, w, qt, backward=low), x, master)
        return vjp(dy)

    return run


@pytest.mark.parametrize("form", FORMATS)
def test_wrong_codes_are_counted(form, monkeypatch):
    assert backward.misrounded(form, quant.PLAIN) == (0, 3 * 256 * 256)
    grid = GRIDS[form]
    next_but_one = lambda x, bits: grid.rounded(1.5 * x, bits)  # noqa: E731
    monkeypatch.setitem(GRIDS, form, dataclasses.replace(grid, rounded=next_but_one))
    assert backward.misrounded(form, quant.PLAIN)[0] > 100_000


def float64(codes, scale):
    return np.asarray(codes).astype(np.float64) * np.asarray(scale, np.float64)


@pytest.mark.parametrize("form", FORMATS)
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(form):
    grid, draws = GRIDS[form], 4096
    x = np.concatenate([np.linspace(-1, 1, 61), np.geomspace(1e-6, 1, 60)]).astype(np.float32)
    seeds = np.random.default_rng(0).integers(0, 2**32, draws, np.uint32)  # as hashes are

    def made(seed, half):
        bits = backward.halves(backward.random_bits((1, len(x)), seed))[half]
        return backward.codes_of(jnp.asarray(x)[None], 1, grid, bits)

    for half in (0, 1):
        found = jax.jit(jax.vmap(functools.partial(made, half=half)))(seeds)
        rounds_to_a_neighbour(form, x, float64(*found)[:, 0])


def rounds_to_a_neighbour(form, x, values):
    """values: [draws, X]."""
    draws = len(values)
    levels = np.arange(-127, 128) / 127 if form == "int8" else np.unique(_e4m3()) / 448
    above = np.searchsorted(levels, x.astype(np.float64) - 1e-9)
    step = np.minimum(np.abs(levels[np.minimum(above, len(levels) - 1)] - x), 1) + np.abs(x - levels[above - 1])
    assert np.all(np.abs(values - x) <= step + 1e-6), "one of the two neighbours"
    # A mean of n draws from two neighbours `step` apart errs by step / (2 sqrt(n)) at most, in its standard deviation.
    error = np.abs(values.mean(0) - x)
    assert np.all(error <= 5 * step / (2 * draws**0.5) + 1e-7), (x[error.argmax()], error.max())
    nearest = np.abs(levels[None] - x[:, None]).min(1)
    assert np.any(nearest > 5 * step / (2 * draws**0.5) + 1e-7), "a rounding to nearest would not pass"


def _e4m3():
    import ml_dtypes

    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return codes[np.isfinite(codes)]


@pytest.mark.parametrize(
    ("scheme", "form"), [("w8a8", "int8"), ("w8a8", "fp8"), ("fp8", "fp8"), ("bf16", "fp8"), ("w4a8:g32", "int8")]
)
def test_gradients_lie_within_the_rounding_of_float64s(scheme, form):
    x, w, dy = data()
    dx, dw = jax.jit(layer(scheme, form))(x, w, dy)
    config = quant.parse_scheme(scheme)
    w_q, x_q = np.asarray(w, np.float64), np.asarray(x, np.float64)
    w_scale = x_scale = None  # along the contraction, where the forward's codes are taken as they are
    if config is not None:
        qt = quant.quantize(w, config)
        w_q = np.asarray(config.dequantize(qt), np.float64)
        if config.kernel == "e4m3" and form == "fp8":
            w_scale = np.asarray(qt.scales, np.float64)
        codes, scale = config.activations(x, numerics=quant.PLAIN)
        x_q = float64(codes, scale)
        if codes.dtype == GRIDS[form].dtype and form == "fp8":
            x_scale = np.asarray(scale, np.float64)
    else:
        w_q = np.asarray(jnp.asarray(w_q, jnp.float32).astype(x.dtype), np.float64)
    dy = np.asarray(dy, np.float64)
    for got, lhs, rhs, along in ((dx, dy, w_q, w_scale), (dw, dy.T, x_q, x_scale)):
        lhs_error, rhs_error = bounds(lhs if along is None else lhs * along.T, form), bounds(rhs.T, form).T
        if along is None:
            bound = lhs_error @ np.abs(rhs) + np.abs(lhs) @ rhs_error + lhs_error @ rhs_error
        else:
            bound = lhs_error @ np.abs(rhs / along)
        error = np.abs(np.asarray(got, np.float64) - lhs @ rhs)
        assert np.all(error <= bound + 1e-6 * np.abs(lhs) @ np.abs(rhs))
        assert error.max() > 0.01 * bound.max(), "codes were multiplied"


def bounds(a, form):
    """The most that a rounding of rows moves each of them: a step of int8, or an eighth of the value in e4m3."""
    scale = np.abs(a).max(1, keepdims=True) / GRIDS[form].largest
    return (
        scale * np.where(a == 0, 0, 1)
        if form == "int8"
        else np.where(a == 0, 0, np.maximum(np.abs(a) / 8, scale / 512))
    )


@pytest.mark.parametrize("form", FORMATS)
def test_the_mean_over_updates_is_the_gradient_in_full_precision(form):
    x, w, dy = data()
    want = layer("bf16", "bf16")(x, w, dy)
    lows = jax.vmap(lambda step: backward.of_layers(form, backward.root_seed(step, 0), 3, 2))(jnp.arange(256))
    seeds = lows.seed[:, 1]
    many = jax.jit(jax.vmap(lambda seed: layer("bf16", form, seed)(x, w, dy)))(seeds)
    for each, full in zip(many, want, strict=True):
        spread = each.std(0) / len(seeds) ** 0.5
        off = np.abs(each.mean(0) - full)
        assert np.all(off <= 5.5 * spread + 1e-6 * np.abs(full).max())


def test_updates_micro_batches_layers_and_the_two_products_draw_other_bits():
    seeds = [
        backward.of_layers("int8", backward.root_seed(update, micro), number, 3).seed
        for update in (0, 1)
        for micro in (0, 1)
        for number in (0, 1)
    ]
    parts = [Backward("int8", seed, ~seed).part(number, 2) for seed in np.concatenate(seeds) for number in (0, 1)]
    assert len({int(seed) for part in parts for seed in (part.seed, part.inputs)}) == 2 * 2 * 8 * 3
    x, w, dy = data()
    again = layer("w8a8", "int8")(x, w, dy), layer("w8a8", "int8")(x, w, dy)
    assert all(np.array_equal(a, b) for a, b in zip(*again, strict=True))
    other = layer("w8a8", "int8", jnp.uint32(8))(x, w, dy)
    assert not any(np.array_equal(a, b) for a, b in zip(again[0], other, strict=True))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("form", FORMATS)
def test_a_number_that_is_not_finite_reaches_the_gradient(form, bad):
    x, w, dy = data()
    dx, dw = layer("w8a8", form)(x, w, dy.at[2, 4].set(bad))
    assert not np.isfinite(dx[2]).any()
    assert not np.isfinite(dw[4]).any()
    assert np.isfinite(np.delete(dx, 2, 0)).all()
    assert np.isfinite(np.delete(dw, 4, 0)).all()


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize(
    ("form", "sizes"), [("int8", (2, 1)), ("int8", (1, 2)), ("int8", (2, 2)), ("fp8", (4, 1)), ("fp8", (2, 2))], ids=str
)
def test_a_mesh_has_the_bits_of_one_device(form, sizes):
    x, w, dy = data()
    mesh = Mesh(np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes), ("data", "tensor"))
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in ((x, P("data")), (w, P("tensor")), (dy, P("data", "tensor")))
    ]
    one, many = (jax.jit(layer("w8a8", form))(*operands) for operands in ((x, w, dy), placed))
    for a, b in zip(one, many, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def as_elsewhere(monkeypatch):
    """Products as on a device that is no CPU and has no kernel of ours."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, default, **_: default(*operands))


@pytest.mark.parametrize("form", FORMATS)
def test_other_devices_products_are_those_of_a_cpu(form, as_elsewhere, request):
    x, w, dy = data()
    elsewhere = layer("w8a8", form)(x, w, dy)
    request.getfixturevalue("monkeypatch").undo()
    for got, want in zip(elsewhere, layer("w8a8", form)(x, w, dy), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * float(jnp.abs(want).max()))


def test_long_sums_of_the_largest_codes_overflow_nowhere(as_elsewhere):
    """More rows than an int32 holds products of: 2^17 and 8 times 127 x 128."""
    rows = 2**17 + 8
    x, w = (jnp.full((1, rows), code, jnp.int8) for code in (127, -128))
    one = jnp.ones((1, 1))
    got = codes_product(x, one, w, one[0], jnp.float32, quant.PLAIN)
    assert float(got[0, 0]) == np.float32(127 * -128 * rows)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_hopper_gpus_kernel_gives_xlas_bits(form, monkeypatch):
    """Interpreted; both gradients in bfloat16, as `train.grad_dtype=bfloat16` has them."""
    x, w, dy = (a.astype(jnp.bfloat16) for a in data())
    config = quant.parse_scheme("w8a8" if form == "int8" else "fp8")
    qt, used = quant.quantize(w, config), config.activations(x, numerics=quant.PLAIN)
    low = Backward(form, jnp.uint32(3), jnp.uint32(4))
    run = functools.partial(backward.gradients, low, dy, used, qt, jnp.bfloat16, quant.PLAIN)
    want = run()
    interpreted(monkeypatch)
    monkeypatch.setattr(rounding_triton, "serves", lambda *_: False)
    taken = []
    monkeypatch.setattr(products, "serves_gradient", lambda *_: taken.append(1) or True)
    assert_equal_bits(run(), want)
    assert len(taken) == 2


def ways_of(x, factors):
    """The two contractions of x, along rows and along columns, with factors over six decades or without."""
    values = (jnp.exp(jnp.linspace(-3, 3, size)) for size in x.shape[::-1])
    shaped = [value.reshape(shape) for value, shape in zip(values, ((1, -1), (-1, 1)), strict=True)]
    return [backward._Contraction(axis, shaped[1 - axis] if factors else None) for axis in (1, 0)]


def numpys(x, seed, form, ways):
    """Maxima and codes [as x lies] of each of these contractions: by numpy, because a compiler may be wrong in both of
    the programs that a test compares."""
    made = []
    with np.errstate(over="ignore"):
        hashes = np.arange(x.size, dtype=np.uint32).reshape(x.shape) + np.uint32(seed)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            hashes = (hashes ^ (hashes >> np.uint32(shift))) * np.uint32(factor)
    for way, bits in zip(ways, (hashes >> np.uint32(16), hashes & np.uint32(0xFFFF)), strict=False):
        y = np.asarray(x, np.float32)
        y = y if way.factor is None else y * np.asarray(way.factor)
        largest = np.abs(y).max(way.axis)
        top = np.float32(GRIDS[form].largest)
        y = y * np.expand_dims(top / np.maximum(largest, np.float32(2.0**-100)), way.axis)
        offset = ((bits + 0.5) / 2**16 - 0.5).astype(np.float32)
        if form == "int8":
            made.append((largest, np.clip(np.rint(y + offset), -127, 127).astype(np.int8)))
            continue
        y = np.clip(y, -448, 448)
        size = np.abs(y)
        # Both neighbours in e4m3: 3 bits of mantissa, and multiples of 2^-9 below 2^-6.
        unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(size, 2.0**-30))), -6) - 3)
        down = np.floor(size / unit)
        up = size / unit - down + (bits + 0.5) / 2**16 >= 1
        subnormal = np.rint((size * np.float32(512) + offset).astype(np.float32))
        magnitude = np.where(size < 2.0**-6, subnormal / 512, (down + up) * unit)
        made.append((largest, np.copysign(magnitude, y).astype(ml_dtypes.float8_e4m3fn)))
    return made


def check_codes(x, form, tile, factors=True, **options):
    """Checks maxima and codes of x in both directions, together and alone, and their transposition, beside numpy's."""
    grid, seed = GRIDS[form], jnp.uint32(5)
    for ways in (both := ways_of(x, factors)), both[:1], both[1:]:
        want = numpys(x, 5, form, ways)
        found = rounding_triton.maxima(x, [rounding_triton.Along(*way) for way in ways], tile=tile, **options)
        assert_equal_bits(found, [largest for largest, _ in want])
        want = [codes if way.axis else codes.T for way, (_, codes) in zip(ways, want, strict=True)]
        scales = [backward._scales(largest, grid)[1] for largest in found]
        along = [rounding_triton.Along(*way, inverse) for way, inverse in zip(ways, scales, strict=True)]
        assert_equal_bits(rounding_triton.codes(x, seed, along, grid.rounded, grid.dtype, tile=tile, **options), want)
        plain = backward._coded(x, grid, dataclasses.replace(quant.PLAIN, own_kernels=False), seed, *ways)
        assert_equal_bits([codes for codes, _ in plain], want)
    assert_equal_bits(rounding_triton.transposed(jnp.asarray(want[0]), tile=tile, **options), want[0].T)


@pytest.mark.parametrize("tile", [(32, 32), (16, 8)], ids=["some elements outside", "none outside"])
@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_numpys(form, tile):
    """In both directions, with zeros among the elements."""
    check_codes(data()[2].astype(jnp.bfloat16), form, rounding_triton.Tile(m=tile[0], n=tile[1]), interpret=True)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("source", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (2, 100_000), (1000, 1040), (1024, 896)], ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_numpys_on_a_gpu(form, shape, source, factors):
    """Magnitudes over six decades: small codes of eight-bit floats have fewer bits. int8: codes of the forward."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 0, shape)
    x = rng.integers(-127, 128, shape) if source == "int8" else x
    check_codes(jnp.asarray(x, source), form, rounding_triton.Tile(), factors)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("form", FORMATS)
def test_on_a_gpu_kernels_give_xlas_codes_and_sums_keep_14_bits(form):
    """Sizes that no tile divides. Hopper tensor cores keep 14 bits of partial sums of e4m3 codes. So a sum may err by
    the last of these bits. On an H200 it errs by 3.6e-5 of the magnitudes, and by 1e-4 if the cores alone add it up."""
    rows, outputs, inputs = 4000, 1040, 528
    rng = np.random.default_rng(1)
    x, w, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    config = quant.parse_scheme("w8a8" if form == "int8" else "fp8")
    used, qt = config.activations(x, numerics=quant.PLAIN), quant.quantize(w, config)
    low = Backward(form, jnp.uint32(3), jnp.uint32(4))

    def run(numerics, dtype=jnp.bfloat16):
        return jax.jit(lambda *a: backward.gradients(low, *a, dtype, numerics))(dy, used, qt)

    plain = dataclasses.replace(quant.PLAIN, own_kernels=False)
    own, xla = run(quant.PLAIN), run(plain)
    if form == "int8":
        assert_equal_bits(own, xla)
        return
    seed = backward.random_bits((2,), low.seed)[0]
    ways = backward._Contraction(1, qt.scales.T), backward._Contraction(0, used[1])
    (_, dx), (_, dw) = made = numpys(np.asarray(dy), seed, form, ways)
    lhs, rhs = (float64(dx, 1), float64(dw, 1).T), (float64(qt.codes, 1), float64(used[0], 1))
    scales = [np.asarray(largest, np.float64)[:, None] / GRIDS[form].largest for largest, _ in made]
    shares = []
    for a, b, scale, *gradients in zip(lhs, rhs, scales, own, xla, strict=True):
        exact, magnitudes = scale * (a @ b), scale * (np.abs(a) @ np.abs(b))
        for gradient in gradients:  # each is rounded to bfloat16 once
            over = np.abs(np.asarray(gradient, np.float64) - exact) - 2.0**-8 * np.abs(exact)
            shares.append(float(np.max(over / magnitudes)))
    assert max(shares) <= 2.0**-14, dict(zip(("dX own", "dX xla", "dW own", "dW xla"), shares, strict=True))
