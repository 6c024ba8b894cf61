# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates: bad gradients move nothing, and one program, the host's memory or a compile ahead change no number."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import models
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loss import get_loss
from qarl_jax.metrics import values
from qarl_jax.optim import build, by_stack, leafwise
from qarl_jax.runtime.mesh import make_mesh
from tests.reference import tiny
from tests.reference.learners import (
    ROWS,
    assert_close,
    assert_same_bits,
    counts_of,
    fresh,
    gradient,
    make,
    packed,
)

nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def moved():
    """(learner, host copy of a state with momentum, where it lies)."""
    made, state = fresh()
    grads = jax.tree.map(lambda x: x + 1e-3, made.zero_grads(state))
    state, metrics = made.apply_update(state, grads)
    assert int(state.updates) == 1
    assert values(metrics)["optim/skipped"] == 0
    return made, jax.tree.map(np.array, jax.device_get(state)), jax.tree.map(lambda x: x.sharding, state)


def again(host, shardings):
    return jax.tree.map(lambda x, where: jax.device_put(jnp.array(x, copy=True), where), host, shardings)


@pytest.mark.slow
def test_a_zero_gradient_leaves_the_whole_state_as_it_is(moved):
    made, host, where = moved
    state, metrics = made.apply_update(again(host, where), made.zero_grads(again(host, where)))
    assert_same_bits(state, host)
    assert (values(metrics)["optim/skipped"], values(metrics)["optim/nonfinite"]) == (1, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_is_detected_and_leaves_the_whole_state_as_it_is(moved, bad):
    made, host, where = moved
    grads = jax.tree.map(lambda x: x + 1e-3, made.zero_grads(again(host, where)))
    leaves, structure = jax.tree.flatten(grads)
    leaves[-1] = jax.device_put(leaves[-1].at[(0,) * leaves[-1].ndim].set(bad), leaves[-1].sharding)
    grads = jax.tree.unflatten(structure, leaves)
    state, metrics = made.apply_update(again(host, where), grads)
    assert_same_bits(state, host)
    assert (values(metrics)["optim/skipped"], values(metrics)["optim/nonfinite"]) == (1, 1)


def test_a_batch_without_responses_has_no_gradient_and_moves_nothing(moved):
    made, host, where = moved
    rows = packed()
    empty = dataclasses.replace(rows.batch, loss_mask=np.zeros_like(rows.batch.loss_mask))
    state = again(host, where)
    old = made.put(rows.batch).rollout_logprobs
    grads, _ = made.accumulate_grads(
        made.zero_grads(state), state.params, made.quantize(state.params), made.put(empty), old, 0, 0
    )
    state, metrics = made.apply_update(state, grads)
    assert_same_bits(state, host)
    assert values(metrics)["optim/skipped"] == 1


@functools.cache
def updated(micro_rows, **options):
    """(state on the host, metrics) after one `update` of w4a16 in bfloat16 compute, `micro_rows` rows at a time."""
    config = dataclasses.replace(tiny.random_model().config, compute_dtype="bfloat16", qkv_bias=True)
    graphdef, params, _ = models.split(models.random_model(config))
    made = Learner(
        models.with_scheme(graphdef, "w4a16:g32"),
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.AdamW(lr=0.01, eps=1e-3)),
        mesh=make_mesh(),
        options=Options(max_segments=6, logprob_chunk=64, **options),
    )
    state, rows = made.init(params), packed()
    micros = [made.put(micro) for micro in rows.micro_batches(micro_rows)]
    state, metrics = made.update(
        state, made.quantize(state.params), micros, [None] * len(micros), rows.num_tokens, rows.num_sequences
    )
    return jax.device_get(state), values(metrics)


@pytest.mark.slow
def test_one_program_for_an_update_gives_the_numbers_of_three():
    made, state = fresh()
    rows, other = packed(), fresh()[1]
    qweights, micro = made.quantize(state.params), made.put(rows.batch)
    counts = rows.num_tokens, rows.num_sequences
    old = made.score(state.params, qweights, micro)[0]
    grads, measured = made.accumulate_grads(made.zero_grads(other), other.params, qweights, micro, old, *counts)
    other, applied = made.apply_update(other, grads)
    state, together = made.update(state, qweights, [micro], [old], *counts)
    assert_close(state, other, 1e-6)
    apart = values(measured | applied)
    assert values(together) == {key: pytest.approx(value, rel=1e-5, abs=1e-7) for key, value in apart.items()}
    assert apart["optim/skipped"] == 0
    assert int(state.updates) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "bound"), [("", 2**14), nightly("fsdp8", 2**14), nightly("", 2**30)])
def test_a_state_on_the_host_gives_the_numbers_of_one_on_the_device(mesh, bound, monkeypatch):
    """In groups, and as one program."""
    monkeypatch.setattr(by_stack, "GROUP_BYTES", bound)
    made, params = make(mesh=mesh)
    chosen = build.Muon(lr=0.02, moment_dtype="int8", second_moment_dtype="int8")
    rows, after = packed(), {}
    for offload in (False, True):
        learner = Learner(
            made.graphdef,
            loss_fn=made.loss_fn,
            optimizer=leafwise.Optimizer(chosen),
            mesh=made.mesh,
            options=dataclasses.replace(made.options, offload=offload),
        )
        state = learner.init(jax.tree.map(lambda x: jnp.array(x, copy=True), params))
        kind = "pinned_host" if offload else "device"
        programs = []
        for _ in range(3):
            assert {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state)} == {kind}
            assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
            before = jax.tree.leaves(state.opt_state)
            micro = learner.put(rows.batch)
            rest = learner.quantize(state.params), micro, None, *learner._counts(*counts_of(rows)), None
            with jax.set_mesh(learner.mesh):
                grads, measured = learner._grads(state.params, *rest)
            state, applied = learner.apply_update(state, grads)
            assert all(x.is_deleted() for x in before)
            walked = [program for group in learner._apply._programs.values() for program in group]
            assert (len(walked) > 1) == (bound < 2**30)
            programs.append([program._cache_size() for program in (learner._apply._whole, *walked)])
        assert programs[2] == programs[1]  # no trip makes another one
        after[offload] = jax.device_get(state), values(measured | applied)
        if offload:  # and `update` takes this way by itself
            again = learner.init(jax.tree.map(lambda x: jnp.array(x, copy=True), params))
            for _ in range(3):
                again, metrics = learner.update(
                    again, learner.quantize(again.params), [learner.put(rows.batch)], [None], *counts_of(rows)
                )
            assert_same_bits(jax.device_get(again), after[True][0])
            assert values(metrics) == after[True][1]
            assert learner._update._cache_size() == 0
    assert_same_bits(after[True][0], after[False][0])
    assert after[True][1] == after[False][1]


@pytest.mark.slow
def test_a_batch_of_nothing_moves_nothing_in_one_program_either(moved):
    made, host, where = moved
    rows = packed()
    batch = made.put(dataclasses.replace(rows.batch, loss_mask=np.zeros_like(rows.batch.loss_mask)))
    state = again(host, where)
    state, metrics = made.update(state, made.quantize(state.params), [batch], [batch.rollout_logprobs], 0, 0)
    assert_same_bits(state, host)
    assert values(metrics)["optim/skipped"] == 1


@pytest.mark.slow
def test_a_bfloat16_gradient_is_the_float32_one_rounded():
    (full, also), (half, metrics) = (updated(ROWS, grad_dtype=dtype) for dtype in ("float32", "bfloat16"))
    # Rounding all masters first changes nothing that is computed; but they are two programs.
    assert metrics["loss/total"] == pytest.approx(also["loss/total"], rel=1e-5, abs=1e-7)
    assert metrics["optim/grad_norm"] == pytest.approx(also["optim/grad_norm"], rel=2**-8)
    # One AdamW step is lr g / (|g| + eps): a relative error of 2^-8 (bfloat16 keeps 8 bits) in g moves it by less.
    for a, b in zip(jax.tree.leaves(half.params), jax.tree.leaves(full.params), strict=True):
        np.testing.assert_allclose(a, b, atol=0.01 * 2**-8)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half.params)} == {"float32"}


@pytest.mark.nightly
def test_a_bfloat16_accumulator_over_two_micro_batches_stays_within_its_rounding():
    one, two = (updated(rows, grad_dtype="bfloat16")[1] for rows in (ROWS, ROWS // 2))
    assert two["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=2**-6)
    assert two["loss/total"] == pytest.approx(one["loss/total"], rel=1e-2, abs=1e-3)


@pytest.mark.slow
def test_an_entropy_bonus_pulls_and_raises_entropy():
    """Without advantages the bonus is all there is; along its gradient the entropy rises by the step times |grad|^2."""
    rows = packed()
    batch = dataclasses.replace(rows.batch, advantages=np.zeros_like(rows.batch.advantages))
    graphdef, params, _ = models.split(tiny.random_model())
    made = Learner(
        graphdef,
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.AdamW()),
        mesh=make_mesh(),
        options=Options(max_segments=6, logprob_chunk=64, entropy_coef=1.0),
    )
    state = made.init(jax.tree.map(lambda x: jnp.array(x, copy=True), params))
    pull = gradient(made, state, dataclasses.replace(rows, batch=batch), ROWS, scored=False)[0]
    size = float(leafwise.global_norm(pull))
    assert size > 1e-3
    step = 1e-2 / size
    placed, mask = made.put(batch), batch.loss_mask
    entropy = [
        float(np.asarray(made.score(params, made.quantize(params), placed)[1])[mask].mean())
        for params in (state.params, jax.tree.map(lambda p, g: p - step * g, state.params, pull))
    ]
    assert entropy[1] - entropy[0] == pytest.approx(1e-2 * size, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one_program", "offload", "scored"), [nightly(True, False, False), (False, False, True), (True, True, True)]
)
def test_a_step_finds_compiled_what_was_compiled_ahead_of_its_weights(one_program, offload, scored, caplog):
    graphdef, params, _ = models.split(tiny.random_model())
    graphdef = models.with_scheme(graphdef, "w2a16_midpoint:g32")
    learner = functools.partial(
        Learner,
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.Muon(lr=0.02)),
        mesh=make_mesh(),
        options=Options(max_segments=6, logprob_chunk=64, one_program=one_program, offload=offload),
    )
    made = learner(graphdef, beside={} if one_program else {"w8": learner(models.at_width(graphdef, 8))})
    size = 2
    rows = packed(size)
    micros = list(rows.micro_batches(size))
    micros = micros[:1] if one_program else micros
    made.compile_ahead(size, tiny.ROW_LEN, scored=scored)
    state = made.init(jax.tree.map(lambda x: jnp.array(x, copy=True), params))
    told, really = (
        [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(y)] for y in (made.abstract_state(), state)
    )
    assert told == really
    with jax.log_compiles(), caplog.at_level("WARNING"):
        qweights = made.quantize(state.params)
        put = [made.put(micro) for micro in micros]
        old = [made.score(state.params, qweights, micro)[0] if scored else None for micro in put]
        beside = {
            name: [other.score(state.params, other.quantize(state.params), micro)[0] for micro in put]
            for name, other in made.beside.items()
        }
        made.update(state, qweights, put, old, rows.num_tokens, rows.num_sequences, beside=beside)
    built = {
        name for record in caplog.records for name in re.findall(r"XLA compilation of jit\(([^)]*)", record.message)
    }
    assert not built & {"quantize_params", "_logprobs", "_accumulate_fn", "_grads_fn", "_update_fn", "whole"}
