# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints are passed over loudly, and kept; those of another version are refused."""

import json
import logging
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.run import on_disk
from qarl_jax.run.checkpoint import Checkpoints, Config, DamagedCheckpointError
from qarl_jax.types import UserError
from tests.reference.checkpointing import assert_same_bits, largest_file, tree

EXTRA = {"cursor": [3, 17], "policy_version": 7, "seed": 2**63, "run_id": "a", "config_hash": "f00"}


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as opened:
        yield opened


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


@pytest.mark.parametrize("number", [3, 5])
def test_a_checkpoint_of_another_version_is_refused(checkpoints, monkeypatch, number):
    monkeypatch.setattr(on_disk, "FORMAT", number)
    checkpoints.save(1, {"x": jnp.float32(1)})
    monkeypatch.undo()
    with pytest.raises(UserError, match=rf"another version of qarl_jax \(checkpoint format {number}; .* new run_dir"):
        checkpoints.restore({"x": jnp.float32(0)})


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
