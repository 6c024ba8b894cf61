# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""AxisRules, fallbacks, and: a mesh changes no number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from qarl_jax.models import (
    ModelConfig,
    MoEConfig,
    abstract_model,
    by_path,
    merge,
    parse_rules,
    quantize_params,
    random_model,
    split,
)
from qarl_jax.runtime.mesh import (
    MESH_AXES,
    AxisRules,
    batch_sharding,
    constrain,
    make_mesh,
    named_sharding,
    param_shardings,
)
from qarl_jax.types import UserError

DENSE = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=67,  # divisible by no mesh: the embedding stays whole
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    tie_embeddings=True,
    qk_norm=True,
    initializer_range=0.2,
)
MOE = dataclasses.replace(
    DENSE,
    architecture="Qwen3MoeForCausalLM",
    vocab_size=64,
    tie_embeddings=False,
    moe=MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True),
    moe_layers=(0, 1),
)
MESHES = {
    "fsdp8": {"fsdp": 8},
    "tensor8": {"tensor": 8},
    "fsdp2-tensor4": {"fsdp": 2, "tensor": 4},
    "expert4": {"expert": 4},
    "fsdp2-expert4": {"fsdp": 2, "expert": 4},
    "data2-fsdp2-tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def test_logical_axes_map_to_mesh_axes():
    assert AxisRules().spec(("layers", "heads", "embed")) == P(None, ("fsdp", "tensor"), None)
    assert AxisRules().spec(("layers", "expert", "mlp", "embed")) == P(None, ("expert",), ("fsdp", "tensor"), None)


def test_a_collision_names_the_parameter_and_both_axes():
    rules = AxisRules(expert=("tensor",))
    with pytest.raises(UserError, match=r"moe\.gate.*'expert' and 'mlp'.*'tensor'"):
        rules.spec(("layers", "expert", "mlp", "embed"), "moe.gate.kernel")


def test_an_unknown_logical_axis_names_the_parameter():
    with pytest.raises(UserError, match=r"attn\.q.*'width'"):
        AxisRules().spec(("width",), "attn.q")


def test_a_dimension_that_does_not_divide_stays_whole():
    mesh = make_mesh(fsdp=2, tensor=4)
    assert named_sharding(("heads", "embed"), (64, 24), mesh).spec == P(("fsdp", "tensor"), None)
    assert named_sharding(("heads", "embed"), (12, 24), mesh).spec == P(None, None)


def test_mesh_errors_say_what_is_wrong():
    with pytest.raises(UserError, match="needs 16 devices, but there are 8"):
        make_mesh(fsdp=16)
    with pytest.raises(UserError, match=r"mesh\.tensor is 0"):
        make_mesh(tensor=0)
    with pytest.raises(UserError, match="only one axis may be -1"):
        make_mesh(data=-1, fsdp=-1)
    assert make_mesh(fsdp=-1, tensor=2).shape == {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1}
    assert make_mesh().axis_names == MESH_AXES


def test_every_kernel_is_sharded_on_its_outputs_alone_and_qtensors_lie_like_masters():
    mesh = make_mesh(fsdp=2, tensor=4)
    config = dataclasses.replace(DENSE, quant=parse_rules("w4a16:g32"))
    model = abstract_model(config)
    specs = {path: sharding.spec for path, sharding in by_path(param_shardings(split(model)[1], mesh)).items()}
    assert specs["stacks.0.attn.q.kernel"] == P(None, ("fsdp", "tensor"), None)
    assert specs["stacks.0.mlp.down.kernel"] == P(None, ("fsdp", "tensor"), None)
    assert specs["stacks.0.attn_norm.weight"] == P(None, None)
    assert specs["embed.kernel"] == P(None, None)  # 67 rows
    for path, qtensor in by_path(param_shardings(split(model)[2], mesh)).items():
        assert qtensor.codes.spec == specs[path], path
        assert qtensor.scales.spec == specs[path], path


def test_optimizer_state_lies_like_the_parameters_it_belongs_to():
    mesh = make_mesh(fsdp=8)
    params = split(abstract_model(MOE))[1]
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    shardings = param_shardings(state, mesh)
    wanted = by_path(param_shardings(params, mesh))
    found = by_path(shardings[0].mu)
    assert {path: s.spec for path, s in found.items()} == {path: s.spec for path, s in wanted.items()}
    assert shardings[0].count.spec == P()


def test_constrain_without_a_mesh_is_the_identity():
    x = jnp.ones((3, 4))
    assert constrain(x, "batch", "tensor") is x


@functools.partial(jax.jit, static_argnums=0)
def step(graphdef, params, tokens):
    """Loss, logits and gradient through freshly quantized weights."""
    qweights = quantize_params(graphdef, params)

    def loss(params):
        logits = merge(graphdef, params, qweights)(tokens)
        return jnp.square(jax.nn.log_softmax(logits)).mean(), logits

    (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, logits, grads, qweights


@functools.lru_cache
def single_device(config):
    graphdef, params, _ = split(random_model(config, 1))
    tokens = np.random.default_rng(0).integers(0, 64, (8, 6)).astype(np.int32)
    return graphdef, params, tokens, jax.device_get(step(graphdef, params, tokens))


def compare(config, mesh_name, tol):
    graphdef, params, tokens, wanted = single_device(config)
    mesh = make_mesh(**MESHES[mesh_name])
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, param_shardings(params, mesh))
        found = jax.device_get(step(graphdef, placed, jax.device_put(tokens, batch_sharding(mesh))))
    for a, b in zip(jax.tree.leaves(found[3]), jax.tree.leaves(wanted[3]), strict=True):
        np.testing.assert_array_equal(a, b)  # QTensors: bit-equal
    scale = np.abs(wanted[1]).max()
    assert np.abs(found[1] - wanted[1]).max() < tol * scale
    assert found[0] == pytest.approx(wanted[0], rel=tol)
    for (path, a), b in zip(jax.tree.leaves_with_path(found[2]), jax.tree.leaves(wanted[2]), strict=True):
        # Gradients sum over the batch in another order.
        assert np.abs(a - b).max() < 10 * tol * np.abs(b).max(), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["fsdp2-tensor4", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("fsdp8", "tensor8"))]
)
def test_dense_logits_and_gradients_on_a_mesh_equal_one_device(mesh):
    compare(DENSE, mesh, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=pytest.mark.nightly) for m in ("expert4", "fsdp2-tensor4", "fsdp2-expert4")]
)
def test_moe_logits_and_gradients_on_a_mesh_equal_one_device(mesh):
    compare(MOE, mesh, 1e-5)


@pytest.mark.nightly
def test_w4a16_logits_and_gradients_on_a_mesh_equal_one_device():
    compare(dataclasses.replace(DENSE, quant=parse_rules("w4a16:g32")), "data2-fsdp2-tensor2", 1e-5)


@pytest.mark.nightly
def test_w8a8_loss_on_a_mesh_equals_one_device():
    graphdef, params, tokens, wanted = single_device(dataclasses.replace(DENSE, quant=parse_rules("w8a8")))
    mesh = make_mesh(**MESHES["data2-fsdp2-tensor2"])
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, param_shardings(params, mesh))
        found = jax.device_get(step(graphdef, placed, jax.device_put(tokens, batch_sharding(mesh))))
    for a, b in zip(jax.tree.leaves(found[3]), jax.tree.leaves(wanted[3]), strict=True):
        np.testing.assert_array_equal(a, b)
    # An activation code flips where float32 noise moves a value over a rounding edge: single logits may move, few do.
    assert found[0] == pytest.approx(wanted[0], rel=1e-3)
    assert np.median(np.abs(found[1] - wanted[1])) < 1e-5 * np.abs(wanted[1]).max()
