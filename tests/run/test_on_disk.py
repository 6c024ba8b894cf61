# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder is made by one process at a time, and whole."""

import errno
import os
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from qarl_jax.run import on_disk
from qarl_jax.types import UserError
from tests.reference import tiny


def test_a_folder_that_another_process_makes_is_refused(tmp_path):
    out = tmp_path / "models" / "out"
    code = f"from qarl_jax.run import on_disk; held = on_disk.whole_folder({str(out)!r})"
    code += "; (held.__enter__() / 'file').touch(); print(1, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=tiny.environment(), **pipes) as first:
        assert first.stdout.readline() == b"1\n"
        said = rf"--out .*out is in use by process {first.pid}: stop it, or name another"
        with pytest.raises(UserError, match=said), on_disk.whole_folder(out):
            raise AssertionError
        assert (tmp_path / "models" / "out.partial" / "file").exists()
        first.kill()
    with on_disk.whole_folder(out) as staging:
        assert not (staging / "file").exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path):
    out = tmp_path / "models" / "out"

    def fails(error):
        with on_disk.whole_folder(out) as staging:
            (staging / "file").write_text("a")
            raise error

    with pytest.raises(UserError, match=r"--out .*out cannot be written: No space.*Free some"):
        fails(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert not list(out.parent.iterdir())
    with pytest.raises(UserError, match=r"--out .*out cannot be written: I/O error: No space.*28\). Free some"):
        fails(SafetensorError("I/O error: No space left on device (os error 28)"))
    assert not list(out.parent.iterdir())
    with pytest.raises(FileNotFoundError):
        fails(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
