# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts laid out together equal vLLM's own one by one: scales by vLLM's code, codes with a stand-in for its kernel,
which needs a GPU (there the first load of a model compares them, bit for bit)."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from qarl_bridge.engine import fast_load, marlin_experts  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def ops():
    return pytest.importorskip("vllm._custom_ops")


@pytest.fixture(scope="module")
def int_wna16(ops):
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    return int_wna16


@pytest.mark.parametrize(("inputs", "group"), [(256, 64), (64, 64), (128, -1)])
def test_scales_together_are_those_one_by_one(int_wna16, inputs, group):
    groups = 1 if group == -1 else inputs // group
    s = torch.arange(5 * groups * 128, dtype=torch.float32).reshape(5, groups, 128)
    want = int_wna16.marlin_moe_permute_scales(s, inputs, 128, group)
    with marlin_experts.experts_together() as called:
        got = int_wna16.marlin_moe_permute_scales(s, inputs, 128, group)
    assert called == ["marlin_moe_permute_scales"]
    assert torch.equal(got, want)
    assert not torch.equal(got, s)
    int_wna16.marlin_moe_permute_scales(s, inputs, 128, group)
    assert len(called) == 1  # vLLM's own again


def tiles(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit=False):
    """A layout of tiles of 16 inputs, as the kernel's: [K / 8, N] words -> [K / 16, 2 N]."""
    assert tuple(b_q_weight.shape) == (size_k // 8, size_n)
    assert b_q_weight.is_contiguous()
    words = b_q_weight.reshape(size_k // 16, 2, size_n).flip(1).transpose(1, 2)
    if perm.numel():
        words = words.roll(int(perm[0]), 1)
    return words.reshape(size_k // 16, 2 * size_n)


def test_codes_together_are_those_one_by_one_and_reordered_ones_stay_apart(ops, monkeypatch):
    monkeypatch.setattr(ops, "gptq_marlin_repack", tiles)
    monkeypatch.setattr(
        ops,
        "gptq_marlin_moe_repack",
        lambda b, perm, *sizes: torch.stack([tiles(one, p, *sizes) for one, p in zip(b, perm, strict=True)]),
    )
    rng = np.random.default_rng(0)
    codes = torch.from_numpy(rng.integers(0, 2**31, (3, 8, 48)).astype(np.int32))
    plain, reordered = torch.empty(3, 0, dtype=torch.int32), torch.arange(3 * 64, dtype=torch.int32).reshape(3, 64)
    for perm, together in ((plain, True), (reordered, False)):
        want = ops.gptq_marlin_moe_repack(codes, perm, 64, 48, 4)
        with marlin_experts.experts_together() as called:
            got = ops.gptq_marlin_moe_repack(codes, perm, 64, 48, 4)
        assert bool(called) == together
        assert torch.equal(got, want)


def test_a_vllm_without_these_functions_is_left_alone(int_wna16, monkeypatch):
    before = int_wna16.marlin_moe_permute_scales
    with marlin_experts.experts_together(False):
        assert int_wna16.marlin_moe_permute_scales is before
    monkeypatch.setattr(marlin_experts, "_LAYOUT", "vllm.no_such_module")
    with marlin_experts.experts_together() as called:
        assert int_wna16.marlin_moe_permute_scales is before
    assert called == []


def test_a_load_that_fails_after_experts_were_laid_out_together_says_that_they_were(int_wna16, monkeypatch):
    """The bridge then tries them one by one."""
    from vllm.model_executor.model_loader.reload import layerwise

    def fails(model):
        int_wna16.marlin_moe_permute_scales(torch.zeros(2, 1, 64), 64, 64, -1)
        raise RuntimeError("a kernel of another version")

    monkeypatch.setattr(layerwise, "initialize_layerwise_reload", fails)
    loader = fast_load.WholeModules(torch.nn.Module(), None)
    for together in (True, False):
        loader.together = together
        assert fast_load.prove(loader, {}, []) == "RuntimeError: a kernel of another version"
        assert loader.did_together == together
