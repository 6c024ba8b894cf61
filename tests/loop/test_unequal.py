# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A token that the learner scores otherwise than the sampler is found and named, once, where equality is promised."""

import numpy as np
import pytest

from qarl_jax.data import packing
from qarl_jax.loop import unequal
from qarl_jax.run import config
from tests.reference.rollouts import completion, group_of


def group(uid, lengths, version=3):
    each = (completion(range(10, 10 + n), -np.arange(1.0, n + 1), prompt=(5, 6), version=version) for n in lengths)
    return group_of(tuple(each), uid=uid)


def part(groups, changed=()):
    """An update's rows, and log-probs of the learner that differ at (group, sample, position)."""
    packed = packing.pack(groups, [np.zeros(len(g.completions)) for g in groups], row_len=16, rows_multiple=2)
    scored = np.where(packed.batch.loss_mask, packed.batch.rollout_logprobs, -9.0).astype(np.float32)
    for at in changed:
        (segment,) = (s for s in packed.segments if (s.group, s.sample) == at[:2])
        scored[segment.row, segment.response.start + at[2]] += 0.5
    return packed, groups, [scored[i : i + 2] for i in range(0, len(scored), 2)]


def test_the_first_unequal_token_has_its_prompt_response_and_position():
    groups = [group("a/1", (4, 3)), group("b/2", (5, 5))]
    found = unequal.first([part(groups), part(groups, [(1, 1, 3), (1, 0, 4)])], version=3)
    assert (found.uid, found.sample, found.position, found.token) == ("b/2", 0, 4, 14)
    assert (found.sampler, found.learner, found.unequal, found.tokens) == (-5.0, -4.5, 2, 34)
    assert found.sequence == (5, 6, 10, 11, 12, 13, 14)
    assert str(found).startswith("2 of 34 tokens ")
    assert "prompt b/2" in str(found)


def test_equal_log_probs_and_other_places_are_no_finding():
    assert unequal.first([part([group("a/1", (4, 3))])], version=3) is None


def test_tokens_of_older_versions_were_drawn_by_another_policy():
    old = part([group("a/1", (4, 3), version=2)], [(0, 0, 0)])
    assert unequal.first([old], version=3) is None
    assert unequal.first([old], version=2).uid == "a/1"


@pytest.mark.parametrize(
    ("overrides", "execution", "reason"),
    [
        (["quant.forward=w8a8"], "graphs", ""),
        (["quant.forward=bf16"], "eager", ""),
        (["quant.forward=bf16", "quant.rollout=w8a8"], "graphs", "the learner computes in bf16, the sampler in w8a8"),
        (["quant.forward=w8a8"], "compiled", "compiled kernels round otherwise"),
        (["quant.forward=w8a8"], "none", "computes nothing"),
        (["quant.forward=w8a8", "quant.engine=plain"], "graphs", "does not round where vLLM does"),
        (["quant.forward=w8a8", "rollout.engine.kernels=vllm"], "graphs", "other kernels than the learner's"),
        (["quant.forward=w8a8", "rollout.engine.split_attention=true"], "graphs", "may split the keys"),
        (["quant.forward=w4a16", "rollout.engine.int4_kernel=marlin"], "graphs", "int4_kernel=marlin"),
        (["quant.forward=w4a16:g64"], "graphs", ""),
        (["quant.forward=w8a8", "rollout.engine.int4_kernel=marlin"], "graphs", ""),
        (["quant.forward=fp8", "quant.kernels=xla"], "graphs", "quant.kernels=xla"),
        (["quant.forward=w8a8", "quant.kernels=xla"], "graphs", ""),
        (["quant.forward=w8a8", "model.attention=xla"], "graphs", "model.attention=xla"),
        (["quant.forward=w8a8", "model.dtype=float32"], "graphs", "in float32, vLLM in bfloat16"),
    ],
)
def test_equality_is_promised_where_both_sides_keep_the_contract_and_a_run_says_which(overrides, execution, reason):
    given = ["model.path=/m", "data.source={name: jsonl, path: /d.jsonl}", "rollout.engine.name=vllm"]
    cfg = config.load(
        None, [*given, *(["quant.engine=cuda"] if "quant.engine=plain" not in overrides else []), *overrides]
    )
    found = unequal.reason(cfg, execution)
    assert reason in found
    assert bool(reason) is bool(found)
    promise = f"every log-prob is to be equal in learner and sampler, to the bit (execution {execution})"
    differ = f"log-probs may differ between learner and sampler: {found}"
    assert unequal.promise(cfg, execution) == (differ if reason else promise)
    embedded = config.load(None, [*given[:2], "quant.forward=w8a8"])
    assert "closeness" in unequal.reason(embedded, "")
