# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic, on a GPU: the engine's log-probs are the learner's where the last digit of float64 decides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.models.logprobs import statistics
from qarl_jax.quant import resolve
from tests.reference.logits import logits_beside_a_midpoint

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.mark.parametrize("vocab", [5000, 151_936])
def test_log_probs_are_the_learners_beside_a_midpoint(vocab):
    from qarl_bridge.engine.cuda import sampling

    z = logits_beside_a_midpoint(300, vocab)
    of = jax.jit(functools.partial(statistics, numerics=resolve("cuda")))
    mine = of(z, jnp.zeros(len(z), jnp.int32))[0]
    theirs = sampling.token_logprobs(torch.from_numpy(z).cuda(), torch.zeros(len(z), 1, dtype=torch.int64).cuda())
    np.testing.assert_array_equal(theirs[:, 0].cpu(), mine)
