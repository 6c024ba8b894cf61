# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about the rules for each parameter, schedules, stored moments and the update of a master weight."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import TypeCheckError

from qarl_jax.numerics import stochastic
from qarl_jax.optim import build, eight_bit, leafwise, muon
from qarl_jax.optim.build import AdamW, Muon, Schedule
from qarl_jax.optim.eight_bit import LINEAR, SIGNED, UNSIGNED, Blocks
from qarl_jax.types import UserError
from tests.reference.muon import adamw_steps, muon_steps
from tests.reference.optimizing import normal, run, unguarded

FREE = {"clip_norm": None, "weight_decay": 0.0}


# --------------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("path", "ndim", "expected"),
    [
        ("layers.attn.q_proj.kernel", 3, "muon"),
        ("layers.mlp.gate_proj.kernel", 3, "muon"),
        ("stacks.0.moe.experts.down_proj", 4, "muon"),
        ("layers.attn.q_proj.bias", 2, "adamw"),  # stacked over layers, still a bias
        ("layers.attn.q_norm.scale", 2, "adamw"),  # stacked over layers, still a norm
        ("layers.input_layernorm.weight", 2, "adamw"),
        ("final_norm.scale", 1, "adamw"),
        ("embed.embedding", 2, "adamw"),
        ("embed_tokens.weight", 2, "adamw"),
        ("lm_head.kernel", 2, "adamw"),
        ("head.kernel", 2, "adamw"),
        ("layers.moe.router.kernel", 3, "adamw"),
        ("layers.something", 1, "adamw"),
    ],
)
def test_only_matrices_of_the_layers_are_orthogonalised(path, ndim, expected):
    assert build.label(path, ndim) == expected
    assert build.label(tuple(path.split(".")), ndim) == expected


@pytest.mark.slow
def test_labels_see_through_nnx_variables():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up_proj = nnx.Linear(4, 6, rngs=rngs)
            self.norm = nnx.RMSNorm(4, rngs=rngs)

    params = nnx.split(Block(nnx.Rngs(0)))[1]
    named = {build.path_name(p): v for p, v in jax.tree_util.tree_leaves_with_path(build.labels(params))}
    assert named == {"up_proj.kernel": "muon", "up_proj.bias": "adamw", "norm.scale": "adamw"}
    moved = run(Muon(lr=0.1, weight_decay=0.0), params, [params])
    assert jax.tree.structure(moved) == jax.tree.structure(params)


def test_embeddings_under_muon_follow_adamw_and_experts_follow_muon():
    params = {"embed": {"embedding": normal(0, 10, 4)}, "experts": {"up": normal(1, 2, 3, 6, 4)}}
    grads = [jax.tree.map(lambda p, i=i: normal(10 + i, *p.shape), params) for i in range(3)]
    cfg = Muon(lr=0.01, adamw_lr=0.03, clip_norm=None)
    got = run(cfg, params, grads)
    want = adamw_steps(params["embed"]["embedding"], [g["embed"]["embedding"] for g in grads], lr=0.03, b2=0.95)
    np.testing.assert_allclose(got["embed"]["embedding"], want, atol=1e-6)
    want = muon_steps(
        params["experts"]["up"][1, 2], [g["experts"]["up"][1, 2] for g in grads], lr=0.01, weight_decay=0.01
    )
    np.testing.assert_allclose(got["experts"]["up"][1, 2], want, atol=2e-6)


# ---------------------------------------------------------------------------------------------------------------- AdamW


def test_adamw_follows_the_float64_reference_and_spares_norms_and_biases_from_decay():
    params = {"kernel": normal(0, 6, 4), "norm": {"scale": normal(1, 4)}, "bias": normal(2, 6)}
    grads = [jax.tree.map(lambda p, i=i: normal(10 + i, *p.shape), params) for i in range(4)]
    got = run(AdamW(lr=0.01, weight_decay=0.3, clip_norm=None), params, grads)
    for pick, decay in [(lambda t: t["kernel"], 0.3), (lambda t: t["norm"]["scale"], 0.0), (lambda t: t["bias"], 0.0)]:
        want = adamw_steps(pick(params), [pick(g) for g in grads], lr=0.01, weight_decay=decay)
        np.testing.assert_allclose(pick(got), want, atol=1e-6)


def test_adamw_in_float32_is_optax_s_to_the_last_bit(compiled_as_a_run):
    """Policies are known by their hash: their last bits may not change with a rewriting of this optimizer."""
    params = {"kernel": normal(0, 96, 64), "table": normal(1, 33, 64), "bias": normal(2, 64)}
    ours = leafwise.Optimizer(AdamW(lr=0.01, **FREE))
    theirs = optax.chain(optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8), optax.scale_by_learning_rate(0.01))
    results = []
    for tx, update in ((ours, functools.partial(unguarded, ours)), (theirs, theirs.update)):
        state, step = tx.init(params), jax.jit(update)
        for seed in range(5):
            grads = jax.tree.map(lambda p, seed=seed: normal(10 + seed, *p.shape), params)
            with jax.numpy_dtype_promotion("standard"):
                updates, state = step(grads, state, params)
        results.append(updates)
    jax.tree.map(np.testing.assert_array_equal, *results)


# ------------------------------------------------------------------------------------------------------------ schedules


def test_schedules_pass_through_the_hand_computed_points():
    cosine = build.make_schedule(2.0, Schedule(kind="cosine", warmup_updates=4, end_ratio=0.1), total_updates=14)
    assert [float(cosine(t)) for t in (0, 1, 3)] == [0.5, 1.0, 2.0]  # (t + 1) / 4 of the peak
    # Half way through the decay (update 9 of 4..14) the cosine is 0: 2 (0.1 + 0.9 / 2) = 1.1; afterwards 2 * 0.1.
    np.testing.assert_allclose([float(cosine(t)) for t in (4, 9, 14, 99)], [2.0, 1.1, 0.2, 0.2], rtol=1e-6)
    linear = build.make_schedule(1.0, Schedule(kind="linear"), total_updates=10)
    np.testing.assert_allclose([float(linear(t)) for t in (0, 5, 10)], [1.0, 0.5, 0.0], atol=1e-7)
    constant = build.make_schedule(3.0, Schedule())
    assert float(constant(0)) == float(constant(10**6)) == 3.0


def test_schedules_are_traceable_and_float32():
    schedule = build.make_schedule(1.0, Schedule(kind="cosine"), total_updates=7)
    values = jax.jit(jax.vmap(schedule))(jnp.arange(8))
    assert values.dtype == jnp.float32
    assert np.all(np.diff(values) < 0)


def test_the_learning_rate_of_update_n_is_schedule_of_n():
    w, grads = np.zeros((1, 3), np.float32), [{"kernel": np.ones((1, 3), np.float32)}] * 3
    cfg = AdamW(lr=0.1, schedule=Schedule(kind="linear"), **FREE)
    # Constant gradient: Adam's direction is 1, so the weight moves by the lr: 0.1, 0.05, 0.
    np.testing.assert_allclose(run(cfg, {"kernel": w}, grads, total_updates=2)["kernel"], -0.15, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ clipping and applying


def test_gradients_are_clipped_by_their_global_norm_and_the_unclipped_norm_is_reported():
    # |(3, 4)| = 5 clipped to 1 is (0.6, 0.8); under SGD-like AdamW with b1 = b2 = 0 only the sign would show, so look
    # at the first moment: (1 - b1) times the clipped gradient.
    params = {"a": jnp.zeros((1,)), "b": jnp.zeros((1,))}
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    tx = leafwise.Optimizer(AdamW(b1=0.5, clip_norm=1.0))
    _, state, stats = leafwise.update(tx, grads, tx.init(params), params)
    mu = optax.tree.get(state, "mu")
    np.testing.assert_allclose([mu["a"][0], mu["b"][0]], [0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(stats["grad_norm"], 5.0)


@pytest.mark.slow
@pytest.mark.parametrize(("cfg", "bad"), [(Muon(lr=0.1), np.nan), (AdamW(lr=0.1), np.inf)])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported(cfg, bad):
    params = {"kernel": jnp.asarray(normal(0, 4, 3)), "bias": jnp.asarray(normal(1, 4))}
    tx = leafwise.Optimizer(cfg)
    good = jax.tree.map(jnp.ones_like, params)
    params, state, stats = leafwise.update(tx, good, tx.init(params), params)
    assert bool(stats["finite"])
    broken = {**good, "bias": good["bias"].at[2].set(bad)}
    new_params, new_state, stats = jax.jit(lambda g, s, p: leafwise.update(tx, g, s, p))(broken, state, params)
    assert not bool(stats["finite"])
    assert not np.isfinite(stats["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, new_params, params)
    jax.tree.map(np.testing.assert_array_equal, new_state, state)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [Muon(lr=0.1), AdamW(lr=0.1)])
def test_a_bfloat16_master_is_updated_in_float32_and_rounded_once(cfg):
    w = jnp.asarray(normal(0, 2, 6, 4)).astype(jnp.bfloat16)
    g = jnp.asarray(normal(1, 2, 6, 4)).astype(jnp.bfloat16)
    tx = leafwise.Optimizer(cfg)
    state = tx.init({"kernel": w})
    assert {x.dtype for x in jax.tree.leaves(state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
    low, _, _ = leafwise.update(tx, {"kernel": g}, state, {"kernel": w})
    high = run(cfg, {"kernel": w.astype(jnp.float32)}, [{"kernel": g.astype(jnp.float32)}])
    np.testing.assert_array_equal(low["kernel"], high["kernel"].astype(jnp.bfloat16))


@pytest.mark.parametrize("second", ["float32", "bfloat16"])
def test_moments_have_the_configured_dtypes(second):
    params = {"kernel": jnp.zeros((6, 4)), "bias": jnp.zeros((6,))}
    tx = leafwise.Optimizer(Muon(moment_dtype="bfloat16", second_moment_dtype=second))
    state = tx.init(params)
    new_state = jax.eval_shape(lambda s: leafwise.update(tx, params, s, params)[1], state)
    dtypes = {
        build.path_name(path): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(new_state)
        if leaf.ndim
    }
    kinds = {name.split(".")[-2]: dtype for name, dtype in dtypes.items()}
    assert kinds == {"momentum": "bfloat16", "mu": "bfloat16", "nu": second}
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, new_state)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, new_state)


@pytest.mark.parametrize("second", ["float32", "bfloat16", "int8"])
def test_a_bfloat16_first_moment_is_averaged_in_float32_and_rounded_once(second):
    """bfloat16 has no 0.9: its 0.8984 would make every update 1.6 % too short."""
    tx = leafwise.Optimizer(AdamW(b1=0.9, moment_dtype="bfloat16", second_moment_dtype=second, clip_norm=None))
    params, g = {"kernel": jnp.zeros((4, 256))}, jnp.asarray(normal(1, 4, 256))
    first = unguarded(tx, {"kernel": g}, tx.init(params), params)[1]
    before = optax.tree.get(first, "mu")["kernel"]
    after = optax.tree.get(unguarded(tx, {"kernel": g}, first, params)[1], "mu")["kernel"]
    assert before.dtype == after.dtype == jnp.bfloat16
    wanted = 0.9 * np.float64(before) + 0.1 * np.float64(g)
    nearest = np.float64(jnp.asarray(wanted, jnp.float32).astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.float64(after), nearest)


# ------------------------------------------------------------------------------------------------- stochastic rounding


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average():
    x = np.exp(np.random.default_rng(0).normal(size=512)).astype(np.float32)
    low = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = (low.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    seeds = jnp.arange(2000, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    many = np.asarray(jax.vmap(stochastic.round_stochastically, (None, 0))(x, seeds), np.float64)
    assert ((many == low) | (many == high)).all()
    # Share of roundings up: its expectation is p = (x - low) / (high - low), its deviation sqrt(p (1 - p) / 2000).
    p = (x.astype(np.float64) - low) / (high - low)
    error = (many == high).mean(0) - p
    assert np.abs(error).max() < 5 * 0.5 / np.sqrt(2000)
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(2000 * 512)
    # Neighbouring elements are rounded independently: their joint frequency is the product.
    up = (many == high) - p
    assert abs((up[:, 1:] * up[:, :-1]).mean()) < 5 * 0.25 / np.sqrt(2000 * 511)


def test_stochastic_rounding_keeps_what_bfloat16_holds_and_what_is_not_finite():
    x = jnp.array([0.0, -0.0, 1.0, -2.5, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    for seed in range(5):
        out = stochastic.round_stochastically(x, jnp.uint32(seed))
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(x))


def test_a_bfloat16_second_moment_forgets_as_a_float32_one_does():
    """b2 = 0.999 moves an average by a thousandth: rounded to nearest it would stay at its first value for ever."""
    params = {"kernel": jnp.zeros((64, 64))}
    cfg = AdamW(lr=0.0, second_moment_dtype="bfloat16", clip_norm=None)
    tx = leafwise.Optimizer(cfg)
    state = tx.init(params)
    step = jax.jit(lambda s, g: unguarded(tx, {"kernel": jnp.full((64, 64), g)}, s, params)[1])
    state = step(state, jnp.float32(1.0))
    for _ in range(200):
        state = step(state, jnp.float32(0.0))
    nu = np.asarray(optax.tree.get(state, "nu")["kernel"], np.float64)
    # 4,096 independent averages: (1 - 0.999) 0.999^200, to within what their mean may be off.
    assert nu.mean() == pytest.approx(0.001 * 0.999**200, rel=0.01)


def test_second_moments_round_alike_on_every_mesh():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(0, 16, 24)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))
    one, many = (jax.jit(stochastic.round_stochastically)(part, jnp.uint32(7)) for part in (x, placed))
    np.testing.assert_array_equal(one, many)


# ---------------------------------------------------------------------------------------------------------- eight bits

EIGHT = {"moment_dtype": "int8", "second_moment_dtype": "int8"}


def steps(cfg, params, grads_per_step):
    """(parameters, optimizer state) after one donated update per gradient tree."""
    tx = leafwise.Optimizer(cfg)
    params = jax.tree.map(lambda x: jnp.array(x, copy=True), params)
    state = leafwise.init(tx, params)
    step = jax.jit(lambda g, s, p: leafwise.update(tx, g, s, p)[:2], donate_argnums=(1, 2))
    for grads in grads_per_step:
        params, state = step(jax.tree.map(jnp.asarray, grads), state, params)
    return params, state


@pytest.mark.parametrize("config_type", [Muon, AdamW])
def test_matrices_have_moments_in_a_byte_each_and_few_numbers_stay_in_float32(config_type):
    params = {
        "layers": {"kernel": jnp.zeros((3, 6, 300)), "norm": jnp.zeros((3, 300))},
        "embed": jnp.zeros((10, 300)),
        "bias": jnp.zeros((6,)),
    }
    tx = leafwise.Optimizer(config_type(**EIGHT))
    state = tx.init(params)
    new_state = jax.eval_shape(lambda s: leafwise.update(tx, params, s, params)[1], state)
    described = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (state, new_state)]
    assert described[0] == described[1]
    few = {"norm", "bias"}
    for kind, dtype in (("momentum", "int8"), ("mu", "int8"), ("nu", "uint8")):
        leaves = jax.tree.leaves_with_path(state, is_leaf=lambda x: isinstance(x, Blocks))
        found = [x for p, x in leaves if kind in (keys := build.path_name(p).split(".")) and not few & set(keys)]
        assert all(blocks.codes.dtype == dtype and blocks.scale.dtype == jnp.float32 for blocks in found)
        assert len(found) == {Muon: 1, AdamW: 0 if kind == "momentum" else 2}[config_type]
    others = [x for p, x in jax.tree.leaves_with_path(state) if few & set(build.path_name(p).split("."))]
    assert {x.dtype.name for x in others} == {"float32"}
    assert len(others) == 4  # two moments of a norm and of a bias


@pytest.mark.slow
def test_muon_in_eight_bits_is_muon_with_its_momentum_rounded_between_updates():
    w, grads = normal(0, 2, 12, 300), [normal(i, 2, 12, 300) for i in (1, 2)]
    cfg = Muon(lr=0.1, moment_dtype="int8", **FREE)
    once, state = steps(cfg, {"kernel": w}, [{"kernel": grads[0]}])
    # The first update has no rounded momentum behind it.
    exact = run(Muon(lr=0.1, **FREE), {"kernel": w}, [{"kernel": grads[0]}])
    np.testing.assert_allclose(once["kernel"], exact["kernel"], atol=1e-6)
    stored = optax.tree.get(state, "momentum")["kernel"]
    momentum = np.asarray(eight_bit.decode(stored, LINEAR))
    scale = np.repeat(np.asarray(stored.scale), 256, axis=-1)[..., :300]
    assert (np.abs(momentum - 0.05 * grads[0]) <= scale / 254 * (1 + 1e-4)).all()
    twice, _ = steps(cfg, {"kernel": w}, [{"kernel": g} for g in grads])
    u = 0.95 * (0.95 * momentum + 0.05 * grads[1]) + 0.05 * grads[1]
    for number in range(2):
        want = once["kernel"][number] - 0.1 * 0.2 * 300**0.5 * muon.orthogonalize(jnp.asarray(u[number]))
        np.testing.assert_allclose(twice["kernel"][number], want, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("leading", [(), (3,)])
def test_adamw_in_eight_bits_stays_within_what_its_grids_allow(leading):
    w, grads = normal(0, *leading, 12, 300), [normal(i, *leading, 12, 300) for i in (1, 2)]
    b1, b2 = 0.9, 0.95
    trees = [{"kernel": g} for g in grads]
    once, twice = (steps(AdamW(lr=1.0, b1=b1, b2=b2, **EIGHT, **FREE), {"kernel": w}, trees[:n])[0] for n in (1, 2))
    exact = run(AdamW(lr=1.0, b1=b1, b2=b2, **FREE), {"kernel": w}, trees[:1])
    np.testing.assert_allclose(once["kernel"], exact["kernel"], atol=1e-6)  # nothing was stored before it
    # The second direction is (b1 m + (1 - b1) g) / sqrt(b2 v + (1 - b2) g^2), bias corrected: linear in m, monotonic in
    # v, so that it lies between its values at the ends of what m and v may have been rounded to.
    m, v = (1 - b1) * grads[0].astype(np.float64), (1 - b2) * grads[0].astype(np.float64) ** 2
    largest = [np.stack([np.abs(x[..., i : i + 256]).max(-1) for i in (0, 256)], -1) for x in (m, v)]
    floor_m, floor_v = (
        np.repeat(x, 256, -1)[..., :300] * f for x, f in zip(largest, (2.0**-16, 2.0**-24), strict=True)
    )
    off_m, off_v = np.abs(m) * (2**SIGNED.step - 1) + floor_m, v * (2**UNSIGNED.step - 1)
    corners = [
        (b1 * (m + a * off_m) + (1 - b1) * grads[1]) / (1 - b1**2)
        / np.sqrt((b2 * np.maximum(v + b * off_v, floor_v) + (1 - b2) * grads[1].astype(np.float64) ** 2) / (1 - b2**2))
        for a in (-1, 1) for b in (-1, 1)
    ]  # fmt: skip
    moved = np.asarray(once["kernel"], np.float64) - np.asarray(twice["kernel"])
    assert (moved >= np.min(corners, 0) - 1e-5).all()
    assert (moved <= np.max(corners, 0) + 1e-5).all()
    middle = (b1 * m + (1 - b1) * grads[1]) / (1 - b1**2) / np.sqrt(
        (b2 * v + (1 - b2) * grads[1].astype(np.float64) ** 2) / (1 - b2**2)
    )  # fmt: skip
    assert np.abs(moved - middle).max() > 1e-3  # the moments have been rounded
    assert abs((moved - middle).mean()) < 0.01  # and to no side


def test_an_eight_bit_second_moment_forgets_beside_one_that_does_not():
    """Half of a block keeps its square of 1, so that its scale stays; the other half must decay by its codes alone."""
    params = {"kernel": jnp.zeros((64, 256))}
    tx = leafwise.Optimizer(AdamW(lr=0.0, second_moment_dtype="int8", clip_norm=None))
    held = jnp.arange(256) < 128
    step = jax.jit(lambda s, g: unguarded(tx, {"kernel": jnp.broadcast_to(g, (64, 256))}, s, params)[1])
    state = step(tx.init(params), jnp.ones((256,)))
    for _ in range(200):
        state = step(state, held.astype(jnp.float32))
    nu = np.asarray(eight_bit.decode(optax.tree.get(state, "nu")["kernel"], UNSIGNED), np.float64)
    # 8,192 averages each, to within what their mean may be off; the held ones grow as 1 - 0.999^201.
    assert nu[:, 128:].mean() == pytest.approx(0.001 * 0.999**200, rel=0.02)
    assert nu[:, :128].mean() == pytest.approx(1 - 0.999**201, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("config_type", [pytest.param(Muon, marks=pytest.mark.nightly), AdamW])
def test_eight_bit_states_lie_with_their_parameters_and_are_the_same_on_a_mesh(config_type):
    """Blocks of 256: on one device's columns, over several devices', and a short last one."""
    shapes = {"rows": (3, 16, 700), "columns": (8, 2048), "cut": (8, 800), "embed": (16, 300)}
    specs = {"rows": (None, "fsdp"), "columns": (None, "fsdp"), "cut": (None, "fsdp"), "embed": ("fsdp", None)}
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    grads = [{name: normal(10 * i, *shape) for name, shape in shapes.items()} for i in (1, 2, 3)]
    cfg = config_type(lr=0.01, weight_decay=0.0, clip_norm=None, **EIGHT)
    single, state = steps(cfg, params, grads)

    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    places = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}
    sharded = jax.device_put(params, places)
    tx = leafwise.Optimizer(cfg)
    on_mesh = leafwise.init(tx, sharded)
    born = jax.tree.map(lambda x: x.sharding, on_mesh)
    step = jax.jit(lambda g, s, p: leafwise.update(tx, g, s, p)[:2], donate_argnums=(1, 2))
    for g in grads:
        before = jax.tree.leaves(on_mesh)
        sharded, on_mesh = step(jax.device_put(g, places), on_mesh, sharded)
        assert all(x.is_deleted() for x in before)
    for name in shapes:
        np.testing.assert_allclose(sharded[name], single[name], atol=1e-6)
    for a, b in zip(jax.tree.leaves(jax.device_get(on_mesh)), jax.tree.leaves(jax.device_get(state)), strict=True):
        if (
            a.dtype == jnp.float32
        ):  # two programs: a multiplication and an addition are fused in one and not in the other
            np.testing.assert_allclose(a, b, rtol=1e-6)
        else:  # which a code sees where its random number lies between the two
            assert np.abs(a.astype(int) - b).max() <= 1
            assert (a != b).mean() < 1e-3
    jax.tree.map(
        lambda x, where: x.sharding.is_equivalent_to(where, x.ndim) or pytest.fail(str(x.sharding)), on_mesh, born
    )

    kind = "momentum" if config_type is Muon else "nu"
    blocks = optax.tree.get(on_mesh, kind)
    local = {
        name: jax.tree.map(lambda x: x.addressable_shards[0].data.shape, blocks[name])
        for name in ("rows", "columns", "cut")
    }
    assert local == {
        "rows": Blocks(codes=(3, 2, 700), scale=(3, 2, 3)),
        "columns": Blocks(codes=(8, 256), scale=(8, 1)),
        "cut": Blocks(codes=(8, 100), scale=(8, 4)),  # its blocks lie across devices
    }


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_leaves_eight_bit_states_as_they_are():
    params = {"kernel": jnp.asarray(normal(0, 4, 300))}
    tx = leafwise.Optimizer(AdamW(lr=0.1, **EIGHT))
    params, state, _ = leafwise.update(tx, params, tx.init(params), params)
    broken = {"kernel": params["kernel"].at[2, 7].set(jnp.nan)}
    after, new_state, stats = leafwise.update(tx, broken, state, params)
    assert not bool(stats["moved"])
    jax.tree.map(np.testing.assert_array_equal, (after, new_state), (params, state))


def test_a_zero_gradient_changes_nothing_and_is_reported():
    params = {"kernel": jnp.asarray(normal(0, 4, 3))}
    tx = leafwise.Optimizer(Muon(lr=0.1))
    params, state, stats = leafwise.update(tx, params, tx.init(params), params)
    assert bool(stats["moved"])
    after, new_state, stats = leafwise.update(tx, jax.tree.map(jnp.zeros_like, params), state, params)
    assert (bool(stats["moved"]), bool(stats["finite"]), float(stats["update_norm"])) == (False, True, 0.0)
    jax.tree.map(np.testing.assert_array_equal, (after, new_state), (params, state))


# ------------------------------------------------------------------------------------------------------------- sharding


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg", [Muon(lr=0.02), pytest.param(AdamW(lr=0.02), marks=pytest.mark.nightly)], ids=["muon", "adamw"]
)
def test_weights_sharded_on_their_outputs_follow_the_single_device_run(cfg):
    params = {
        "layers": {"kernel": normal(0, 3, 32, 12), "norm": normal(2, 3, 12)},
        "experts": normal(3, 2, 2, 8, 16),  # wide, where the layers are tall
        "embed": normal(4, 16, 12),
    }
    grads = [jax.tree.map(lambda p, i=i: normal(20 + i, *p.shape), params) for i in range(2)]
    single = run(cfg, params, grads)

    mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    outputs = ("fsdp", "tensor")
    specs = {
        "layers": {
            "kernel": PartitionSpec(None, outputs, None),
            "norm": PartitionSpec(),
        },
        "experts": PartitionSpec(None, None, outputs, None),
        "embed": PartitionSpec(outputs, None),
    }

    def place(tree):
        return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)

    tx = leafwise.Optimizer(cfg)
    sharded = place(params)
    state = leafwise.init(tx, sharded)
    step = jax.jit(lambda g, s, p: leafwise.update(tx, g, s, p), donate_argnums=(1, 2))
    for g in grads:
        sharded, state, _ = step(place(g), state, sharded)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sharded, single)
    moments = optax.tree.get(state, "momentum" if isinstance(cfg, Muon) else "mu")
    kernel = moments["layers"]["kernel"]
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, specs["layers"]["kernel"]), kernel.ndim)


def test_optimizer_state_is_born_in_its_parameter_s_sharding():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    on_outputs = NamedSharding(mesh, PartitionSpec(None, "fsdp", None))
    params = {"layers": {"kernel": jax.device_put(normal(0, 2, 16, 4), on_outputs)}}
    state = leafwise.init(leafwise.Optimizer(Muon()), params)
    momentum = optax.tree.get(state, "momentum")["layers"]["kernel"]
    assert momentum.sharding == on_outputs
    counters = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 0]
    assert counters
    assert all(c.sharding.is_fully_replicated for c in counters)


# --------------------------------------------------------------------------------------------------------------- config


@pytest.mark.slow
@pytest.mark.parametrize("config_type", build.OPTIMIZERS.values(), ids=build.OPTIMIZERS.keys())
def test_every_optimizer_descends_a_quadratic_and_accepts_an_abstract_tree(config_type):
    target = {"layers": {"kernel": normal(0, 2, 6, 4)}, "norm": normal(1, 4)}
    params = jax.tree.map(jnp.zeros_like, target)
    cfg = config_type(lr=0.1, weight_decay=0.0)
    tx = leafwise.Optimizer(cfg)
    abstract = jax.eval_shape(tx.init, jax.eval_shape(lambda: params))
    assert jax.tree.structure(abstract) == jax.tree.structure(tx.init(params))

    def distance(p):
        return sum(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.sum((a - b) ** 2)), p, target)))

    state = tx.init(params)
    before = distance(params)
    step = jax.jit(lambda s, p: leafwise.update(tx, jax.tree.map(jnp.subtract, p, target), s, p))
    for _ in range(100):
        params, state, _ = step(state, params)
    assert distance(params) < 0.1 * before
    assert hash(cfg) == hash(dataclasses.replace(cfg))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Muon(momentum=1.0), "^momentum must"),
        (lambda: AdamW(lr=-1.0), "^lr must"),
        (lambda: AdamW(lr=math.nan), "^lr must"),
        (lambda: AdamW(clip_norm=0.0), "clip_norm"),
        (lambda: AdamW(b2=1.0), "^b2 must"),
        (lambda: AdamW(eps=0.0), "^eps must be positive, got 0.0"),
        (lambda: build.make_schedule(1.0, Schedule(kind="linear")), "number of updates"),
        (lambda: build.make_schedule(1.0, Schedule(kind="linear", warmup_updates=9), 9), "warmup_updates"),
    ],
)
def test_impossible_settings_are_refused_with_the_field_s_name(make, says):
    with pytest.raises(UserError, match=says):
        make()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AdamW(moment_dtype="float16"), "'?float32'?, '?bfloat16'?, '?int8'?"),
        (lambda: Muon(second_moment_dtype="int4"), "'?float32'?, '?bfloat16'?, '?int8'?"),
        (lambda: Schedule(kind="cosin"), "'?constant'?, '?linear'?, '?cosine'?"),
    ],
)
def test_a_misspelt_choice_is_refused_with_the_choices(make, says):
    # Where annotations are checked (--jaxtyping-packages), a wrong Literal is caught before our sentence.
    with pytest.raises((UserError, TypeCheckError), match=says):
        make()


# ---- bfloat16 masters -----------------------------------------------------------------------------------------------


def moved_masters(rounding, updates, dtype="bfloat16", lr=1e-6):
    """(weights before, and after so many updates by AdamW of the sign of each), [64, 512] of a model's size."""
    optimizer = leafwise.Optimizer(AdamW(lr=lr, weight_decay=0.0, clip_norm=None, master_rounding=rounding), 1000)
    params = {"w": (0.02 * jax.random.normal(jax.random.key(0), (64, 512))).astype(dtype)}
    state, step = leafwise.init(optimizer, params), jax.jit(functools.partial(leafwise.update, optimizer))
    grads, first = {"w": jnp.ones((64, 512))}, params["w"]
    for _ in range(updates):
        params, state, _ = step(grads, state, params)
    return np.float64(first), np.float64(params["w"])


def test_bfloat16_masters_stand_still_rounded_to_nearest_and_move_by_the_update_in_the_mean_stochastically():
    before, nearest = moved_masters("nearest", 50)
    assert (nearest != before).mean() < 0.05  # only those near zero
    before, after = moved_masters("stochastic", 50)
    changes = after - before
    # Each of 50 updates is -1e-6, of an expected total of -5e-5; its error is a Bernoulli variable's.
    error = changes.std() / np.sqrt(changes.size)
    assert abs(changes.mean() + 5e-5) < 4 * error
    assert error < 2.5e-6
    _, again = moved_masters("stochastic", 50)
    np.testing.assert_array_equal(after, again)


def test_float32_masters_are_not_rounded():
    _, plain = moved_masters("nearest", 3, "float32")
    _, asked = moved_masters("stochastic", 3, "float32")
    np.testing.assert_array_equal(plain, asked)


def test_a_resumed_run_rounds_its_masters_alike_and_every_update_otherwise():
    optimizer = leafwise.Optimizer(AdamW(lr=1e-4, master_rounding="stochastic"), 10)
    step = jax.jit(functools.partial(leafwise.update, optimizer))
    params = {"a": jnp.full((32, 64), 0.02, jnp.bfloat16), "b": jnp.full((32, 64), 0.02, jnp.bfloat16)}
    state, grads = leafwise.init(optimizer, params), jax.tree.map(lambda p: jnp.ones(p.shape), params)
    states = [(params, state)]
    for _ in range(4):
        params, state, _ = step(grads, state, params)
        states.append((params, state))
    saved = jax.tree.map(jnp.asarray, jax.device_get(states[2]))
    for wanted, _ in states[3:]:
        *saved, _ = step(grads, saved[1], saved[0])
        jax.tree.map(np.testing.assert_array_equal, saved[0], wanted)
    first = states[1][0]
    assert (np.asarray(first["a"]) != np.asarray(first["b"])).mean() > 0.05  # leaves have bits of their own
