# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Fresh masters drawn on the devices."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import models
from qarl_jax.runtime.mesh import make_mesh
from tests.reference import tiny

CONFIG = tiny.model_config(
    architecture="Qwen3MoeForCausalLM",
    moe=models.MoEConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=32, norm_topk_prob=True),
    moe_layers=(1,),
    initializer_range=0.1,
)


@pytest.mark.slow
def test_a_seed_means_the_same_masters_on_every_mesh_and_no_device_holds_more_than_its_part():
    alone = models.by_path(models.random_masters(CONFIG, make_mesh(), 3))
    spread = models.by_path(models.random_masters(CONFIG, make_mesh(fsdp=2, expert=2), 3))
    for path, x in alone.items():
        np.testing.assert_array_equal(np.asarray(spread[path]), np.asarray(x), err_msg=path)
    gate = spread["stacks.1.moe.gate.kernel"]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(1, 1, *gate.shape[2:])}
    assert not np.array_equal(alone["stacks.1.moe.gate.kernel"], alone["stacks.1.moe.up.kernel"])


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_fast")
def test_kernels_are_normal_norms_one_biases_zero_in_the_masters_dtype():
    config = dataclasses.replace(CONFIG, param_dtype=jnp.dtype("bfloat16"), qkv_bias=True)
    for path, x in models.by_path(models.random_masters(config, make_mesh(), 0)).items():
        values = np.asarray(x, np.float32)
        assert x.dtype == jnp.bfloat16
        if path.endswith("kernel"):
            assert abs(values.std() / 0.1 - 1) < 6 / np.sqrt(values.size), path
        else:
            assert (values == (1 if path.endswith("weight") else 0)).all(), path


@pytest.mark.slow
def test_a_seed_means_the_same_masters_wherever_stacks_are_cut():
    config = dataclasses.replace(CONFIG, num_layers=4, moe_layers=())
    whole = models.by_path(models.random_masters(config, make_mesh(), 3))
    parts = models.by_path(models.random_masters(dataclasses.replace(config, splits=(1,)), make_mesh(), 3))
    for path, x in whole.items():
        own = [parts[path.replace("stacks.0.", f"stacks.{n}.")] for n in range(2 if "stacks" in path else 1)]
        found = np.concatenate(own) if len(own) == 2 else np.asarray(own[0])
        np.testing.assert_array_equal(found, np.asarray(x), err_msg=path)
