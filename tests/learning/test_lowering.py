# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The jitted programs of a train step lower for every platform, from shapes alone."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from qarl_jax import models
from qarl_jax.learning import learner as learning
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.learning.state import TrainState
from qarl_jax.loss import get_loss
from qarl_jax.optim import build, leafwise
from qarl_jax.runtime.mesh import make_mesh

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "models"


def lowered(name, scheme, mesh, platform):
    """The whole step (score, gradient, update) of two layers of a published model, from shapes alone."""
    config = models.read_config(
        json.loads((FIXTURES / f"{name}.json").read_text())["config"],
        compute_dtype="bfloat16",
        quant=models.parse_rules(scheme),
        attention="xla",
        remat="full",
    )
    config = dataclasses.replace(config, num_layers=2, moe_layers=config.moe_layers[:2])
    graphdef, params, qweights = models.split(models.abstract_model(config))
    made = Learner(
        graphdef,
        loss_fn=get_loss("tbpo"),
        optimizer=leafwise.Optimizer(build.Muon()),
        mesh=make_mesh(**mesh),
        options=Options(max_segments=4),
    )
    ints, floats = jax.ShapeDtypeStruct((8, 64), jnp.int32), jax.ShapeDtypeStruct((8, 64), jnp.float32)
    batch = learning.TrainBatch(
        tokens=ints,
        positions=ints,
        segment_ids=ints,
        loss_mask=jax.ShapeDtypeStruct((8, 64), jnp.bool_),
        rollout_logprobs=floats,
        advantages=floats,
    )
    count = jax.ShapeDtypeStruct((), jnp.float32)
    # Placed as the learner places them: a donated buffer must have its successor's sharding.
    params = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), params, made.param_shardings
    )
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), params)
    state = TrainState(
        params=params,
        opt_state=jax.eval_shape(made.optimizer.init, params),
        updates=jax.ShapeDtypeStruct((), jnp.int32),
    )
    with jax.set_mesh(made.mesh):
        traces = [
            jax.jit(functools.partial(models.quantize_params, graphdef)).trace(params),
            made._accumulate.trace(grads, params, qweights, batch, floats, count, count),
            made._apply._whole.trace(state, grads),
            made._update.trace(state, jax.ShapeDtypeStruct((), jnp.bool_), qweights, batch, floats, count, count, None),
        ]
        return [trace.lower(lowering_platforms=(platform,)).as_text() for trace in traces]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_train_step_lowers_for_every_platform(platform):
    for text in lowered("Qwen3-8B", "w4a16", {}, platform):
        assert "stablehlo" in text


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cuda", pytest.param("tpu", marks=pytest.mark.nightly)])
def test_the_train_step_of_an_moe_model_lowers_on_a_mesh(platform):
    quantize, accumulate, *_ = lowered("Qwen3-30B-A3B", "w8a8", {"fsdp": 2, "expert": 4}, platform)
    assert "sharding" in accumulate
    assert "xi8>" in quantize
