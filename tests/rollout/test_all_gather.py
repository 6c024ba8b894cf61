# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Stacks of weights on their way to engines: what is cast and gathered at once, and what is sent for it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qarl_jax.rollout.vllm import all_gather
from qarl_jax.runtime.mesh import make_mesh
from tests.reference import launches

BF16 = np.dtype(jnp.bfloat16)


def placed(shape, spec, sizes, dtype=jnp.float32):
    values = np.arange(np.prod(shape)).reshape(shape) % 100
    return jax.device_put(jnp.asarray(values, dtype), NamedSharding(make_mesh(**sizes), PartitionSpec(*spec)))


@pytest.mark.parametrize("spread_over", [1, 2])
def test_stacks_come_in_pieces_of_whole_tensors(spread_over):
    stack = all_gather.Stack(placed((6, 8, 4), (None, "fsdp"), {"fsdp": spread_over}), BF16, 1)
    norm = all_gather.Stack(placed((8,), (), {"fsdp": spread_over}), BF16, 0)
    wanted = {"norm": all_gather.Piece(norm, range(1)), "stack": all_gather.Piece(stack, range(6))}
    found = list(
        all_gather.batches(wanted, 4 * 8 * 4 * 2 + 17)
    )  # four tensors of the stack in bfloat16: three divide six
    assert [[(key, piece.wanted) for key, piece in batch] for batch in found] == [
        [("norm", range(1)), ("stack", range(3))],
        [("stack", range(3, 6))],
    ]
    pieces = [piece for batch in found for _, piece in batch]
    made = all_gather.gathered(pieces)
    assert all(len(on) == spread_over for on in made)
    for piece, on in zip(pieces, made, strict=True):
        want = piece.stack.array.astype(jnp.bfloat16)
        if piece.stack.lead:
            want = want[piece.wanted.start : piece.wanted.stop]
        for array in on.values():
            np.testing.assert_array_equal(array, want)


def test_a_tensor_larger_than_the_limit_comes_alone():
    stack = all_gather.Stack(placed((3, 8, 4), (None, "fsdp"), {"fsdp": 2}), BF16, 1)
    found = list(all_gather.batches({"a": all_gather.Piece(stack, range(1, 3))}, 1))
    assert [piece.wanted for batch in found for _, piece in batch] == [range(1, 2), range(2, 3)]


def test_gathering_waits_for_another_threads_launch_over_the_same_gpus():
    mesh = make_mesh(fsdp=2)
    stack = all_gather.Stack(placed((6, 8, 4), (None, "fsdp"), {"fsdp": 2}), BF16, 1)
    assert launches.waiting(mesh, [lambda: all_gather.gathered([all_gather.Piece(stack, range(6))])]) == [True]


def test_what_lies_on_one_gpu_as_it_travels_is_not_copied():
    stack = all_gather.Stack(jnp.ones((6, 8, 4), jnp.int8), np.dtype(np.int8), 1)
    (((_, piece),),) = all_gather.batches({"a": all_gather.Piece(stack, range(6))}, 1)
    (on,) = all_gather.gathered([piece])
    assert on[0] is stack.array


@pytest.mark.parametrize(
    ("shape", "spec", "sizes"),
    [
        ((16, 8, 4, 6), (None, "expert"), {"expert": 4}),
        ((16, 8, 4, 6), (None, "expert", "fsdp"), {"expert": 2, "fsdp": 2}),
        ((16, 8, 6), (None, None, "fsdp"), {"fsdp": 2}),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_no_more_is_sent_than_what_is_wanted(shape, spec, sizes, dtype):
    """The whole stack was once gathered for every piece of it."""
    array = placed(shape, spec, sizes, dtype)
    stack = all_gather.Stack(array, np.dtype(dtype), 1)
    parts, place = all_gather._places(stack)
    text = all_gather._cut.lower([array], [jnp.uint32(3)], (2,), (stack.dtype,), (parts,), place).compile().as_text()
    sent = [
        np.prod([int(n) for n in dims.split(",")])
        for dims in re.findall(r"= \w+\[([\d,]+)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)", text)
    ]
    assert sent
    assert max(sent) <= 2 * np.prod(shape[1:])
