# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One 8-bit grid serves several widths: slices, losses over them, and engines that are switched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import models, quant
from qarl_jax.quant.schemes import nested_grid, w8a16_asym
from qarl_jax.rollout import PolicyWeights, SamplingConfig
from qarl_jax.rollout.embedded.engine import Config, JaxSampler
from qarl_jax.types import UserError
from tests.reference.tiny_policies import policy, prompts

SLICES = ["w4a16_shift", "w2a16_shift", "w4a16_midpoint", "w2a16_midpoint"]


def masters(*shape, seed=0):
    return np.random.default_rng(seed).standard_t(3, size=shape).astype(np.float32) * 0.05


@pytest.mark.parametrize("name", SLICES)
def test_codes_of_a_slice_are_the_top_bits_of_the_masters(name):
    w = masters(32, 128)
    scheme = quant.parse_scheme(f"{name}:g32")
    master, cut = quant.quantize(w, w8a16_asym.Config(32)), quant.quantize(w, scheme)
    whole = np.asarray(master.codes)
    np.testing.assert_array_equal(scheme.codes(cut), whole >> (8 - scheme.bits))
    again = nested_grid.sliced(master, scheme)
    for array in scheme.wire.arrays:
        assert np.asarray(cut.arrays[array.name]).tobytes() == np.asarray(again.arrays[array.name]).tobytes()
    assert {array.name for array in scheme.wire.arrays if array.name != "codes"} == master.arrays.keys() - {"codes"}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_filled_up_to_eight_bits_is_the_same_weight_in_the_masters_layout(name):
    cut = quant.quantize(masters(32, 128), quant.parse_scheme(f"{name}:g32"))
    whole = nested_grid.filled(cut)
    assert whole.scheme == w8a16_asym.Config(32)
    for array in whole.scheme.wire.arrays:
        assert whole.arrays[array.name].shape == array.shape(32, 128), array.name
    np.testing.assert_array_equal(quant.dequantize(whole), quant.dequantize(cut))


@pytest.mark.parametrize(
    ("name", "bias", "rms"),
    [
        ("w4a16_shift", -7.5, 8.8),
        ("w2a16_shift", -31.5, 36.5),
        ("w4a16_midpoint", 0.5, 4.7),
        ("w2a16_midpoint", 0.5, 18.5),
    ],
)
def test_a_slice_errs_by_its_rule_in_steps_of_the_master(name, bias, rms):
    """Every code of 0 to 255 once: the mean and the root mean square of what is cut off, less the middle."""
    scheme = quant.parse_scheme(f"{name}:g256")
    codes = jnp.arange(256, dtype=jnp.uint8)[None]
    held = {"codes": codes, "scales": jnp.ones((1, 1), jnp.float8_e4m3fn), "zero_points": jnp.zeros((1, 1), jnp.uint8)}
    master = quant.QTensor(held | {"tensor_scale": jnp.ones((1, 1))}, w8a16_asym.Config(256))
    error = np.asarray(scheme.dequantize(nested_grid.sliced(master, scheme))) - np.arange(256)
    assert error.mean() == pytest.approx(bias)
    assert np.sqrt((error**2).mean()) == pytest.approx(rms, abs=0.1)


def test_widths_of_one_grid_name_each_other_and_no_other_scheme_has_any():
    for bits in quant.WIDTHS:
        asked = quant.parse_scheme("w8a16_asym" if bits == 8 else f"w{bits}a16_midpoint", 64)
        assert quant.at_width(w8a16_asym.Config(64), bits) == asked
        assert quant.at_width(quant.parse_scheme("w2a16_midpoint:g64"), bits) == asked
    assert str(quant.at_width(quant.parse_scheme("w2a16_shift:g64"), 4)) == "w4a16_shift:g64"
    assert quant.at_width(None, 4) is None
    with pytest.raises(UserError, match="w4a16_asym:g64 has one width: train under w8a16_asym"):
        quant.at_width(quant.parse_scheme("w4a16_asym:g64"), 2)
    with pytest.raises(UserError, match="no slice of 3 bits: choose 8, 4, 2"):
        quant.at_width(w8a16_asym.Config(64), 3)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(8,), (8, 4), (8, 4, 2)])
@pytest.mark.parametrize("slices", ["shift", "midpoint"])
def test_a_loss_over_widths_is_the_mean_of_the_losses_of_slices_made_by_themselves(widths, slices):
    w, x = jnp.asarray(masters(16, 64)), jnp.asarray(masters(8, 64, seed=1))

    def loss(params, qweights, x):
        return jnp.mean(quant.dot(x, params["w"], qweights["w"]) ** 2)

    names = {8: "w8a16_asym"} | {bits: f"w{bits}a16_{slices}" for bits in (4, 2)}
    qweights = {"w": quant.quantize(w, w8a16_asym.Config(32))}
    got = jax.jit(jax.value_and_grad(quant.over_widths(loss, widths, slices)))({"w": w}, qweights, x)
    alone = [
        jax.value_and_grad(loss)({"w": w}, {"w": quant.quantize(w, quant.parse_scheme(f"{names[bits]}:g32"))}, x)
        for bits in widths
    ]
    want = jax.tree.map(lambda *parts: sum(parts) / len(parts), *alone)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1]["w"], want[1]["w"], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_running_engine_is_switched_between_widths_by_a_publish():
    whole = policy("w8a16_asym")
    graphdef, params = whole.graphdef, whole.params

    def at(bits):
        own = models.at_width(graphdef, bits)
        return PolicyWeights(graphdef=own, params=params, qweights=models.quantizer(own)(params))

    def drawn(engine, bits, version):
        engine.publish(at(bits), version)
        groups = engine.generate(prompts(2), num_samples=2, sampling=SamplingConfig(max_response_len=6), key=0)
        return [(c.tokens, tuple(np.asarray(c.logprobs).tolist())) for group in groups for c in group]

    sizes = Config(batch_size=4, min_slots=4, prompt_bucket=16, response_bucket=16)
    switched, found = JaxSampler(sizes), {}
    for version, bits in enumerate((8, 2, 8)):
        found[version] = drawn(switched, bits, version)
        assert found[version] == drawn(JaxSampler(sizes), bits, 0)
    assert found[0] == found[2] != found[1]
