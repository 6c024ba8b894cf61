# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A first step whose sampler and learner differ more than is known of the run says so, with what to do."""

import pytest

from qarl_jax.loop import first_step
from qarl_jax.run import config
from qarl_jax.verify import alignment

VLLM = ("rollout.engine.name=vllm",)


def run(*overrides):
    given = ["model.path=/m", "data.source={name: jsonl, path: /d.jsonl}", "quant.engine=cuda", *overrides]
    return config.load(None, given)


def remark(cfg, k3):
    return first_step.remark(cfg, {} if k3 is None else {"mismatch/k3": k3}, alignment.of_run(cfg))


def test_what_is_known_needs_no_remark():
    aligned = run(*VLLM, "quant.forward=w8a8")
    assert remark(aligned, 0.0) is None
    assert remark(run(*VLLM, "quant.forward=w8a8", "model.attention=xla"), 1.6e-3) is None
    assert remark(run(*VLLM, "quant.forward=bf16", "quant.rollout=w8a8"), 4.2e-2) is None
    assert remark(run(*VLLM, "quant.forward=bf16", "quant.rollout=w2a16"), 9.0) is None, "not measured"
    assert remark(aligned, None) is None


@pytest.mark.parametrize(
    ("overrides", "k3", "remedy"),
    [
        (["quant.forward=w8a8", "rollout.engine.arithmetic=vllm"], 5.8e-2, "set rollout.engine.arithmetic=batch_inv"),
        (["quant.forward=w8a8", "quant.engine=plain"], 4.2e-2, "set quant.engine=auto"),
        (["quant.forward=bf16", "quant.rollout=w8a8"], 5e-1, "set quant.forward=w8a8"),
        (["quant.forward=w4a16"], 1e-12, "known for exactly 0: see which layer differs with python -m"),
        (["quant.forward=w4a16"], 1e-2, "python -m qarl_jax.parity --model /m --scheme w4a16 --engine cuda"),
    ],
)
def test_more_is_told_in_one_sentence_with_the_remedy(overrides, k3, remedy):
    said = remark(run(*VLLM, *overrides), k3)
    assert said.startswith(f"mismatch/k3 of the first step is {k3:.1e}, and ")
    assert remedy in said
    assert said.endswith(".")
    assert "\n" not in said


def test_rows_that_are_mostly_padding_are_told_with_the_remedy():
    packed = run("rollout.max_response_len=32")
    assert first_step.padding(packed, {"train/padding_share": 0.4}) is None
    assert first_step.padding(packed, {}) is None
    said = first_step.padding(packed, {"train/padding_share": 0.8})
    assert said.startswith("80% of the learner's rows is padding")
    assert "raise train.max_segments" in said
    assert "a train.row_len below 1056" in said
