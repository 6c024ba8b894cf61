# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The battery every scheme passes (a registry line enrols it), and each grid against references and oracles."""

import dataclasses
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl_jax import quant
from qarl_jax.quant import QTensor
from qarl_jax.quant.schemes import asym_grid, fp8, w2a16, w2a16_asym, w3a16, w4a4, w4a8, w4a16, w4a16_asym, w8a8
from qarl_jax.types import UserError
from tests.reference import quant_reference as ref

SCHEMES = [config() for config in quant.SCHEMES.values()]
CONFIGS = [
    *SCHEMES,
    w4a16.Config(32),
    w4a16.Config(64),
    w4a16.Config(-1),
    w4a8.Config(32),
    w3a16.Config(32),
    w2a16.Config(-1),
    w2a16_asym.Config(16),
    w4a16_asym.Config(128),
    w4a4.Config(64),
]
as_a_run = pytest.mark.usefixtures("compiled_as_a_run")  # bits hang on the compiler


def weight(*shape, seed=0, scale=0.05):
    """Gaussian, with an outlier in every row and a few exact ties."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape).astype(np.float32) * scale
    w[..., 0] *= 6
    w[..., 1] = w[..., 0] / 2
    return w


def reference(w, config):
    """The published arrays, by the numpy formulas."""
    return ref.grid(config.name).arrays(w, config)


def codes_of(qt: QTensor):
    if hasattr(qt.scheme, "activation_bits"):
        return ref.grid(qt.scheme.name).codes({name: np.asarray(array) for name, array in qt.arrays.items()})
    unpacked = {1: np.asarray, 2: lambda codes: ref.nibbles(np.asarray(codes)), 8: quant.unpack_int4}
    return np.asarray(unpacked[qt.scheme.wire.codes.inputs](qt.codes))


def as_bits(x):
    x = np.asarray(x)
    return x.view({1: np.int8, 2: np.int16, 4: np.int32}[x.dtype.itemsize])


def assert_same_bytes(a: QTensor, b: QTensor):
    assert a.scheme == b.scheme
    assert_published(a, b.arrays)


def assert_published(qt: QTensor, arrays):
    assert qt.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (qt.arrays[name].dtype, qt.arrays[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(as_bits(qt.arrays[name]), as_bits(array), err_msg=name)


def steps_of(qt: QTensor):
    return ref.grid(qt.scheme.name).step({name: np.asarray(array) for name, array in qt.arrays.items()})


# Other groups than a scheme's own meet the formulas in the tests of random weights, below; the rest of it is nightly.
OF_THE_CONTRACT = [pytest.param(c, marks=[] if c in SCHEMES else pytest.mark.nightly) for c in CONFIGS]


@pytest.mark.parametrize("config", OF_THE_CONTRACT, ids=str)
class TestContract:
    def test_dtypes_and_shapes_of_the_contract(self, config):
        for lead in ((), (3,), (2, 3)):
            w = jax.ShapeDtypeStruct((*lead, 128, 256), jnp.float32)
            qt, blank = (jax.eval_shape(lambda w, f=f: f(w, config), w) for f in (quant.quantize, quant.blank))
            assert blank == qt
            assert qt.shape == (*lead, 128, 256)
            want = reference(np.ones((*lead, 128, 256), np.float32), config)
            assert qt.arrays.keys() == want.keys() == {array.name for array in config.wire.arrays}
            for array in config.wire.arrays:
                held = qt.arrays[array.name]
                assert held.dtype == array.dtype == want[array.name].dtype
                assert held.shape == (*lead, *array.shape(128, 256)) == want[array.name].shape

    @pytest.mark.slow
    @as_a_run
    def test_codes_and_scales_equal_the_numpy_formula_bit_for_bit(self, config):
        for seed in range(3):
            w = weight(128, 256, seed=seed, scale=10.0 ** (seed * 3 - 4))
            assert_published(quant.quantize(w, config), reference(w, config))

    @pytest.mark.slow
    @as_a_run
    def test_jitted_equals_eager(self, config):
        w = jnp.asarray(weight(128, 256))
        assert_same_bytes(jax.jit(lambda w: quant.quantize(w, config))(w), quant.quantize(w, config))

    @pytest.mark.slow
    def test_a_float32_master_and_its_bfloat16_export_have_the_same_bytes(self, config):
        w = jnp.asarray(weight(128, 256))
        assert_same_bytes(quant.quantize(w, config), quant.quantize(w.astype(jnp.bfloat16), config))

    @pytest.mark.slow
    def test_stacked_layers_quantize_as_they_do_one_by_one(self, config):
        w = jnp.asarray(weight(2, 3, 128, 256))
        stacked = quant.quantize(w, config)
        for i in np.ndindex(2, 3):
            assert_same_bytes(jax.tree.map(lambda x: x[i], stacked), quant.quantize(w[i], config))  # noqa: B023

    @pytest.mark.slow
    def test_rows_are_independent_of_each_other(self, config):
        w = weight(128, 256)
        other = w.copy()
        other[3] *= 17 if all(array.outputs for array in config.wire.arrays) else 1 / 17
        a, b = quant.quantize(w, config), quant.quantize(other, config)
        keep = np.arange(128) != 3
        np.testing.assert_array_equal(as_bits(codes_of(a))[keep], as_bits(codes_of(b))[keep])
        np.testing.assert_array_equal(as_bits(a.scales)[keep], as_bits(b.scales)[keep])

    @pytest.mark.slow
    @as_a_run
    def test_dequantize_is_the_served_weight_bit_for_bit(self, config):
        w = weight(128, 256)
        want = ref.grid(config.name).value(reference(w, config))
        got = jax.jit(lambda w: quant.dequantize(quant.quantize(w, config), jnp.float32))(w)
        np.testing.assert_array_equal(as_bits(got), as_bits(want))

    def test_a_zero_row_gives_zeros_and_a_safe_scale(self, config):
        w = weight(128, 256)
        w[2] = 0
        qt = quant.quantize(w, config)
        scale = np.asarray(qt.scales, np.float32)
        assert (scale > 0).all()
        np.testing.assert_array_equal(scale[2], reference(w, config)["scales"][2].astype(np.float32))
        # The middle of a code's steps is not 0: it is as small as the least scale makes it.
        least = getattr(config, "middle", 0) and config.middle * 2.0**-9 * float(qt.arrays["tensor_scale"][0, 0])
        assert (np.abs(np.asarray(quant.dequantize(qt, jnp.float32))[2]) <= least).all()

    @pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e30])
    @as_a_run
    def test_extreme_magnitudes_stay_finite_and_on_the_grid(self, config, magnitude):
        w = (weight(128, 256) * magnitude).astype(np.float32)
        qt = quant.quantize(w, config)
        assert_published(qt, reference(w, config))
        assert np.isfinite(np.asarray(quant.dequantize(qt, jnp.float32))).all()

    def test_the_largest_error_is_half_a_step(self, config):
        w = weight(128, 256)
        qt = quant.quantize(w, config)
        error = np.abs(np.asarray(quant.dequantize(qt, jnp.float32)) - ref.bf(w))
        grid, step = ref.grid(config.name), steps_of(qt)
        if grid.half:
            # Half a step of the value, or of the smallest normal.
            largest = np.maximum(np.abs(ref.bf(w)) * grid.half[0], step * grid.half[1])
            assert (error <= largest * (1 + 1e-6)).all()
        else:
            # The largest weight sits at 7.5 (127.5) steps, up to the scale's own rounding, and is clamped to 7 (127).
            # A served weight of few bits is rounded once more, to bfloat16.
            assert (error <= step * grid.clamped + np.abs(ref.bf(w)) * 2.0**-8).all()

    def test_quantizing_the_served_weight_again_moves_no_value_by_more_than_one_step(self, config):
        """Exact idempotence is impossible with absmax / 7.5 (code 7 shrinks the next absmax); the drift is bounded."""
        once = quant.dequantize(quant.quantize(weight(128, 256), config), jnp.float32)
        again = quant.quantize(once, config)
        grid, step = ref.grid(config.name), steps_of(again)
        if grid.half:
            step = 2 * np.maximum(np.abs(np.asarray(once)) * grid.half[0], step * grid.half[1])
        assert (np.abs(np.asarray(quant.dequantize(again, jnp.float32)) - np.asarray(once)) <= step * grid.drift).all()


def test_int4_codes_of_a_negative_extreme_are_idempotent():
    """With the absmax on the -8 side, scale = 8 s / 7.5 differs from s; on exact powers the codes still reproduce."""
    codes = np.tile(np.arange(-8, 8), 8)[None].astype(np.float32)  # one row, group of 128, absmax 8
    qt = quant.quantize(codes * 0.9375, w4a16.Config(128))  # scale = bf16(7.5 / 7.5) = 1
    assert float(qt.scales[0, 0]) == 1.0
    want = np.clip(np.rint(codes * 0.9375), -8, 7)
    np.testing.assert_array_equal(codes_of(qt), want)
    assert_same_bytes(quant.quantize(np.where(want == -8, -7.5, want), w4a16.Config(128)), qt)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # mean |error| / mean |w| of N(0, 1): a step s = absmax / 7.5 errs by s / 4 on average, mean |w| = 0.798, the
        # expected absmax of 32, 64, 128, 1024 normals is 2.347, 2.596, 2.827, 3.446. The clamp at 7 adds 1-3 %.
        (w4a16.Config(32), 2.347 / 7.5 / 4 / 0.798),
        (w4a16.Config(64), 2.596 / 7.5 / 4 / 0.798),
        (w4a16.Config(128), 2.827 / 7.5 / 4 / 0.798),
        (w4a16.Config(-1), 3.446 / 7.5 / 4 / 0.798),
        (w4a8.Config(128), 2.827 / 7.5 / 4 / 0.798),
        (w8a8.Config(), 3.446 / 127.5 / 4 / 0.798),
        # Three mantissa bits: a relative error uniform in +-2**-4 / m, m in [1, 2): 2**-5 ln 2 on average, over |w|.
        (fp8.Config(), 2.0**-5 * 0.693),
    ],
    ids=str,
)
def test_expected_relative_error_of_gaussian_weights(config, expected):
    w = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
    error = np.abs(np.asarray(quant.dequantize(quant.quantize(w, config), jnp.float32)) - ref.bf(w)).mean()
    assert error / np.abs(w).mean() == pytest.approx(expected, rel=0.04)


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from(CONFIGS), st.floats(-30, 30))
@settings(max_examples=25, deadline=None)
def test_heavy_tailed_sparse_weights_of_any_size_give_the_reference_codes(seed, config, exponent):
    rng = np.random.default_rng(seed)
    w = (rng.standard_t(2, size=(128, 128)) * 2.0**exponent).astype(np.float32)
    w[rng.random(w.shape) < 0.2] = 0
    assert_published(quant.quantize(w, config), reference(w, config))


@pytest.mark.slow
@given(st.floats(0.01, 100), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_scaling_a_weight_by_a_power_of_two_scales_its_scale_and_keeps_its_codes(factor, seed):
    factor = 2.0 ** round(np.log2(factor))
    w = weight(128, 128, seed=seed, scale=5.0)  # far above the smallest scale an engine takes
    for config in CONFIGS:
        a, b = quant.quantize(w, config), quant.quantize((w * factor).astype(np.float32), config)
        np.testing.assert_array_equal(as_bits(a.codes), as_bits(b.codes))
        np.testing.assert_array_equal(steps_of(a) * factor, steps_of(b))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "codes"), [(w3a16.Config(), range(-4, 4)), (w2a16.Config(), range(-2, 2))], ids=str)
def test_fewer_bits_use_all_of_their_codes_and_no_other(config, codes):
    w = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32)
    assert set(np.unique(codes_of(quant.quantize(w, config)))) == set(codes)


@pytest.mark.slow
def test_each_bit_less_costs_about_twice_the_error():
    """A step is absmax / 7.5, / 3.5, / 1.5: 2.1 and 2.3 times as large, and so is the error while steps are small."""
    w = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32)

    def error(config):
        return np.abs(np.asarray(quant.dequantize(quant.quantize(w, config), jnp.float32)) - w).mean()

    four, three, two = error(w4a16.Config()), error(w3a16.Config()), error(w2a16.Config())
    assert three / four == pytest.approx(7.5 / 3.5, rel=0.05)
    assert 1.5 < two / three < 7 / 3  # at two bits most weights round to 0 and err by their own size


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "most"), [(2, 0.40), (3, 0.173), (4, 0.083), (8, 0.0056)])
def test_zero_points_and_scales_that_clip_nothing_err_by_no_more_than_was_measured(bits, most):
    """rms error of N(0, 1) in groups of 32. Symmetric grids of as many bits: 0.47, 0.20, 0.095 (2, 3, 4 bits)."""
    w = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
    error = np.asarray(quant.dequantize(quant.quantize(w, quant.parse_scheme(f"w{bits}a16_asym:g32")))) - w
    assert np.sqrt((error.astype(np.float32) ** 2).mean()) < most


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_linear_layers_of_an_8b_take_the_bytes_that_the_page_says(bits):
    """Shapes alone. The aim at two bits is 2.0 to 2.2 GB."""
    scheme, held = quant.parse_scheme(f"w{bits}a16_asym:g32"), 0
    for shape in [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(12288, 4096)] * 2 + [(4096, 12288)]:
        w = jax.ShapeDtypeStruct((36, *shape), jnp.float32)
        qt = jax.eval_shape(functools.partial(quant.quantize, scheme=scheme), w)
        held += sum(x.size * x.dtype.itemsize for x in qt.arrays.values())
    page = (pathlib.Path(__file__).parents[2] / "docs" / "schemes.md").read_text()
    (said,) = re.findall(rf"^\| {bits} bits \|.*?([\d.]+) GB \|", page, re.M)
    assert f"{held / 1e9:.2f}" == said


def test_groups_of_one_value_of_one_sign_and_far_below_the_largest_stay_on_the_grid():
    """4.5 is 3 * 1.5, a scale that e4m3 has; 0.7 and 0.02 err by its rounding alone; 1e-7 takes the least scale."""
    w = np.repeat(np.float32([4.5, -4.5, 0.7, 0.02, 1e-7, 0]), 16)[None].repeat(16, 0)
    qt = quant.quantize(w, w2a16_asym.Config(16))
    got = np.asarray(quant.dequantize(qt, jnp.float32)).reshape(16, 6, 16)
    assert (got == got[:1, :, :1]).all(), "a group of one value has one value"
    np.testing.assert_array_equal(got[0, :2, 0], [4.5, -4.5])
    np.testing.assert_allclose(got[0, 2:4, 0], [0.7, 0.02], rtol=1 / 16)
    assert not got[0, 4:, 0].any()
    mixed = np.abs(weight(16, 64)) + 0.5
    zeros = quant.quantize(mixed, w4a16_asym.Config(16)).arrays["zero_points"]
    assert not np.asarray(zeros).any(), "a group above 0 is widened to hold it"


@as_a_run
def test_every_finite_float8_value_is_its_own_code():
    values = np.arange(256, dtype=np.uint8).view(ref.F8)
    values = values[np.isfinite(values.astype(np.float32))]
    np.testing.assert_array_equal(as_bits(jax.jit(fp8.to_e4m3)(values.astype(np.float32))), as_bits(values))


@as_a_run
def test_to_e4m3_rounds_as_ml_dtypes_does_everywhere():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=200_000) * s for s in (1e-4, 1e-2, 1, 100)]).astype(np.float32)
    grid = np.arange(127, dtype=np.uint8).view(ref.F8).astype(np.float32)
    ties = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([x, ties, -ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e3))])
    x = x.astype(np.float32)
    np.testing.assert_array_equal(as_bits(jax.jit(fp8.to_e4m3)(x)), as_bits(np.clip(x, -448, 448).astype(ref.F8)))


# ---- what the user sees --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "group", "hint"), [((4, 100), 128, "8"), ((4, 96), 128, "32"), ((4, 192), 128, "64")]
)
def test_a_group_size_that_does_not_divide_is_a_sentence_naming_the_weight_and_what_is_allowed(shape, group, hint):
    with pytest.raises(UserError, match=r"layers\.mlp\.down_proj.*another group size, as in w4a16:g64\.$") as error:
        quant.quantize(jnp.ones(shape), w4a16.Config(group), name="layers.mlp.down_proj")
    assert hint in str(error.value)
    assert str(shape[-1]) in str(error.value)


def test_parse_scheme_reads_every_name_and_prints_back():
    assert quant.parse_scheme("bf16") is None
    assert quant.parse_scheme("w8a8", group_size=64) == w8a8.Config()
    assert quant.parse_scheme("w4a16") == w4a16.Config(128)
    assert quant.parse_scheme("w4a16", group_size=64) == w4a16.Config(64)
    assert quant.parse_scheme("w4a16:g32", group_size=64) == w4a16.Config(32)
    assert quant.parse_scheme("w4a16:g-1") == w4a16.Config(-1)
    for config in CONFIGS:
        assert quant.parse_scheme(str(config)) == config
        if hasattr(config, "group_size"):
            other = dataclasses.replace(config, group_size=2 * abs(config.group_size) * 8)
            assert quant.parse_scheme(str(other)) == other


@pytest.mark.parametrize(
    "text", ["w4", "W8A8", "w8a8:g32", "w4a16:32", "w4a16:gx", "w4a16:g12", "w4a16:g0", "bf16:g2", ""]
)
def test_a_scheme_nobody_knows_is_a_user_error(text):
    with pytest.raises(UserError):
        quant.parse_scheme(text)


def test_w4a8_is_refused_by_name_where_vllm_on_cuda_would_drop_its_activations_rounding():
    assert quant.on_engine(w4a8.Config(64), quant.resolve("cpu")) == w4a8.Config(64)
    assert quant.on_engine(None, quant.resolve("cuda")) is None
    with pytest.raises(UserError, match=r"w4a16 or fp8, or sample .* \(rollout.engine.name=jax\)"):
        quant.on_engine(w4a8.Config(128), quant.resolve("cuda"))


def test_an_engine_of_one_asymmetric_scheme_is_known_to_refuse_the_bytes_of_others():
    names = [n for n, made in quant.SCHEMES.items() if issubclass(made, asym_grid.Config) and made.bits == 2]
    wires = [quant.SCHEMES[name]().wire for name in names]
    zeros = {array.leaf for wire in wires for array in wire.arrays if array.name == "zero_points"}
    assert set(names) == {"w2a2", "w2a16_asym", "w2a16_shift", "w2a16_midpoint"}
    assert zeros == {"weight_zero_point", "weight_zero_point_mid", "weight_zero_point_a2"}  # shift is as without slices


def test_schemes_are_hashable_and_distinct():
    assert len({str(c) for c in CONFIGS}) == len(set(CONFIGS))
