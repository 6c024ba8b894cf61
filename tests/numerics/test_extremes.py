# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Every hand-written nonlinearity is finite, and so is its gradient, where its inputs are zero or huge."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.loss.kl import KINDS, estimate
from qarl_jax.models import layers, moe
from qarl_jax.models.attention import attention
from qarl_jax.models.logprobs import token_logprobs
from qarl_jax.numerics.engine import RECORDS
from qarl_jax.quant.schemes import on_engine, parse_scheme, scheme_names
from qarl_jax.types import UserError

pytestmark = pytest.mark.usefixtures("compiled_programs")  # a formula is finite, however it is compiled
HUGE = (0.0, -0.0, 1e-30, 20.0, -20.0, 88.0, -88.0, 89.0, -89.0, -131.0, 745.0, -745.0, 1e4, -1e4, 1e30, -1e30)
of_every_record = pytest.mark.parametrize("numerics", RECORDS.values(), ids=RECORDS)
in_each_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])


def value_and_gradients(function, *operands):
    """Values of `function`, and the gradient of their sum by every operand; all of it is finite."""

    def total(*operands):
        values = function(*operands)
        return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(values)), values

    run = jax.jit(jax.value_and_grad(total, tuple(range(len(operands))), has_aux=True))
    (_, values), gradients = run(*operands)
    for leaf in jax.tree.leaves((values, gradients)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all(), leaf
    return values, gradients


@of_every_record
@in_each_dtype
def test_swiglu_has_the_gradient_of_silu(numerics, dtype):
    gate, up = (x.reshape(-1) for x in jnp.meshgrid(jnp.asarray(HUGE, dtype), jnp.asarray([1.0, -3.0], dtype)))
    _, (d_gate, d_up) = value_and_gradients(functools.partial(layers.silu_and_mul, numerics=numerics), gate, up)
    x, u = (np.asarray(part, np.float64) for part in (gate, up))
    sigmoid = np.exp(-np.logaddexp(0, -x))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-2 if dtype == jnp.bfloat16 else 1e-5, atol=1e-30)
    close(np.asarray(d_gate, np.float64), sigmoid * (1 + x * (1 - sigmoid)) * u)
    close(np.asarray(d_up, np.float64), x * sigmoid)


@pytest.mark.parametrize("order", ["any", "torch", "float64"])
def test_the_inverse_of_a_root_mean_square_is_finite(order):
    x = jnp.tile(jnp.asarray(HUGE, jnp.float32)[:, None], 32)
    value_and_gradients(lambda x: x * layers.inverse_rms(x, 1e-6, order=order), x)


@of_every_record
def test_a_routers_weights_are_finite(numerics):
    _, among = moe.arithmetic(numerics)
    logits = jnp.stack([jnp.asarray([x, 1.0, -x, 0.0]) for x in HUGE])
    value_and_gradients(lambda logits: among(logits[:, :2], logits), logits)


@of_every_record
def test_attention_is_finite_with_huge_queries_and_keys(numerics):
    huge = jnp.asarray([x for x in HUGE if abs(x) <= 1e4], jnp.bfloat16)
    q = jnp.ones((len(huge), 4, 2, 8), huge.dtype).at[:, 1].set(huge[:, None, None])
    k, v = jnp.ones((2, len(huge), 4, 1, 8), huge.dtype).at[0, :, 2].set(-1e4)
    value_and_gradients(functools.partial(attention, numerics=numerics), q, k, v)


@of_every_record
def test_log_probs_and_entropies_are_finite_with_huge_logits(numerics):
    hidden = jnp.tile(jnp.asarray(HUGE, jnp.bfloat16)[:, None, None], (1, 4, 2))
    head = jnp.asarray([[1.0, 0.0], [0.5, 0.25], [-1.0, 0.0]])
    tokens = jnp.tile(jnp.asarray([[0, 1, 2, 0]], jnp.int32), (len(HUGE), 1))
    score = functools.partial(token_logprobs, numerics=numerics, entropy_gradient=True, temperature=0.5)
    value_and_gradients(lambda hidden, head: score(hidden, head, tokens, jnp.ones_like(tokens)), hidden, head)


@of_every_record
@pytest.mark.parametrize("name", scheme_names())
def test_layers_of_every_scheme_are_finite_with_rows_of_zeros_and_huge_rows(numerics, name):
    try:
        scheme = on_engine(parse_scheme(name), numerics)
    except UserError:
        no_layer = {"w4a8": ("cuda",)}
        assert numerics.profile in no_layer.get(name, ("cpu", "cuda"))
        return
    x = jnp.tile(jnp.asarray([0.0, 1e-30, 1.0, 1e4, -1e4], jnp.bfloat16)[:, None], 128).at[3, ::2].set(0)
    master = jnp.tile(jnp.asarray([0.0, 1e4, 1.0, 1e-30])[:, None], (32, 128))
    weight = None if scheme is None else quant.quantize(master, scheme)
    value_and_gradients(lambda x, master: quant.dot(x, master, weight, numerics=numerics), x, master)


@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimates_are_finite(kind):
    value_and_gradients(functools.partial(estimate, kind=kind), jnp.asarray(HUGE))
