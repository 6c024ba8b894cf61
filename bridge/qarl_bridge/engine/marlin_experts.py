# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""int4 experts laid out for vLLM's Marlin kernel all at once, where vLLM does one expert after the other.

vLLM repacks the codes and permutes the scales of each expert by calls of their own, about ten a matrix, one of them a
copy from the host: of the 12,000 matrices of a Qwen3-30B-A3B that is most of a publish. Both act on tiles of 16 inputs,
or on rows, and know nothing of experts: those of a layer, stacked along the inputs, are one larger matrix.

Used while whole modules are loaded, never by vLLM's own loader, with which the first load is compared bit for bit
(fast_load.py).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

_LAYOUT = "vllm.model_executor.layers.fused_moe.oracle.int_wna16"  # where experts' layouts are made
_OPS = "vllm._custom_ops"
_SCALES, _CODES = "marlin_moe_permute_scales", "gptq_marlin_moe_repack"


@contextlib.contextmanager
def experts_together(wanted: bool = True) -> Iterator[list[str]]:
    """vLLM lays experts out together meanwhile, if it is a version whose functions are known, and if `wanted`.

    Yields:
      A list to which the names of the replaced functions are added when they are called.
    """
    called: list[str] = []
    if not wanted:
        yield called
        return
    try:
        layout, ops = importlib.import_module(_LAYOUT), importlib.import_module(_OPS)
        utils = importlib.import_module(getattr(layout, _SCALES).__module__)
        one_by_one = getattr(ops, _CODES)
    except (ImportError, AttributeError):
        yield called
        return

    def scales(s: Any, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False) -> Any:
        """s [E, groups, N]; its rows are permuted alike."""
        called.append(_SCALES)
        return utils.marlin_permute_scales(s, size_k, size_n, group_size, is_a_8bit).reshape(s.shape)

    def codes(b_q_weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Any:
        """b_q_weight [E, K / 8, N]; perm [E, 0], or [E, K] where inputs are reordered: each expert's by itself then."""
        if perm.numel() or size_k % 16:
            return one_by_one(b_q_weight, perm, size_k, size_n, num_bits, is_a_8bit)
        called.append(_CODES)
        experts = len(b_q_weight)
        rows = b_q_weight.reshape(-1, b_q_weight.shape[-1]).contiguous()
        packed = ops.gptq_marlin_repack(rows, perm.reshape(-1), experts * size_k, size_n, num_bits, is_a_8bit)
        return packed.reshape(experts, size_k // 16, -1)

    before = getattr(layout, _SCALES)
    setattr(layout, _SCALES, scales)
    setattr(ops, _CODES, codes)
    try:
        yield called
    finally:
        setattr(layout, _SCALES, before)
        setattr(ops, _CODES, one_by_one)
