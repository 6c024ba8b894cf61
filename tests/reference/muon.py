# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Muon and AdamW in float64 numpy, one matrix at a time, as the papers write them (arXiv 2502.16982; 1711.05101)."""

import numpy as np


def newton_schulz(u: np.ndarray, steps: int = 5, eps: float = 1e-8) -> np.ndarray:
    """Jordan's quintic, through the singular values: each sigma goes to a sigma + b sigma^3 + c sigma^5, five times."""
    a, b, c = 3.4445, -4.7750, 2.0315
    left, sigma, right = np.linalg.svd(u.astype(np.float64), full_matrices=False)
    sigma = sigma / (np.sqrt((sigma**2).sum()) + eps)
    for _ in range(steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return (left * sigma) @ right


def muon_steps(w, grads, *, lr, weight_decay=0.0, momentum=0.95, nesterov=True) -> np.ndarray:
    """`w` [N, K] after one update per gradient in `grads`."""
    w = w.astype(np.float64)
    n, k = w.shape
    factor = 0.2 * np.sqrt(max(n, k))
    m = np.zeros_like(w)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g if nesterov else m
        w = w - lr * (weight_decay * w + factor * newton_schulz(u))
    return w


def adamw_steps(w, grads, *, lr, weight_decay=0.0, b1=0.9, b2=0.999, eps=1e-8) -> np.ndarray:
    """`w` (any shape) after one update per gradient in `grads`."""
    w = w.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        w = w - lr * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + weight_decay * w)
    return w
