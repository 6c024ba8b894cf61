# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Stacks of experts on the wire are the tensors of a checkpoint, and nothing else is changed."""

import numpy as np
import pytest
from qarl_bridge.protocol import expert_stacks, formats, messages
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax.quant.schemes import w4a16, w8a8
from qarl_jax.rollout.vllm.engine import engine_tensors
from tests.bridge.test_cuda_ipc import policy


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "w4a16:g32", "nvfp4"])
def test_published_stacks_are_the_checkpoints_tensors(scheme):
    weights = policy(scheme, moe=True)
    checkpoint, published = dict(engine_tensors(weights)), dict(engine_tensors(weights, stacked=True))
    assert len(published) < len(checkpoint)
    assert any(".experts.*." in name for name in published)
    got = dict(expert_stacks.apart(published.items()))
    assert got.keys() == checkpoint.keys()
    for name, array in checkpoint.items():
        assert (got[name].dtype, got[name].tobytes()) == (array.dtype, array.tobytes()), name
    assert {expert_stacks.name_of(name) for name in checkpoint} == published.keys()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bf16", "w4a16:g32"])
def test_a_folder_with_a_checkpoint_expects_what_is_published(scheme):
    weights = policy(scheme, moe=True)

    def described(tensors):
        return {
            n: messages.Expected(name=n, dtype=messages.dtype_name(a.dtype), shape=list(a.shape)) for n, a in tensors
        }

    wanted = described(engine_tensors(weights, stacked=True))
    assert expert_stacks.expected(described(engine_tensors(weights))) == wanted
    assert expert_stacks.expected(wanted) == wanted
    torn = described(engine_tensors(weights))
    name = next(n for n in torn if ".experts.1." in n)
    torn[name] = messages.Expected(name=name, dtype="int8", shape=[3])
    assert name in expert_stacks.expected(torn)


def test_every_expert_of_a_stack_is_checked_when_it_is_packed():
    held = {"codes": np.zeros((3, 4, 32), np.int8), "scales": np.ones((3, 4, 1), np.float32)}
    name = "model.layers.0.mlp.experts.*.up_proj.weight"
    int8, int4 = w8a8.Config().wire, w4a16.Config(32).wire
    packed = formats.pack(name, held, int8)
    assert [array.shape for array in packed.values()] == [(3, 4, 32), (3, 4, 1)]
    words = {"codes": np.zeros((3, 4, 4), np.int32), "scales": np.ones((3, 4, 1), formats.BFLOAT16)}
    shapes = formats.pack(name, words, int4)[name.removesuffix("weight") + "weight_shape"]
    np.testing.assert_array_equal(shapes, [[4, 32]] * 3)
    held["scales"][2, 3] = np.nan
    with pytest.raises(BridgeError, match="a value of scales is not finite and positive"):
        formats.pack(name, held, int8)
    with pytest.raises(BridgeError, match=r"scales have shape \(4, 1\), expected \(3, 4, 1\)"):
        formats.pack(name, held | {"scales": held["scales"][0]}, int8)
