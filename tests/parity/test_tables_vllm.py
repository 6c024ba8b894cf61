# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The real vLLM on a CPU with embedding and head in four bits: published twice, read back, equal to the learner."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qarl_jax import models
from qarl_jax.rollout import SamplingConfig
from qarl_jax.rollout.vllm.engine import Config, VllmEngine
from qarl_jax.types import Prompt
from qarl_jax.verify import ladder

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]  # tests/test_vllm_run.py trains, publishes and exports such tables
ASSET = pathlib.Path(__file__).parents[2] / "assets" / "tiny-qwen3"
ENGINE = Config(kv_cache_gb=0.1, max_model_len=128, readback="full", threads=1)
PROMPTS = [Prompt(uid=str(i), tokens=(3 + i, 13, 5, 14 + i), text="", answer="") for i in range(6)]


def rules(tables):
    return [{"match": "embed|head", "scheme": tables}, {"match": "", "scheme": "w4a16:g64"}]


def folder_of(tied, folder):
    """The quickstart's policy, its head its own or its embedding."""
    tensors = load_file(ASSET / "model.safetensors")
    config = json.loads((ASSET / "config.json").read_text()) | {"tie_word_embeddings": tied}
    save_file(
        {name: x for name, x in tensors.items() if not (tied and name == "lm_head.weight")},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=[(True, "w4a16:g64"), (False, "w4a16:g32"), (False, "w4a16_asym:g32")])
def served(request, tmp_path_factory):
    """(engine, weights of versions 0 and 1, reports, completions of version 1)."""
    tied, tables = request.param
    folder = folder_of(tied, tmp_path_factory.mktemp("model"))
    first = ladder.load(str(folder), rules(tables), "cpu")
    scaled = jax.tree.map(lambda x: (x * 1.03).astype(x.dtype), first.params)
    second = dataclasses.replace(first, params=scaled, qweights=models.quantize_params(first.graphdef, scaled))
    engine = VllmEngine(ENGINE, run_id="tables", incarnation=1)
    try:
        reports = [engine.publish(weights, step) for step, weights in enumerate((first, second))]
        drawn = engine.generate(PROMPTS, num_samples=4, sampling=SamplingConfig(max_response_len=24), key=5)
        yield tied, engine, second, reports, [one for group in drawn for one in group]
    finally:
        engine.close()


def test_no_token_of_a_second_version_differs_from_the_learners(served):
    _, _, weights, _, completions = served
    sampled = ladder.Sampled.of(completions)
    learned, _ = ladder.score(weights, sampled)
    assert sampled.response.sum() > 200
    np.testing.assert_array_equal(learned[sampled.response], sampled.logprobs[sampled.response])


def test_every_row_and_every_input_is_read_back_through_whole_modules(served):
    tied, engine, _, reports, _ = served
    replica = engine.fleet.replicas[0].client
    layers, columns = 4 * (256 + 256 + 256 + 384), 256  # of a head, or of an embedding that is one
    assert [report["rows_read_back"] for report in reports] == [layers + columns] * 2
    assert [report["weights_read_back"] for report in reports] == [4 * (4 + 4) + 3 - tied] * 2
    kernels = {name: kernel for name, kernel in replica.facts.kernels.items() if ".layers." not in name}
    assert kernels == dict.fromkeys(["model.embed_tokens", "lm_head"][: 2 - tied], "Float64Linear")
    assert "loading whole modules" in replica.status().facts.notes
    assert replica.read_back("sampled", seed=5).rows == 17 * 16
