# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a command tells its user: mistakes and warnings as sentences on stderr, without a library's decoration."""

import logging
import os
import re
import shutil
import subprocess
import sys

import pytest

from qarl_jax.__main__ import VERBS
from qarl_jax.__main__ import main as qarl
from qarl_jax.types import Parser, UserError, entry_point
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
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    arguments = {line.split()[0]: line.split()[1:] for line in lines[::2]}
    assert list(arguments) == list(VERBS)
    assert all(len(purpose.strip()) > 20 for purpose in lines[1::2])
    for verb, given in arguments.items():
        file = (ROOT / f"{VERBS[verb].replace('.', '/')}.py").read_text()
        needed = re.findall(r'add_argument\(\s*"(--[a-z-]+)", (?:required=True|\*\*must)', file)
        assert given, verb
        assert set(needed) <= set(given), verb
    assert {"--checkpoint", "FILE"} <= {word.strip("[]|") for word in arguments["evaluate"]}
    doors = {path.stem for path in (ROOT / "qarl_jax").glob("[a-z]*.py") if "__main__" in path.read_text()}
    assert doors < VERBS.keys()


@pytest.mark.parametrize(
    ("name", "said"), [("qarl", "usage: qarl train"), ("python", "usage: python -m qarl_jax.train")]
)
def test_a_verb_shows_its_usage_as_it_was_called(name, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"/bin/{name}", "train", "--help"])
    with pytest.raises(SystemExit) as stop:
        qarl()
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(said)


def test_an_unknown_verb_is_told_with_those_there_are(capsys):
    assert qarl(["trian"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: trian: no such verb.")
    assert "  train " in said


def test_a_command_line_takes_its_config_with_or_without_the_option(capsys):
    parser = Parser("train", config="a file", needed=True)
    for line in (["--config", "a.yaml", "x=1"], ["a.yaml", "x=1"], ["x=1", "--config", "a.yaml"]):
        args = parser.parse_args(line)
        assert (args.config, args.overrides) == ("a.yaml", ["x=1"])
    with pytest.raises(SystemExit):
        parser.parse_args(["x=1"])
    assert "train quickstart" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        Parser("qat", config="a file", needed=True).parse_args(["x=1"])
    assert "qat FILE" in capsys.readouterr().err  # quickstart is no config of it
    assert Parser("doctor", config="a file").parse_args(["x=1"]).config is None


def test_make_tells_an_unfit_python_in_a_line_and_makes_nothing(tmp_path):
    for name in ("Makefile", "pyproject.toml", "bridge/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    command = ["make", "quickstart", "PYTHON=false"]
    done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "false is not Python 3.11 to 3.13: add PYTHON=python3.13, say" in line
    assert not (tmp_path / ".venv").exists()
