# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic for every CPU: the bridge's operations under each of vLLM's builds that this machine can run, against
the learner's, to the last bit; and whole models of a real width on a live engine.

What cannot run here (AMX tiles on a CPU without them; Arm) is named in the summary of the test session. Those builds
run the same torch operations, and nothing of vLLM's that rounds.
"""

import functools
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qarl_bridge.engine.cpu import build as cpu_build
from qarl_bridge.engine.cpu.build import BUILDS

from qarl_jax import models, quant
from qarl_jax.models import layers
from qarl_jax.models.attention import attention
from qarl_jax.quant.schemes import fp8, w4a8, w4a16, w8a8
from qarl_jax.verify import ladder
from tests.reference import cpu_ops

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
CPU = quant.resolve("cpu")
SCHEMES = {"bf16": None, "w4a16": w4a16.Config(), "w4a8": w4a8.Config(), "w8a8": w8a8.Config(), "fp8": fp8.Config()}


@functools.cache
def runnable():
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    if torch.cuda.is_available():
        pytest.skip("compares CPU builds")
    return cpu_build.runnable(torch)


# The builds between AVX2 and AMX are nightly, as whole models of a real width are.
BETWEEN = ("avx512", "avx512_bf16")


@pytest.fixture(params=[pytest.param(b, marks=[pytest.mark.nightly] * (b in BETWEEN)) for b in (*BUILDS, "arm")])
def build(request):
    """Each build, said in the summary (conftest.py): run here, or why not."""
    possible = runnable()
    request.node.user_properties.append(("cpu_build", f"{request.param}: {'run' * (request.param in possible)}"))
    if request.param not in possible:
        pytest.skip(f"this machine cannot run vLLM's {request.param} build")
    return request.param


@pytest.fixture(scope="module")
def learners():
    """The learner's outputs, by the names of `cpu_ops`."""

    @jax.jit
    def run(given):  # arguments: XLA would fold constants, not compile what has them
        def bf16(name):
            return given[name].astype(jnp.bfloat16)

        out = {}
        for k, _ in cpu_ops.SHAPES:
            x, w, b = bf16(f"x_{k}"), given[f"w_{k}"], given[f"b_{k}"]
            for name, config in SCHEMES.items():
                qt = None if config is None else quant.quantize(w, config)
                out[f"{name}_{k}"] = quant.dot(x, w, qt, b, numerics=CPU)
            out[f"head_{k}"] = learners_logits(x, bf16(f"w_{k}"))
        config = types.SimpleNamespace(
            param_dtype=jnp.float32, rms_norm_eps=1e-6, numerics=CPU, norm_order="float64", compute_dtype=jnp.bfloat16,
            head_dim=cpu_ops.HEAD_DIM, rope_theta=cpu_ops.THETA,
            rope_scaling=None,
        )  # fmt: skip
        norm = layers.RMSNorm(896, config=config, stack={})
        norm.weight.set_value(given["norm"])
        x = bf16("x_896")
        out["norm"], (out["added"], _) = norm(x), norm.add(x, bf16("residual"))
        gate, up = jnp.split(bf16("x_4864"), 2, axis=-1)
        out["swiglu"] = layers.silu_and_mul(gate, up, CPU)
        table = layers.rope_table(config, jnp.arange(cpu_ops.LENGTH, dtype=jnp.int32)[None])
        q, k = (layers.apply_rope(bf16(name)[None], table, CPU) for name in ("q", "k"))
        out["rope"], out["attention"] = q[0], attention(q, k, bf16("v")[None], numerics=CPU)[0]
        return out

    return {name: np.asarray(value, np.float32) for name, value in run(cpu_ops.inputs()).items()}


def learners_logits(hidden, head):
    from qarl_jax.models.logprobs import logits_of

    return logits_of(hidden, head, numerics=CPU)


def test_every_operation_under_every_build_is_the_learners_to_the_last_bit(build, learners, tmp_path):
    file = tmp_path / "out.npz"
    done = subprocess.run(
        [sys.executable, cpu_ops.__file__, str(file)],
        env=os.environ | {cpu_build.VARIABLE: build, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(file) as engines:
        assert set(engines) - {"logprobs"} == set(learners)
        for name, value in learners.items():
            np.testing.assert_array_equal(value, engines[name], err_msg=name)
        logits = cpu_ops.inputs()["logits"].astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_array_equal(engines["logprobs"], exact.astype(np.float32))


def test_a_build_this_cpu_cannot_run_and_one_that_does_not_exist_are_refused(monkeypatch):
    torch = types.SimpleNamespace(
        cpu=types.SimpleNamespace(
            _is_avx512_supported=lambda: False,
            _is_avx512_bf16_supported=lambda: False,
            _is_amx_tile_supported=lambda: False,
        )
    )
    monkeypatch.setattr(cpu_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv(cpu_build.VARIABLE, "avx512")
    with pytest.raises(cpu_build.BridgeError, match="this CPU can run avx2 only"):
        cpu_build.choose(torch)
    monkeypatch.setenv(cpu_build.VARIABLE, "sse")
    with pytest.raises(cpu_build.BridgeError, match="use one of avx2, avx512, avx512_bf16, amx"):
        cpu_build.choose(torch)
    monkeypatch.setattr(cpu_build.platform, "machine", lambda: "aarch64")
    assert cpu_build.runnable(torch) == ("arm",)


@pytest.fixture(scope="module")
def real_width(tmp_path_factory):
    """A Qwen2 of Qwen2.5-0.5B's width (896, 4,864; 14 heads, 2 of keys; biases), one layer, random weights."""
    folder = tmp_path_factory.mktemp("real-width")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "vocab_size": 512,
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 1,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1e6,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
                "initializer_range": 0.05,
            }
        )
    )
    config = models.read_config(folder, compute_dtype="bfloat16", param_dtype="float32")
    graphdef, params, rest = models.split(models.random_model(config, 0))
    noise = np.random.default_rng(0)
    # Biases and norms, too, have opinions.
    params = jax.tree.map(lambda x: x + 0.1 * noise.normal(size=x.shape).astype(x.dtype) * (x.shape[-1] < 4864), params)
    models.save_hf(models.merge(graphdef, params, rest), folder)
    return folder


LIVE = [(build, scheme) for build in cpu_build.BUILDS for scheme in ("w4a16", "bf16", "w8a8", "w4a8")]


@pytest.mark.nightly
@pytest.mark.parametrize(("forced", "scheme"), LIVE)
def test_a_model_of_a_real_width_has_the_engines_log_probs_to_the_last_bit(real_width, monkeypatch, forced, scheme):
    if forced not in runnable():
        pytest.skip(f"this machine cannot run vLLM's {forced} build")
    monkeypatch.setenv(cpu_build.VARIABLE, forced)
    options = ladder.Options(prompts=4, prompt_len=12, response_len=12, threads=1, unaligned=False)
    result = ladder.climb(str(real_width), scheme, "cpu", options)
    assert result["first_broken"] is None, result["rungs"]
    assert result["engine"].endswith(forced)
    assert result["profile"] == "cpu"
    assert result["decode_prefill"]["equal"] == 1
    assert result["aligned"]["tokens"] > 20
    assert result["aligned"]["max_abs"] == result["aligned"]["k3"] == 0
