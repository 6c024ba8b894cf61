# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs are those a count by hand gives, and a device's peak is its own."""

import json
import pathlib
import types

import jax
import pytest

from qarl_jax import models
from qarl_jax.learning.trainable import Trainable
from qarl_jax.loop.updates import Updates
from qarl_jax.observe import flops

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "models"


def published(name):
    """(config, abstract parameters) of a published model."""
    config = models.read_config(json.loads((FIXTURES / f"{name}.json").read_text())["config"])
    return config, models.split(models.abstract_model(config))[1]


def test_a_dense_step_is_counted_by_the_formula():
    config, params = published("Qwen3-8B")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert flops.active_parameters(config, params) == count
    # Four rows of 4,096 tokens: 6 P tokens + 6 layers heads head_dim T^2 per row.
    wanted = 6 * count * 4 * 4096 + 4 * 6 * 36 * 32 * 128 * 4096**2
    assert flops.training(config, count, [4096] * 4) == wanted
    # Packed into one row or not: attention sees the sequences, not the row.
    assert flops.training(config, count, [2048] * 8) == wanted - 4 * 6 * 36 * 32 * 128 * 4096**2 / 2


def test_frozen_weights_have_no_gradient_and_every_width_is_a_pass():
    config, params = published("Qwen3-8B")
    layers = sum(leaf.size for path, leaf in models.by_path(params).items() if path.startswith("stacks."))
    learner = types.SimpleNamespace(
        config=config, abstract_params=params, trainable=Trainable(freeze=("^stacks",)), beside={"w4": None}
    )
    row = types.SimpleNamespace(segments=[types.SimpleNamespace(prompt_len=96, response_len=4000)])
    count = flops.active_parameters(config, params)
    wanted = 2 * (flops.training(config, count, [4096]) - 2 * layers * 4096)
    assert Updates._flops(types.SimpleNamespace(_learner=learner), row) == wanted


def test_of_an_moe_model_only_the_routed_experts_count():
    config, params = published("Qwen3-30B-A3B")
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    experts = 48 * 128 * 3 * 768 * 2048  # layers, experts, matrices, F, D
    assert flops.active_parameters(config, params) == total - experts + experts * 8 / 128
    assert 3.2e9 < flops.active_parameters(config, params) < 3.5e9  # "A3B"


@pytest.mark.parametrize(
    ("kind", "tera"),
    [("NVIDIA H200", 989.4), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756), ("TPU v5 lite", 197)],
)
def test_devices_are_known_by_their_kind(kind, tera):
    assert flops.peak(kind) == tera * 1e12


def test_an_unknown_device_has_no_peak():
    assert flops.peak("cpu") is None
    assert flops.of_devices(jax.devices("cpu")[:2]) is None
