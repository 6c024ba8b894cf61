# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays whose elements 32 bits do not place: which kernels leave them out; others reach the last element."""

import re

import jax
import jax.numpy as jnp
import pytest

from qarl_jax.kernels import experts_triton, rounding_triton
from qarl_jax.kernels.offsets import in_reach
from qarl_jax.quant import PLAIN
from tests.reference.one_layer import on_hopper

COLUMNS = 2**15
# Rows of bytes: 2^31 of them, the fewest and the most that 32 bits of JAX's do not place, and more than 2^32.
ROWS = {2**16: True, 2**16 + 1: False, 2**17: False, 2**17 + 1: True}


def codes(rows):
    return jax.ShapeDtypeStruct((rows, COLUMNS), jnp.int8)


@pytest.mark.parametrize("rows", ROWS)
def test_jax_places_in_64_bits_what_is_said_to_be_in_reach(rows, monkeypatch):
    from jax._src.pallas.triton import lowering

    texts, lower = [], lowering.lower_jaxpr_to_triton_module

    def kept(*args, **named):
        result = lower(*args, **named)
        texts.append(result.module.operation.get_asm())
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", kept)
    try:
        jax.jit(rounding_triton.transposed).trace(codes(rows)).lower(lowering_platforms=("cuda",))
    except RuntimeError as error:  # JAX 0.11 asks the device for its shared memory
        if "No supported GPU devices found" not in str(error):
            raise
        pytest.skip("this JAX lowers Pallas for a GPU on a GPU only")
    (widths,) = {tuple(sorted(set(re.findall(r"tt\.addptr.*xi(\d+)>", text)))) for text in texts}
    assert in_reach(codes(rows).size, codes(rows).dtype) == ROWS[rows] == (rows <= 2**16 or widths == ("64",))


def test_elements_of_more_bytes_are_always_in_reach():
    for size in (2**31, 2**31 + 1, 2**32, 2**33):
        assert in_reach(size, jnp.dtype(jnp.bfloat16))
        assert in_reach(size, jnp.dtype(jnp.float32))


@pytest.mark.parametrize("rows", ROWS)
def test_a_kernel_serves_what_it_reaches(rows, monkeypatch):
    monkeypatch.setattr(rounding_triton, "is_hopper", lambda: True)
    for module in (rounding_triton, experts_triton):
        monkeypatch.setattr(module, "on_one_device", lambda: True)
    wide = jax.ShapeDtypeStruct((rows, COLUMNS), jnp.bfloat16)  # its codes are bytes
    assert rounding_triton.serves(wide, PLAIN) == ROWS[rows]
    assert rounding_triton.serves(codes(rows), PLAIN) == ROWS[rows]
    small = jax.ShapeDtypeStruct((4, 8, COLUMNS), jnp.int8)
    assert experts_triton.serves(codes(rows), small) == ROWS[rows]
    assert experts_triton.serves(wide, small)


def placed(shape):
    """A byte for each element of a matrix, which neighbours and far elements do not share."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return (row * 31 + (row >> 9) * 17 + column * 7).astype(jnp.int8)


def check_transposed(shape, **options):
    got = jax.jit(lambda: rounding_triton.transposed(placed(shape), **options))()
    assert got.shape == shape[::-1]
    assert jax.jit(lambda got: (got == placed(shape).T).all())(got)


def test_a_transposed_matrix_is_made_of_its_elements():
    check_transposed((300, 520), interpret=True)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [rows for rows, reached in ROWS.items() if reached])
def test_a_matrix_of_2_to_the_31_bytes_and_more_is_transposed_on_a_gpu(rows):
    check_transposed((rows, COLUMNS))
