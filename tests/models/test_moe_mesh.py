# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An MoE model on a mesh: each device sorts its own tokens, the bits are one device's, the wire is low-bit."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qarl_jax import models, quant
from qarl_jax.kernels import experts_triton
from qarl_jax.models.layers import Quantized
from qarl_jax.models.moe import MoE
from qarl_jax.runtime.mesh import batch_sharding, constrain, make_mesh, param_shardings

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices"),
    pytest.mark.usefixtures("compiled_programs"),  # the nightly cases are compiled as a run
]
B, T, D, F, E, K = 8, 10, 64, 96, 4, 2
COPIES = B * T * K
CONFIG = models.ModelConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=64,
    hidden_size=D,
    intermediate_size=F,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_embeddings=False,
    qk_norm=True,
    initializer_range=0.2,
    moe=models.MoEConfig(num_experts=E, num_experts_per_tok=K, intermediate_size=F, norm_topk_prob=True),
    moe_layers=(0, 1),
)
MESHES = {
    "data2-fsdp2-expert2": {"data": 2, "fsdp": 2, "expert": 2},
    "data2-expert4": {"data": 2, "expert": 4},
    "fsdp2-tensor2-expert2": {"fsdp": 2, "tensor": 2, "expert": 2},
    "fsdp3-expert2": {"fsdp": 3, "expert": 2},  # divides no rows
    "data2-expert3": {"data": 2, "expert": 3},  # divides no experts
    "tensor3-expert2": {"tensor": 3, "expert": 2},  # divides F, not D
}


@functools.lru_cache
def block(scheme, dtype):
    """An MoE model: its structure, masters, QTensors."""
    moe = MoE(config=dataclasses.replace(CONFIG, compute_dtype=dtype), rngs=nnx.Rngs(0), stack={})
    config = quant.parse_scheme(scheme)
    for linear in (moe.gate, moe.up, moe.down) if config else ():
        qtensor = quant.quantize(linear.kernel.get_value(), config)
        linear.quantized = Quantized(qtensor, axes=linear.kernel.get_metadata()["axes"])
    return nnx.split(moe, nnx.Param, Quantized)


@functools.lru_cache
def data(dtype):
    """Activations, a cotangent, and experts to send some tokens to."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(B, T, D)), dtype) for _ in range(2))
    routed = np.argsort(rng.random((B, T, E)))[..., :K].astype(np.int16)
    return x, dy, jnp.asarray(np.where(rng.random((B, T, 1)) < 0.5, routed, -1))


@functools.partial(jax.jit, static_argnums=0)
def forward(structure, params, qweights, x, routed):
    return nnx.merge(structure, params, qweights)(constrain(x, "batch", None, None), routed)


@functools.partial(jax.jit, static_argnums=0)
def backward(structure, params, qweights, x, dy):
    return jax.vjp(lambda params, x: forward(structure, params, qweights, x, None), params, x)[1](dy)


def on_mesh(function, sizes, structure, params, qweights, *rest):
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        params, qweights = (jax.device_put(tree, param_shardings(tree, mesh)) for tree in (params, qweights))
        return jax.device_get(function(structure, params, qweights, *rest))


SPREAD = ["data2-fsdp2-expert2", "data2-expert4", "fsdp3-expert2", "data2-expert3"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "mesh"),
    [*(pytest.param("bf16", mesh, marks=pytest.mark.nightly) for mesh in SPREAD), ("w4a16:g32", "data2-fsdp2-expert2")],
)
def test_no_bit_depends_on_how_tokens_and_experts_are_spread(scheme, mesh):
    state, (x, _, _) = block(scheme, "bfloat16"), data("bfloat16")
    want = jax.device_get(forward(*state, x, None))
    np.testing.assert_array_equal(on_mesh(forward, MESHES[mesh], *state, x, None), want)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SPREAD[:1])
def test_nor_does_a_float32_output_but_for_its_last_bits(mesh):
    """Which a CPU's vectors decide: without AVX the end of a row of numbers is computed otherwise than its middle."""
    state, (x, _, _) = block("bf16", "float32"), data("float32")
    want = jax.device_get(forward(*state, x, None))
    np.testing.assert_allclose(on_mesh(forward, MESHES[mesh], *state, x, None), want, atol=1e-6 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp2-tensor2-expert2", pytest.param("tensor3-expert2", marks=pytest.mark.nightly)])
def test_nor_on_how_features_are_where_sums_are_exact(mesh):
    """int8. A CPU's float products may add in another order where a device has fewer outputs, as in dense layers."""
    state, (x, _, routed) = block("w8a8", "bfloat16"), data("bfloat16")
    want = jax.device_get(forward(*state, x, routed))
    np.testing.assert_array_equal(on_mesh(forward, MESHES[mesh], *state, x, routed), want)
    assert (want != jax.device_get(forward(*state, x, None))).any(), "the replayed experts are others"


def changed(state, change):
    """The layer after `change` of a copy of it."""
    moe = nnx.merge(*jax.tree.map(jnp.asarray, state))
    change(moe)
    return nnx.split(moe, nnx.Param, Quantized)


def part_of(shard, shards):
    """Leaves a layer an engine shard's inner features of every expert: rows of gate and up, columns of down."""

    def change(moe):
        for linear, axis in ((moe.gate, -2), (moe.up, -2), (moe.down, -1)):

            def own(a, axis=axis):
                each = a.shape[axis] // shards  # 0: a scale of all inputs
                return jax.lax.slice_in_dim(a, shard * each, (shard + 1) * each, axis=axis) if each else a

            for held in (linear.kernel, linear.quantized):
                if held is not None:
                    held.set_value(jax.tree.map(own, held.get_value()))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "shards"),
    [("w8a8", 2), *(pytest.param(s, 3, marks=pytest.mark.nightly) for s in ("bf16", "w8a8", "w4a16:g32"))],
)
def test_each_engine_shard_rounds_the_weighted_sum_of_its_own_inner_features(scheme, shards):
    """They are added by rank, in float32, and rounded once. A mesh changes no bit, and masters learn in all parts."""
    state, (x, dy, routed) = block(scheme, "bfloat16"), data("bfloat16")
    parts = [forward(*changed(state, part_of(shard, shards)), x, routed) for shard in range(shards)]
    want = functools.reduce(np.add, (np.asarray(part, np.float32) for part in parts)).astype(jnp.bfloat16)
    sharded = changed(state, lambda moe: setattr(moe, "numerics", dataclasses.replace(moe.numerics, shards=shards)))
    got = jax.device_get(forward(*sharded, x, routed))
    np.testing.assert_array_equal(got, want)
    assert (got != jax.device_get(forward(*state, x, routed))).any()
    np.testing.assert_array_equal(on_mesh(forward, MESHES["data2-fsdp2-expert2"], *sharded, x, routed), got)
    gradients, alone = (jax.device_get(backward(*one, x, dy)) for one in (sharded, state))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(alone), strict=True):
        a, b = (np.asarray(leaf, np.float32) for leaf in (a, b))
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)  # but for roundings: straight through


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp2-tensor2-expert2",
        *(
            pytest.param(mesh, marks=pytest.mark.nightly)
            for mesh in ("data2-fsdp2-expert2", "fsdp3-expert2", "data2-expert3", "tensor3-expert2")
        ),
    ],
)
def test_gradients_on_a_mesh_equal_one_device(mesh):
    state, (x, dy, _) = block("bf16", "float32"), data("float32")
    want = jax.device_get(backward(*state, x, dy))
    got = on_mesh(backward, MESHES[mesh], *state, x, dy)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() < 1e-6 * np.abs(b).max(), path


def program(scheme, sizes, gradient):
    """A model whose layers are scanned, or its gradient, compiled for a mesh; and its abstract QTensors."""
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16", remat="dots", quant=models.parse_rules(scheme))
    structure, params, qweights = models.split(models.abstract_model(config))
    mesh = make_mesh(**sizes)

    def placed(tree):
        places = param_shardings(tree, mesh)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, places)

    def loss(params, qweights, tokens):
        return jnp.square(models.merge(structure, params, qweights)(tokens)).mean()

    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=batch_sharding(mesh))
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss) if gradient else loss).lower(placed(params), placed(qweights), tokens)
        return lowered.compile().as_text(), models.by_path(qweights)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "passes"), [pytest.param("w8a8", 2, marks=pytest.mark.nightly), ("w4a16:g32", 1)])
def test_a_device_has_its_own_tokens_copies_and_gathers_its_own_experts_codes(scheme, passes):
    """passes: the forward, and the backward, which recomputes."""
    text, qweights = program(scheme, MESHES["data2-fsdp2-expert2"], gradient=passes == 2)
    # All operands and results of a compiled program are one device's: 4 ways to cut the rows.
    assert re.search(rf"\[(\d+,)*{COPIES // 4}[,\]]", text)
    assert not re.search(rf"\[(\d+,)*{COPIES}[,\]]", text)
    gathers = [
        (dtype, math.prod(map(int, dims.split(","))))
        for dtype, dims in re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    ]
    # Per layer; of the experts half.
    codes = sum(q.codes.size // 2 // (2 if ".moe." in path else 1) for path, q in qweights.items())
    assert sum(n for dtype, n in gathers if dtype in ("s8", "s32") and n > B * T) == passes * codes
    # What is gathered as floats are scales and activations: never as many numbers as one device's part of a projection.
    assert max(n for dtype, n in gathers if dtype not in ("s8", "s32")) < E // 2 * F * D // 2


@pytest.mark.slow
def test_a_gpu_mesh_has_the_grouped_kernels_forward_and_backward():
    state = block("w8a8", "bfloat16")
    like = jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16)
    with jax.set_mesh(make_mesh(**MESHES["data2-fsdp2-expert2"])):
        assert not experts_triton.serves(like)
        text = backward.trace(*state, like, like).lower(lowering_platforms=("cuda",)).as_text()
    local = COPIES // 4
    products = re.findall(r"triton.*name = \\?\"?grouped_(\w+).*-> tensor<([\dx]+)x\w+>", text)
    assert ("product", f"{local}x{F}") in products
    assert ("gradient", f"{E // 2}x{F}x{D}") in products
