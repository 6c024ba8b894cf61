# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A token that the learner scores otherwise than the sampler is found and named, once, where equality is promised."""

import numpy as np

from qarl_jax.data import packing
from qarl_jax.loop import first_mismatch
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


def test_the_first_mismatch_has_its_prompt_response_and_position():
    groups = [group("a/1", (4, 3)), group("b/2", (5, 5))]
    found = first_mismatch.first([part(groups), part(groups, [(1, 1, 3), (1, 0, 4)])], version=3)
    assert (found.uid, found.sample, found.position, found.token) == ("b/2", 0, 4, 14)
    assert (found.sampler, found.learner, found.mismatched, found.tokens) == (-5.0, -4.5, 2, 34)
    assert found.sequence == (5, 6, 10, 11, 12, 13, 14)
    assert str(found).startswith("2 of 34 tokens ")
    assert "prompt b/2" in str(found)


def test_equal_log_probs_and_other_places_are_no_finding():
    assert first_mismatch.first([part([group("a/1", (4, 3))])], version=3) is None


def test_tokens_of_older_versions_were_drawn_by_another_policy():
    old = part([group("a/1", (4, 3), version=2)], [(0, 0, 0)])
    assert first_mismatch.first([old], version=3) is None
    assert first_mismatch.first([old], version=2).uid == "a/1"
