# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The learner: sums that add up however a batch is cut or placed, a forward that reads QTensors alone, safe updates."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qarl_jax import models, quant
from qarl_jax.learning.learner import EXACT, Learner, is_exact
from qarl_jax.loop.publisher import Publisher, by_layer, code_flips
from qarl_jax.loop.updates import Updates
from qarl_jax.metrics import Mean, merge, values
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.optim import build
from tests.reference import launches, tiny
from tests.reference.learners import (
    ROWS,
    assert_close,
    assert_same_bits,
    counts_of,
    fresh,
    gradient,
    groups,
    make,
    packed,
)

nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)


# ---- several widths of one policy -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_update_over_two_widths_takes_the_mean_of_their_gradients():
    rows, schemes = packed(), {"w2": "w2a16_midpoint:g32", "w8": "w8a16_asym:g32"}
    alone, (made, state) = {}, fresh(schemes["w2"])
    for name, scheme in schemes.items():
        alone[name] = jax.device_get(gradient(*fresh(scheme), rows, ROWS)[0])
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *alone.values())
    wanted, _ = made.apply_update(state, jax.device_put(mean, made.param_shardings))

    options = dataclasses.replace(made.options, one_program=False, share=0.5)
    build_one = functools.partial(
        Learner, loss_fn=made.loss_fn, optimizer=made.optimizer, mesh=made.mesh, options=options
    )
    other = build_one(models.at_width(made.graphdef, 8))
    both = build_one(made.graphdef, beside={"w8": other})
    _, state = fresh(schemes["w2"])
    micros = [both.put(micro) for micro in rows.micro_batches(ROWS // 2)]
    old, theirs = (
        [one.score(state.params, one.quantize(state.params), micro)[0] for micro in micros] for one in (both, other)
    )
    assert not np.array_equal(old[0], theirs[0])
    counts = rows.num_tokens, rows.num_sequences
    found, metrics = both.update(state, both.quantize(state.params), micros, old, *counts, beside={"w8": theirs})
    assert_close(found.params, wanted.params, 1e-4)
    assert {"loss/total", "w8/loss/total", "w8/mismatch/k3"} <= metrics.keys()
    for name in alone:  # neither of them alone
        with pytest.raises(AssertionError):
            assert_close(alone[name], mean, 1e-2)


# ---- one sum, however it is cut ------------------------------------------------------------------------------------


@functools.cache
def whole(loss):
    """Gradient and metrics of the whole mini-batch in one pass."""
    made, state = fresh(loss=loss)
    return jax.device_get(gradient(made, state, packed(), ROWS))


@pytest.mark.slow
def test_parts_of_a_batch_sum_to_its_gradient():
    """Each row in one of three passes, the other rows empty: the same program as for the whole."""
    rows, made, state = packed(), *fresh()
    qweights, grads, total = made.quantize(state.params), made.zero_grads(state), {}
    for part in range(3):
        mine = (np.arange(ROWS) % 3 == part)[:, None]
        micro = made.put(jax.tree.map(lambda x, mine=mine: np.where(mine, x, np.zeros_like(x)), rows.batch))
        old, _ = made.score(state.params, qweights, micro)
        grads, measured = made.accumulate_grads(
            grads, state.params, qweights, micro, old, rows.num_tokens, rows.num_sequences
        )
        total = merge(total, measured)
    wanted, metrics = whole("tbpo")
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(wanted))
    assert_close(grads, wanted, 1e-5)
    for key, value in values(total).items():
        assert value == pytest.approx(metrics[key], rel=1e-4, abs=1e-5), key


@pytest.mark.slow
def test_one_token_that_differs_counts_among_a_billion():
    """Float32 would add a micro-batch's count to 2^30 in steps of 128."""
    rows, made, state = packed(), *fresh()
    qweights, micro = made.quantize(state.params), made.put(rows.batch)
    old, _ = made.score(state.params, qweights, micro)
    row, column = np.argwhere(rows.batch.loss_mask)[0]
    _, measured = made.accumulate_grads(
        made.zero_grads(state), state.params, qweights, micro, old.at[row, column].add(1), *counts_of(rows)
    )
    total = merge(measured, {EXACT: Mean(np.int32(2**30), np.int32(2**30))})
    assert not is_exact(total)
    assert values(total)[EXACT] < 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["tbpo", nightly("grpo"), nightly("nll")])
def test_microbatches_sum_to_the_full_batch_gradient(loss):
    wanted, metrics = whole(loss)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(wanted))
    found, also = gradient(*fresh(loss=loss), packed(), ROWS // 4)
    assert_close(found, wanted, 1e-5)
    for key in metrics:
        assert also[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5), key


@pytest.mark.slow
def test_packing_changes_no_gradient():
    alone = packed(max_segments=1)
    assert alone.batch.tokens.shape[0] == 16 > packed().batch.tokens.shape[0]
    found, _ = gradient(*fresh(), alone, ROWS)
    assert_close(found, whole("tbpo")[0], 1e-5)


@pytest.mark.slow
def test_the_order_of_rows_changes_no_gradient():
    rows = packed()
    order = np.random.default_rng(1).permutation(ROWS)
    shuffled = dataclasses.replace(rows, batch=jax.tree.map(lambda x: x[order], rows.batch))
    found, _ = gradient(*fresh(), shuffled, ROWS)
    assert_close(found, whole("tbpo")[0], 1e-5)


@pytest.mark.slow
def test_without_old_logprobs_the_proximal_policy_is_the_current_one():
    found, metrics = gradient(*fresh(), packed(), ROWS, scored=False)
    assert_close(found, whole("tbpo")[0], 1e-5)
    assert metrics["proximal/max_abs"] == 0


@pytest.mark.slow
def test_scoring_and_gradient_agree_far_below_the_band():
    _, metrics = whole("tbpo")
    assert metrics["proximal/noise"] < 3e-5  # a tenth of the published band, 3e-4
    made, state = fresh()
    rows = packed()
    _, entropy = made.score(state.params, made.quantize(state.params), made.put(rows.batch))
    mask = rows.batch.loss_mask
    assert metrics["entropy/mean"] == pytest.approx(np.asarray(entropy)[mask].mean(), rel=1e-5)


# ---- one run, on any mesh ------------------------------------------------------------------------------------------


@functools.cache
def first_step(scheme, mesh=""):
    """(QTensors, loss, change of the matrices that Muon updates, state) of one update.

    AdamW's first step is lr * g / |g|, so float32 noise in a gradient near zero decides a whole step: its parameters
    are left to the comparison of gradients in `test_a_mesh_gives_the_gradient_of_one_device`.
    """
    made, state = fresh(scheme, mesh)
    rows = packed()
    before = jax.device_get(state.params)
    qweights = jax.device_get(made.quantize(state.params))
    grads, metrics = gradient(made, state, rows, ROWS)
    state, _ = made.apply_update(state, grads)
    after = jax.tree.leaves(jax.device_get(state.params))
    kinds = jax.tree.leaves(build.labels(before))
    pairs = zip(jax.tree.leaves(before), after, kinds, strict=True)
    change = [new - old for old, new, kind in pairs if kind == "muon"]
    assert change
    return qweights, metrics["loss/total"], change, state


def check_mesh(scheme, mesh, loss_tol, update_tol):
    wanted, found = first_step(scheme), first_step(scheme, mesh)
    assert_same_bits(found[0], wanted[0])
    assert found[1] == pytest.approx(wanted[1], rel=loss_tol)
    assert_close(found[2], wanted[2], update_tol)
    made, _ = make(scheme, mesh)
    kinds = zip(jax.tree.leaves(found[3].params), jax.tree.leaves(made.param_shardings), strict=True)
    assert all(leaf.sharding.is_equivalent_to(kind, leaf.ndim) for leaf, kind in kinds)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [nightly("fsdp2-tensor4")])
def test_a_mesh_gives_the_gradient_of_one_device(mesh):
    wanted, found = (gradient(*fresh("bf16", where), packed(), ROWS)[0] for where in ("", mesh))
    assert_close(found, wanted, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [*map(nightly, ("fsdp8", "tensor8", "data2-fsdp4", "fsdp2-tensor4"))])
def test_a_mesh_of_eight_equals_one_device_in_float32(mesh):
    check_mesh("bf16", mesh, 1e-5, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp2-tensor4", nightly("tensor8")])
def test_int4_tensors_are_bit_equal_on_a_mesh_and_the_loss_agrees(mesh):
    check_mesh("w4a16:g32", mesh, 1e-5, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "wait"), [("fsdp2-tensor4", True), ("", False)])
def test_what_sends_between_devices_is_launched_by_one_thread_at_a_time(mesh, wait):
    made, state = fresh(mesh=mesh)
    rows = packed()
    qweights = made.quantize(state.params)
    (micro,) = map(made.put, rows.micro_batches(ROWS))
    grads = [made.zero_grads(state) for _ in range(2)]  # each is given away
    calls = (
        lambda: jax.block_until_ready(made.quantize(state.params)),
        lambda: jax.block_until_ready(made.score(state.params, qweights, micro)),
        lambda: made.accumulate_grads(grads.pop(), state.params, qweights, micro, None, *counts_of(rows)),
    )
    assert launches.waiting(made.mesh, calls, 0.5 if wait else 60) == [wait] * len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [nightly("fsdp8"), nightly("data2-fsdp4")])
def test_int8_tensors_are_bit_equal_on_a_mesh_and_the_loss_agrees(mesh):
    # An activation code flips where float32 noise moves a value over a rounding edge, and the gradient with it.
    check_mesh("w8a8", mesh, 1e-3, 5e-2)


# ---- the forward reads QTensors alone ------------------------------------------------------------------------------


def poisoned(params, qweights):
    """The masters, NaN wherever there is a QTensor."""
    flat = dict(nnx.to_flat_state(params))
    for keys, _ in nnx.to_flat_state(qweights):
        path = (*keys[:-1], "kernel")
        flat[path] = flat[path].replace(jnp.full_like(flat[path].get_value(), jnp.nan))
    return nnx.from_flat_state(flat)


def test_a_quantized_masters_value_is_never_read():
    made, state = fresh()
    qweights = made.quantize(state.params)
    bad = made.init(poisoned(state.params, qweights)).params
    assert sum(bool(jnp.isnan(leaf).any()) for leaf in jax.tree.leaves(bad)) == 7
    rows = packed()
    batch = made.put(rows.batch)
    wanted = made.score(state.params, qweights, batch)
    assert_same_bits(made.score(bad, qweights, batch), wanted)
    assert np.isfinite(wanted[0]).all()
    counts = (rows.num_tokens, rows.num_sequences)
    one, _ = made.accumulate_grads(made.zero_grads(state), state.params, qweights, batch, wanted[0], *counts)
    two, _ = made.accumulate_grads(made.zero_grads(state), bad, qweights, batch, wanted[0], *counts)
    assert_same_bits(two, one)


class Recorder:
    """An engine that remembers what was published."""

    def __init__(self):
        self.version, self.published, self.facts = -1, [], None

    def publish(self, weights, version):
        self.published.append(weights)
        self.version = version
        return {}


@pytest.mark.slow
def test_weights_are_quantized_once_per_update_and_the_published_tensors_are_read_next(monkeypatch, tmp_path):
    settings = {"prompts_per_update": 2, "micro_batch_rows": ROWS, "max_segments": 6}
    cfg = tiny.World(tmp_path).changed(train=settings).config
    world_learner, state = fresh()
    quantized, read = [], []
    quantize, update, score = world_learner.quantize, world_learner.update, world_learner.score

    def quantizing(params):
        quantized.append(quantize(params))
        return quantized[-1]

    def updating(state, qweights, *rest, **options):
        read.append(qweights)
        return update(state, qweights, *rest, **options)

    def scoring(params, qweights, batch):
        read.append(qweights)
        return score(params, qweights, batch)

    monkeypatch.setattr(world_learner, "quantize", quantizing)
    monkeypatch.setattr(world_learner, "update", updating)
    monkeypatch.setattr(world_learner, "score", scoring)
    engine = Recorder()
    publisher = Publisher(cfg, world_learner, engine)
    publisher.publish(state, 0)
    advantages = np.stack([group.rewards for group in groups()])
    updates = Updates(cfg, world_learner, publisher, PhaseTimer())
    state, learning = updates.run(state, groups(), advantages, 0)
    report = publisher.publish(state, 1)
    metrics = learning.result().metrics
    assert metrics["train/updates"] == 2
    assert len(quantized) == 3  # at the start, and after each of two updates
    first, second, third = quantized
    half = len(read) // 2
    assert engine.published[0].qweights is first
    assert [any(tensors is one for one in quantized[:2]) for tensors in read] == [True] * len(read)
    assert read[0] is first
    assert read[half - 1] is first  # all scoring passes and all micro-batches of the first update
    assert read[-1] is second
    assert engine.published[1].qweights is third
    flips = code_flips(first, third).values()
    whole = float(sum(m.total.sum() for m in flips) / sum(m.count.sum() for m in flips))
    assert report["quant/code_flips"] == pytest.approx(whole)
    assert [len(row) for row in publisher.flips.values()] == [2] * 7
    assert np.mean(list(publisher.flips.values())) == pytest.approx(whole, rel=0.5)  # weights differ in size
    assert 0 < report["quant/code_flips"] < 1
    assert publisher.qweights(state) is third  # and the next forward reads what was published


def test_code_flips_count_the_planted_ones():
    rng = np.random.default_rng(2)
    w = jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)
    nibbles = quant.quantize(w, quant.parse_scheme("w4a16:g32"))
    # Words 0 and 5: one nibble in the first, three in the other, the sign bit's among them.
    flipped = nibbles.codes.at[0, 0].set(nibbles.codes[0, 0] ^ 0x00000F00)
    flipped = flipped.at[3, 5].set(flipped[3, 5] ^ jnp.int32(-(2**31) + 0x11))
    other = dataclasses.replace(nibbles, arrays=nibbles.arrays | {"codes": flipped})
    assert float(code_flips({"head": nibbles}, {"head": other})["head"].value) == pytest.approx(4 / (16 * 64))
    assert float(code_flips({"head": nibbles}, {"head": nibbles})["head"].value) == 0
    for scheme in ("w8a8", "fp8"):
        eight = quant.quantize(w, quant.parse_scheme(scheme))
        codes = np.asarray(eight.codes).copy()
        codes.view(np.uint8)[[0, 1, 7], [3, 3, 60]] ^= 1
        other = dataclasses.replace(eight, arrays=eight.arrays | {"codes": jnp.asarray(codes)})
        assert float(code_flips({"head": eight}, {"head": other})["head"].value) == pytest.approx(3 / (16 * 64))


def test_code_flips_are_told_apart_by_weight_and_layer():
    """Three layers in two stacks, the second without `up`: a flip in layer 1 of `up`, two in layer 2 of `q`."""
    w = jnp.asarray(np.random.default_rng(2).normal(size=(2, 16, 64)), jnp.float32)
    two = jax.vmap(lambda w: quant.quantize(w, quant.parse_scheme("w8a8")))(w)
    one = jax.tree.map(lambda x: x[:1], two)
    before = {"stacks": [{"mlp": {"up": {"kernel": two}}, "q": {"kernel": two}}, {"q": {"kernel": one}}]}
    up, q = (np.asarray(x.codes).copy() for x in (two, one))
    up[1, 0, 0] ^= 1
    q[0, [3, 4], 5] ^= 1
    after = jax.tree.map(lambda x: x, before)
    after["stacks"][0]["mlp"]["up"]["kernel"] = dataclasses.replace(two, arrays=two.arrays | {"codes": jnp.asarray(up)})
    after["stacks"][1]["q"]["kernel"] = dataclasses.replace(one, arrays=one.arrays | {"codes": jnp.asarray(q)})
    stacks = [SimpleNamespace(start=0, length=2), SimpleNamespace(start=2, length=1)]
    found = by_layer(jax.device_get(code_flips(before, after)), stacks)
    assert {name: [x and round(x * 1024) for x in row] for name, row in found.items()} == {
        "flips/mlp.up": [0, 1, None],
        "flips/q": [0, 0, 2],
    }
