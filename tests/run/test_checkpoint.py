# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about checkpoints: exact, atomic, checked, and never the reason that something is lost."""

import contextlib
import dataclasses
import errno
import json
import pickle
import resource
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from qarl_jax.optim import build, by_stack, leafwise
from qarl_jax.run import checkpoint, on_disk
from qarl_jax.run.checkpoint import Checkpoints, Config
from qarl_jax.types import UserError
from tests.reference.checkpointing import assert_same_bits, largest_file, normal, tree

EXTRA = {"cursor": [3, 17], "policy_version": 7, "seed": 2**63, "run_id": "a", "config_hash": "f00"}


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as opened:
        yield opened


# ---------------------------------------------------------------------------------------------------------------- exact


def test_parameters_optimizer_state_and_extra_come_back_bit_for_bit(checkpoints):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 6, rngs=rngs)
            self.norm = nnx.RMSNorm(4, rngs=rngs)

    params = nnx.split(Block(nnx.Rngs(0)))[1]
    tx = leafwise.Optimizer(build.Muon(lr=0.1))
    step = jax.jit(lambda grads, state, params: leafwise.update(tx, grads, state, params))
    params, opt_state, _ = step(params, tx.init(params), params)
    state = {"params": params, "opt_state": opt_state, "updates": jnp.int32(1)}
    checkpoints.save(1, state, EXTRA)
    back = checkpoints.restore(jax.eval_shape(lambda: state))
    assert_same_bits(back.state, state)
    assert (back.step, back.extra) == (1, EXTRA)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "asynchronous"),
    [
        *(("device", False), ("pinned_host", True)),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("device", True), ("pinned_host", False))),
    ],
)
def test_an_eight_bit_state_resumes_bit_for_bit_wherever_it_rests(tmp_path, kind, asynchronous, monkeypatch):
    check_resumed(tmp_path, kind, asynchronous, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs JAX on a GPU (JAX_PLATFORMS=cuda,cpu)")
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_a_state_is_saved_in_the_background_beside_updates_on_a_gpu(tmp_path, kind, monkeypatch):
    """Arrays are copied before they are saved on a CPU alone."""
    check_resumed(tmp_path, kind, True, monkeypatch)


def check_resumed(tmp_path, kind, asynchronous, monkeypatch):
    eight = {"moment_dtype": "int8", "second_moment_dtype": "int8"}
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.standard_normal((3, 8, 300)), jnp.float32) for name in ("kernel", "embed")}
    tx = leafwise.Optimizer(build.Muon(lr=0.1, **eight))
    update = by_stack.Update(tx, lambda stats, updates: stats, offload=kind == "pinned_host")
    monkeypatch.setattr(by_stack, "GROUP_BYTES", 2**14)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class State:
        params: object
        opt_state: object
        updates: object

    def fresh():
        copies = jax.tree.map(jnp.copy, params)
        return update.placed(State(copies, leafwise.init(tx, copies), jnp.int32(0)))

    def trained(state, updates):
        for _ in range(updates):
            state, _ = update(state, jax.tree.map(jnp.sin, state.params))
        return state

    state = trained(fresh(), 2)
    assert len(by_stack.groups_of(state.params)) == 2
    copied = jax.device_get(state)
    with Checkpoints(tmp_path / "checkpoints", Config(asynchronous=asynchronous)) as checkpoints:
        checkpoints.save(1, vars(state))
        onward = jax.device_get(trained(state, 2))
        checkpoints.wait()
        back = State(**checkpoints.restore(vars(fresh())).state)
    assert_same_bits(back, copied)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(back.opt_state)} == {kind}
    assert_same_bits(trained(back, 2), onward)


def test_reading_a_checkpoint_unpickles_nothing(checkpoints, monkeypatch):
    checkpoints.save(1, tree(), EXTRA)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    assert_same_bits(checkpoints.restore(jax.eval_shape(tree)).state, tree())


def test_every_dtype_special_value_and_empty_array_survives(checkpoints):
    specials = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], np.float32)
    arrays = {
        "float32": jnp.asarray(specials),
        "bfloat16": jnp.asarray(specials).astype(jnp.bfloat16),
        "fp8": jnp.asarray([0.5, -448.0]).astype(jnp.float8_e4m3fn),
        "int8": jnp.arange(-128, 128).astype(jnp.int8),
        "int32": jnp.asarray([-(2**31), 2**31 - 1], jnp.int32),
        "uint32": jnp.asarray([2**32 - 1], jnp.uint32),
        "bool": jnp.asarray([True, False]),
        "scalar": jnp.float32(1.5),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "numpy": np.arange(6.0, dtype=np.float32).reshape(2, 3),
    }
    checkpoints.save(0, {"all": arrays, "nothing": {}})
    assert_same_bits(checkpoints.restore({"all": arrays, "nothing": {}}).state, {"all": arrays, "nothing": {}})


@pytest.mark.parametrize("direction", ["one device to eight", "eight devices to another eight"])
def test_another_mesh_restores_the_same_bits_in_its_own_sharding(checkpoints, direction):
    def mesh(shape):
        return jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def place(tree, spec, on):
        return jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(on, spec if x.ndim == 3 else PartitionSpec())), tree
        )

    params = tree()
    if direction.startswith("eight"):
        params = place(params, PartitionSpec(None, "fsdp", None), mesh((8, 1)))
    checkpoints.save(1, {"params": params})
    target = place(tree(9), PartitionSpec(None, ("fsdp", "tensor"), None), mesh((2, 4)))
    back = checkpoints.restore({"params": target}).state["params"]
    assert_same_bits(back, params)
    assert back["layers"]["kernel"].sharding.is_equivalent_to(target["layers"]["kernel"].sharding, 3)


def test_an_abstract_tree_without_shardings_lands_on_the_default_device(checkpoints):
    checkpoints.save(1, {"params": tree()})
    back = checkpoints.restore({"params": jax.eval_shape(tree)}).state["params"]
    assert back["embed"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_part_of_a_step_can_be_read_alone_even_when_another_part_is_damaged(checkpoints):
    checkpoints.save(1, {"params": tree(), "opt_state": tree(5)})
    largest_file(checkpoints.path(1) / "state" / "opt_state").write_bytes(b"")
    assert_same_bits(checkpoints.restore({"params": tree(1)}).state, {"params": tree()})


# ----------------------------------------------------------------------------------------------- schedule and retention


def test_the_newest_steps_are_kept(tmp_path):
    with Checkpoints(tmp_path, Config(keep=2, asynchronous=False)) as checkpoints:
        assert checkpoints.steps() == []
        for step in range(1, 8):
            checkpoints.save(step, {"x": jnp.float32(step)})
        assert checkpoints.steps() == [6, 7]
        assert float(checkpoints.restore({"x": jnp.float32(0)}, step=6).state["x"]) == 6.0
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000006", "step_00000007"]


def test_the_schedule_asks_every_so_many_steps_or_never():
    assert [s for s in range(1, 10) if Checkpoints(".", Config(every=3)).should_save(s)] == [3, 6, 9]
    assert not any(Checkpoints(".", Config(every=0)).should_save(s) for s in range(10))


def test_saving_a_step_again_replaces_it(checkpoints):
    checkpoints.save(3, {"x": jnp.float32(1)})
    checkpoints.save(3, {"x": jnp.float32(2)})
    assert float(checkpoints.restore({"x": jnp.float32(0)}).state["x"]) == 2.0
    assert [p.name for p in checkpoints.directory.iterdir()] == ["step_00000003"]


def test_a_background_save_holds_what_was_there_when_it_was_called(tmp_path):
    with Checkpoints(tmp_path, Config(asynchronous=True)) as checkpoints:
        x = normal(0, 512, 256)
        before = np.asarray(x).copy()
        clobber = jax.jit(lambda a: a * 0.0 - 1.0, donate_argnums=0)
        for step in (1, 2):
            checkpoints.save(step, {"x": x}, {"step": step})
            x = clobber(x)
            x.block_until_ready()
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        np.testing.assert_array_equal(checkpoints.restore({"x": x}, step=1).state["x"], before)
        np.testing.assert_array_equal(checkpoints.restore({"x": x}, step=2).state["x"], np.full_like(before, -1))


# -------------------------------------------------------------------------------------------------------- user mistakes


def test_another_model_is_refused_by_name_shape_and_dtype(checkpoints):
    checkpoints.save(1, {"params": tree()})
    wider = {**tree(), "embed": jnp.zeros((64, 8))}
    with pytest.raises(UserError, match=r"params embed was saved with shape \(32, 8\), but this run has .* \(64, 8\)"):
        checkpoints.restore({"params": wider})
    lower = {**tree(), "embed": tree()["embed"].astype(jnp.bfloat16)}
    with pytest.raises(UserError, match="dtype float32, but this run has dtype bfloat16"):
        checkpoints.restore({"params": lower})
    with pytest.raises(UserError, match=r"lacks head; has layers\.kernel, layers\.norm"):
        checkpoints.restore({"params": {"embed": tree()["embed"], "head": tree()["embed"]}})
    with pytest.raises(UserError, match="holds no 'opt_state'; it holds params"):
        checkpoints.restore({"opt_state": tree()})


def test_a_place_without_checkpoints_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    for path, says in [("none", "no checkpoint directory"), ("file", "is a file"), (".", "holds no checkpoint")]:
        with pytest.raises(UserError, match=says):
            Checkpoints(tmp_path / path).restore({"x": jnp.zeros(())})
        with pytest.raises(UserError, match=says):
            checkpoint.find(tmp_path / path)


def test_a_missing_step_names_the_steps_there_are(checkpoints):
    checkpoints.save(4, {"x": jnp.zeros(())})
    with pytest.raises(UserError, match=r"no step 5; it has \[4\]"):
        checkpoints.restore({"x": jnp.zeros(())}, step=5)


def test_find_accepts_a_run_its_checkpoints_or_one_step(tmp_path):
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(4, {"x": jnp.zeros(())})
    for path, step in [("run", None), ("run/checkpoints", None), ("run/checkpoints/step_00000004", 4)]:
        found, found_step = checkpoint.find(tmp_path / path)
        assert (found.directory, found_step) == (tmp_path / "run" / "checkpoints", step)


def test_saving_below_a_file_is_an_error_that_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a file stands where a directory is needed"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(1, {"x": jnp.zeros(())})


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (ValueError("RESOURCE_EXHAUSTED: Error writing: [OS error 28: No space left on device]"), "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), "no permission"),
    ],
    ids=["full", "full in tensorstore", "denied"],
)
def test_a_failed_save_leaves_earlier_steps_intact_and_the_next_one_works(
    tmp_path, monkeypatch, failure, says, asynchronous
):
    with Checkpoints(tmp_path, Config(keep=1, asynchronous=asynchronous)) as checkpoints:
        checkpoints.save(1, {"params": tree(1)})
        checkpoints.wait()

        def fail(path, text):
            raise failure

        def save():
            checkpoints.save(2, {"params": tree(2)})
            checkpoints.wait()

        with monkeypatch.context() as patched:
            patched.setattr(on_disk, "write", fail)
            with pytest.raises(UserError, match=says) as caught:
                save()
        assert "Earlier checkpoints are intact (steps [1])" in str(caught.value)
        assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
        assert_same_bits(checkpoints.restore({"params": tree()}).state, {"params": tree(1)})
        save()
        assert checkpoints.steps() == [2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_in_orbax_is_one_sentence_without_the_traceback_of_its_threads(
    tmp_path, caplog, capfd, asynchronous
):
    noise = {  # 12 writes of 2 MiB, not to be compressed: some fail when the first has failed already
        f"x{i}": np.random.default_rng(i).integers(0, 2**31, 1 << 19, dtype=np.int32) for i in range(12)
    }
    with Checkpoints(tmp_path, Config(asynchronous=asynchronous)) as checkpoints:
        checkpoints.save(1, {"params": {"x": np.zeros(3)}})
        checkpoints.wait()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # a real failure, of TensorStore itself
        try:
            told = r"Cannot save step 2 .* larger than is allowed .*intact \(steps \[1\]\)"
            with pytest.raises(UserError, match=told), contextlib.closing(checkpoints):
                checkpoints.save(2, {"params": noise})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [record for record in caplog.records if record.exc_info]
    assert "Traceback" not in capfd.readouterr().err


def test_a_failed_background_save_is_told_without_waiting_for_the_next(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, Config(asynchronous=True)) as checkpoints:
        checkpoints.check()  # nothing was saved
        tried = threading.Event()

        def fail(path, text):
            tried.wait()
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(on_disk, "write", fail)
        checkpoints.save(1, {"params": tree(1)})
        checkpoints.check()  # it still runs
        tried.set()
        checkpoints._writer.join()
        with pytest.raises(UserError, match=r"Cannot save step 1 .* the disk is full"):
            checkpoints.check()
        checkpoints.check()  # told once


def test_an_unexpected_failure_is_not_disguised_as_the_user_s(checkpoints, monkeypatch):
    def fail(path, text):
        raise ZeroDivisionError

    monkeypatch.setattr(on_disk, "write", fail)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(1, {"x": jnp.zeros(())})


def test_extra_that_json_cannot_hold_is_refused_before_anything_is_written(checkpoints):
    for bad in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            checkpoints.save(1, {"x": jnp.zeros(())}, bad)
    assert not checkpoints.directory.exists()


@pytest.mark.parametrize("options", [{"every": -1}, {"keep": 0}])
def test_impossible_settings_are_refused_with_the_field_s_name(options):
    with pytest.raises(UserError, match=f"^{next(iter(options))} must"):
        Config(**options)


# ----------------------------------------------------------------------------------------------------------------- kill

CHILD = """
    import sys, time
    import numpy as np
    from qarl_jax.run import on_disk
    from qarl_jax.run.checkpoint import Checkpoints, Config

    where, stage = sys.argv[1:]
    checkpoints = Checkpoints(where, Config(keep=2, asynchronous=stage == "background"))
    state = lambda step: {"params": {"w": np.full((1 << 18,), step, np.float32)}}
    checkpoints.save(1, state(1), {"step": 1})
    checkpoints.wait()

    def hang(*args):
        print("now", flush=True)
        time.sleep(60)

    if stage == "arrays":
        Checkpoints._finish = hang
    elif stage in ("background", "manifest"):
        on_disk.write = lambda path, text, write=on_disk.write: (
            hang() if path.name == "manifest.json" else write(path, text)
        )
    elif stage == "rename":
        on_disk.sync = hang
    step = 2
    if stage == "anywhere":
        print("now", flush=True)
    while True:
        checkpoints.save(step, state(step), {"step": step})
        checkpoints.wait()
        step += 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["arrays", "manifest", "rename", "background", "anywhere"])
def test_sigkill_during_a_save_leaves_a_usable_checkpoint(tmp_path, stage):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path), stage], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "now\n"
        if stage == "anywhere":
            time.sleep(np.random.default_rng().uniform(0.05, 0.5))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    with Checkpoints(tmp_path) as checkpoints:
        back = checkpoints.restore({"params": {"w": jnp.zeros((1 << 18,))}})
        assert back.step == {"rename": 2, "anywhere": back.step}.get(stage, 1)
        assert back.extra == {"step": back.step}
        np.testing.assert_array_equal(back.state["params"]["w"], np.full((1 << 18,), back.step, np.float32))
        checkpoints.save(back.step + 1, back.state)
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]  # the debris is gone


def test_the_manifest_names_every_array(checkpoints):
    checkpoints.save(1, {"params": tree()})
    manifest = json.loads((checkpoints.path(1) / "manifest.json").read_text())
    assert manifest["arrays"]["params"]["layers.kernel"] == {"shape": [2, 16, 8], "dtype": "float32"}


def test_names_on_disk_do_not_depend_on_how_nnx_wraps_an_array(checkpoints):
    params = nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))[1]
    checkpoints.save(1, {"params": params})
    plain = {"kernel": params["kernel"][...], "bias": params["bias"][...]}
    assert_same_bits(checkpoints.restore({"params": plain}).state["params"], plain)
