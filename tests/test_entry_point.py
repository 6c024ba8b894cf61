# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a command tells its user: mistakes and warnings as sentences on stderr, without a library's decoration."""

import logging
import re
import shutil
import subprocess
import sys

import pytest

from qarl_jax.types import UserError, entry_point
from tests.reference.tiny import ROOT


@pytest.fixture
def decorated():
    """A root logger that some library has set up."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


def test_a_warning_is_a_plain_sentence(decorated, capsys, caplog):
    log = logging.getLogger("qarl_jax.run.checkpoint")

    @entry_point
    def main(argv):
        log.warning("Step %d is damaged.", 3)
        log.info("not for everybody")
        return 0

    assert main() == 0
    assert capsys.readouterr().err == "warning: Step 3 is damaged.\n"
    log.warning("afterwards")  # a library's user gets it by logging's own ways
    assert "afterwards" in caplog.text


def test_a_mistake_is_one_sentence_and_exit_code_2(capsys):
    @entry_point
    def main(argv):
        raise UserError("train.steps: expected an integer")

    assert main() == 2
    assert capsys.readouterr().err == "error: train.steps: expected an integer\n"


def test_the_package_lists_its_commands():
    done = subprocess.run([sys.executable, "-m", "qarl_jax"], capture_output=True, text=True, check=True)
    called = [line.split()[2] for line in done.stdout.splitlines() if line.startswith("python -m ")]
    verbs = ("train", "convert", "doctor", "evaluate", "export", "parity", "plot", "sft")
    assert called == [f"qarl_jax.{verb}" for verb in verbs]
    arguments = {
        line.split()[2]: line.split()[3:] for line in done.stdout.splitlines() if line.startswith("python -m ")
    }
    for verb, given in arguments.items():
        file = (ROOT / f"{verb.replace('.', '/')}.py").read_text()
        needed = re.findall(r'add_argument\(\s*"(--[a-z-]+)", (?:required=True|\*\*must)', file)
        assert given, verb
        assert set(needed) <= set(given), verb
    assert {"--config", "--checkpoint"} <= set(arguments["qarl_jax.evaluate"])


def test_make_tells_an_unfit_python_in_a_line_and_makes_nothing(tmp_path):
    for name in ("Makefile", "pyproject.toml", "bridge/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        ["make", "quickstart", "PYTHON=false"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "false is not Python 3.11 to 3.13: add PYTHON=python3.13, say" in line
    assert not (tmp_path / ".venv").exists()
