# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic, whatever a rollout meets: long prompts, chunks, hits in the prefix cache, preemption, requests that
join others, stop tokens, temperatures. Against a live vLLM on a CPU, by the gate that a GPU runs at real width."""

import dataclasses
import json

import pytest

from benchmarks import gate, random_folder
from tests.reference import split_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# Of a page of 128 tokens: the longest prompts need two, what they have alike is one, and a response grows into another.
# One thread: two that wait for each other's turn on a busy machine take twenty times as long.
SIZES = "--sequences 16 --prompt-len 12 --long-prompt 171 --response-len 24 --updates 0 --kv-cache-gb 0.2 --threads 1"

SHARDS = ["--replay", "--tensor-parallel", "2"]


def test_no_token_differs_whatever_a_rollout_meets(tmp_path, monkeypatch):
    """Every condition in the engine with little room, which the others do not ask for, and which costs a start less."""
    pytest.importorskip("vllm")
    tight = {name: dataclasses.replace(condition, tight=True) for name, condition in gate.CONDITIONS.items()}
    monkeypatch.setattr(gate, "CONDITIONS", tight)
    assert compared(tmp_path, "assets/tiny-qwen3", "w8a8", "--conditions", "all") == 7


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["w8a8", "bf16", "w4a16", "nvfp4", "w2a16_asym:g32", "w2a2:g32", "w4a4:g32"])
def test_no_token_differs_in_engines_with_room_and_without(scheme, tmp_path):
    pytest.importorskip("vllm")
    assert compared(tmp_path, "assets/tiny-qwen3", scheme, "--conditions", "all") == 7


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["w2a16_asym:g32", "w2a2:g32"])
def test_no_token_differs_where_channels_are_split(scheme, tmp_path):
    pytest.importorskip("vllm")
    split_model.make("assets/tiny-qwen3", tmp_path / "model", scheme, 0.25, "bfloat16")
    conditions = ["--conditions", "plain", "samples", "--updates", "1"]
    assert compared(tmp_path, str(tmp_path / "model"), scheme, *conditions) == 4


@pytest.mark.nightly
def test_no_token_differs_whatever_a_rollout_with_adapters_meets(tmp_path):
    pytest.importorskip("vllm")
    again = ["--conditions", "all", "--lora-rank", "8", "--updates", "1"]
    assert compared(tmp_path, "assets/tiny-qwen3", "w4a16", *again) == 14


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scheme", "more"),
    [("w8a8", ["--replay"]), ("w8a8", []), ("nvfp4", []), ("w8a8", SHARDS), ("w4a16:g64", SHARDS), ("bf16", SHARDS)],
    ids=["the engine's experts", "the learner's own", "the learner's own, nvfp4", *["two shards"] * 3],
)
def test_no_token_of_an_moe_model_differs(scheme, more, tmp_path):
    pytest.importorskip("vllm")
    random_folder.make(tmp_path / "model", random_folder.config_of("tiny-moe"), deviation=0.06)
    conditions = ["--conditions", "plain", "samples", "preempted"]
    assert compared(tmp_path, str(tmp_path / "model"), scheme, *conditions, *more) == 3


def compared(folder, model, scheme, *arguments):
    """How many conditions the gate met without a mismatched token; its controls found some."""
    found = folder / "rows.json"
    assert gate.main(["--model", model, "--schemes", scheme, *SIZES.split(), *arguments, "--json", str(found)]) == 0
    rows = json.loads(found.read_text())["rows"]
    met = [row for row in rows if "condition" in row]
    for row in met:
        assert (row["unequal"], row["exact"]) == (0, 1.0), row
        assert row["tokens"] > 100, row
    assert all(row["control"] > 0 for row in rows if "control" in row)
    return len(met)
