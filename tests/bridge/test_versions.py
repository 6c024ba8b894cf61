# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM's engine, and patches that keep an order of sums, by vLLM's version."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from qarl_bridge.engine import versions  # noqa: E402
from qarl_bridge.protocol import messages  # noqa: E402
from qarl_bridge.protocol.errors import BridgeError  # noqa: E402


def arguments(on_gpu=False, **options):
    options = messages.EngineOptions(**{"max_num_seqs": 4, "kv_cache_gb": 0.5} | options)
    return versions.engine_arguments(options, path="/m", has_weights=False, on_gpu=on_gpu)


def test_engine_arguments_follow_the_options():
    made = arguments()
    assert (made["enforce_eager"], made["kv_cache_memory_bytes"], made["load_format"]) == (True, 1 << 29, "dummy")
    assert "max_model_len" not in made
    made = arguments(arithmetic="vllm", on_gpu=True)
    assert not made["enforce_eager"]
    assert "compilation_config" not in made


def test_a_gpu_runs_eager_ops_in_cuda_graphs_unless_told_otherwise_and_a_cpu_cannot():
    made = arguments(on_gpu=True)
    assert not made["enforce_eager"]
    assert made["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert arguments(on_gpu=True, eager=True)["enforce_eager"]
    assert arguments(on_gpu=True, eager=True, arithmetic="vllm")["enforce_eager"]
    with pytest.raises(BridgeError, match=r"arithmetic=vllm needs a CUDA GPU.*leave .* at batch_invariant"):
        arguments(arithmetic="vllm")


def test_routing_is_recorded_by_a_worker_that_is_ready_before_graphs_are_captured():
    made = arguments(on_gpu=True, record_routing=True)
    assert made["worker_cls"] == "qarl_bridge.engine.worker.BridgeWorker"
    assert made["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert "worker_cls" not in arguments(on_gpu=True)


def test_a_version_nobody_tried_is_said_to_be_one():
    assert versions.untested_note("0.25.1") == versions.untested_note("0.32.0+cpu") == []
    (note,) = versions.untested_note("0.41.0")
    assert "0.41.0 was not tried" in note
    assert versions.release("0.25.1+cu130") == (0, 25)


def test_attention_is_told_not_to_split_sequences(monkeypatch):
    calls = []
    backend = types.ModuleType("some_backend")
    backend.flash_attn_varlen_func = lambda *args, **named: calls.append((args, named)) or "out"
    backend.get_scheduler_metadata = lambda **named: calls.append(((), named)) or "schedule"
    monkeypatch.setitem(sys.modules, "some_backend", backend)
    assert versions.keep_sequences_whole("some_backend") == ""
    assert backend.flash_attn_varlen_func(1, q=np.zeros((2, 4, 128)), num_splits=0) == "out"
    assert backend.get_scheduler_metadata(batch_size=3) == "schedule"
    assert [call[1]["num_splits"] for call in calls] == [1, 1]
    assert calls[1] == ((), {"batch_size": 3, "num_splits": 1})
    monkeypatch.setitem(sys.modules, "another_backend", types.ModuleType("another_backend"))
    assert "may split" in versions.keep_sequences_whole("another_backend")
    assert "may split" in versions.keep_sequences_whole("no_such_backend")


@pytest.mark.parametrize("head", [{"headdim": 64}, {"q": np.zeros((2, 14, 64))}])
def test_narrow_heads_meet_blocks_of_128_keys_in_a_decoding_step_too(head):
    one = {"num_splits": 1}
    assert versions._one_order(head | {"max_seqlen_q": 1}) == one | {"max_seqlen_q": 128}
    assert versions._one_order(head | {"max_seqlen_q": 7}) == one | {"max_seqlen_q": 128}
    assert versions._one_order(head | {"max_seqlen_q": 300}) == one | {"max_seqlen_q": 300}
    wide = {"headdim": 128} if "headdim" in head else {"q": np.zeros((2, 14, 128))}
    assert versions._one_order(wide | {"max_seqlen_q": 1}) == one


def test_fp8_products_of_few_rows_are_those_of_many(monkeypatch):
    given = []

    class Kernel:
        def apply_scaled_mm(self, *, A, B, As, output_shape):
            given.append((tuple(A.shape), tuple(As.shape), output_shape))
            return ((A.float() @ B.float()) * As).view(*output_shape)

    module = types.ModuleType("some_kernels")
    module.CutlassFP8ScaledMMLinearKernel = Kernel
    monkeypatch.setitem(sys.modules, "some_kernels", module)
    plain = Kernel.apply_scaled_mm
    assert versions.keep_fp8_scales_in_order("some_kernels") == ""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 32, generator=generator).to(torch.float8_e4m3fn)
    for rows, filled in ((1, 65), (64, 65), (65, 65), (100, 100)):
        x = torch.randn(rows, 16, generator=generator).to(torch.float8_e4m3fn)
        named = {"A": x, "B": weight, "As": torch.rand(rows, 1, generator=generator), "output_shape": [1, rows, 32]}
        torch.testing.assert_close(Kernel().apply_scaled_mm(**named), plain(Kernel(), **named), rtol=0, atol=0)
        assert given[-2][:2] == ((filled, 16), (filled, 1))
    one_scale = {"A": x[:3], "B": weight, "As": torch.ones(1), "output_shape": [3, 32]}
    Kernel().apply_scaled_mm(**one_scale)
    assert given[-1][0] == (3, 16)
    assert "may order scales" in versions.keep_fp8_scales_in_order("no_such_kernels")
