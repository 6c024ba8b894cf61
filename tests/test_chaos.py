# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A minute of what `make chaos` does for an hour, and that it tells when something does not hold."""

import json
import subprocess
import sys
import types

import pytest

from tests import chaos
from tests.reference import tiny


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kinds", [["checkpoints", "mutations", "inputs"], ["trainer"]], ids=["files", "kills"])
def test_a_minute_of_chaos_holds(tmp_path, kinds):
    """Kills of a trainer, whose moments are random here, are asked for by name in test_resume.py."""
    short = ["--minutes", "5", "--scale", "0.004", "--lanes", "1", "--steps", "3", "--seed", "3"]  # two kills
    command = [sys.executable, "-m", "tests.chaos", *short]
    environment = tiny.environment()
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out", "--kinds", *kinds],
        cwd=tiny.ROOT,
        env=environment | {"XLA_FLAGS": " ".join(flags)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "out" / "table.json").read_text())["made"]
    assert all(made[kind]["held"] >= 1 for kind in kinds), made


def broken(lane, rng):
    raise chaos.BrokenError("it did not hold", 2)


def impossible(lane, rng):
    raise chaos.ImpossibleError("not on this machine")


def test_what_does_not_hold_and_what_cannot_be_run_is_told(tmp_path, monkeypatch, capsys):
    kinds = {"good": lambda lane, rng: 1, "bad": broken, "elsewhere": impossible}
    monkeypatch.setattr(chaos, "KINDS", {name: chaos.Kind(name, 4, trial) for name, trial in kinds.items()})
    monkeypatch.setattr(chaos, "Lane", lambda folder, steps: folder.mkdir() or types.SimpleNamespace(number=0))
    out = ["--lanes", "2", "--out", str(tmp_path / "out")]
    assert chaos.main([*out, "--kinds", "good"]) == 0
    assert chaos.main([*out, "--kinds", "elsewhere"]) == 1  # nothing was tried
    capsys.readouterr()
    assert chaos.main([*out, "--kinds", *kinds]) == 1
    said = capsys.readouterr().out
    assert "| good | 4 | 4 | 0 |" in said
    assert "| bad | 4 | 0 | 4 |" in said
    assert "| elsewhere | cannot be run here" in said
    assert "it did not hold" in said


def test_the_corpus_names_every_case_once_and_says_what_is_to_be_told():
    cases = chaos.corpus()
    assert len({case["name"] for case in cases}) == len(cases)
    assert all(case["says"] for case in cases)
