# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An update in groups: the same bits wherever the state rests, one program's numbers, two groups on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qarl_jax.learning.state import TrainState
from qarl_jax.optim import by_stack, leafwise
from qarl_jax.optim.build import AdamW, Muon, Schedule
from qarl_jax.optim.eight_bit import Blocks
from qarl_jax.runtime import compilation
from tests.reference.optimizing import has_same_bits

SHAPES = {
    "embed": {"kernel": (48, 24)},
    "layers": {"down": (3, 16, 24), "norm": {"weight": (3, 24)}, "up": (3, 24, 16), "v": (3, 8, 24)},
    "norm": {"weight": (24,)},
}
UPS = PartitionSpec(None, "fsdp", None)
SPECS = {"embed": {"kernel": PartitionSpec("fsdp", None)}, "layers": {"down": UPS, "up": UPS, "v": UPS}}
BOUND = 3000  # bytes: v (2,304) and the last norm share a group, every other leaf is one
LEAVES = 6
UPDATES = ("clipped", "small", "zero", "nonfinite", "clipped")  # what each gradient is like


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(by_stack, "GROUP_BYTES", BOUND)


@functools.cache
def mesh(on):
    return jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)) if on else None


def drawn(seed, size, on_mesh, dtype="float32"):
    """A tree of SHAPES with normal numbers, on one device or split over eight."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        x = jnp.asarray(size * rng.standard_normal(shape), dtype)
        if not on_mesh:
            return jax.device_put(x, jax.devices()[0])
        spec = functools.reduce(lambda tree, key: tree.get(key.key, {}), path, SPECS) or PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh(True), spec))

    return jax.tree_util.tree_map_with_path(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def gradient(kind, number, on_mesh, dtype="float32"):
    grads = drawn(10 + number, {"clipped": 1.0, "small": 1e-3, "zero": 0.0, "nonfinite": 1.0}[kind], on_mesh, dtype)
    if kind == "nonfinite":
        grads["layers"]["up"] = grads["layers"]["up"].at[2, 3, 4].set(jnp.inf)
    return grads


def start(update, on_mesh, dtype="float32"):
    params = drawn(0, 1.0, on_mesh, dtype)
    state = TrainState(
        params=params, opt_state=leafwise.init(update.optimizer, params), updates=jnp.zeros((), jnp.int32)
    )
    return update.placed(state)


def make(cfg, **options):
    return by_stack.Update(leafwise.Optimizer(cfg, 20), lambda stats, updates: stats | {"before": updates}, **options)


def run(update, on_mesh=False, dtype="float32"):
    """(state, stats) on the host after each of UPDATES."""
    state, seen = start(update, on_mesh, dtype), []
    for number, kind in enumerate(UPDATES):
        before = jax.tree.leaves((state.params, state.opt_state))
        state, stats = update(state, gradient(kind, number, on_mesh, dtype))
        assert all(x.is_deleted() for x in before)
        # Of copies: what a host reads of a CPU's arrays is their own memory, which is not given away then.
        own = jax.tree.map(jnp.copy, (state, stats)) if jax.default_backend() == "cpu" else (state, stats)
        seen.append(jax.tree.map(np.array, jax.device_get(own)))
    return seen


nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
MUON, ADAMW = (Muon, "int8", "float32", True), (AdamW, "bfloat16", "float32", False)
CASES = [
    nightly(Muon, "float32", "float32", False),
    nightly(Muon, "bfloat16", "bfloat16", True),
    nightly(Muon, "int8", "bfloat16", False),
    nightly(AdamW, "float32", "float32", True),
    nightly(AdamW, "int8", "float32", True),
]


def config(kind, moments):
    schedule = Schedule(kind="cosine", warmup_updates=2)
    return kind(lr=0.02, moment_dtype=moments, second_moment_dtype=moments, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moments", "master", "on_mesh"), [ADAMW, nightly(*MUON), *CASES]
)  # Muon: test_learner.py
def test_a_state_on_the_host_gives_the_bits_of_one_on_the_device(kind, moments, master, on_mesh, compiled_as_a_run):
    check_both_memories(kind, moments, master, on_mesh)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs JAX on a GPU (JAX_PLATFORMS=cuda,cpu)")
@pytest.mark.parametrize(
    ("kind", "moments", "master"),
    [(AdamW, "bfloat16", "float32"), (AdamW, "int8", "float32"), (Muon, "int8", "bfloat16")],
)
def test_a_state_on_the_host_gives_the_bits_of_one_on_a_gpu(kind, moments, master):
    """Copies move an optimizer state beside the programs of the next group, on a device that has both memories."""
    check_both_memories(kind, moments, master, False)


def check_both_memories(kind, moments, master, on_mesh):
    here, there = (make(config(kind, moments), offload=offload) for offload in (False, True))
    found, wanted = (run(update, on_mesh, master) for update in (there, here))
    assert has_same_bits(found, wanted)
    kinds = [{x.sharding.memory_kind for x in jax.tree.leaves(start(u, on_mesh).opt_state)} for u in (here, there)]
    assert kinds == [{"device"}, {"pinned_host"}]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "moments", "master", "on_mesh"), [MUON, nightly(*ADAMW), *CASES])
def test_groups_give_the_numbers_of_one_program(kind, moments, master, on_mesh, monkeypatch):
    update = make(config(kind, moments), offload=True)
    found = run(update, on_mesh, master)
    assert len(by_stack.groups_of(start(update, on_mesh).params)) == 5
    monkeypatch.setattr(by_stack, "GROUP_BYTES", 2**30)
    assert len(by_stack.groups_of(start(update, on_mesh).params)) == 1
    wanted = run(update, on_mesh, master)
    ulp = 2.0**-7 if master == "bfloat16" else 1e-5
    for number, ((state, stats), (whole, expected)) in enumerate(zip(found, wanted, strict=True)):
        still = UPDATES[number] in ("zero", "nonfinite")
        assert bool(stats["moved"]) == bool(expected["moved"]) == (not still)
        assert int(state.updates) == int(whole.updates) == int(stats["before"]) + (not still)
        assert jax.tree.structure((state, stats)) == jax.tree.structure((whole, expected))
        for key in ("grad_norm", "update_norm"):
            np.testing.assert_allclose(stats[key], expected[key], rtol=1e-4 if moments == "int8" else ulp)
        if UPDATES[number] != "nonfinite":
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-4 if moments == "int8" else ulp),
                stats["squares"],
                expected["squares"],
            )
        for a, b in zip(*(jax.tree.leaves(x.params) for x in (state, whole)), strict=True):
            # An eight-bit code that falls the other way moves a weight by a tenth of a step, 0.02, at most.
            loose = 0.002 if moments == "int8" else 0.0
            np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=ulp, atol=ulp + loose)
        if still:
            before = found[number - 1][0]
            assert has_same_bits((state.params, state.opt_state), (before.params, before.opt_state))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AdamW, nightly(Muon)])
def test_masters_round_by_their_place_in_the_whole_wherever_they_lie(kind, monkeypatch):
    def masters(on_mesh, **options):
        cfg = kind(lr=0.02, master_rounding="stochastic")
        return [np.asarray(x) for x in jax.tree.leaves(run(make(cfg, **options), on_mesh, "bfloat16")[-1][0].params)]

    groups, host, spread = masters(False), masters(False, offload=True), masters(True)
    assert has_same_bits(groups, host)
    monkeypatch.setattr(by_stack, "GROUP_BYTES", 2**30)
    for a, b, c in zip(groups, masters(False), spread, strict=True):
        # Other bits would move about half of them; the same ones, what lies on the edge.
        assert (a != b).mean() < 0.02
        assert (a != c).mean() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("on_mesh", [nightly(False), True])
@pytest.mark.parametrize(
    ("kind", "moments"),
    [(AdamW, "bfloat16"), *(nightly(*c) for c in ((Muon, "bfloat16"), (Muon, "int8"), (AdamW, "int8")))],
)
def test_a_rounding_s_random_bits_are_those_of_the_place_in_the_whole(kind, moments, on_mesh, monkeypatch):
    """Other bits would move about half of what is rounded stochastically; the same ones, what lies on the edge."""
    update = make(config(kind, moments), offload=True)
    found = run(update, on_mesh)[-1][0].opt_state
    monkeypatch.setattr(by_stack, "GROUP_BYTES", 2**30)
    wanted = run(update, on_mesh)[-1][0].opt_state

    def stored(tree):
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Blocks))
        return [np.asarray(x.codes if isinstance(x, Blocks) else x) for x in leaves]

    pairs = zip(stored(found), stored(wanted), strict=True)
    rounded = [(a, b) for a, b in pairs if a.dtype in ("bfloat16", "int8", "uint8")]
    assert len(rounded) >= (5 if kind is Muon else 8)  # momenta, and both moments of what AdamW updates
    for a, b in rounded:
        assert (a != b).mean() < 0.02


@pytest.mark.slow
def test_no_more_than_two_groups_of_moments_are_on_the_device_and_they_hold_every_parameter_once():
    update = make(Muon(moment_dtype="bfloat16", second_moment_dtype="bfloat16"), offload=True)
    state = start(update, False)
    groups = by_stack.groups_of(state.params)
    assert sorted(i for group in groups for i in group) == list(range(LEAVES))
    own = [sum(x.nbytes for x in jax.tree.leaves(each)) for each in leafwise.moments_of(state.params, state.opt_state)]
    sizes = [sum(own[i] for i in group) for group in groups]
    assert sum(sizes) + 4 == sum(x.nbytes for x in jax.tree.leaves(state.opt_state))  # and the count
    held = []

    def on_device():
        arrays = [x for x in jax.live_arrays() if x.dtype == jnp.bfloat16 and x.sharding.memory_kind == "device"]
        return sum(x.nbytes for x in arrays)  # moments are the only numbers in bfloat16

    others = on_device()

    def watched(program):
        def call(*arguments):
            new = program(*arguments)
            held.append(on_device() - others)
            return new

        return call

    programs = update.programs(state)
    programs[:] = map(watched, programs)
    update(state, gradient("small", 0, False))
    neighbours = [a + b for a, b in zip([0, *sizes], sizes, strict=False)]
    assert held == neighbours
    assert max(held) < sum(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_it_waits_only_where_memory_is_to_be_given_back(offload, monkeypatch):
    update = make(AdamW(), offload=offload)
    state, waited = start(update, False), []
    wait = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: (waited.extend(jax.tree.leaves(tree)), wait(tree))[1])
    update(state, gradient("small", 0, False))
    arriving_and_leaving = 2 * len(jax.tree.leaves(state.opt_state))
    assert len(waited) == (2 + arriving_and_leaving if offload else 0)  # the two norms, and every moment and counter


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_no_update_compiles_again(offload):
    update = make(Muon(moment_dtype="int8", second_moment_dtype="int8"), offload=offload)
    state, grads = start(update, False), [gradient("small", number, False) for number in range(4)]
    built = compilation.Recompiles()
    state, _ = update(state, grads[0])
    assert built.take() >= len(by_stack.groups_of(state.params)) == 5
    state, _ = update(state, grads[1])  # the count of updates, a fresh array before, is a program's result from here on
    assert built.take() <= 1
    for gradients in grads[2:]:
        state, _ = update(state, gradients)
    assert built.take() == 0


@pytest.mark.slow
def test_an_update_in_groups_leaves_the_gradients_to_their_owner():
    update = make(AdamW(), offload=True)
    grads = gradient("small", 0, False)
    update(start(update, False), grads)
    assert not any(x.is_deleted() for x in jax.tree.leaves(grads))
