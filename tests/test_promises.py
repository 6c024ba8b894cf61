# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A failing test opens with the promise it guards and its claim."""

import os
import pathlib
import subprocess
import sys

from tests.reference import promises

ROOT = pathlib.Path(__file__).parents[1]


def test_every_place_that_a_promise_names_is_there():
    places = [place for places in promises.PLACES.values() for place in places]
    assert len(places) == len(set(places))
    assert not [place for place in places if not (ROOT / "tests" / place).exists()]


def test_the_longest_place_decides():
    assert promises.of("bridge/test_server.py") == "Nothing is lost"
    assert promises.of("bridge/test_formats.py") == "One grid"
    assert promises.of("run/test_checkpoint.py") == "Nothing is lost"
    assert promises.of("test_docs.py") == "A command does what the guide says"


def test_the_headline_of_a_failure_names_promise_and_claim(tmp_path):
    file = tmp_path / "tests" / "quant" / "test_fails.py"
    file.parent.mkdir(parents=True)
    file.write_text("def test_codes_are_equal():\n    assert 1 == 2\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.reference.promises",
        "-q",
        f"--rootdir={tmp_path}",
        str(file),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if line.startswith("____"))
    assert line.strip("_ ") == "One grid: codes are equal"
