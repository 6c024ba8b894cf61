# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Int8 codes that a norm writes for the w8a8 layer behind it, in place of a kernel of their own.

A norm does not know which layer reads its output. So it marks its output (`offer`). Layers quantize by
`vllm._custom_ops.scaled_int8_quant`, which `install` replaces. There a marked input without codes asks its norm for
them, and from then on the norm writes them (`room`). vLLM's profiling run does the asking, before CUDA graphs are
captured.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm import _custom_ops

from qarl_bridge.engine.cuda import norm_ops


def room(norm: Any, x: torch.Tensor) -> norm_ops.Codes | None:
    """Returns room for the codes of a norm's output, shaped as x, if a layer asked for them; else None."""
    return norm_ops.room_for_codes(x) if getattr(norm, "int8_asked", False) else None


def offer(norm: Any, y: torch.Tensor, codes: norm_ops.Codes | None) -> None:
    """Marks a norm's output, with its codes, if there are any. Nothing may write to it before it is quantized."""
    y.int8_norm, y.int8_codes = norm, codes  # type: ignore[attr-defined]


def install() -> None:
    """Lets vLLM's quantizer of int8 rows take codes that a norm wrote (idempotent)."""
    plain = _custom_ops.scaled_int8_quant
    if getattr(plain, "takes_codes", False):
        return

    @functools.wraps(plain)
    def quantized(input: torch.Tensor, scale: Any = None, azp: Any = None, symmetric: bool = True) -> Any:
        if scale is None and azp is None and symmetric and hasattr(input, "int8_norm"):
            if input.int8_codes is not None:
                return *input.int8_codes, None
            input.int8_norm.int8_asked = True
        return plain(input, scale, azp, symmetric)

    quantized.takes_codes = True  # type: ignore[attr-defined]
    _custom_ops.scaled_int8_quant = quantized
