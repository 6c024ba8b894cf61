# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Under fsdp the wire carries the QTensors: what the compiled programs gather, by dtype and by the byte."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from qarl_jax import models
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loss import get_loss
from qarl_jax.models import invariant_scaling
from qarl_jax.optim import build, leafwise
from qarl_jax.runtime import mesh
from qarl_jax.types import TrainBatch
from tests.reference import tiny

pytestmark = [pytest.mark.slow, pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")]
# A program's text is decided before LLVM, and equal to the byte with these options.
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
WIDTH = {"s8": 1, "s32": 4, "bf16": 2, "f32": 4, "pred": 1}


def programs(scheme):
    """(the scoring and the gradient program for fsdp=8, lowered from shapes; abstract params; abstract QTensors)."""
    config = dataclasses.replace(
        tiny.model_config(num_layers=3), compute_dtype="bfloat16", quant=models.parse_rules(scheme), remat="full"
    )
    graphdef, params, qweights = models.split(models.abstract_model(config))
    made = Learner(
        graphdef,
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.AdamW()),
        mesh=mesh.make_mesh(fsdp=8),
        options=Options(logprob_chunk=64, diagnostics=True),
    )

    def placed(tree, dtype=None):
        places = mesh.param_shardings(tree, made.mesh)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=s), tree, places)

    ints, floats, flags = (
        jax.ShapeDtypeStruct((8, 24), dtype, sharding=made.batch_sharding)
        for dtype in (jnp.int32, jnp.float32, jnp.bool_)
    )
    batch = TrainBatch(
        tokens=ints, positions=ints, segment_ids=ints, loss_mask=flags, rollout_logprobs=floats, advantages=floats
    )
    count = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.set_mesh(made.mesh):
        score = made._score.lower(placed(params), placed(qweights), batch)
        gradient = made._accumulate.lower(
            placed(params, jnp.float32), placed(params), placed(qweights), batch, floats, count, count
        )
    return score, gradient, params, qweights


def gathered(text):
    """(dtype, elements) of every all-gather in a compiled program."""
    found = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
    assert found
    return [(dtype, math.prod(int(n) for n in dims.split(",") if n)) for dtype, dims in found]


def check(text, qweights, passes):
    """Per layer and pass: the codes, as they are published, and the scales; nothing else."""
    tensors = list(models.by_path(qweights).values())
    layers = tensors[0].codes.shape[0]
    ops = gathered(text)
    codes = sum(q.codes.size * q.codes.dtype.itemsize for q in tensors) // layers
    scales = sum(q.scales.size for q in tensors) // layers
    assert sum(n * WIDTH[dtype] for dtype, n in ops if dtype in ("s8", "s32")) == passes * codes
    # A scale is bfloat16 under w4a16, which XLA's CPU backend widens to float32 on the wire; its number is what counts.
    assert sum(n for dtype, n in ops if dtype not in ("s8", "s32")) == passes * scales
    return codes, scales


def test_scoring_under_fsdp_gathers_int4_codes_and_scales_alone():
    score, _, params, qweights = programs("w4a16:g32")
    codes, scales = check(score.compile(UNOPTIMIZED).as_text(), qweights, passes=1)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 3) // 3
    assert codes + 2 * scales == weights * (0.5 + 2 / 32)  # where bfloat16 would take 2 bytes a weight


def test_forward_and_backward_under_fsdp_gather_int8_codes_and_scales_alone():
    _, gradient, params, qweights = programs("w8a8")
    text = gradient.compile(UNOPTIMIZED).as_text()
    codes, _ = check(text, qweights, passes=2)  # recomputation gathers once more
    assert codes == sum(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim == 3) // 3


def test_metrics_travel_with_the_gradients():
    """Sums alone, in one all-reduce: others would have no order among a loop's collectives (`metrics.masked_max`)."""
    _, gradient, _, _ = programs("w4a16:g32")
    text = gradient.compile(UNOPTIMIZED).as_text()
    reduced = re.findall(r"= \(?(\w+)\[.* all-reduce(?:-start)?\(", text[text.index("\nENTRY") :])
    assert reduced == ["f32"]


def test_the_quantization_error_is_added_over_devices_behind_all_loops():
    """In one all-reduce: two in loops of two weights would have no order."""
    _, _, params, qweights = programs("w4a16:g32")
    on = mesh.make_mesh(fsdp=8)

    def at(x, place):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    given = [jax.tree.map(at, tree, mesh.param_shardings(tree, on)) for tree in (params, qweights)]
    text = invariant_scaling.quantization_error.lower(*given).compile(UNOPTIMIZED).as_text()
    reduced = re.findall(r" all-reduce(?:-start)?\(", text)
    assert " while(" in text
    assert len(reduced) == len(re.findall(r" all-reduce(?:-start)?\(", text[text.index("\nENTRY") :])) > 0


def test_without_quantization_the_wire_carries_the_compute_dtype_and_not_the_master():
    """Read off the program as it is handed to the compiler: XLA's CPU backend widens bfloat16 collectives."""
    score, _, params, _ = programs("bf16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    pinned = re.findall(
        r"sdy\.sharding_constraint %\S+ <@mesh, \[([^\n]*)\]> : tensor<(\d+)x(\d+)x(\w+)>", score.as_text()
    )
    weights = [dtype for where, n, k, dtype in pinned if "fsdp" not in where]
    assert len(weights) == 7
    assert set(weights) == {"bf16"}
