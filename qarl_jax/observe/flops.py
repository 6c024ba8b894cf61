# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes model FLOPs of a step and peak FLOP/s of devices; their ratio is the MFU (arXiv 2204.02311, app. B).

For sequences of T_i tokens, forward and backward together,

    (6 P - 2 F) sum_i T_i  +  6 L N H sum_i T_i^2

with P active parameters (of experts, those a token is routed to), F of them frozen, L layers, N query heads of width H.
A token's matrix products take 2 operations per parameter forward and 4 backward, 2 if it is frozen. Causal attention
takes 4 N H T^2 / 2 per layer forward and twice as many backward. Recomputation, padding and optimizer do not count, so
they lower the MFU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax

from qarl_jax import models

# Dense bfloat16 FLOP/s of one device, as its vendor states them, by a part of `device_kind`; the first that fits.
PEAKS: tuple[tuple[str, float], ...] = (
    ("B300", 2.25e15),
    ("B200", 2.25e15),
    ("H200", 9.894e14),
    ("H100 PCIe", 7.56e14),
    ("H100 NVL", 8.35e14),
    ("H100", 9.894e14),
    ("A100", 3.12e14),
    ("L40S", 3.62e14),
    ("L40", 1.81e14),
    ("L4", 1.21e14),
    ("TPU7x", 2.307e15),
    ("TPU v6 lite", 9.18e14),
    ("TPU v6e", 9.18e14),
    ("TPU v5p", 4.59e14),
    ("TPU v5 lite", 1.97e14),
    ("TPU v5e", 1.97e14),
    ("TPU v5", 4.59e14),
    ("TPU v4", 2.75e14),
)


def peak(device_kind: str) -> float | None:
    """Returns the dense bfloat16 FLOP/s of a device by its `device_kind`; None if unknown (as for any CPU)."""
    return next((flops for name, flops in PEAKS if name.lower() in device_kind.lower()), None)


def active_parameters(model: models.ModelConfig, params: Any) -> float:
    """Counts the parameters that one token uses; of an MoE model's experts only the share it is routed to."""
    out = 0.0
    for path, leaf in models.by_path(params).items():
        routed = model.moe is not None and ".moe." in path and ".router." not in path
        share = model.moe.num_experts_per_tok / model.moe.num_experts if routed and model.moe is not None else 1.0
        out += math.prod(leaf.shape) * share
    return out


def training(model: models.ModelConfig, parameters: float, lengths: Iterable[int], frozen: float = 0.0) -> float:
    """Computes the model FLOPs of a forward and backward over sequences of these lengths.

    Args:
      parameters: active parameters. frozen: those among them that have no gradient.
    """
    lengths = list(lengths)
    attention = model.num_layers * model.num_heads * model.head_dim * sum(n * n for n in lengths)
    return 6.0 * (parameters * sum(lengths) + attention) - 2.0 * frozen * sum(lengths)


def of_devices(devices: Iterable[jax.Device]) -> float | None:
    """Returns the total peak FLOP/s of these devices; None if one is unknown."""
    peaks = [peak(device.device_kind) for device in devices]
    return None if any(p is None for p in peaks) else sum(p for p in peaks if p is not None)
