# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: the fp8 codes that the bridge makes of int4 words are those of vLLM's kernel and of the learner."""

import jax.numpy as jnp
import numpy as np
import pytest

from qarl_jax import quant
from qarl_jax.quant.schemes import w4a8_fp8
from tests.reference import quant_reference

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("published", ["ours", "any scales"])
def test_codes_and_scales_are_those_vllms_kernel_looks_up_and_the_learners(published):
    from qarl_bridge.engine import pinned_w4a8

    w = 0.02 * np.random.default_rng(3).standard_normal((256, 384)).astype(np.float32)
    w[:4] *= 1e-3  # below the engine's smallest channel scale
    codes, scale = quant_reference.w4a8_fp8_weight(w) if published == "ours" else quant_reference.int4_weight(w, 128)
    words = quant_reference.pack(codes)
    made, channel = pinned_w4a8.fp8_codes(
        torch.from_numpy(words), torch.from_numpy(scale.view(np.int16)).view(torch.bfloat16)
    )
    want_channel, want = quant_reference.cutlass_int4_fp8(words, scale)
    np.testing.assert_array_equal(made.float().numpy(), want)
    np.testing.assert_array_equal(channel.numpy(), want_channel)
    held = w4a8_fp8.as_fp8(quant.QTensor(jnp.asarray(words), jnp.asarray(scale), w4a8_fp8.Config()))
    np.testing.assert_array_equal(np.asarray(held.qvalue, np.float32), want)
    np.testing.assert_array_equal(held.scale, want_channel)
