# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters on the bases that a real vLLM serves: its layers against the formula, and many versions in a row."""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from qarl_bridge.protocol import messages

from qarl_jax import models
from qarl_jax.models.params import united
from qarl_jax.rollout import SamplingConfig
from qarl_jax.rollout.vllm.engine import VllmEngine, engine_config, engine_tensors
from qarl_jax.rollout.vllm.process import BridgeProcess
from qarl_jax.runtime.mesh import make_mesh
from qarl_jax.types import UserError
from qarl_jax.verify import ladder
from tests.reference import tiny
from tests.reference.bridge_world import connected
from tests.reference.qwen3 import qwen3

# tests/test_vllm_run.py has a run of adapters, tests/bridge/test_adapters.py their layers without a vLLM.
pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
SCRIPT = pathlib.Path(__file__).parents[1] / "reference" / "live_adapters.py"
MODEL = str(pathlib.Path(__file__).parents[2] / "assets" / "tiny-qwen3")


@pytest.fixture(scope="module", params=[("w8a8", 40), ("bf16", 40), ("w4a16", 200)], ids=str)
def found(request, tmp_path_factory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("engine")
    scheme, publishes = request.param
    command = [sys.executable, str(SCRIPT), scheme, str(folder), str(publishes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1]) | {"publishes": publishes}
    assert "error" not in result, (result, done.stderr[-3000:])
    return result


def test_every_layer_computes_the_formula_of_its_adapter_to_the_bit(found):
    """y' = bf(y + bf(bf(x A^T) B^T)) of all 16 fused layers, in numpy; once after a complete version that follows."""
    assert [count for _, count in found["outputs"]] == [57344, 57344]
    assert [wrong for wrong, _ in found["outputs"]] == [0, 0]
    assert found["adapters_matter"]


def test_an_adapter_of_zeros_leaves_the_bits_of_the_base(found):
    assert found["zero_is_the_base"], "greedy and sampled tokens and log-probs, as with the adapters taken away"


def test_a_partial_version_is_served_as_the_same_version_whole(found):
    assert found["partial_is_whole"]
    assert found["partial_is_whole_again"]
    layers, adapted = 16, 16
    assert found["first"][1] == found["read_back"] == layers + adapted + 4 * 4 + 3  # norms, embedding, head


def test_many_publishes_in_a_row_leave_nothing_behind(found):
    row = found["row"]
    assert len(row["versions"]) >= found["publishes"]
    assert set(row["versions"]) == {0}, "every completion was drawn under the version published last"
    assert row["files"][-1] <= row["files"][5] + 2
    assert row["seen"] >= row["kept"] * row["least"], "tensors of the smallest matrix's size, which were kept"
    # A matrix kept per publish adds its bytes to every one. Without it most add nothing, and a few some kilobytes.
    warm = row["held"][15:]
    assert np.median(np.diff(warm)) < row["least"] / 2
    assert warm[-1] - warm[0] < row["bytes"], "one copy per version would be 24 or 184 times as much"
    assert row["slots"] == 2 * 16, "every version lies in the memory that the first one had"
    assert "loading whole modules" in found["notes"]


def test_bad_adapters_are_refused_and_the_last_good_version_is_served_to_the_bit(found):
    words = (
        "holds NaN",
        "has adapters of rank 16 and 32 of down_proj",
        "up_proj and v_proj, and the engine was started for adapters of rank 16",
        "read_back",
    )
    for (error, same), said in zip(found["refused"], words, strict=True):
        assert said in error
        assert same, error


def started(weights, options):
    """A bridge started by hand for such versions, and the settings of an engine over it."""
    bridge = BridgeProcess(arguments=["--options", options.to_json()])
    expected = [
        messages.Expected(name=name, dtype=messages.dtype_name(array.dtype), shape=list(array.shape))
        for name, array in engine_tensors(weights)
    ]
    address, _ = bridge.start(engine_config(weights.graphdef), expected)
    key = str(pathlib.Path(bridge.folder) / "key")
    return bridge, dataclasses.replace(options, endpoints=(address,), key_file=key)


def test_a_run_starts_from_an_engine_that_holds_its_base_and_publishes_adapters_alone(tmp_path):
    """Three trainers, one engine: the second finds its base there, the third another one, and is refused."""
    pytest.importorskip("vllm")
    base = ladder.load(MODEL, "w8a8", "cpu")
    config = models.config_of(base.graphdef)
    prompts = ladder.random_prompts(config.vocab_size, 8, 16, 0)
    sampling = SamplingConfig(max_response_len=16)
    options = ladder.Options(prompts=8, prompt_len=16, response_len=16, threads=1)
    bridge, settings = started(ladder.with_adapters(base, 8), options.engine(config))
    other = jax.tree.map_with_path(lambda path, x: 2 * x if "embed" in jax.tree_util.keystr(path) else x, base.params)
    reports = []
    try:
        for number in range(2):
            weights = ladder.with_adapters(base, 8, seed=number)
            with contextlib.closing(VllmEngine(settings, run_id=f"run{number}")) as engine:
                reports.append(engine.publish(weights, 0))
                sampled = ladder.Sampled.of(
                    drawn := ladder.flat(engine.generate(prompts, num_samples=1, sampling=sampling, key=number))
                )
                assert {one.policy_version for one in drawn} == {0}
                logprobs, _ = ladder.score(weights, sampled)
                assert (logprobs == sampled.logprobs)[sampled.response].all()
        weights = ladder.with_adapters(dataclasses.replace(base, params=other), 8)
        with (
            contextlib.closing(VllmEngine(settings, run_id="other")) as engine,
            pytest.raises(UserError, match="holds another base"),
        ):
            engine.publish(weights, 0)
    finally:
        bridge.close()
    adapters = 2 * 7 * config.num_layers
    assert [report["tensors"] for report in reports] == [adapters] * 2
    assert [report["weights_read_back"] for report in reports] == [4 * config.num_layers] * 2  # fused layers
    assert [report["base_s"] > 0 for report in reports] == [True, False]


def test_a_run_starts_from_an_engine_that_loaded_its_base_from_a_folder(tmp_path):
    pytest.importorskip("vllm")
    weights = ladder.with_adapters(ladder.load(MODEL, "bf16", "cpu"), 8)
    config = models.config_of(weights.graphdef)
    settings = ladder.Options(prompts=8, prompt_len=16, response_len=16, threads=1).engine(config)
    targets = [name for names in config.linear_names for name in names]
    options = json.loads(settings.to_json()) | {"lora_rank": 8, "lora_targets": targets}
    socket, key = str(tmp_path / "s"), str(tmp_path / "key")
    command = [sys.executable, "-m", "qarl_bridge", "--socket", socket, "--model", MODEL, "--key-file", key]
    with (tmp_path / "log").open("wb") as log:
        bridge = subprocess.Popen([*command, "--options", json.dumps(options)], stdout=log, stderr=log)
    try:
        connected(socket, key, bridge, patience_s=400).close()
        lines = []
        settings = dataclasses.replace(settings, endpoints=(socket,), key_file=key)
        with contextlib.closing(VllmEngine(settings, log=lines.append)) as engine:
            report = engine.publish(weights, 0)
            assert (report["tensors"], report["base_s"]) == (2 * 7 * config.num_layers, 0), lines
            sampling, prompts = SamplingConfig(max_response_len=16), ladder.random_prompts(config.vocab_size, 8, 16, 0)
            drawn = ladder.flat(engine.generate(prompts, num_samples=1, sampling=sampling, key=0))
            sampled = ladder.Sampled.of(drawn)
            assert (ladder.score(weights, sampled)[0] == sampled.logprobs)[sampled.response].all()
    finally:
        bridge.terminate()
        bridge.wait(60)


def test_partial_versions_of_an_moe_model_are_what_the_learner_scores(tmp_path):
    """Adapters of attention, and norms: neither the loader nor the read-back misses the experts, which stay."""
    pytest.importorskip("vllm")
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (tmp_path / "config.json").write_text(
        json.dumps(qwen3(vocab=64, hidden=128, intermediate=128, layers=2, heads=2, kv_heads=1, head_dim=64) | moe)
    )
    config = models.read_config(tmp_path, compute_dtype="bfloat16", param_dtype="float32")
    models.save_hf(models.random_model(config, 0), tmp_path)
    base = ladder.load(str(tmp_path), "w8a8", "cpu")
    options = ladder.Options(prompts=6, prompt_len=16, response_len=12, threads=1)
    prompts = ladder.random_prompts(config.vocab_size, 6, 16, 0)
    engine = VllmEngine(dataclasses.replace(options.engine(config), readback="full"))
    try:
        for number in range(3):
            weights = ladder.with_adapters(base, 8, seed=number)
            norms = frozenset(path for path in weights.fixed if "attn_norm" in path)
            scale = 1 + number / 4
            params = jax.tree.map_with_path(
                lambda path, x, scale=scale: x * scale if "attn_norm" in jax.tree_util.keystr(path) else x,
                weights.params,
            )
            weights = dataclasses.replace(weights, params=params, fixed=weights.fixed - norms)
            report = engine.publish(weights, number)
            layers = config.num_layers
            assert number == 0 or report["tensors"] == layers * (2 * 4 + 1)
            drawn = ladder.flat(
                engine.generate(prompts, num_samples=1, sampling=SamplingConfig(max_response_len=12), key=number)
            )
            sampled = ladder.Sampled.of(drawn)
            logprobs, _ = ladder.score(weights, sampled)
            assert {c.policy_version for c in drawn} == {number}
            assert (logprobs == sampled.logprobs)[sampled.response].all()
    finally:
        engine.close()


def test_vllms_own_lora_serves_an_exported_folder_with_the_learners_log_probs(tmp_path):
    pytest.importorskip("vllm")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "base").mkdir()
    folder = tiny.model_folder(tmp_path / "base")
    config = models.read_config(folder, compute_dtype="float32", lora=models.Lora(rank=8, scale=12 / 8**0.5))
    rng, ids = np.random.default_rng(0), list(range(3, 19))
    adapters = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype), models.fresh_adapters(config, make_mesh())
    )
    models.write_peft(tmp_path / "adapters", config, adapters, alpha=12, rslora=True, base=str(folder))
    graphdef, masters = models.load_masters(folder, config)
    logits = models.merge(graphdef, united(masters, adapters), nnx.State({}))(jnp.asarray([ids]))
    wanted = jnp.take_along_axis(jax.nn.log_softmax(logits[0, :-1]), jnp.asarray(ids[1:])[:, None], axis=1)[:, 0]
    command = [sys.executable, str(SCRIPT.with_name("live_peft.py")), str(folder), str(tmp_path / "adapters")]
    done = subprocess.run([*command, *map(str, ids)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    base, served = json.loads(done.stdout.strip().splitlines()[-1])
    np.testing.assert_allclose(served, wanted, atol=2e-5)
    assert np.abs(np.array(served) - base).max() > 0.1
