# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An elementwise update by a kernel: XLA's numbers, in place, for the leaves that it takes and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.kernels import adamw
from qarl_jax.learning.learner import TrainState
from qarl_jax.optim import build, by_stack
from qarl_jax.optim.build import AdamW, Muon, Schedule
from qarl_jax.runtime import mesh

SHAPES = {
    "embed": {"kernel": (32, 64)},
    "layers": {"down": (3, 16, 64), "norm": {"weight": (3, 64)}, "v": (3, 5, 64)},
    "norm": {"weight": (64,)},
}
BLOCK = 256
LARGE = 2  # embed and down; v is no whole number of blocks, norms are small


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(adamw, "BLOCK", BLOCK)
    monkeypatch.setattr(adamw, "LEAST", 512)
    monkeypatch.setattr(by_stack, "is_hopper", lambda: True)


@pytest.fixture
def interpreted(small, monkeypatch):
    """What XLA would compute on a CPU is computed by the kernel, step by step. The leaves' paths that it had."""
    seen = []

    def by_kernel(self, layout, group, part):
        if len(group.params) == 1 and group.params[0] in layout.in_one_pass:
            seen.append(group.params)
            return self.in_one_pass(layout, group, part, interpret=True)
        return by_xla(self, layout, group, part)

    by_xla = by_stack.Update._by_xla
    monkeypatch.setattr(by_stack.Update, "_by_xla", by_kernel)
    return seen


def drawn(seed, size, dtype):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(size * rng.standard_normal(shape), dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


GRADS = ("clipped", "small", "zero", "nonfinite", "clipped")


def updates_of(cfg, master, grads=GRADS, one_program=True, like=None):
    """(state, stats) after each of `grads`, each update from what the last one in `like` came to, or its own."""
    with jax.set_mesh(mesh.make_mesh()):
        return _updates_of(cfg, master, grads, one_program, like)


def _updates_of(cfg, master, grads, one_program, like):
    update = by_stack.Update(build.make_optimizer(cfg, 20), lambda stats, updates: stats | {"before": updates})
    params = drawn(0, 1.0, master)
    state = TrainState(params=params, opt_state=build.init(update.optimizer, params), updates=jnp.zeros((), jnp.int32))
    seen = []
    step = jax.jit(update.whole) if one_program else update
    for number, kind in enumerate(grads):
        gradient = drawn(10 + number, {"clipped": 1.0, "small": 1e-3, "zero": 0.0, "nonfinite": 1.0}[kind], master)
        if kind == "nonfinite":
            gradient["layers"]["down"] = gradient["layers"]["down"].at[2, 3, 4].set(jnp.inf)
        if like is not None and number:
            state = jax.tree.map(jnp.array, like[number - 1][0])
        state, stats = step(state, gradient)
        seen.append(jax.device_get(jax.tree.map(jnp.copy, (state, stats))))
    return seen


def config(kind, moments):
    # Of b2 = 0.999 the first bias corrections, 1 - b2^t, have four digits in float32, whoever computes them.
    decay = {"weight_decay": 0.1, "b2": 0.9} if kind is AdamW else {"adamw_weight_decay": 0.1, "adamw_b2": 0.9}
    schedule = Schedule(kind="cosine", warmup_updates=2)
    return kind(lr=0.02, moment_dtype=moments, second_moment_dtype=moments, schedule=schedule, **decay)


def assert_close(found, wanted, master, moments):
    """Equal but for last bits, which other programs round otherwise; stochastic rounding has the same bits to add."""
    for (state, stats), (other, expected) in zip(found, wanted, strict=True):
        assert jax.tree.structure((state, stats)) == jax.tree.structure((other, expected))
        assert stats["moved"] == expected["moved"]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), stats, expected)
        rough = {"bfloat16": 2.0**-7, "float32": 1e-5}
        for tree, dtype in (("params", master), ("opt_state", moments)):
            for a, b in zip(*(jax.tree.leaves(getattr(x, tree)) for x in (state, other)), strict=True):
                assert a.dtype == b.dtype
                if a.dtype == jnp.bfloat16:
                    assert (a != b).mean() < 0.02
                np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rough[dtype], atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moments", "master", "one_program"),
    [
        (AdamW, "bfloat16", "bfloat16", True),
        (AdamW, "float32", "float32", False),
        (Muon, "bfloat16", "float32", True),
    ],
)
def test_a_kernel_gives_the_numbers_of_xla(interpreted, monkeypatch, kind, moments, master, one_program):
    monkeypatch.setattr(by_stack, "GROUP_BYTES", 3000)
    cfg = config(kind, moments)
    found = updates_of(cfg, master, one_program=one_program)
    assert len(set(interpreted)) == (LARGE if kind is AdamW else 1)  # Muon's embedding
    monkeypatch.setattr(by_stack, "is_hopper", lambda: False)
    count = len(interpreted)
    wanted = updates_of(cfg, master, one_program=one_program, like=found)
    assert len(interpreted) == count
    assert_close(found, wanted, master, moments)
    for number, (state, _) in enumerate(found):
        if number in (2, 3):  # zero, nonfinite
            before = found[number - 1][0]
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True)
            assert all(a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["int8", "bfloat16"])
def test_what_is_not_elementwise_or_not_on_hopper_is_left_to_xla(interpreted, monkeypatch, moments):
    cfg = AdamW(lr=0.02, moment_dtype=moments, second_moment_dtype=moments)
    if moments == "bfloat16":
        monkeypatch.setattr(by_stack, "is_hopper", lambda: False)
    updates_of(cfg, "bfloat16", grads=("small",))
    assert not interpreted


def test_a_kernel_takes_whole_blocks_of_a_large_leaf_on_one_device(small):
    def like(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    with jax.set_mesh(mesh.make_mesh(fsdp=1)):
        assert adamw.serves(like((2, 256)), like((2, 256), jnp.float32))
        assert not adamw.serves(like((2, 257)))
        assert not adamw.serves(like((256,)))
        assert not adamw.serves(like((2**20, 2**11)))
        assert not adamw.serves(like((2, 256)), like((2, 256), jnp.int8))
        assert not adamw.serves(like((2, 256)), like((256, 2)))
    with jax.set_mesh(mesh.make_mesh(fsdp=2)):
        assert not adamw.serves(like((2, 256)))


def test_scalars_are_computed_before_the_kernel_and_what_stacks_held_is_written_in_place(small):
    def step(scalars, first, stacks, reads):
        x, (g,) = stacks[0], reads
        moved = x + jnp.cos(scalars["t"]) * g + first.astype(jnp.float32)
        return [moved], [jnp.sum(g)]

    x, g = jnp.zeros((4, BLOCK)), jnp.ones((4, BLOCK))
    traced = jax.make_jaxpr(lambda t, x, g: adamw.run(step, {"t": t}, [x], [g]))(jnp.float32(0), x, g)
    names = [eqn.primitive.name for eqn in traced.eqns]
    assert names.index("cos") < names.index("pallas_call")
    (call,) = (eqn for eqn in traced.eqns if eqn.primitive.name == "pallas_call")
    assert "cos" not in str(call.params["jaxpr"])
    assert dict(call.params["input_output_aliases"]) == {1: 0}
    (found,), (total,) = adamw.run(step, {"t": jnp.float32(0)}, [x], [g], interpret=True)
    np.testing.assert_array_equal(found, np.broadcast_to(1 + BLOCK * np.arange(4)[:, None], (4, BLOCK)))
    assert total == 4 * BLOCK


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "moments", "master"), [(AdamW, "bfloat16", "bfloat16"), (Muon, "float32", "float32")])
def test_on_a_gpu_the_kernel_gives_the_numbers_of_xla(monkeypatch, kind, moments, master):
    monkeypatch.setitem(SHAPES["embed"], "kernel", (2048, 2048))
    monkeypatch.setitem(SHAPES["layers"], "down", (3, 1024, 2048))
    cfg, runs = config(kind, moments), []
    kernel = adamw.run
    monkeypatch.setattr(adamw, "run", lambda *args, **options: runs.append(1) or kernel(*args, **options))
    found = updates_of(cfg, master)
    assert len(runs) == (LARGE if kind is AdamW else 1)
    monkeypatch.setattr(by_stack, "is_hopper", lambda: False)
    assert_close(found, updates_of(cfg, master, like=found), master, moments)
