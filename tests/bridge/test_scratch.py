# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a killed process leaves in the temporary directory goes with the next start of its kind; nothing else does."""

import os
import pathlib
import socket
import stat
import subprocess
import sys
import tempfile
import uuid

import pytest
from qarl_bridge.protocol import scratch
from qarl_bridge.protocol.errors import BridgeError
from qarl_bridge.protocol.scratch import Scratch

from qarl_jax.rollout.vllm.process import BridgeProcess
from qarl_jax.types import UserError


@pytest.fixture(autouse=True)
def temporary(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # unlike tmp_path, short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield pathlib.Path(folder)


@pytest.fixture
def long(temporary, monkeypatch):
    """A temporary directory whose name leaves no room for that of a socket; `temporary` stands for /tmp."""
    folder = temporary / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(scratch, "_FALLBACK", str(temporary))
    return folder


def test_a_long_temporary_directory_is_not_used_for_sockets(long, temporary):
    mine = Scratch("qarl-engine-")
    assert os.path.dirname(mine.path) == str(temporary)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(mine.path, str(uuid.uuid4())))  # as vLLM names its own
    mine.close()
    assert list(temporary.iterdir()) == [long]


def test_where_no_folder_is_short_enough_the_error_says_what_to_set(long, monkeypatch):
    monkeypatch.setattr(scratch, "_FALLBACK", "/proc/none")
    with pytest.raises(BridgeError, match=r"too long for unix sockets.* set TMPDIR to a folder of at most 49 bytes"):
        Scratch("qarl-engine-")
    with pytest.raises(UserError, match=r"cannot start the vLLM bridge: .*TMPDIR"):
        BridgeProcess(arguments=[]).start({}, [])


def test_a_folder_is_ones_own_and_goes_when_it_is_closed():
    one = Scratch("kind-")
    assert stat.S_IMODE(os.stat(one.path).st_mode) == 0o700
    one.close()
    one.close()
    assert not os.path.exists(one.path)


def test_what_a_killed_process_held_is_swept_and_what_a_live_one_holds_is_not(temporary):
    hold = "from qarl_bridge.protocol.scratch import Scratch; s = Scratch('kind-'); print(s.path, flush=True); input()"
    command = [sys.executable, "-c", hold]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as holder:
        path = holder.stdout.readline().strip()
        assert os.path.dirname(path) == str(temporary)
        other, foreign = temporary / "other-1", temporary / "kind-without-a-lock"
        other.mkdir()
        foreign.mkdir()
        mine = Scratch("kind-")
        assert os.path.isdir(path)
        holder.kill()
    another = Scratch("kind-")
    assert not os.path.exists(path)
    assert {entry.path for entry in os.scandir(temporary)} == {mine.path, another.path, str(other), str(foreign)}
    mine.close()
    another.close()


def test_a_folder_that_another_process_sweeps_at_the_same_moment_is_no_error(temporary, monkeypatch):
    """Four processes of a run that start again together once failed here."""
    (temporary / "kind-1").mkdir()
    entries = list(os.scandir(temporary))
    (temporary / "kind-1").rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(scratch.os, "scandir", lambda folder: entries)
        scratch.sweep("kind-", str(temporary))
