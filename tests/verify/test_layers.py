# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear layers and blocks against an engine: here the engine is the learner itself, written down layer by layer."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from qarl_bridge.protocol import messages

from qarl_jax import models
from qarl_jax.models.attention import attention
from qarl_jax.models.layers import rope_table
from qarl_jax.verify import layers
from tests.reference import tiny_policies

pytestmark = pytest.mark.usefixtures("compiled_programs")
TOKENS = 6


def test_the_difference_of_two_outputs_by_hand():
    # 1.0 and 1.0078125 are neighbours in bfloat16 (2^-7 apart); 2.0 and 2.0625 are four steps of 2^-6 apart.
    theirs = np.array([1.0, 2.0, 3.0, 0.0], ml_dtypes.bfloat16)
    mine = np.array([1.0078125, 2.0625, 3.0, 0.0], ml_dtypes.bfloat16)
    d = layers.Difference.of("m", mine, theirs)
    assert (d.equal, d.max_abs, d.max_ulp, d.count) == (0.5, 0.0625, 4.0, 4)
    assert d.relative == pytest.approx(np.hypot(0.0078125, 0.0625) / np.sqrt(14))
    same = layers.Difference.of("m", theirs, theirs)
    assert (same.equal, same.max_abs, same.max_ulp, same.relative) == (1.0, 0.0, 0.0, 0.0)


def test_layers_are_picked_from_both_ends_and_the_middle():
    assert layers.picked_layers(1) == [0]
    assert layers.picked_layers(2) == [0, 1]
    assert layers.picked_layers(36) == [0, 18, 35]


def record(module, inputs, outputs):
    return messages.Recorded(
        module=module,
        inputs=[messages.Array.of(np.asarray(x)) for x in inputs],
        outputs=[messages.Array.of(np.asarray(x)) for x in outputs],
    )


def layer_of(model, number):
    return nnx.merge(*layers._split_layer(model, number))


def engine_records(weights):
    """What an engine that computes as the learner would record, from the modules called one by one (not jitted)."""
    model = models.merge(weights.graphdef, weights.params, weights.qweights)
    config = model.config
    rng = np.random.default_rng(0)
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    rope = rope_table(config, positions)
    linear, blocks = [], []
    for name in layers.linear_names(config):
        _, _, number, own = name.split(".", 3)
        layer = layer_of(model, int(number))
        x, parts = None, []
        for path in layers.LINEARS[own]:
            block, leaf = path.split(".")
            module = getattr(getattr(layer, block), leaf)
            if x is None:
                x = jnp.asarray(rng.normal(size=(TOKENS, module.kernel.get_value().shape[-1])), config.compute_dtype)
            parts.append(module(x))
        linear.append(record(name, [x], [jnp.concatenate(parts, axis=-1)]))
    for name in layers.block_names(config):
        layer = layer_of(model, int(name.rsplit(".", 1)[1]))
        delta, residual = (
            jnp.asarray(rng.normal(size=(1, TOKENS, config.hidden_size)), config.compute_dtype) for _ in range(2)
        )
        first = name.endswith(".0")  # the first block is given no residual
        out = layer(
            delta, jnp.zeros_like(residual) if first else residual, rope,
            lambda q, k, v: (attention(q, k, v, numerics=config.numerics), None),
        )  # fmt: skip
        inputs = [positions[0].astype(jnp.int32), delta[0]] + ([] if first else [residual[0]])
        blocks.append(record(name, inputs, [out[0][0], out[1][0]]))
    return linear, blocks


@pytest.mark.slow
@pytest.mark.parametrize("moe", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_modules_that_compute_the_same_agree_and_one_changed_output_shows(moe):
    weights = tiny_policies.policy("bf16", moe=moe)
    linear, blocks = engine_records(weights)
    assert len(linear) == (4 if moe else 8)  # the experts are compared with their block
    assert len(blocks) == 2
    for records, is_linear in ((linear, True), (blocks, False)):
        found = layers.compare(weights, records, is_linear)
        assert [d.module for d in found] == [r.module for r in records]
        assert max(d.relative for d in found) < 1e-5
        changed = [array.numpy().copy() for array in records[0].outputs]
        changed[0][2, 3] += 1
        bent = record(records[0].module, [array.numpy() for array in records[0].inputs], changed)
        (broken,) = layers.compare(weights, [bent], is_linear)
        assert broken.max_abs > found[0].max_abs + 0.5
        assert broken.relative > 1e-3


def test_one_unequal_output_breaks_the_promise_of_an_aligned_pair_and_others_promise_nothing():
    same = layers.Difference("layer", equal=1.0, max_abs=0.0, max_ulp=0, relative=0.0, count=10_000)
    near = layers.Difference("other", equal=0.9999, max_abs=1e-3, max_ulp=1, relative=1e-6, count=10_000)
    assert layers.judge([same, same], aligned=True)[0] is True
    ok, said = layers.judge([same, near], aligned=True)
    assert ok is False
    assert "99.995% of 20000 outputs equal" in said
    assert layers.judge([same, near], aligned=False)[0] is None


@pytest.mark.slow
@pytest.mark.parametrize("moe", [False, True])
def test_the_first_block_that_differs_is_named_with_its_token_and_its_own_linear_layers(moe):
    weights = tiny_policies.policy("bf16", moe=moe)
    model = models.merge(weights.graphdef, weights.params, weights.qweights)
    routing = np.random.default_rng(0).permuted(np.tile(np.arange(4, dtype=np.int32), (TOKENS, 2, 1)), axis=2)[..., :2]
    held = {}  # an engine that computes as the learner, to the bit
    for one in (records := engine_records(weights))[1]:
        held[one.module] = list(layers.block_outputs(model, one, routing if moe else None)[0])
    for one in records[0]:
        _, _, number, own = one.module.split(".", 3)
        x = jnp.asarray(one.inputs[0].numpy())
        held[one.module] = [layers._apply_linear(*layers._split_layer(model, int(number)), x, layers.LINEARS[own])]
    inputs = {one.module: [array.numpy() for array in one.inputs] for part in records for one in part}

    def probe(sequence, names):
        found = [record(name, inputs[name], held[name]) for name in names]
        return [*found, record(messages.ROUTING, [], [routing])] if moe else found

    assert layers.first_difference(probe, weights, range(TOKENS)) == ""
    held["model.layers.1"][0] = held["model.layers.1"][0].copy()
    held["model.layers.1"][0][4, 0] = np.nextafter(held["model.layers.1"][0][4, 0], np.float32(9))
    said = f"block 1, from token 4 on (1 of {TOKENS} tokens); of its linear layers"
    assert layers.first_difference(probe, weights, range(TOKENS)) == f"{said} none by itself"
    name = "model.layers.1.self_attn.o_proj"
    held[name] = [np.nextafter(np.asarray(held[name][0]), np.float32(9))]
    assert layers.first_difference(probe, weights, range(TOKENS)) == f"{said} self_attn.o_proj by itself"
