# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Learners of a random tiny model, the responses that they learn from, and their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax import models
from qarl_jax.data import packing
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loss import get_loss
from qarl_jax.metrics import merge, values
from qarl_jax.optim import build, leafwise
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.sft import NegativeLogLikelihood
from tests.reference import tiny
from tests.reference.rollouts import completion, group_of

MESHES = {
    "fsdp8": {"fsdp": 8},
    "tensor8": {"tensor": 8},
    "fsdp2-tensor4": {"fsdp": 2, "tensor": 4},
    "data2-fsdp4": {"data": 2, "fsdp": 4},
}
ROWS = 8  # of a whole mini-batch, packed


@functools.cache
def groups(count=4, samples=4):
    """Random responses of 1 to 12 tokens to prompts of 2 to 8, with made-up rollout log-probs."""
    rng = np.random.default_rng(0)
    out = []
    for number in range(count):
        prompt = tuple(int(token) for token in rng.integers(3, 30, rng.integers(2, 9)))
        completions = []
        for _ in range(samples):
            tokens = rng.integers(0, 30, rng.integers(1, 13))
            completions.append(completion(tokens, rng.normal(-3.4, 0.5, len(tokens)), prompt=prompt))
        rewards = rng.normal(size=samples)
        out.append(group_of(completions, rewards, uid=str(number)))
    return out


def packed(rows_multiple=ROWS, **options):
    """The responses of `groups` in rows, their rewards as advantages."""
    return packing.pack(
        groups(),
        np.stack([group.rewards for group in groups()]),
        row_len=tiny.ROW_LEN,
        rows_multiple=rows_multiple,
        **{"max_segments": 6} | options,
    )


@functools.cache
def make(scheme="w4a16:g32", mesh="", loss="tbpo"):
    """(learner, masters on the host), float32 compute, Muon."""
    options = {"clip_high": 0.5, "neg_clip_low": 0.5, "neg_clip_high": 0.5} if loss == "tbpo" else {}
    loss_fn = NegativeLogLikelihood() if loss == "nll" else get_loss(loss, **options)
    graphdef, params, _ = models.split(tiny.random_model())
    made = Learner(
        models.with_scheme(graphdef, scheme),
        loss_fn=loss_fn,
        optimizer=leafwise.Optimizer(build.Muon(lr=0.02)),
        mesh=make_mesh(**MESHES[mesh] if mesh else {}),
        options=Options(max_segments=6, logprob_chunk=64),
    )
    return made, jax.device_get(params)


def fresh(scheme="w4a16:g32", mesh="", loss="tbpo"):
    """(learner, a state of its own)."""
    made, params = make(scheme, mesh, loss)
    return made, made.init(jax.tree.map(lambda x: jnp.array(x, copy=True), params))


def counts_of(rows):
    return rows.num_tokens, rows.num_sequences


def gradient(made, state, rows, size, scored=True):
    """(gradient, reduced metrics) of the responses packed in `rows`, `size` rows at a time."""
    qweights = made.quantize(state.params)
    grads, total = made.zero_grads(state), {}
    for micro in map(made.put, rows.micro_batches(size)):
        old = made.score(state.params, qweights, micro)[0] if scored else None
        grads, measured = made.accumulate_grads(
            grads, state.params, qweights, micro, old, rows.num_tokens, rows.num_sequences
        )
        total = merge(total, measured)
    return grads, values(total)


def assert_close(found, wanted, tol):
    """Per array, the largest error against the largest value."""
    pairs = zip(jax.tree.leaves_with_path(jax.device_get(found)), jax.tree.leaves(jax.device_get(wanted)), strict=True)
    for (path, a), b in pairs:
        error = np.abs(np.asarray(a, np.float64) - b).max()
        assert error <= tol * np.abs(b).max(), (jax.tree_util.keystr(path), error, np.abs(b).max())


def assert_same_bits(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
