# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Which pairs of learner and engine keep one contract, so that every number is to be equal to the last bit
(docs/concepts/engines.md)."""

from __future__ import annotations

from qarl_jax.numerics.engine import Numerics


def left_out(
    scheme: str, numerics: Numerics, *, attention: str, products: str = "auto", int4_kernel: str = "auto"
) -> str:
    """What of this pair no contract covers, as a sentence that names the setting; "": nothing.

    Args:
      scheme: of learner and sampler. numerics: the learner's.
      attention: `model.attention`. products: `quant.kernels`. int4_kernel: as in `rollout.engine`.
    """
    if numerics.profile == "plain":
        return "the learner does not round where vLLM does (quant.engine=plain)"
    if numerics.float64:  # on a CPU all is the contract's
        return ""
    name = scheme.partition(":")[0]
    if name in ("w4a16", "w3a16", "w2a16") and int4_kernel in ("machete", "marlin"):
        return f"the number of rows orders the sums of rollout.engine.int4_kernel={int4_kernel}"
    if name != "w8a8" and products == "xla":
        return "XLA orders the learner's sums of few rows its own way (quant.kernels=xla)"
    if attention not in ("auto", "flash3"):
        return f"the learner's attention adds in another order (model.attention={attention})"
    return ""
