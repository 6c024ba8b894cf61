# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters on the bases that a real vLLM serves: its layers against the formula, and many versions in a row."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SCRIPT = pathlib.Path(__file__).parents[1] / "reference" / "live_adapters.py"
NIGHTLY = [pytest.param(scheme, marks=pytest.mark.nightly) for scheme in ("bf16", "w4a16")]


@pytest.fixture(scope="module", params=["w8a8", *NIGHTLY])
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


def test_every_layer_computes_the_formula_of_its_adapter_to_the_bit(found):
    """y' = bf(y + bf(bf(x A^T) B^T)) of all 16 fused layers, in numpy; once after a complete version that follows."""
    assert [count for _, count in found["outputs"]] == [57344, 57344]
    assert [wrong for wrong, _ in found["outputs"]] == [0, 0]
    assert found["adapters_matter"]


def test_an_adapter_of_zeros_leaves_the_bits_of_the_base(found):
    assert found["zero_is_the_base"], "greedy and sampled tokens and log-probs, as with the adapters taken away"


def test_a_partial_version_is_served_as_the_same_version_whole(found):
    assert found["partial_is_whole"]
    assert found["partial_is_whole_again"]
    layers, adapted = 16, 16
    assert found["first"][1] == found["read_back"] == layers + adapted + 4 * 4 + 3  # norms, embedding, head


def test_many_publishes_in_a_row_leave_nothing_behind(found):
    row = found["row"]
    assert set(row["versions"]) == {0}, "every completion was drawn under the version published last"
    assert row["files"][-1] <= row["files"][5] + 2
    growth = row["rss"][-1] - row["rss"][5]
    assert growth < 4 * row["bytes"], "one copy per version would be nearly ten times as much"
    assert "loading whole modules" in found["notes"]


def test_bad_adapters_are_refused_and_the_last_good_version_is_served_to_the_bit(found):
    words = (
        "holds NaN",
        "engine expects bfloat16[4, 256]",
        "k_proj.lora_A.weight: the engine was started",
        "read_back",
    )
    for (error, same), said in zip(found["refused"], words, strict=True):
        assert said in error
        assert same, error
