# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic, on a GPU: the engine's log-probs are the learner's where the last digit of float64 decides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax.models.logprobs import statistics
from qarl_jax.numerics.float32 import from_float64
from qarl_jax.quant import resolve
from tests.reference.logits import logits_beside_a_midpoint

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _kernel(x_ptr, y_ptr, LOG: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = tl.load(x_ptr + at).to(tl.float64)
    tl.store(y_ptr + at, tl.log(1.0 + x) if LOG else tl.exp(x))


@pytest.mark.parametrize("is_log", [False, True])
def test_exponentials_and_logarithms_are_the_learners(is_log):
    """Compares float64 results by two float32 halves: the first, and what it leaves."""
    x = np.random.default_rng(0).uniform(0 if is_log else -60, 60 if is_log else 0, 1 << 20).astype(np.float32)

    def halves(x):
        y = jnp.log(1.0 + x) if is_log else jnp.exp(x)
        first = jax.lax.reduce_precision(y, 8, 23)
        return first, y - first

    first, rest = jax.jit(functools.partial(from_float64, halves))(x)
    y = torch.empty(len(x), dtype=torch.float64, device="cuda")
    _kernel[(len(x) // 1024,)](torch.from_numpy(x).cuda(), y, LOG=is_log)
    y = y.cpu()
    np.testing.assert_array_equal(y.float(), first)
    np.testing.assert_array_equal((y - y.float().double()).float(), rest)


@pytest.mark.parametrize("vocab", [5000, 151_936])
def test_log_probs_are_the_learners_beside_a_midpoint(vocab):
    from qarl_bridge.engine.cuda import sampling

    z = logits_beside_a_midpoint(300, vocab)
    of = jax.jit(functools.partial(statistics, numerics=resolve("cuda")))
    mine = of(z, jnp.zeros(len(z), jnp.int32))[0]
    theirs = sampling.token_logprobs(torch.from_numpy(z).cuda(), torch.zeros(len(z), 1, dtype=torch.int64).cuda())
    np.testing.assert_array_equal(theirs[:, 0].cpu(), mine)
