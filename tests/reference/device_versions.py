# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What is published through GPUs in tests of the bridge: small policies as a learner has them, and their names."""

import ctypes
import functools

import jax
import jax.numpy as jnp
from qarl_bridge.protocol import messages

from qarl_jax import models
from qarl_jax.rollout import PolicyWeights
from qarl_jax.runtime.mesh import make_mesh, param_shardings
from tests.reference import bridge_world, tiny


@functools.cache
def policy(scheme, moe=False, seed=0):
    config = tiny.model_config(
        quant=models.parse_rules(scheme),
        architecture="Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM",
        moe=models.MoEConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True)
        if moe
        else None,
        moe_layers=(1,) if moe else (),
        tie_embeddings=moe,
        param_dtype=jnp.float32,
    )
    graphdef, params, qweights = models.split(models.random_model(config, seed))
    return PolicyWeights(graphdef=graphdef, params=params, qweights=qweights)


def identity(step=0):
    return {
        "version": messages.Version(run_id="run", incarnation=1, step=step),
        "model": messages.model_fingerprint(bridge_world.CONFIG),
        "scheme": messages.scheme_hash(bridge_world.CONFIG["quantization_config"]),
    }


def spread(weights, **sizes):
    """`weights` on a mesh, as a learner has them."""
    mesh = make_mesh(**sizes)
    placed = [jax.device_put(tree, param_shardings(tree, mesh)) for tree in (weights.params, weights.qweights)]
    return PolicyWeights(graphdef=weights.graphdef, params=placed[0], qweights=placed[1])


def read(pointer, size):
    return ctypes.string_at(pointer, size)
