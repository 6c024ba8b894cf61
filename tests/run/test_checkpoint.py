# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about checkpoints: exact, atomic, checked, and never the reason that something is lost."""

import contextlib
import dataclasses
import errno
import json
import logging
import pickle
import resource
import shutil
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
from qarl_jax.run.checkpoint import Checkpoints, Config, DamagedCheckpointError
from qarl_jax.types import UserError

EXTRA = {"cursor": [3, 17], "policy_version": 7, "seed": 2**63, "run_id": "a", "config_hash": "f00"}


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def tree(seed=0):
    return {
        "layers": {"kernel": normal(seed, 2, 16, 8), "norm": normal(seed + 1, 2, 8)},
        "embed": normal(seed + 2, 32, 8),
    }


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as opened:
        yield opened


def largest_file(directory):
    return max((p for p in directory.rglob("*") if p.is_file() and "/d/" in str(p)), key=lambda p: p.stat().st_size)


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
        assert checkpoints.latest_step() is None
        for step in range(1, 8):
            checkpoints.save(step, {"x": jnp.float32(step)})
        assert checkpoints.steps() == [6, 7]
        assert checkpoints.latest_step() == 7
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


# --------------------------------------------------------------------------------------------------------------- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, lambda path: path.unlink()], ids=["cut", "altered", "missing"]
)
def test_a_damaged_newest_step_is_passed_over_loudly_and_kept(checkpoints, caplog, damage):
    checkpoints.save(1, {"params": tree(1)}, {"step": 1})
    checkpoints.save(2, {"params": tree(2)}, {"step": 2})
    victim = largest_file(checkpoints.path(2))
    damage(victim)
    with caplog.at_level(logging.WARNING):
        back = checkpoints.restore({"params": tree()})
    assert_same_bits(back.state, {"params": tree(1)})
    assert (back.step, back.extra) == (1, {"step": 1})
    assert victim.name in caplog.text
    assert checkpoints.path(2).is_dir()
    with pytest.raises(DamagedCheckpointError, match=victim.name):
        checkpoints.restore({"params": tree()}, step=2)


@pytest.mark.parametrize("name", ["extra.json", "manifest.json"])
def test_damaged_json_is_damage_too(checkpoints, caplog, name):
    checkpoints.save(1, {"x": jnp.float32(1)})
    checkpoints.save(2, {"x": jnp.float32(2)})
    truncate(checkpoints.path(2) / name)
    assert checkpoints.restore({"x": jnp.float32(0)}).step == 1
    assert name in caplog.text


def test_a_step_s_folder_under_another_step_s_name_is_not_taken_for_that_step(checkpoints, caplog):
    checkpoints.save(1, {"x": jnp.float32(1)})
    shutil.copytree(checkpoints.path(1), checkpoints.path(7))
    assert checkpoints.restore({"x": jnp.float32(0)}).step == 1
    assert "step_00000007 is damaged: its manifest is that of step 1" in caplog.text
    with pytest.raises(DamagedCheckpointError, match="copied or renamed"):
        checkpoints.restore({"x": jnp.float32(0)}, step=7)


def test_a_restore_of_everything_reads_no_file_that_it_has_not_compared(checkpoints):
    checkpoints.save(1, {"params": tree(), "opt_state": tree(5)})
    wanted = {"params": tree(1), "opt_state": tree(1)}
    for file in on_disk.files(checkpoints.path(1)):
        whole = file.read_bytes()
        file.write_bytes(whole + b"x")
        with pytest.raises(DamagedCheckpointError, match=file.name):
            checkpoints.restore(wanted, step=1)
        file.write_bytes(whole)
    assert_same_bits(checkpoints.restore(wanted, step=1).state, {"params": tree(), "opt_state": tree(5)})


def test_a_step_without_its_manifest_is_damage_and_not_silently_absent(checkpoints, caplog):
    checkpoints.save(1, {"x": jnp.float32(1)})
    checkpoints.save(2, {"x": jnp.float32(2)})
    (checkpoints.path(2) / "manifest.json").unlink()
    assert checkpoints.restore({"x": jnp.float32(0)}).step == 1
    assert "step_00000002 is damaged: manifest.json is missing" in caplog.text
    (checkpoints.path(1) / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"steps \[1, 2\]"):
        checkpoints.restore({"x": jnp.float32(0)})


def test_no_flipped_bit_of_a_manifest_ends_a_resume_or_passes_unseen(checkpoints):
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.float32(step)}, {"step": step})
    path = checkpoints.path(2) / "manifest.json"
    whole = path.read_bytes()
    for bit in np.random.default_rng(0).permutation(8 * len(whole))[:60]:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        back = checkpoints.restore({"x": jnp.float32(0)})
        # White space between two values may change: then nothing has.
        assert back.step == 1 or json.loads(data) == json.loads(whole), bytes(data)
        assert float(back.state["x"]) == back.step


def test_a_checkpoint_written_before_manifests_had_a_sum_is_read(checkpoints):
    checkpoints.save(1, {"x": jnp.float32(1)})
    path = checkpoints.path(1) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["crc"]
    path.write_text(json.dumps(manifest | {"format": 1}))
    assert checkpoints.restore({"x": jnp.float32(0)}).step == 1
    path.write_text("[]")
    with pytest.raises(DamagedCheckpointError):
        checkpoints.restore({"x": jnp.float32(0)})


def test_a_checkpoint_in_which_a_stack_of_layers_is_a_segment_is_read(checkpoints, monkeypatch):
    arrays = {"stacks": [{"kernel": jnp.arange(3.0)}]}
    monkeypatch.setattr(on_disk, "FORMAT", 2)
    checkpoints.save(1, {"params": {"segments": arrays["stacks"]}})
    monkeypatch.undo()
    back = checkpoints.restore({"params": jax.tree.map(jnp.zeros_like, arrays)})
    np.testing.assert_array_equal(back.state["params"]["stacks"][0]["kernel"], [0.0, 1.0, 2.0])


@pytest.mark.parametrize("clips", [True, False])
def test_an_optimizer_state_of_nested_transformations_is_read(checkpoints, monkeypatch, clips):
    params = {"layers": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.ones((2, 3))}}
    tx = leafwise.Optimizer(build.Muon())
    state = tx.init(params)
    bias = {"layers": {"bias": state.mu["layers"]["bias"]}}
    rules = {
        "muon": {
            "inner_state": [
                {"momentum": {"layers": {"kernel": state.momentum["layers"]["kernel"] + 1}}},
                (),
                {"count": jnp.int32(7)},
            ]
        },
        "adamw": {
            "inner_state": [
                {
                    "count": jnp.int32(7),
                    "mu": jax.tree.map(lambda x: x + 2, bias),
                    "nu": jax.tree.map(lambda x: x + 3, bias),
                },
                (),
                {"count": jnp.int32(7)},
            ]
        },
    }
    older = {"inner_states": rules}
    monkeypatch.setattr(on_disk, "FORMAT", 3)
    checkpoints.save(1, {"opt_state": [(), older] if clips else older})
    monkeypatch.undo()
    back = checkpoints.restore({"opt_state": state}).state["opt_state"]
    assert back.count == 7
    found = (back.momentum["layers"]["kernel"], back.mu["layers"]["bias"], back.nu["layers"]["bias"])
    assert [float(x.mean()) for x in found] == [1.0, 2.0, 3.0]
    with pytest.raises(UserError, match="another model or optimizer"):
        checkpoints.restore({"opt_state": leafwise.Optimizer(build.AdamW()).init(params)})


def test_a_run_that_fell_back_saves_over_the_damaged_step_and_keeps_the_evidence(checkpoints):
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.arange(100.0)})
    truncate(largest_file(checkpoints.path(2)))
    assert checkpoints.restore({"x": jnp.arange(100.0)}).step == 1
    checkpoints.save(2, {"x": jnp.arange(100.0) + 1})
    assert checkpoints.restore({"x": jnp.arange(100.0)}).step == 2
    assert (checkpoints.directory / "step_00000002.damaged").is_dir()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit], ids=["cut", "altered"])
def test_a_damaged_step_does_not_count_towards_keep_and_stays(tmp_path, damage):
    x = {"x": jnp.arange(100.0)}
    options = Config(keep=2, asynchronous=False)
    with Checkpoints(tmp_path, options) as checkpoints:
        for step in (10, 15):
            checkpoints.save(step, x)
    damage(largest_file(checkpoints.path(15)))
    with Checkpoints(tmp_path, options) as resumed:  # another process, which fell back to 10
        resumed.save(17, x)
        assert resumed.steps() == [10, 15, 17]
        resumed.save(20, x)
        assert resumed.steps() == [15, 17, 20]


def test_when_every_step_is_damaged_it_is_an_error_that_names_them(checkpoints):
    for step in (1, 2):
        checkpoints.save(step, {"x": jnp.arange(100.0)})
        truncate(largest_file(checkpoints.path(step)))
    with pytest.raises(DamagedCheckpointError, match=r"steps \[1, 2\]"):
        checkpoints.restore({"x": jnp.arange(100.0)})


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
