# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One policy's log-probs of one set of responses, in every way that a run may cut and place them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax import models
from qarl_jax.data import packing
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loss import get_loss
from qarl_jax.observe.token_trace import LOGPROBS
from qarl_jax.optim import build, leafwise
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import RolloutGroup
from tests.reference.rollouts import completion, group_of

MAX_SEGMENTS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How the responses meet the learner.

    Attributes:
      rows: of a micro-batch; 0: all rows in one.
      row_len: times the longest response with its prompt.
      packed: several responses to a row.
      program: "score", or "update": the one with the gradient, accumulated where there are several micro-batches.
      remat: what its backward recomputes.
      chunk: tokens whose logits exist at once.
      grad_dtype: of the update's gradients.
      mesh: sizes of mesh axes.
    """

    rows: int = 4
    row_len: float = 1.5
    packed: bool = True
    program: Literal["score", "update"] = "score"
    remat: str = "none"
    chunk: int = 1024
    grad_dtype: str = "float32"
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)


REFERENCE = Way()
# Each changes several things at once, so that few programs are compiled.
WAYS = {
    "single rows of one response": Way(rows=1, packed=False, row_len=1.0, chunk=96),
    "eight longer rows": Way(rows=8, row_len=2.7),
    "an update accumulated": Way(program="update", rows=2, remat="full"),
    "an update in one program": Way(program="update", rows=0),
    "bfloat16 gradients": Way(program="update", rows=2, grad_dtype="bfloat16"),
    "two devices share the masters": Way(program="update", rows=2, mesh={"fsdp": 2}, remat="dots"),
}
# One thing at a time.
MORE_WAYS = {
    "micro-batches of one row": Way(rows=1),
    "of two": Way(rows=2),
    "a response to a row": Way(packed=False),
    "few logits at a time": Way(chunk=96),
    **{f"remat={name}": Way(program="update", rows=2, remat=name) for name in models.REMAT},
    "two devices share the rows": Way(mesh={"data": 2}),
    "two devices share each layer": Way(mesh={"tensor": 2}),
}


def groups(vocab: int, lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[RolloutGroup]:
    """Random responses, one to a prompt; lengths: (prompt, response) tokens of each."""
    rng = np.random.default_rng(seed)
    out = []
    for number, (prompt_len, response_len) in enumerate(lengths):
        prompt, tokens = (tuple(map(int, rng.integers(0, vocab, n))) for n in (prompt_len, response_len))
        out.append(group_of([completion(tokens, prompt=prompt)], [1], uid=str(number)))
    return out


def moved(model: models.Transformer, size: float = 1e-3) -> models.Transformer:
    """As updates leave a policy: no master, no norm's weight among them, is a bfloat16 number or one any longer."""
    graphdef, params, _ = models.split(model)
    leaves, structure = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    leaves = [x + np.asarray(size * rng.standard_normal(x.shape), x.dtype) for x in leaves]
    params = jax.tree.unflatten(structure, leaves)
    return models.merge(graphdef, params, models.quantizer(graphdef)(params))


def logprobs(model: models.Transformer, responses: list[RolloutGroup], way: Way, temperature: float) -> list[Any]:
    """Per response, the learner's log-probs [n] float32 of its tokens."""
    longest = max(len(g.completions[0].prompt_tokens) + len(g.completions[0].tokens) for g in responses)
    packed = packing.pack(
        responses,
        np.ones((len(responses), 1)),
        row_len=int(way.row_len * longest),
        rows_multiple=max(1, way.rows),
        max_segments=MAX_SEGMENTS if way.packed else 1,
    )
    graphdef, params, _ = models.split(model)
    config = dataclasses.replace(models.config_of(graphdef), remat=way.remat)
    learner = Learner(
        models.split(models.abstract_model(config))[0],
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.AdamW(lr=1e-3)),
        mesh=make_mesh(**way.mesh),
        options=Options(
            max_segments=packed.max_segments,
            logprob_chunk=way.chunk,
            temperature=temperature,
            token_logprobs=True,
            grad_dtype=way.grad_dtype,
        ),
    )
    params = jax.device_put(jax.tree.map(lambda x: jnp.array(x, copy=True), params), learner.param_shardings)
    qweights = learner.quantize(params)
    micros = [learner.put(micro) for micro in packed.micro_batches(way.rows or len(packed.batch.tokens))]
    if way.program == "score":
        found = np.concatenate([np.asarray(learner.score(params, qweights, micro)[0]) for micro in micros])
    else:
        state, none = learner.init(params), [None] * len(micros)
        _, metrics = learner.update(state, qweights, micros, none, packed.num_tokens, packed.num_sequences)
        found = np.asarray(metrics[LOGPROBS].value)
    return packed.responses(found)


def differing(a: list[Any], b: list[Any]) -> int:
    """Tokens whose log-probs do not have the same bits."""
    return sum(int((x.view(np.int32) != y.view(np.int32)).sum()) for x, y in zip(a, b, strict=True))
