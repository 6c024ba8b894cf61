# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""End-to-end distillation: trains all layers of the quantized model to match the full-precision model's distribution.

    loss = mean over positions of KL(p_full || p_low) = sum_v p_full(v) (log p_full(v) - log p_low(v))

over the whole vocabulary. Embedding, final norm and head are the teacher's and are not trained, as in `blocks.py`.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from qarl_jax import models
from qarl_jax.models.logprobs import logits_of, token_logprobs, used
from qarl_jax.models.params import is_fixed, part_of, united
from qarl_jax.optim import build
from qarl_jax.qat.updates import Plan, Trainer

_CHUNK = 1024  # positions whose logits exist at once


def kl(
    low: Float[Array, "P D"], full: Float[Array, "P D"], head: Float[Array, "V D"], chunk: int = _CHUNK
) -> Float[Array, ""]:
    """Computes the mean over positions of KL(full || low) from final hidden states, float32; `full` is a constant."""
    positions = low.shape[0]
    parts = -(-positions // chunk)
    pad = ((0, parts * chunk - positions), (0, 0))  # zeros in both: a KL of zero

    @jax.checkpoint
    def of(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        ours, theirs = (jax.nn.log_softmax(logits_of(x, head)) for x in pair)
        return (jnp.exp(theirs) * (theirs - ours)).sum()

    split = [jnp.pad(x, pad).reshape(parts, chunk, -1) for x in (low, jax.lax.stop_gradient(full))]
    return jax.lax.map(of, tuple(split)).sum() / positions


def learns(path: str) -> bool:
    """Tells whether a leaf is trained: the layers' leaves are, except indices of duplicated inputs."""
    return path.startswith("stacks.") and not is_fixed(path)


def nll(model: models.Transformer, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Computes the summed negative log-likelihood of all tokens except the first of each row, float32."""
    hidden = model.hidden_states(tokens)
    return -token_logprobs(hidden, model.head_weight(), tokens, jnp.ones_like(tokens))[0].sum()


def distill(
    teacher: tuple[Any, nnx.State],
    student: tuple[Any, nnx.State],
    tokens: Int[np.ndarray, "R T"],
    heldout: Int[np.ndarray, "H T"],
    optimizer: build.Config,
    plan: Plan,
    every: int,
    folder: pathlib.Path,
    task: Any,
    widths: Sequence[int] = (),
) -> tuple[nnx.State, list[float], tuple[float, float]]:
    """Trains the student's layers to match the teacher's distribution.

    Args:
      teacher, student: (graphdef, masters); the teacher's masters may have the compute dtype.
      tokens, heldout: rows to train on and rows to measure on, unpadded.
      optimizer, plan, every, folder, task, widths: as in `Trainer`.

    Returns:
      The student's masters, the loss of each update, and the loss on the held-out rows before and after the training.
    """
    graphdef, masters = student
    rest = part_of(masters, lambda path: not learns(path))

    @jax.jit
    def told(theirs: Any, batch: jax.Array) -> jax.Array:  # once for all widths
        return models.merge(teacher[0], theirs, nnx.State({})).hidden_states(batch)

    def loss(params: Any, qweights: Any, rest: Any, full: jax.Array, batch: jax.Array) -> jax.Array:
        low = models.merge(graphdef, united(params, rest), qweights)
        head = used(low.head_weight(), full.dtype)
        ours = low.hidden_states(batch)
        return kl(ours.reshape(-1, ours.shape[-1]), full.reshape(-1, full.shape[-1]), head)

    trainer = Trainer(graphdef, loss, optimizer, plan, every, widths)

    def inputs(batch: Int[np.ndarray, "B T"]) -> tuple[Any, ...]:
        return rest, told(teacher[1], jnp.asarray(batch)), jnp.asarray(batch)

    def measured(params: nnx.State) -> float:
        parts = [heldout[at : at + plan.batch] for at in range(0, len(heldout), plan.batch)]
        return sum(len(part) * float(trainer.measure(params, *inputs(part))) for part in parts) / len(heldout)

    params = part_of(masters, learns)
    before = measured(params)
    params, losses = trainer.fit(params, lambda rows: inputs(tokens[rows]), folder, task)
    return united(params, rest), losses, (before, measured(params))


def perplexity(graphdef: Any, masters: nnx.State, tokens: Int[np.ndarray, "H T"], batch: int) -> float:
    """Computes exp(mean negative log-likelihood) of all tokens but each row's first, under the graphdef's scheme.

    Args:
      tokens: rows [H, T], unpadded. batch: rows per forward pass.
    """

    @jax.jit
    def of(masters: Any, qweights: Any, rows: jax.Array) -> jax.Array:
        return nll(models.merge(graphdef, masters, qweights), rows)

    qweights = jax.jit(functools.partial(models.quantize_params, graphdef))(masters)
    sums = [float(of(masters, qweights, jnp.asarray(tokens[at : at + batch]))) for at in range(0, len(tokens), batch)]
    return float(np.exp(sum(sums) / (tokens.shape[0] * (tokens.shape[1] - 1))))
