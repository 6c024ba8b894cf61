# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward and its gradient lower for platforms that are not here."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from qarl_jax.models import abstract_model, merge, parse_rules, read_config, split

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "models"


def lowered(name, scheme, platform):
    """Value and gradient of the mean logit of a published model, two layers of it, as StableHLO for `platform`."""
    config = read_config(
        json.loads((FIXTURES / f"{name}.json").read_text())["config"],
        compute_dtype="bfloat16",
        quant=parse_rules(scheme),
        attention="xla",
        remat="dots",
    )
    config = dataclasses.replace(config, num_layers=2, moe_layers=config.moe_layers[:2])
    graphdef, params, qweights = split(abstract_model(config))

    def loss(params, qweights, tokens, positions, segment_ids):
        return merge(graphdef, params, qweights)(tokens, positions, segment_ids).mean()

    ints = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    trace = jax.jit(jax.value_and_grad(loss)).trace(params, qweights, ints, ints, ints)
    return trace.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize(("name", "scheme"), [("Qwen3-8B", "w4a16"), ("Qwen3-30B-A3B", "w8a8"), ("Qwen3-8B", "bf16")])
def test_forward_and_gradient_lower_for_every_platform(name, scheme, platform):
    text = lowered(name, scheme, platform)
    assert "stablehlo.while" in text  # the layers are scanned, not unrolled
    if scheme == "w8a8":
        assert "xi8>" in text
