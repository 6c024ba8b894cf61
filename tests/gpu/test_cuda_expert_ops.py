# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic, on a GPU: experts and routers are the same for every number of rows, and the learner's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.models.moe import _weighted_sum, arithmetic
from qarl_jax.numerics.float32 import in_float64

pytestmark = pytest.mark.gpu

EXPERTS, TOP, ROWS = 32, 8, 1500
CUDA = quant.resolve("cuda")


@pytest.fixture(scope="module")
def routed():
    """ids [ROWS, TOP], each row's experts distinct."""
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(EXPERTS)[:TOP] for _ in range(ROWS)]).astype(np.int32)


def learners(x, w, qt, ids):
    """[ROWS, TOP, N]: each copy of a row times its expert's weight, as in `models/moe.py`."""

    def run(x, w, qt, ids):
        expert = ids.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)
        y = quant.expert_dot(x[order // TOP], w, qt, sizes, numerics=CUDA)
        return jnp.zeros_like(y).at[order].set(y).reshape(*ids.shape, -1)

    return jax.jit(run)(x, w, qt, ids)


def engines(x, held, ids, rows):
    import torch
    from qarl_bridge.engine.cuda import expert_ops as own
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    number = ids.numel()
    height = max(16, min(128, 1 << (number // EXPERTS).bit_length()))
    copies, experts, end = moe_align_block_size(ids, height, EXPERTS)
    codes, scale = (x, None) if rows is None else rows(x)
    found = {"copies": copies, "experts": experts, "end": end, "number": number, "height": height}
    weight, scales, *factor = held
    y = own.product(codes, weight, scales, factor=factor[0] if factor else None, top=TOP, x_scale=scale, **found)
    assert y.dtype == torch.bfloat16
    return y.view(*ids.shape, -1)


# The last is of two shards: 256 inputs at a time do not divide it.
@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (2048, 384)], ids=str)
@pytest.mark.parametrize("scheme", ["bf16", "w8a8", "fp8", "w4a16", "w4a16:g32", "w4a16:g64", "nvfp4"])
def test_an_experts_product_depends_on_no_other_row_and_is_the_learners(scheme, shape, routed):
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from qarl_bridge.engine.cuda import experts as cuda_experts
    from qarl_bridge.engine.cuda import ops

    n, k = shape
    keys = jax.random.split(jax.random.key(n), 2)
    x = jax.random.normal(keys[0], (ROWS, k), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (EXPERTS, n, k)) * 0.03).astype(jnp.bfloat16)
    config = quant.parse_scheme(scheme)
    qt = None if config is None else quant.quantize(w, config)
    mine = torch.from_dlpack(learners(x, w, qt, jnp.asarray(routed)))
    x_t, ids = torch.from_dlpack(x), torch.from_numpy(routed).cuda()
    rows = {"w8a8": cuda_experts._int8_rows, "fp8": cuda_experts._fp8_rows}.get(scheme)
    if qt is None:
        held = torch.from_dlpack(w), None
    elif scheme == "nvfp4":
        from qarl_bridge.engine.cuda import nvfp4

        bits = torch.from_dlpack(jax.lax.bitcast_convert_type(qt.scales, jnp.uint8)).view(torch.float8_e4m3fn)
        factor = (1 / torch.from_dlpack(qt.arrays["divisor"])).reshape(EXPERTS, 1).expand(EXPERTS, n).contiguous()
        held = *nvfp4.served(torch.from_dlpack(qt.codes), bits), factor
    elif scheme.startswith("w4a16"):
        words = ops.interleaved(torch.from_dlpack(qt.codes).reshape(EXPERTS, n, k // 8))
        scale = torch.from_dlpack(qt.scales).reshape(EXPERTS, n, -1).transpose(1, 2).contiguous()
        held = words, scale
    else:
        bits = torch.from_dlpack(jax.lax.bitcast_convert_type(qt.codes, jnp.int8))
        held = bits.view(torch.float8_e4m3fn) if scheme == "fp8" else bits, torch.from_dlpack(qt.scales)
    whole = engines(x_t, held, ids, rows)
    for few in (1, 17, 128, 700):
        assert torch.equal(engines(x_t[:few].contiguous(), held, ids[:few].contiguous(), rows), whole[:few])
    assert torch.equal(whole, mine)


def test_a_routers_choice_its_weights_and_the_weighted_sum_are_the_learners():
    torch = pytest.importorskip("torch")
    from qarl_bridge.engine.cuda import expert_ops as own

    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (ROWS, 2048), jnp.bfloat16)
    w = (jax.random.normal(keys[1], (EXPERTS, 2048)) * 0.03).astype(jnp.bfloat16)
    outputs = jax.random.normal(keys[2], (ROWS, TOP, 512), jnp.bfloat16)

    product, softmax_among = arithmetic(CUDA)

    def run(x, w, outputs):
        logits = product(x.astype(jnp.float32), w.astype(jnp.float32))
        chosen, ids = jax.lax.top_k(logits, TOP)
        weights = softmax_among(chosen, chosen)
        total = in_float64(_weighted_sum)(outputs.astype(jnp.float32), weights)
        return logits, ids.astype(jnp.int32), weights, total.astype(jnp.bfloat16)

    mine = [torch.from_dlpack(a) for a in jax.jit(run)(x, w, outputs)]
    logits = own.router_logits(torch.from_dlpack(x), torch.from_dlpack(w))
    weights, ids = own.choose(logits, TOP, True)
    total = own.weighted_sum(torch.from_dlpack(outputs).reshape(ROWS * TOP, -1), weights)
    assert torch.equal(logits[:1], own.router_logits(torch.from_dlpack(x)[:1], torch.from_dlpack(w)))
    for found, wanted in zip((logits, ids, weights, total), mine, strict=True):
        assert torch.equal(found, wanted)
