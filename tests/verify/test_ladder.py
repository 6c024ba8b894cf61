# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The parity ladder: its estimators by hand, its exact rungs, its exit codes; the whole of it against vLLM (slow)."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from qarl_jax import models, parity
from qarl_jax.verify import ladder
from tests.reference.qwen3 import SMALL
from tests.reference.rollouts import completion

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_the_estimators_equal_the_numbers_worked_by_hand():
    # d = log 2 and log 0.5: exp(d) - 1 - d = 1 - log 2 and -0.5 + log 2, whose mean is 0.25.
    learner, engine = np.log([[2.0, 0.5, 9.0]]).astype(np.float32), np.zeros((1, 3), np.float32)
    entropy = np.array([[1.0, 0.6, 0.4]])
    stats = ladder.mismatch(learner, engine, entropy, np.ones((1, 3), bool))
    assert stats["tokens"] == 2, "the third position is nearly certain and does not count"
    assert stats["k1"] == pytest.approx(0, abs=1e-6)
    assert stats["k3"] == pytest.approx(0.25, rel=1e-6)
    assert stats["max_abs"] == stats["mean_abs"] == pytest.approx(np.log(2), rel=1e-6)
    assert stats["within_1e-4"] == 0


def test_equal_logprobs_have_no_mismatch_and_k3_is_never_negative():
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=(4, 50)), rng.random((4, 50)) < 0.5
    assert ladder.mismatch(x, x, np.ones_like(x), mask)["k3"] == 0
    noisy = x + 1e-3 * rng.normal(size=x.shape)
    assert 0 < ladder.mismatch(noisy, x, np.ones_like(x), mask)["k3"] < 1e-6


def test_completions_become_padded_rows():
    sampled = ladder.Sampled.of(
        [completion((7,), [-1.0], prompt=(5, 6)), completion((9, 4), [-2.0, -3.0], prompt=(8,))]
    )
    assert sampled.tokens.shape == (2, 32)
    np.testing.assert_array_equal(sampled.tokens[:, :4], [[5, 6, 7, 0], [8, 9, 4, 0]])
    np.testing.assert_array_equal(sampled.segment_ids[:, :4], [[1, 1, 1, 0]] * 2)
    np.testing.assert_array_equal(sampled.response[:, :4], [[0, 0, 1, 0], [0, 1, 1, 0]])
    np.testing.assert_array_equal(sampled.logprobs[:, :4], [[0, 0, -1, 0], [0, -2, -3, 0]])


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_fast")
def test_scores_are_those_of_the_models_logits(folder):
    weights = ladder.load(folder, "bf16", "plain")
    sampled = ladder.Sampled.of([completion((7, 8), prompt=(5, 6)), completion((9, 4), prompt=(8,))])
    logprobs, entropy = ladder.score(weights, sampled)
    model = models.merge(weights.graphdef, weights.params, weights.qweights)
    z = np.asarray(model(sampled.tokens), np.float64)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    for row, t in zip(*np.nonzero(sampled.response), strict=True):
        assert logprobs[row, t] == pytest.approx(logp[row, t - 1, sampled.tokens[row, t]], abs=1e-4)
        assert entropy[row, t] == pytest.approx(-(np.exp(logp) * logp)[row, t - 1].sum(), abs=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_fast")  # quantize is asked to the bit of an engine in tests/parity
@pytest.mark.parametrize("scheme", [pytest.param("w8a8", marks=pytest.mark.nightly), "w4a16:g64"])
def test_the_exact_rungs_hold_and_break_with_one_code(folder, scheme):
    weights = ladder.load(folder, scheme, "plain")
    assert [rung.ok for rung in ladder.exact_rungs(weights)] == [True, True]
    leaves, structure = jax.tree.flatten(weights.qweights)
    first = np.asarray(leaves[0]).copy()
    first.reshape(-1)[0] ^= 1
    broken = dataclasses.replace(weights, qweights=jax.tree.unflatten(structure, [first, *leaves[1:]]))
    assert next(ladder.exact_rungs(broken)).ok is False


def test_an_unquantized_scheme_leaves_the_first_rungs_out(folder):
    assert [rung.ok for rung in ladder.exact_rungs(ladder.load(folder, "bf16", "plain"))] == [None, None]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scheme", "w3a3"],
        ["--scheme", "w8a8", "--model", "/nowhere"],
        ["--scheme", "w8a8", "--prompts", "0"],
    ],
)
def test_user_errors_exit_with_2_and_one_sentence(folder, arguments, capsys):
    assert parity.main(["--model", folder, "--engine", "cpu", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(("broken", "code"), [(None, 0), ("read-back", 1)])
def test_the_exit_code_says_whether_a_promise_is_broken(folder, monkeypatch, capsys, broken, code):
    monkeypatch.setattr(ladder, "climb", lambda *args: {"rungs": [], "first_broken": broken})
    assert parity.main(["--model", folder, "--scheme", "w8a8", "--engine", "cpu", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["first_broken"] == broken


@pytest.mark.vllm
@pytest.mark.nightly
def test_the_whole_ladder_holds_on_a_live_vllm(folder):
    pytest.importorskip("vllm")
    options = ladder.Options(prompts=8, prompt_len=4, response_len=12, threads=1, unaligned=False)
    result = ladder.climb(folder, "w8a8", "cpu", options)
    assert result["first_broken"] is None
    assert [rung["name"] for rung in result["rungs"]][4:7] == ["alignment", "linear layers", "blocks"]
    assert result["execution"] == "eager"
    assert len(result["rungs"]) == 10
    assert all(rung["ok"] for rung in result["rungs"])
    assert result["aligned"]["tokens"] == 8 * 12
    assert result["aligned"]["k3"] == result["aligned"]["max_abs"] == 0
    assert result["decode_prefill"]["equal"] == 1


BIASED = SMALL | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def write(folder, values, noise=0.0):
    """Writes a random model with these values of config.json. noise: added to every weight, biases too."""
    (folder / "config.json").write_text(json.dumps(values))
    config = models.read_config(folder, compute_dtype="bfloat16", param_dtype="float32")
    graphdef, params, rest = models.split(models.random_model(config, 0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + noise * rng.normal(size=x.shape).astype(x.dtype), params)
    models.save_hf(models.merge(graphdef, params, rest), folder)
    return config


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("scheme", [pytest.param(s, marks=pytest.mark.nightly) for s in ("w8a8", "w4a8", "w4a16:g64")])
def test_a_model_with_biases_climbs_the_ladder_too(tmp_path, scheme):
    """A kernel may keep a copy of the bias in float32, which a published bias must reach."""
    pytest.importorskip("vllm")
    write(tmp_path, BIASED, noise=0.1)
    options = ladder.Options(prompts=8, prompt_len=4, response_len=12, threads=1, unaligned=False)
    result = ladder.climb(str(tmp_path), scheme, "cpu", options)
    assert result["first_broken"] is None, result["rungs"]
    assert result["aligned"]["k3"] == result["aligned"]["max_abs"] == 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["w4a16:g64", "bf16", "w8a8", "w4a8"])
def test_adapters_climb_the_ladder_on_a_base_with_biases(tmp_path, scheme):
    """The adapter comes after the bias, and after the rounding of both."""
    pytest.importorskip("vllm")
    config = write(tmp_path, BIASED, noise=0.1)
    options = ladder.Options(prompts=8, prompt_len=4, response_len=12, threads=1, lora_rank=8)
    result = ladder.climb(str(tmp_path), scheme, "cpu", options)
    assert result["first_broken"] is None, result["rungs"]
    ok = {rung["name"]: rung["ok"] for rung in result["rungs"]}
    assert all(ok[name] for name in ("hash at load", "read-back", "linear layers", "blocks", "sampled tokens"))
    assert result["aligned"]["k3"] == result["aligned"]["max_abs"] == 0
    assert result["decode_prefill"]["equal"] == 1
    plain = ladder.load(str(tmp_path), scheme, "cpu")
    adapted = ladder.with_adapters(plain, 8)
    rows = np.arange(12, dtype=np.int32)[None] % config.vocab_size
    sampled = ladder.Sampled(rows, np.ones_like(rows), rows > 0, np.zeros(rows.shape, np.float32))
    assert np.abs(ladder.score(plain, sampled)[0] - ladder.score(adapted, sampled)[0]).max() > 0.1  # they matter


@pytest.fixture
def left_behind():
    """The memory that shards of a killed engine shared, by vLLM's own name: it kept others from starting."""
    file = pathlib.Path("/dev/shm/-tp:0-[0-1]-cpushm_0")
    file.touch()
    yield
    file.unlink(missing_ok=True)  # another process of the tests may have one, too


@pytest.mark.vllm
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scheme", "shards", "rank", "more"),
    [
        *((scheme, 2, rank, {}) for scheme in ("w8a8", "w4a8", "fp8", "w4a16:g64", "bf16") for rank in (0, 8)),
        *((scheme, 4, 0, {}) for scheme in ("w8a8", "w4a16:g32", "nvfp4", "bf16")),
        ("w4a16:g32", 4, 8, {}),
        *((scheme, 2, 0, MOE) for scheme in ("w8a8", "w4a8:g32", "w4a16:g32", "nvfp4", "bf16")),
        *((scheme, 4, 0, MOE | {"moe_intermediate_size": 128}) for scheme in ("w8a8", "w4a16:g32", "bf16")),
    ],
)
def test_an_engine_of_several_shards_is_mirrored_to_the_last_bit(tmp_path, scheme, shards, rank, more, left_behind):
    """Each shard scales its own inputs of o and down, and rounds its own sum (of experts the weighted one); an adapter
    has the inputs of all."""
    pytest.importorskip("vllm")
    heads = {"num_attention_heads": 4, "num_key_value_heads": shards}
    write(tmp_path, SMALL | heads | more)
    options = ladder.Options(
        prompts=8,
        prompt_len=4,
        response_len=12,
        threads=1,
        unaligned=False,
        tensor_parallel_size=shards,
        lora_rank=rank,
    )
    result = ladder.climb(str(tmp_path), scheme, "cpu", options)
    assert result["first_broken"] is None, result["rungs"]
    ok = {rung["name"]: rung["ok"] for rung in result["rungs"]}
    rungs = ("hash at load", "read-back", "linear layers", "blocks", "prefill", "sampled tokens")
    assert all(ok[name] for name in rungs), result["rungs"]
    assert result["aligned"]["k3"] == result["aligned"]["max_abs"] == 0
    assert result["decode_prefill"]["equal"] == 1
    if more:
        assert (result["own_routing"]["tokens"], result["own_routing"]["max_abs"]) == (result["aligned"]["tokens"], 0)


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_llama_with_stretched_frequencies_climbs_the_ladder_too(tmp_path):
    pytest.importorskip("vllm")
    stretch = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    write(tmp_path, model | {"rope_scaling": {"rope_type": "llama3"} | stretch})
    options = ladder.Options(prompts=8, prompt_len=40, response_len=12, threads=1, unaligned=False)
    result = ladder.climb(str(tmp_path), "w8a8", "cpu", options)
    assert result["first_broken"] is None, result["rungs"]
    assert result["aligned"]["k3"] == result["aligned"]["max_abs"] == 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("scheme", [pytest.param("bf16", marks=pytest.mark.nightly), "w8a8"])
def test_an_moe_model_climbs_the_ladder_too(tmp_path, scheme):
    """vLLM's CPU engine must pack bf16 experts anew at every load; quantized ones run through the bridge's methods."""
    pytest.importorskip("vllm")
    write(tmp_path, SMALL | MOE)
    options = ladder.Options(prompts=6, prompt_len=16, response_len=12, threads=1, unaligned=False)
    result = ladder.climb(str(tmp_path), scheme, "cpu", options)
    assert result["first_broken"] is None, result["rungs"]
    ok = {rung["name"]: rung["ok"] for rung in result["rungs"]}
    assert all(ok[name] for name in ("read-back", "linear layers", "blocks", "sampled tokens"))
    experts = {kernel for kernel in result["kernels"] if "MoE" in kernel}
    assert experts == {"Float64Int8MoEMethod" if scheme == "w8a8" else "Float64MoEMethod"}
    assert result["own_routing"]["tokens"] == result["aligned"]["tokens"]
    assert result["aligned"]["k3"] == result["aligned"]["max_abs"] == 0
    assert result["own_routing"]["max_abs"] == 0
