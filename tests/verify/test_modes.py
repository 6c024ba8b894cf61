# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`parity --modes`: one changed bit tells two modes apart; two engines of one mode on a live vLLM (nightly)."""

import json

import numpy as np
import pytest
from qarl_bridge.protocol import messages

from qarl_jax import parity
from qarl_jax.types import Completion, VersionSpan
from qarl_jax.verify import modes

DRAWN = ["prompt log-probs", "decoded", "decoded, ragged"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.nightly
def test_two_engines_of_one_mode_give_the_same_bits_and_the_command_says_so(folder, capsys):
    pytest.importorskip("vllm")
    command = ["--model", folder, "--scheme", "w8a8", "--engine", "cpu", "--modes", "--json"]
    assert parity.main([*command, "--prompts", "4", "--prompt-len", "6", "--response-len", "8", "--threads", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["first_broken"] is None
    assert [rung["name"] for rung in result["rungs"]] == ["modules", *DRAWN]
    assert result["modes"] == ["eager", "eager"]
    assert min(result["tokens_per_s"]) > 0


def observed(tokens=(3, 4, 5), logprobs=(-1.0, -2.0, -3.0), module=0.0, routed=None):
    def completion():
        return Completion(
            prompt_tokens=(1, 2),
            tokens=tuple(tokens),
            logprobs=np.array(logprobs, np.float32),
            finish_reason="length",
            versions=(VersionSpan(version=0, start=0, end=len(tokens)),),
            routed_experts=None if routed is None else np.full((4, 1, 2), routed, np.int16),
        )

    array = messages.Array.of(np.full(3, module, np.float32))
    recorded = [messages.Recorded(module="model.layers.0", inputs=[array], outputs=[array])]
    return modes.Observed("eager", 1.0, recorded, [completion()], [completion()], [completion()])


@pytest.mark.parametrize(
    ("other", "broken"),
    [
        ({}, []),
        ({"module": np.nextafter(np.float32(0), np.float32(1))}, ["modules"]),
        ({"logprobs": (-1.0, -2.0, np.nextafter(np.float32(-3), np.float32(0)))}, DRAWN),
        ({"tokens": (3, 9, 5)}, DRAWN),
        ({"routed": 1}, ["routed experts"]),
    ],
)
def test_one_bit_of_one_number_tells_two_modes_apart(other, broken):
    one, two = observed(routed=0), observed(**{"routed": 0} | other)
    assert [rung.name for rung in modes.same_bits(one, two) if not rung.ok] == broken
