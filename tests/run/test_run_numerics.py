# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Whose arithmetic a run has under `quant.engine=auto`, and that what goes on with a run keeps it."""

import json

import pytest

from qarl_jax import train
from qarl_jax.quant import resolve
from qarl_jax.run import build, evaluation, export
from qarl_jax.types import UserError
from tests.reference import tiny

VLLM = {"engine": {"name": "vllm"}}


@pytest.fixture(scope="module")
def world(compiled_programs, tmp_path_factory):
    world = tiny.World(tmp_path_factory.mktemp("world"))
    del world.tree["quant"]["engine"]
    return world


def recorded(world):
    return [start["numerics"] for start in json.loads((world.run_dir / "run.json").read_text())["starts"]]


def record(folder, *numerics):
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"config": {}, "starts": [{"numerics": n} for n in numerics]}))


def test_a_folder_says_what_its_run_last_computed_in(tmp_path):
    assert build.recorded_numerics(tmp_path) is None
    record(tmp_path, {"profile": "cpu"}, {"profile": "cuda"})
    assert build.recorded_numerics(tmp_path) == resolve("cuda")
    assert build.recorded_numerics(tmp_path / "checkpoints" / "step_00000001") == resolve("cuda")
    record(tmp_path)
    assert build.recorded_numerics(tmp_path) is None
    record(tmp_path, "of another make")
    assert build.recorded_numerics(tmp_path) is None
    record(tmp_path, {"profile": "abacus"})
    with pytest.raises(UserError, match="unknown numerics profile 'abacus'"):
        build.recorded_numerics(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run\.json is not JSON"):
        build.recorded_numerics(tmp_path)


def test_what_runs_recorded_as_printed_is_still_read(tmp_path):
    record(tmp_path, "Numerics(profile='cpu')")
    assert build.recorded_numerics(tmp_path) == resolve("cpu")


def test_auto_goes_on_in_what_was_recorded_unless_vllm_samples(world, tmp_path):
    record(tmp_path, {"profile": "cuda"})
    assert build.numerics_of_run(world.config, tmp_path) == resolve("cuda")
    assert build.numerics_of_run(world.config, tmp_path / "elsewhere" / "a" / "b" / "c") == resolve("plain")
    assert build.numerics_of_run(world.changed(rollout=VLLM).config, tmp_path) == resolve("cpu")
    for engine in ("plain", "cpu"):
        named = world.changed(quant={"engine": engine}).config
        assert build.numerics_of_run(named, tmp_path) == resolve(engine)


@pytest.mark.slow
def test_a_run_goes_on_and_is_evaluated_and_exported_in_what_it_recorded(world, monkeypatch, tmp_path):
    begun = world.changed(train={"steps": 1}, eval={"at_start": False, "at_end": False})
    assert train.main(begun.command()) == 0
    assert recorded(begun) == [{"profile": "plain"}]
    # As if it had begun under another meaning of auto.
    record_file = begun.run_dir / "run.json"
    record_file.write_text(record_file.read_text().replace('"profile": "plain"', '"profile": "cuda"'))
    asked = []

    def policy_graphdef(cfg, numerics=None):
        asked.append((numerics or cfg.numerics).profile)
        raise UserError("enough")

    monkeypatch.setattr(build, "policy_graphdef", policy_graphdef)
    fresh = world.changed(run_dir=str(world.folder / "fresh"))
    out = ["--format", "compressed-tensors", "--out", str(tmp_path / "out")]
    checkpoint = ["--checkpoint", str(begun.run_dir)]
    assert train.main(world.command()) == train.main(world.command("quant.engine=plain")) == 2
    assert train.main(fresh.command()) == 2
    assert evaluation.main(checkpoint) == export.main([*checkpoint, *out]) == 2
    assert evaluation.main([*checkpoint, "quant.engine=plain"]) == 2
    assert asked == ["cuda", "plain", "plain", "cuda", "cuda", "plain"]
