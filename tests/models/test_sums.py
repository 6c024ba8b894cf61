# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients that are added in the backward: the bits of those that are added afterwards, in less memory."""

import contextlib
import re

import jax
import numpy as np
import pytest

from qarl_jax import models
from qarl_jax.learning.learner import Learner, Options
from qarl_jax.loss import get_loss
from qarl_jax.models import sums
from qarl_jax.optim import build, leafwise
from qarl_jax.runtime.mesh import make_mesh
from tests.reference import tiny
from tests.reference.learners import assert_same_bits, packed

MOE = {
    "architecture": "Qwen3MoeForCausalLM",
    "moe": models.MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True),
    "moe_layers": (1, 2),
}
LORA = {"lora": models.Lora(rank=4, scale=2.0, targets=("q_proj", "down_proj"))}


def learner(scheme, mesh=None, grad_dtype="float32", hidden=64, **fields):
    config = tiny.model_config(hidden, **{"num_layers": 3, "param_dtype": "float32"} | fields)
    graphdef, params, _ = models.split(models.random_model(config, 0))
    made = Learner(
        models.with_scheme(graphdef, scheme),
        loss_fn=get_loss("grpo"),
        optimizer=leafwise.Optimizer(build.AdamW(lr=0.01)),
        mesh=make_mesh(**mesh or {}),
        options=Options(max_segments=6, logprob_chunk=64, grad_dtype=grad_dtype),
    )
    return made, made.init(params)


def accumulated(made, state):
    """The gradient of two micro-batches, on the host."""
    rows = packed()
    grads, qweights = made.zero_grads(state), made.quantize(state.params)
    for micro in rows.micro_batches(4):
        counts = rows.num_tokens, rows.num_sequences
        grads, _ = made.accumulate_grads(grads, state.params, qweights, made.put(micro), None, *counts)
    return jax.device_get(grads)


def afterwards(patch):
    """Adds gradients as a whole."""
    patch.setattr(sums, "in_place", lambda dtype: False)


CASES = {
    "bf16": {},
    "w8a8": {"compute_dtype": "bfloat16", "remat": "dots"},
    "w4a16:g32": {"compute_dtype": "bfloat16", "grad_dtype": "bfloat16", "qkv_bias": True, "remat": "full"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "compiled"),
    [
        *((scheme, "fast") for scheme in CASES),
        *(pytest.param(scheme, "as a run", marks=pytest.mark.nightly) for scheme in CASES),
    ],
)
def test_sums_have_the_bits_of_gradients_that_are_added_afterwards(scheme, compiled, monkeypatch, tmp_path_factory):
    with tiny.compiled_programs(tmp_path_factory) if compiled == "fast" else contextlib.nullcontext():
        with monkeypatch.context() as patch:
            afterwards(patch)
            wanted = accumulated(*learner(scheme, **CASES[scheme]))
        monkeypatch.setattr(sums, "in_place", lambda dtype: True)
        found = accumulated(*learner(scheme, **CASES[scheme]))
    assert_same_bits(found, wanted)
    assert all(np.any(np.asarray(x)) for x in jax.tree.leaves(found))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fields", [MOE, LORA, {"remat": "none"}, {"remat": "mixer"}, {"mesh": {"fsdp": 2, "tensor": 2}}]
)
def test_so_have_those_of_experts_adapters_policies_and_meshes(fields, monkeypatch):
    with monkeypatch.context() as patch:
        afterwards(patch)
        wanted = accumulated(*learner("w8a8", **fields))
    assert_same_bits(accumulated(*learner("w8a8", **fields)), wanted)


def program(made, state):
    """The compiled gradient."""
    (micro, *_) = packed().micro_batches(4)
    rest = made.quantize(state.params), made.put(micro), None, *made._counts(1, 1), None, None
    return made._accumulate.lower(made.zero_grads(state), state.params, *rest).compile()


def program_bytes(made, state):
    """Bytes that the gradient's program needs beside its arguments and results."""
    return program(made, state).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_programs")  # what a loop carries is decided before LLVM
def test_no_second_copy_of_the_gradients_exists(monkeypatch):
    made, state = learner("w8a8", hidden=256, num_layers=8, remat="full")
    stacks = sum(x.nbytes for x in jax.tree.leaves(state.params["stacks"]))
    ours = program_bytes(made, state)
    afterwards(monkeypatch)
    theirs = program_bytes(*learner("w8a8", hidden=256, num_layers=8, remat="full"))
    assert theirs - ours > 0.8 * stacks


@pytest.mark.usefixtures("compiled_programs")
def test_no_layer_copies_its_row_of_the_gradients_before_it_adds():
    made, state = learner("w8a8", remat="full")
    text = program(made, state).as_text()
    rows = {(1, *x.shape[1:]) for x in jax.tree.leaves(state.params["stacks"]) if x.ndim > 2}
    shapes = "|".join(",".join(map(str, row)) for row in rows)
    # Inside of a fusion an operand is a parameter.
    assert not re.findall(rf"f32\[(?:{shapes})\]\S* (?:dynamic-slice|fusion)\(%(?!param).*dynamic[-_]slice.*", text)


@pytest.mark.usefixtures("compiled_programs")
def test_the_backward_carries_one_cotangent_of_delta_and_residual():
    made, state = learner("w8a8", hidden=96, remat="full")
    (micro, *_) = packed().micro_batches(4)
    stream = "f32[{},{},96]".format(*micro.tokens.shape)
    loops = [line for line in program(made, state).as_text().splitlines() if " while(" in line]
    assert [count for line in loops if (count := line.count(stream))] == [2, 1]
