# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The published models: their config.json and tensor lists, written out as fixtures, against our abstract parameters.

A fixture's tensors are [name, shape] with ranges: "model.layers.{0..27}.mlp.up_proj.weight" stands for 28 tensors.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from qarl_jax.models import abstract_model, by_path, hf_names, merge, parse_rules, read_config, split
from qarl_jax.models import published as shapes
from qarl_jax.models.hf.weights import check_names

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "models"
PUBLISHED = sorted(path.stem for path in FIXTURES.glob("*.json"))
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def published(name):
    return json.loads((FIXTURES / f"{name}.json").read_text())


def expand(tensors):
    """{name: shape} of every tensor of a fixture."""
    out = {}
    for template, shape in tensors:
        ranges = [range(int(a), int(b) + 1) for a, b in RANGE.findall(template)]
        for values in itertools.product(*ranges):
            numbers = iter(values)
            out[RANGE.sub(lambda _, numbers=numbers: str(next(numbers)), template)] = tuple(shape)
    return out


def test_the_eight_models_are_there():
    assert len(PUBLISHED) == 8


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_tensor_is_exactly_one_parameter_slice_of_the_same_shape(name):
    fixture = published(name)
    config = read_config(fixture["config"])
    shapes = expand(fixture["tensors"])
    check_names(config, set(shapes), name)
    seen = set()
    total = 0
    params = by_path(split(abstract_model(config))[1])
    names = hf_names(config)
    assert set(names) == set(params)
    for path, own in names.items():
        assert params[path].shape[: own.ndim] == own.shape
        for tensor in own.reshape(-1):
            assert tensor not in seen, tensor
            seen.add(tensor)
            assert shapes[tensor] == params[path].shape[own.ndim :], tensor
        total += math.prod(params[path].shape)
    assert set(shapes) - seen <= {"lm_head.weight"}
    assert total == fixture["num_parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_can_be_quantized_and_run_abstractly(name, scheme):
    config = read_config(
        published(name)["config"], quant=parse_rules(scheme), compute_dtype="bfloat16", param_dtype="bfloat16"
    )
    graphdef, params, qweights = split(abstract_model(config))
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    out = jax.eval_shape(lambda p, q, t: merge(graphdef, p, q)(t), params, qweights, tokens)
    assert out.shape == (2, 16, config.vocab_size)
    assert out.dtype == jnp.float32
    # Every linear layer of every transformer layer, and nothing else: 7 stacks per segment.
    assert len(nnx.to_flat_state(qweights)) == 7


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "Qwen2.5-Math-1.5B",
            {"head_dim": 128, "rope_theta": 1e4, "tie_embeddings": True, "qkv_bias": True, "qk_norm": False},
        ),
        (
            "Qwen2.5-Math-7B",
            {"head_dim": 128, "rope_theta": 1e4, "tie_embeddings": False, "qkv_bias": True, "num_kv_heads": 4},
        ),
        (
            "Qwen3-1.7B",
            {"head_dim": 128, "rope_theta": 1e6, "tie_embeddings": True, "qkv_bias": False, "qk_norm": True},
        ),
        ("Qwen3-8B", {"num_layers": 36, "rope_theta": 1e6, "tie_embeddings": False, "intermediate_size": 12288}),
        ("Qwen3-30B-A3B", {"num_layers": 48, "num_kv_heads": 4, "moe_layers": tuple(range(48))}),
    ],
)
def test_published_configs_read_as_known(name, expected):
    config = read_config(published(name)["config"])
    assert {key: getattr(config, key) for key in expected} == expected


# ---- shapes by name -------------------------------------------------------------------------------------------------

PARAMETERS = {
    "Qwen3-0.6B": 596049920, "Qwen3-4B": 4022468096, "Qwen3-14B": 14768307200, "Qwen3-32B": 32762123264,
    "Qwen3-235B-A22B": 235093634560, "Qwen2.5-0.5B-Instruct": 494032768, "DeepSeek-R1-Distill-Qwen-1.5B": 1777088000,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name in shapes.CONFIGS])
def test_a_shape_by_name_is_that_of_the_published_config(name):
    ours, theirs = read_config(shapes.CONFIGS[name]), read_config(published(name)["config"])
    assert dataclasses.replace(ours, hf_config=theirs.hf_config) == theirs


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_by_name_has_the_published_number_of_parameters(name):
    leaves = by_path(split(abstract_model(read_config(shapes.CONFIGS[name])))[1]).values()
    assert sum(leaf.size for leaf in leaves) == PARAMETERS[name]


def test_a_folder_goes_before_a_name(tmp_path):
    mine = tmp_path / "Qwen3-8B"
    mine.mkdir()
    with shapes.folder(str(mine)) as found:
        assert found == str(mine)
    with shapes.folder("Qwen/Qwen3-8B") as found:
        assert read_config(found).hidden_size == 4096
    assert not pathlib.Path(found).exists()
