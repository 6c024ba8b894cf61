# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: the learner is one function of the tokens. Under an engine's contract a response's log-probs have the
same bits however a run cuts its batch, its layers' memory or its devices (tests/gpu has the same on a GPU)."""

import functools

import numpy as np
import pytest

from qarl_jax import models, quant
from tests.reference import one_function, tiny

# Around a response that fills a row there are many short ones; prompts are longer and shorter than responses.
LENGTHS = [(7, 40), (70, 12), (3, 93), (20, 20), (1, 5), (30, 64), (9, 9), (5, 31), (60, 1), (12, 50)]
TEMPERATURE = 0.7


@functools.cache
def policy(scheme):
    config = tiny.model_config(
        128,
        num_layers=2,
        initializer_range=0.06,
        vocab_size=300,
        qkv_bias=True,
        tie_embeddings=True,
        compute_dtype="bfloat16",
        quant=models.parse_rules(scheme),
        numerics=quant.resolve("cpu"),
    )
    return one_function.moved(models.random_model(config, seed=5))


@functools.cache
def found(scheme, way):
    ways = {"": one_function.REFERENCE} | one_function.WAYS | one_function.MORE_WAYS
    return one_function.logprobs(policy(scheme), one_function.groups(300, LENGTHS), ways[way], TEMPERATURE)


def cases():
    """Two ways under w8a8; one thing at a time, and the other schemes, nightly."""
    chosen = {"w8a8": ["an update accumulated", "two devices share the masters"]}
    for scheme in ("w8a8", "bf16", "w4a16:g32"):
        for way in [*one_function.WAYS, *one_function.MORE_WAYS]:
            often = way in chosen.get(scheme, [])
            yield pytest.param(scheme, way, marks=[] if often else pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "way"), cases())
def test_log_probs_do_not_depend_on_how_a_batch_is_cut(scheme, way):
    wanted = found(scheme, "")
    assert [len(x) for x in wanted] == [n for _, n in LENGTHS]
    assert np.std(np.concatenate(wanted)) > 0.1
    assert one_function.differing(found(scheme, way), wanted) == 0
