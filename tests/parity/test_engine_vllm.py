# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A real vLLM, broken on purpose while it loads the quickstart's model; and its two loaders against each other."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
TABLES = json.dumps([{"match": "embed|head", "scheme": "w4a16:g64"}, {"match": "", "scheme": "w4a16_asym"}])
SCRIPT = pathlib.Path(__file__).parents[1] / "reference" / "live_engine.py"


@pytest.fixture(
    scope="module",
    params=["w8a8", "w4a16", "nvfp4", "w3a16_asym:g32", "w4a4:g32", TABLES],
)
def found(request, tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("engine")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), request.param, str(folder)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert "error" not in result, (result, done.stderr[-3000:])
    return result


def test_whole_modules_are_loaded_once_they_gave_what_vllms_loader_gives(found):
    assert "loading whole modules" in found["notes"]
    assert found["versions_differ"]
    assert found["loaders_agree"], "the same tokens and the same bits of their log-probs by both loaders"


@pytest.mark.parametrize("loader", ["whole", "loader"])
def test_a_failure_in_the_middle_of_a_load_brings_the_last_good_version_back_within_ten_seconds(found, loader):
    assert found[f"{loader}_failure"].startswith("engine: ")
    assert "was restored and serves" in found[f"{loader}_failure"]
    assert found[f"restored_after_{loader}"], "bit for bit what was served before"
    assert found[f"{loader}_recovery_s"] < 10
    assert found["back_to_zero"]


def test_a_version_that_comes_layer_by_layer_is_the_one_that_comes_whole(found):
    """By either loader; of a layer nothing is left when the next one comes."""
    assert found["whole_chunked"]
    assert found["vllm_chunked"]
    assert len(set(found["parts"])) == 1, "as many layers are read back as of a whole version"


def test_modules_of_the_live_engine_can_be_probed(found):
    hidden, prompt = 256, 5
    assert [name for name, _ in found["probed"]] == ["model.layers.0.mlp.down_proj", "model.layers.1"]
    assert found["probed"][0][1] == [[prompt, hidden]]
    assert found["probed"][1][1] == [[prompt, hidden]] * 2
    assert found["probe_errors"] == ["limits", "bad_message"]
