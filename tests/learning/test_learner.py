# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The learner: sums that add up however a batch is cut or placed, a forward that reads QTensors alone, safe updates."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qarl_jax import models, quant
from qarl_jax.data import packing
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loop.publisher import Publisher, by_layer, code_flips
from qarl_jax.loop.updates import Updates
from qarl_jax.loss import get_loss
from qarl_jax.metrics import merge, values
from qarl_jax.observe.phases import PhaseTimer
from qarl_jax.optim import build, by_stack, leafwise
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.sft import NegativeLogLikelihood
from tests.reference import launches, tiny
from tests.reference.rollouts import completion, group_of

MESHES = {
    "fsdp8": {"fsdp": 8},
    "tensor8": {"tensor": 8},
    "fsdp2-tensor4": {"fsdp": 2, "tensor": 4},
    "data2-fsdp4": {"data": 2, "fsdp": 4},
}
nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
ROWS = 8  # of a whole mini-batch, packed


@functools.cache
def groups(count=4, samples=4):
    """Random responses of 1 to 12 tokens to prompts of 2 to 8, with made-up rollout log-probs."""
    rng = np.random.default_rng(0)
    out = []
    for number in range(count):
        prompt = tuple(int(token) for token in rng.integers(3, 30, rng.integers(2, 9)))
        completions = []
        for _ in range(samples):
            tokens = rng.integers(0, 30, rng.integers(1, 13))
            completions.append(completion(tokens, rng.normal(-3.4, 0.5, len(tokens)), prompt=prompt))
        rewards = rng.normal(size=samples)
        out.append(group_of(completions, rewards, uid=str(number)))
    return out


def packed(rows_multiple=ROWS, **options):
    """The responses of `groups` in rows, their rewards as advantages."""
    return packing.pack(
        groups(),
        np.stack([group.rewards for group in groups()]),
        row_len=tiny.ROW_LEN,
        rows_multiple=rows_multiple,
        max_segments=6,
        **options,
    )


@functools.cache
def make(scheme="w4a16:g32", mesh="", loss="tbpo"):
    """(learner, masters on the host), float32 compute, Muon."""
    options = {"clip_high": 0.5, "neg_clip_low": 0.5, "neg_clip_high": 0.5} if loss == "tbpo" else {}
    loss_fn = NegativeLogLikelihood() if loss == "nll" else get_loss(loss, **options)
    graphdef, params, _ = models.split(tiny.random_model())
    made = Learner(
        models.with_scheme(graphdef, scheme),
        loss_fn=loss_fn,
        optimizer=leafwise.Optimizer(build.Muon(lr=0.02)),
        mesh=make_mesh(**MESHES[mesh] if mesh else {}),
        options=Options(max_segments=6, logprob_chunk=64),
    )
    return made, jax.device_get(params)


def fresh(scheme="w4a16:g32", mesh="", loss="tbpo"):
    """(learner, a state of its own)."""
    made, params = make(scheme, mesh, loss)
    return made, made.init(jax.tree.map(lambda x: jnp.array(x, copy=True), params))


def counts_of(rows):
    return rows.num_tokens, rows.num_sequences


def gradient(made, state, rows, size, scored=True):
    """(gradient, reduced metrics) of the responses packed in `rows`, `size` rows at a time."""
    qweights = made.quantize(state.params)
    grads, total = made.zero_grads(state), {}
    for micro in map(made.put, rows.micro_batches(size)):
        old = made.score(state.params, qweights, micro)[0] if scored else None
        grads, measured = made.accumulate_grads(
            grads, state.params, qweights, micro, old, rows.num_tokens, rows.num_sequences
        )
        total = merge(total, measured)
    return grads, values(total)


def assert_close(found, wanted, tol):
    """Per array, the largest error against the largest value."""
    pairs = zip(jax.tree.leaves_with_path(jax.device_get(found)), jax.tree.leaves(jax.device_get(wanted)), strict=True)
    for (path, a), b in pairs:
        error = np.abs(np.asarray(a, np.float64) - b).max()
        assert error <= tol * np.abs(b).max(), (jax.tree_util.keystr(path), error, np.abs(b).max())


def assert_same_bits(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


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
    alone = packed(unpacked=True)
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


# ---- updates -------------------------------------------------------------------------------------------------------


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
    made = Learner(
        models.with_scheme(graphdef, "w4a16:g32"),
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.Muon(lr=0.02)),
        mesh=make_mesh(),
        options=Options(max_segments=6, logprob_chunk=64, one_program=one_program, offload=offload),
    )
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
        made.update(state, qweights, put, old, rows.num_tokens, rows.num_sequences)
    built = {
        name for record in caplog.records for name in re.findall(r"XLA compilation of jit\(([^)]*)", record.message)
    }
    assert not built & {"quantize_params", "_logprobs", "_accumulate_fn", "_grads_fn", "_update_fn", "whole"}
