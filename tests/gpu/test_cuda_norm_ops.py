# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic, on a GPU: kernels that do the work of several of vLLM's give their bits."""

import numpy as np
import pytest

from tests.reference.norms import rows_beside_a_midpoint

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def norm_ops():
    from qarl_bridge.engine.cuda import norm_ops

    return norm_ops


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("vllm")
    from vllm import _custom_ops

    return _custom_ops


@pytest.mark.parametrize("width", [896, 4096, 5120])
def test_codes_of_norms_are_vllms(norm_ops, theirs, width):
    x, r = (torch.randn(300, width, device="cuda").bfloat16() * 3 for _ in "xr")
    x[7], r[7] = 0, 0
    w, codes = torch.rand(width, device="cuda").bfloat16(), norm_ops.room_for_codes(x)
    for got, want in zip(
        norm_ops.rms_norm(x, w, 1e-6, r.clone(), codes), norm_ops.rms_norm(x, w, 1e-6, r.clone()), strict=True
    ):
        assert torch.equal(got, want)
    want, scales, _ = theirs.scaled_int8_quant(norm_ops.rms_norm(x, w, 1e-6, r)[0])
    assert torch.equal(codes[0], want)
    assert torch.equal(codes[1], scales)


@pytest.mark.parametrize(("heads", "kv", "size"), [(32, 8, 128), (16, 2, 64)])
def test_heads_norm_and_rotation_have_the_bits_of_three_kernels(norm_ops, theirs, heads, kv, size):
    qkv = torch.randn(300, (heads + 2 * kv) * size, device="cuda").bfloat16()
    q, k, _ = qkv.split([heads * size, kv * size, kv * size], -1)
    w = torch.rand(2, size, device="cuda").bfloat16()
    positions = torch.randint(0, 40_000, (300,), device="cuda")
    angles = torch.arange(40_960.0, device="cuda")[:, None] * 1e6 ** -torch.linspace(0, 1, size // 2, device="cuda")
    table = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    want = [norm_ops.rms_norm(x.view(300, -1, size), g, 1e-6).view(300, -1) for x, g in zip((q, k), w, strict=True)]
    theirs.rotary_embedding(positions, *want, size, table, True)
    both = qkv[:, : (heads + kv) * size]
    got = norm_ops.rotated_norms(both, heads, (w[0], w[1]), 1e-6, positions, table)
    assert torch.equal(got.view(torch.int16), torch.cat(want, -1).view(torch.int16))


@pytest.mark.parametrize("width", [72, 128, 896, 4096, 5120])
def test_inverse_roots_are_the_learners_beside_a_midpoint(norm_ops, width):
    """Results lie beside a midpoint of two float32 numbers, where the last digits of eps, sum and root show."""
    import jax

    from qarl_jax.models import layers

    x, roots = rows_beside_a_midpoint(2000, width, 1e-6)
    mine = jax.jit(lambda x: layers.inverse_rms(x, 1e-6, order="float64"))(x)
    np.testing.assert_array_equal(np.asarray(mine)[:, 0], roots)
    theirs = norm_ops.rms_norm(torch.from_numpy(x).cuda(), torch.ones(width, device="cuda"), 1e-6)
    np.testing.assert_array_equal(theirs.cpu().numpy(), x * roots[:, None])
