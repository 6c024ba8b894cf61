# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a killed process leaves in the temporary directory goes with the next start of its kind; nothing else does."""

import os
import stat
import subprocess
import sys
import tempfile

import pytest
from qarl_bridge.protocol.scratch import Scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


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
