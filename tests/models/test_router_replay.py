# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Router replay: tokens go where the sampler sent them, and nothing else changes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qarl_jax import models, quant
from qarl_jax.data.packing import pack
from qarl_jax.models.moe import MoE, Router
from tests.reference.hf_models import SHAPES
from tests.reference.quant_reference import bf
from tests.reference.rollouts import completion, group_of

pytestmark = pytest.mark.usefixtures("compiled_programs")

B, T = 2, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two of its three layers are MoE models."""
    folder = tmp_path_factory.mktemp("moe")
    shape = dict(SHAPES["moe-mlp-only-layers"])
    shape.pop("model")
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | shape)
    )
    return models.random_model(models.read_config(folder), 3)


def choices(model, tokens):
    """[B, T, L, k]: what the routers choose themselves, read off one layer after the other."""
    taken = []
    original = Router.__call__

    def record(self, x, replayed=None):
        experts, weights = original(self, x, replayed)
        taken.append(experts)
        return experts, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "__call__", record)
        patch.setattr(jax.lax, "scan", scan_by_hand)
        model.hidden_states(tokens)
    k = model.config.moe.num_experts_per_tok
    routed = np.full((B, T, model.config.num_layers, k), -1, np.int16)
    for layer, experts in zip(model.config.moe_layers, taken, strict=True):
        routed[:, :, layer] = np.asarray(experts).reshape(B, T, k)
    return routed


def scan_by_hand(body, carry, xs):
    length = jax.tree.leaves(xs)[0].shape[0]
    for i in range(length):
        carry, _ = body(carry, jax.tree.map(lambda x, i=i: x[i], xs))
    return carry, None


def hidden(model, tokens, routed):
    graphdef, params, _ = models.split(model)

    @jax.jit
    def run(params, routed):
        return models.merge(graphdef, params, nnx.State({})).hidden_states(tokens, routed_experts=routed)

    return np.asarray(run(params, routed))


@pytest.mark.slow
def test_replaying_the_models_own_choice_changes_nothing_and_another_choice_does(model):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 90, (B, T)), jnp.int32)
    own = choices(model, tokens)
    plain = hidden(model, tokens, None)
    np.testing.assert_allclose(hidden(model, tokens, own), plain, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(hidden(model, tokens, np.full_like(own, -1)), plain)
    layer, experts = model.config.moe_layers[-1], model.config.moe.num_experts
    other = own.copy()
    other[0, 3, layer] = (own[0, 3, layer] + 1) % experts
    difference = np.abs(hidden(model, tokens, other) - plain).max(axis=-1)
    assert difference[0, 3] > 1e-3
    assert difference[1].max() < 1e-5, "the other row is as it was"
    assert difference[0, :3].max() < 1e-5, "and what came before"


@pytest.mark.slow
def test_the_gradient_reaches_the_router_through_the_weights_of_the_replayed_experts(model):
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 90, (B, T)), jnp.int32)
    graphdef, params, _ = models.split(model)
    k, layers = model.config.moe.num_experts_per_tok, model.config.num_layers
    routed = np.broadcast_to(np.arange(k, dtype=np.int16), (B, T, layers, k))

    def loss(params):
        out = models.merge(graphdef, params, nnx.State({})).hidden_states(tokens, routed_experts=jnp.asarray(routed))
        return (out.astype(jnp.float32) ** 3).sum()

    grads = models.by_path(jax.jit(jax.grad(loss))(params))
    routers = {path: np.abs(np.asarray(g)) for path, g in grads.items() if "router" in path}
    assert routers
    for grad in routers.values():
        assert grad[:, :k].max() > 0
        if not model.config.moe.norm_topk_prob:
            continue
        assert grad[:, k:].max() == 0, "experts nobody went to: their logits weigh nothing"


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 6])
def test_on_cuda_rounded_outputs_are_weighted_and_summed_in_float64(model, k):
    moe = dataclasses.replace(model.config.moe, num_experts=8, num_experts_per_tok=k)
    config = dataclasses.replace(
        model.config, moe=moe, numerics=quant.resolve("cuda"), compute_dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    layer = MoE(config=config, rngs=nnx.Rngs(0), stack={})
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 20, config.hidden_size)), jnp.bfloat16)
    got = np.asarray(jax.jit(lambda x: layer(x))(x), np.float32).reshape(40, -1)
    experts, weights = layer.router(x.reshape(40, -1))
    kernels = [np.asarray(linear.kernel.get_value(), np.float32) for linear in (layer.gate, layer.up, layer.down)]
    rows = np.asarray(x, np.float32).reshape(40, -1)
    want = np.zeros_like(got)
    for token, (chosen, weighed) in enumerate(zip(np.asarray(experts), np.asarray(weights), strict=True)):
        row, total = rows[token], np.float64(0)
        for expert, weight in zip(chosen, weighed, strict=True):
            gate, up, down = (kernel[expert] for kernel in kernels)
            g, u = bf(gate @ row), bf(up @ row)
            hidden = bf(bf(g / (1 + np.exp(-g))) * u)
            total = total + np.float64(weight) * bf(down @ hidden)
        want[token] = bf(np.float32(total))
    scale = np.abs(want).max()
    assert (got == want).mean() > 0.98  # float32 sums in another order
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-9 * scale)
    exact = np.asarray(rows, np.float64) @ np.asarray(layer.router.kernel.get_value(), np.float64).T
    exact = exact.astype(np.float32)
    np.testing.assert_array_equal(experts, np.argsort(-exact, axis=1, kind="stable")[:, :k])


def test_packing_puts_each_choice_beside_its_token():
    def routed(prompt, tokens, start):
        fed = len(prompt) + len(tokens) - 1
        experts = start + np.arange(fed * 4, dtype=np.int16).reshape(fed, 2, 2)
        return completion(tokens, prompt=prompt, routed_experts=experts)

    both = (routed((5, 6), (7, 8, 9), 0), routed((5, 6), (4,), 100))
    group = group_of(both)
    packed = pack([group], [[1.0, 1.0]], row_len=10)
    routed = packed.batch.routed_experts
    assert routed.shape == (1, 10, 2, 2)
    assert routed.dtype == np.int16
    for segment, one in zip(packed.segments, both, strict=True):
        end = segment.start + segment.prompt_len + segment.response_len
        np.testing.assert_array_equal(routed[0, segment.start : end - 1], one.routed_experts)
        assert (routed[0, end - 1] == -1).all(), "the last token is drawn, not fed"
    assert (routed[0, 8:] == -1).all()
    plain = dataclasses.replace(group, completions=tuple(dataclasses.replace(c, routed_experts=None) for c in both))
    assert pack([plain], [[1.0, 1.0]], row_len=10).batch.routed_experts is None
