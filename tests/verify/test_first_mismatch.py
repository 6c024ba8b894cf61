# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`parity --at`: the last mismatched token of a run, looked up block by block; on a live vLLM (nightly)."""

import json

import pytest

from qarl_jax import parity
from qarl_jax.verify import first_mismatch


class Recorded:
    """An engine that was asked for blocks of a sequence."""

    def __init__(self, config, run_id):
        self.config = config

    def publish(self, weights, version):
        pass

    def probe(self, sequence, names):
        raise AssertionError

    def close(self):
        self.closed = True


@pytest.mark.parametrize(("where", "code"), [("block 1, from token 3 on", 1), ("", 0)])
def test_a_token_that_a_run_recorded_is_looked_up_block_by_block(folder, tmp_path, monkeypatch, capsys, where, code):
    asked, file = [], tmp_path / "first_mismatch.jsonl"

    def first_difference(probe, weights, sequence):
        asked.append((probe.__self__.config, sequence))
        return where

    monkeypatch.setattr(first_mismatch, "VllmEngine", Recorded)
    monkeypatch.setattr(first_mismatch.layers, "first_difference", first_difference)
    command = ["--model", folder, "--scheme", "bf16", "--engine", "cpu", "--at", str(file)]
    assert parity.main(command) == 2, "no such file"
    file.write_text(json.dumps({"step": 1, "uid": "a/0"}) + "\n")
    assert parity.main(command) == 2, "a record of before sequences were kept"
    records = [{"step": step, "uid": uid, "sequence": [5, 6, step]} for step, uid in ((2, "b/0"), (7, "c/1"))]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    capsys.readouterr()
    assert parity.main(command) == code
    (config, sequence), said = asked[0], capsys.readouterr().out
    assert (sequence, config.max_model_len) == ([5, 6], 3), "what comes before the last recorded token"
    assert '"uid": "c/1"' in said
    assert (where or "no block differs") in said
    file.write_text(json.dumps({"step": 1, "sequence": [5, 600, 7]}) + "\n")
    assert parity.main(command) == 2, "a token that this model does not have"


@pytest.mark.vllm
@pytest.mark.nightly
def test_no_block_of_a_live_engine_differs_where_a_run_would_look(folder, tmp_path, capsys):
    pytest.importorskip("vllm")
    file = tmp_path / "first_mismatch.jsonl"
    file.write_text(json.dumps({"step": 1, "uid": "a/0", "sequence": list(range(60))}) + "\n")
    command = ["--model", folder, "--scheme", "w8a8", "--engine", "cpu", "--threads", "1", "--at", str(file), "--json"]
    assert parity.main(command) == 0
    assert json.loads(capsys.readouterr().out)["where"] == ""
