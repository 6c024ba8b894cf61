# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about Muon's iteration and the directions it gives to stacks of matrices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qarl_jax.optim import eight_bit, leafwise, muon
from qarl_jax.optim.build import Muon
from qarl_jax.runtime.mesh import make_mesh
from tests.reference.muon import muon_steps, newton_schulz
from tests.reference.optimizing import normal, run


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24), (1, 7), (7, 1)])
def test_orthogonalize_keeps_singular_vectors_and_sends_singular_values_near_one(shape):
    u = normal(0, *shape) * 1e-3
    x = np.asarray(muon.orthogonalize(jnp.asarray(u)))
    np.testing.assert_allclose(x, newton_schulz(u), atol=2e-5)
    # A square Gaussian matrix has one tiny singular value, for which five rounds are too few; the others are near 1.
    sigma = np.linalg.svd(x, compute_uv=False)
    assert sigma.max() < 1.25
    assert np.median(sigma) > 0.65


def test_orthogonalize_does_not_depend_on_the_gradient_s_size_or_orientation():
    u = jnp.asarray(normal(1, 12, 20))
    x = muon.orthogonalize(u)
    np.testing.assert_allclose(muon.orthogonalize(1e-4 * u), x, atol=1e-4)
    np.testing.assert_allclose(muon.orthogonalize(u.T), x.T, atol=1e-6)


def test_a_zero_gradient_gives_a_zero_direction():
    np.testing.assert_array_equal(muon.orthogonalize(jnp.zeros((5, 3))), np.zeros((5, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leading", "nesterov"),
    [((), True), ((3,), False), ((2, 2), True)],
)
def test_every_stacked_matrix_follows_the_float64_reference_on_its_own(leading, nesterov):
    w, grads = normal(0, *leading, 12, 8), [normal(i, *leading, 12, 8) for i in (1, 2, 3)]
    cfg = Muon(lr=0.02, weight_decay=0.1, clip_norm=None, nesterov=nesterov)
    got = np.asarray(run(cfg, {"kernel": w}, [{"kernel": g} for g in grads])["kernel"])
    for index in np.ndindex(*leading):
        want = muon_steps(w[index], [g[index] for g in grads], lr=0.02, weight_decay=0.1, nesterov=nesterov)
        np.testing.assert_allclose(got[index], want, atol=2e-6)


@pytest.mark.slow
def test_without_nesterov_each_matrix_moves_as_under_optax_muon():
    # optax corrects the momentum's bias, which Newton-Schulz cannot see unless Nesterov mixes in the gradient.
    # It reads a kernel as [in, out], we as [out, in]: its output axis is our first.
    shapes = {"tall": (12, 8), "wide": (8, 12)}
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    grads = [jax.tree.map(lambda p, i=i: jnp.asarray(normal(10 + i, *p.shape)), params) for i in range(3)]
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    tx = optax.contrib.muon(
        0.02,
        nesterov=False,
        weight_decay=0.1,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dict.fromkeys(shapes, axes),
    )
    want = jax.tree.map(jnp.asarray, params)
    state = tx.init(want)

    @jax.jit
    def step(g, state, want):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(g, state, want)
            return state, optax.apply_updates(want, updates)

    for g in grads:
        state, want = step(g, state, want)
    cfg = Muon(lr=0.02, weight_decay=0.1, clip_norm=None, nesterov=False)
    got = run(cfg, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), got, want)


def test_matched_updates_have_the_rms_of_an_adamw_update():
    # 0.2 sqrt(max) times an orthogonal matrix: RMS 0.2 lr; Newton-Schulz leaves singular values a little under 1.
    shapes = {"square": (64, 64), "tall": (96, 32), "wide": (32, 128)}
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    moved = run(
        Muon(lr=1.0, clip_norm=None, weight_decay=0.0),
        zeros,
        [{name: normal(1, *shape) for name, shape in shapes.items()}],
    )
    for w in moved.values():
        assert 0.15 < float(jnp.sqrt(jnp.mean(w**2))) < 0.22


def test_products_of_bfloat16_move_the_direction_by_a_few_percent():
    u = jnp.asarray(normal(7, 48, 80))
    exact = muon.orthogonalize(u)
    rounded = muon.orthogonalize(u, precision="bfloat16")
    assert rounded.dtype == jnp.float32
    assert 1e-3 < float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact)) < 0.03
    sigma = np.linalg.svd(np.asarray(rounded), compute_uv=False)
    assert sigma.min() > 0.5
    assert sigma.max() < 1.3


def test_by_default_a_gpu_multiplies_in_bfloat16_and_a_cpu_in_float32(monkeypatch):
    u = jnp.asarray(normal(7, 48, 80))
    np.testing.assert_array_equal(
        muon.orthogonalize(u, precision="default"), muon.orthogonalize(u, precision="highest")
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_array_equal(
        muon.orthogonalize(u, precision="default"), muon.orthogonalize(u, precision="bfloat16")
    )


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for sub in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(sub, "jaxpr"):
                    yield from equations(sub.jaxpr)
                elif hasattr(sub, "eqns"):
                    yield from equations(sub)


@pytest.mark.parametrize(("leading", "together"), [((5,), 1), ((6,), 3), ((2, 4), 2), ((2, 3), 3)])
def test_newton_schulz_sees_as_many_matrices_as_it_may(monkeypatch, leading, together):
    monkeypatch.setattr(muon, "TOGETHER", 3 * 12 * 8)  # five and four are no multiples of three
    params = {"kernel": jnp.zeros((*leading, 12, 8))}
    tx = leafwise.Optimizer(Muon())
    jaxpr = jax.make_jaxpr(lambda g, s, p: leafwise.update(tx, g, s, p))(params, tx.init(params), params)
    products = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) == 3 * 5  # three products a round, traced once for the whole stack
    batch = (together,) if together > 1 else ()
    for eqn in products:
        assert all(v.aval.shape[:-2] == batch for v in (*eqn.invars, *eqn.outvars))
    for eqn in equations(jaxpr.jaxpr):  # and no stack of Gram matrices is ever formed
        shapes = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
        assert all(shape[:-2] == batch for shape in shapes if shape[-2:] == (8, 8))


def fresh(grads, dtype="float32"):
    """The momentum of matrices that never moved, as it is stored."""
    return eight_bit.zeros(grads.shape, eight_bit.LINEAR) if dtype == "int8" else jnp.zeros_like(grads, dtype)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_matrices_together_move_as_alone(monkeypatch, dtype):
    grads = jnp.asarray(normal(5, 2, 6, 24, 40))
    stored = fresh(grads, dtype)
    together = jax.jit(muon.step)(grads, stored)
    monkeypatch.setattr(muon, "TOGETHER", 1)
    alone = jax.jit(lambda *args: muon.step(*args))(grads, stored)
    for a, b in zip(jax.tree.leaves(together[0]), jax.tree.leaves(alone[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_newton_schulz_temporaries_are_one_copy_of_the_stack_and_a_few_matrices(monkeypatch):
    monkeypatch.setattr(muon, "TOGETHER", 64 * 64)

    def temporaries(layers):
        grads = jnp.zeros((layers, 64, 64))
        compiled = jax.jit(muon.step, donate_argnums=(1,)).lower(grads, fresh(grads)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    matrix = 64 * 64 * 4
    # The loop returns one stack; a batched iteration would also hold the iterates, their Gram matrices and squares.
    assert temporaries(32) <= (32 + 8) * matrix


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_on_a_mesh_each_device_walks_its_own_experts_and_no_bit_changes(monkeypatch, dtype):
    monkeypatch.setattr(muon, "TOGETHER", 1)  # a device has fewer experts to take together
    grads = jnp.asarray(normal(3, 2, 4, 24, 40))
    stored = fresh(grads, dtype)
    want = jax.jit(muon.step)(grads, stored)
    mesh = make_mesh(fsdp=2, expert=2)
    place = NamedSharding(mesh, PartitionSpec(None, ("expert", "fsdp")))
    spread = jax.tree.map(lambda x: jax.device_put(x, place), (grads, stored))
    with jax.set_mesh(mesh):
        program = jax.jit(muon.step).lower(*spread).compile()
    for a, b in zip(jax.tree.leaves(program(*spread)), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert not re.search("all-gather|all-reduce|all-to-all|collective", program.as_text())
