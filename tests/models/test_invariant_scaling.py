# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Invariant scaling changes no function and no code; an update then moves the scaled weights further."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qarl_jax import models, quant
from qarl_jax.models import invariant_scaling
from qarl_jax.optim.leafwise import squares
from qarl_jax.types import UserError

pytestmark = pytest.mark.usefixtures("compiled_programs")

FAMILIES = {
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
    "qwen3_moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "qk_norm": True,
        "moe": models.MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True),
        "moe_layers": (1,),
    },
}


def weight_change(before, after):
    """||W' - W||^2 / ||W||^2 of two states of one model."""
    updates = jax.tree.map(lambda a, b: b - a, before, after)
    return invariant_scaling.relative_norm(squares(updates), squares(before))


@functools.cache
def random_model(family):
    """A random model whose norms and biases are random too."""
    config = models.ModelConfig(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        initializer_range=0.15,
        max_position_embeddings=64,
        **FAMILIES[family],
    )
    graphdef, params, _ = models.split(models.random_model(config, 0))
    rng = np.random.default_rng(1)
    flat = [
        (
            keys,
            v
            if keys[-1] == "kernel"
            else v.replace(v.get_value() + jnp.asarray(rng.normal(0, 0.3, v.get_value().shape), v.get_value().dtype)),
        )
        for keys, v in nnx.to_flat_state(params)
    ]
    return graphdef, nnx.from_flat_state(flat)


def logits(graphdef, params, scheme="bf16"):
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 61, (2, 9)), jnp.int32)
    graphdef = models.with_scheme(graphdef, scheme)
    forward = jax.jit(lambda params: models.merge(graphdef, params, models.quantize_params(graphdef, params))(tokens))
    return np.asarray(forward(params))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_the_same(family):
    graphdef, params = random_model(family)
    plain, scaled = logits(graphdef, params), logits(graphdef, invariant_scaling.invariant_scaling(params, 1.5))
    assert np.abs(plain).max() > 0.1
    np.testing.assert_allclose(scaled, plain, atol=1e-5 * np.abs(plain).max(), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_map_behind_a_norm_is_scaled_and_nothing_else(family):
    params = random_model(family)[1]
    before, after = models.by_path(params), models.by_path(invariant_scaling.invariant_scaling(params, 1.5))
    touched = {path.split(".", 2)[-1] for path in before if not np.array_equal(before[path], after[path])}
    attention = {"attn_norm.weight", "mlp_norm.weight", *(f"attn.{x}.kernel" for x in "qkv")}
    experts = {"moe.gate.kernel", "moe.up.kernel", "moe.router.kernel"} if family == "qwen3_moe" else set()
    assert touched == attention | {"mlp.gate.kernel", "mlp.up.kernel"} | experts
    for path, value in after.items():
        assert value.dtype == before[path].dtype


@pytest.mark.slow
def test_a_router_left_unscaled_would_be_noticed():
    graphdef, params = random_model("qwen3_moe")
    scaled = invariant_scaling.invariant_scaling(params, 1.5)
    flat, plain = dict(nnx.to_flat_state(scaled)), dict(nnx.to_flat_state(params))
    router = next(keys for keys in flat if "router" in keys)
    broken = logits(graphdef, nnx.from_flat_state(list((flat | {router: plain[router]}).items())))
    assert np.abs(broken - logits(graphdef, params)).max() > 1e-2


def test_scaling_back_undoes_it():
    params = random_model("qwen3")[1]
    back = invariant_scaling.invariant_scaling(invariant_scaling.invariant_scaling(params, 1.5), 1 / 1.5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-7)
    assert invariant_scaling.invariant_scaling(params, 1.0) is params


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16:g32"])
def test_codes_stay_the_same_under_a_power_of_two(scheme):
    # A power of two survives the bfloat16 rounding of the master exactly, so every single code must.
    graphdef, params = random_model("qwen3")
    graphdef = models.with_scheme(graphdef, scheme)
    plain = models.quantize_params(graphdef, params)
    scaled = models.quantize_params(graphdef, invariant_scaling.invariant_scaling(params, 2.0))
    for a, b in zip(invariant_scaling.kernels(params, plain), invariant_scaling.kernels(params, scaled), strict=True):
        np.testing.assert_array_equal(a[1].codes, b[1].codes)


def test_a_fixed_step_moves_scaled_weights_further():
    params = random_model("qwen3")[1]
    moved = jax.tree.map(lambda x: x + 1e-3, params)

    def only_fed(state):
        return nnx.from_flat_state(
            [(k, v) for k, v in nnx.to_flat_state(state) if invariant_scaling.factor(".".join(map(str, k)), 1.5) < 1]
        )

    plain = weight_change(only_fed(params), only_fed(moved))
    scaled = invariant_scaling.invariant_scaling(params, 1.5)
    further = weight_change(only_fed(scaled), only_fed(jax.tree.map(lambda x: x + 1e-3, scaled)))
    assert float(further / plain) == pytest.approx(1.5**2, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16:g32"])
def test_quantization_error_is_that_of_all_codes_together(scheme):
    graphdef, params = random_model("qwen3")
    graphdef = models.with_scheme(graphdef, scheme)
    qweights = models.quantize_params(graphdef, params)
    above = below = 0.0
    for path, q in models.by_path(qweights).items():
        master = np.asarray(models.by_path(params)[path], np.float64)
        above += np.square(np.asarray(quant.dequantize(q, jnp.float32), np.float64) - master).sum()
        below += np.square(master).sum()
    assert float(invariant_scaling.quantization_error(params, qweights)) == pytest.approx(above / below, rel=1e-5)
    assert float(invariant_scaling.quantization_error(params, nnx.State({}))) == 0


def test_weight_change_is_relative_to_all_kernels():
    params = random_model("qwen3")[1]
    twice = jax.tree.map(lambda x: 2 * x, params)
    assert float(weight_change(params, twice)) == pytest.approx(1)
    thrice = jax.tree.map(lambda x: 3 * x, params)
    assert float(weight_change(params, thrice)) == pytest.approx(4)  # squared, as the paper has it
    assert float(weight_change(params, params)) == 0


@pytest.mark.parametrize("scale", [0.0, -1.5, float("nan"), float("inf")])
def test_an_impossible_scale_is_refused(scale):
    with pytest.raises(UserError, match="uaq_scale must be positive"):
        invariant_scaling.invariant_scaling(random_model("qwen3")[1], scale)
