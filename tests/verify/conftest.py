# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One small dense policy, as a folder, for the ladder and what stands beside it."""

import json

import pytest

from qarl_jax import models
from tests.reference.qwen3 import SMALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SMALL))
    config = models.read_config(path, compute_dtype="bfloat16", param_dtype="float32", quant=models.parse_rules("bf16"))
    models.save_hf(models.random_model(config, 0), path)
    return str(path)
