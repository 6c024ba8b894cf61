# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: the learner is one function of the tokens. Under an engine's profile a response's log-probs have the
same bits however a run cuts its batch, its layers' memory or its devices (tests/gpu has the same on a GPU)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import models, quant
from qarl_jax.models.logprobs import token_logprobs
from tests.reference import one_function, tiny

# Around a response that fills a row there are many short ones; prompts are longer and shorter than responses.
LENGTHS = [(7, 40), (70, 12), (3, 93), (20, 20), (1, 5), (30, 64), (9, 9), (5, 31), (60, 1), (12, 50)]
TEMPERATURE = 0.7
EXPERTS = models.MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=64, norm_topk_prob=True)


def config_of(scheme, profile="cpu", **more):
    options = {
        "num_layers": 2,
        "initializer_range": 0.06,
        "vocab_size": 300,
        "qkv_bias": True,
        "tie_embeddings": True,
        "compute_dtype": "bfloat16",
        "quant": models.parse_rules(scheme),
        "numerics": quant.resolve(profile),
    }
    return tiny.model_config(128, **options | more)


@functools.cache
def policy(scheme, moe=False):
    mixed = {"architecture": "Qwen3MoeForCausalLM", "qkv_bias": False, "qk_norm": True, "moe_layers": (0, 1)}
    more = mixed | {"moe": EXPERTS} if moe else {}
    return one_function.moved(models.random_model(config_of(scheme, **more), seed=5))


@functools.cache
def found(scheme, way, moe=False):
    ways = {"": one_function.REFERENCE} | one_function.WAYS | one_function.MORE_WAYS
    return one_function.logprobs(policy(scheme, moe), one_function.groups(300, LENGTHS), ways[way], TEMPERATURE)


def cases():
    """An update accumulated over two devices under w8a8; one thing at a time, and the other schemes, nightly."""
    chosen = {"w8a8": ["two devices share the masters"]}
    for scheme in ("w8a8", "bf16", "w4a16:g32"):
        for way in [*one_function.WAYS, *one_function.MORE_WAYS]:
            often = way in chosen.get(scheme, [])
            yield pytest.param(scheme, way, marks=[] if often else pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "way"), cases())
def test_log_probs_do_not_depend_on_how_a_batch_is_cut(scheme, way):
    wanted = found(scheme, "")
    assert [len(x) for x in wanted] == [n for _, n in LENGTHS]
    assert np.std(np.concatenate(wanted)) > 0.1
    assert one_function.differing(found(scheme, way), wanted) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("way", one_function.WAYS)
def test_nor_do_those_of_an_moe_model(way):
    wanted = found("w8a8", "", moe=True)
    assert np.std(np.concatenate(wanted)) > 0.1
    assert one_function.differing(found("w8a8", way, moe=True), wanted) == 0


def casts(jaxpr):
    """Casts of float32 to bfloat16, in the programs called from there too, that no `reduce_precision` made exact."""
    rounded = {id(out) for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_precision" for out in eqn.outvars}
    for eqn in jaxpr.eqns:
        to = eqn.params["new_dtype"] if eqn.primitive.name == "convert_element_type" else None
        if to == jnp.bfloat16 and eqn.invars[0].aval.dtype == jnp.float32 and id(eqn.invars[0]) not in rounded:
            yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from casts(inner)


@pytest.mark.parametrize("profile", ["plain", "cpu", "cuda"])
@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "fp8", "w4a16:g32"])
def test_every_rounding_to_bfloat16_on_the_way_to_a_log_prob_is_one_that_xla_keeps(scheme, profile):
    """XLA may drop a plain cast where float32 follows, in one program and not in another."""
    config = config_of(scheme, profile)
    graphdef, params, _ = models.split(models.abstract_model(config))
    qweights = jax.eval_shape(lambda p: models.quantize_params(graphdef, p), params)

    def scored(params, qweights, tokens):
        model = models.merge(graphdef, params, qweights)
        hidden = model.hidden_states(tokens, jnp.zeros_like(tokens), tokens)
        return token_logprobs(hidden, model.head_weight(), tokens, tokens, numerics=config.numerics)

    program = jax.make_jaxpr(scored)(params, qweights, jnp.ones((2, 32), jnp.int32))
    assert "reduce_precision" in str(program)
    assert list(casts(program.jaxpr)) == []
