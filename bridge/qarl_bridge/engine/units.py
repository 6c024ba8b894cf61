# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounding of rows to multiples of one unit, so that float64 sums of them are exact in every order."""

from __future__ import annotations

import torch

ROUTER = ".mlp.gate"
"""The end of the name of a router, whose inputs and weights are rounded."""


def units_per_one(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Computes rows' units as `qarl_bridge.engine.cuda.norm_ops.units_per_one` does: float64 [..., 1] of x [..., D]."""
    exponent = (x.abs().amax(dim=-1, keepdim=True).double().view(torch.int64) >> 52).clamp(min=723)
    return ((2045 + bits - exponent) << 52).view(torch.float64)


def in_units(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds rows of x [..., D] to so many bits of their maximum: float64. A router's x has 24, its weights 16."""
    units = units_per_one(x, bits)
    return (x.double() * units).round() / units
