# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches that losses are tested on, one shape [ROWS, T] for all so that compiled operations are shared."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from qarl_jax.loss import Loss, normalized
from qarl_jax.types import LossInputs
from tests.reference.loss_reference import Batch

# One string per packed segment: p prompt, 1 response token, 0 hole. Rows end in padding; the last row is all padding.
LAYOUT = [
    ["p1101", "p1", "pp", "p11"],
    ["p111", "p110111"],
    ["p11111101111"],
    ["p1", "p1", "pp1", "1"],
    ["p1110", "p1111"],
    ["pp", "p1111111"],
    ["p11", "p011", "p11"],
    [],
]
ROWS, T, SEGMENTS = len(LAYOUT), 12, 4

# Mean log-ratios on both sides of every default edge (3e-4, 4e-4, 7e-4), far from each by float32's standards.
RATIO_TARGETS = [0.0, 2e-4, -2e-4, 5.5e-4, -5e-4, 9e-4, 3.5e-4, -9e-4, 5e-4]
WEIGHT_TARGETS = [0.0, 5e-4, 0.3, -0.9, 0.85, -0.2, 1.2]
ADVANTAGES = [1.3, -0.7, 0.0, 0.4, -1.1]


def make_batch(seed: int = 3, *, outliers: bool = False, constant_advantages: bool = True) -> Batch:
    """Ragged responses with holes, one-token and empty ones, and NaN or infinity wherever the mask is off."""
    rng = np.random.default_rng(seed)
    mask, seg = np.zeros((ROWS, T), bool), np.zeros((ROWS, T), np.int32)
    for b, segments in enumerate(LAYOUT):
        text = "".join(segments)
        ids = [s + 1 for s, part in enumerate(segments) for _ in part]
        mask[b, : len(text)] = [c == "1" for c in text]
        seg[b, : len(text)] = ids
    lp, lo, ls, adv = (np.full((ROWS, T), np.nan, np.float32) for _ in range(4))
    lo[-1], ls[-1], adv[-1], lp[-1] = -np.inf, np.inf, np.inf, -np.inf
    empty = Batch(lp=lp, lo=lo, ls=ls, adv=adv, mask=mask, seg=seg)
    for i, (b, ts) in enumerate(empty.responses()):
        n = len(ts)
        noise, noise_w = rng.normal(size=n) * 0.35, rng.normal(size=n) * 0.6
        now = -rng.uniform(0.1, 3.0, size=n)
        ratio = RATIO_TARGETS[i % len(RATIO_TARGETS)] + noise - noise.mean()
        weight = WEIGHT_TARGETS[i % len(WEIGHT_TARGETS)] + noise_w - noise_w.mean()
        if outliers:
            if i % 3 == 0:
                ratio[0] += [25.0, -30.0, 22.0][i // 3 % 3]
            if i % 4 == 1:
                ratio += [24.0, 12.0, -23.0][i // 4 % 3]
            if i % 3 == 1:
                weight[-1] += [26.0, -26.0][i // 3 % 2]
        elif i == 4:
            weight[0] = -11.0  # below the veto's log(1e-4) = -9.2
        lp[b, ts], lo[b, ts] = now, now - ratio
        ls[b, ts] = lo[b, ts] - weight
        adv[b, ts] = ADVANTAGES[i % len(ADVANTAGES)] if constant_advantages else rng.normal(size=n)
    f64 = lambda x: x.astype(np.float64)  # noqa: E731
    return Batch(lp=f64(lp), lo=f64(lo), ls=f64(ls), adv=f64(adv), mask=mask, seg=seg)


def inputs(batch: Batch, **kwargs) -> LossInputs:
    """The batch as the objectives see it; the float64 copies are float32 numbers, so nothing is rounded here."""
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    kwargs.setdefault("max_segments", SEGMENTS)
    return LossInputs(
        logprobs=f32(batch.lp),
        old_logprobs=f32(batch.lo),
        rollout_logprobs=f32(batch.ls),
        advantages=f32(batch.adv),
        loss_mask=jnp.asarray(batch.mask),
        segment_ids=jnp.asarray(batch.seg, jnp.int32),
        **kwargs,
    )


def objective(logprobs: jax.Array, x: LossInputs, loss: Loss):
    """The scalar the learner differentiates, and (Mean, metrics)."""
    x = dataclasses.replace(x, logprobs=logprobs)
    mean, metrics = loss(x)
    return normalized(mean, x, loss), (mean, metrics)


def value_and_grad(loss: Loss, x: LossInputs):
    """(value, gradient [B, T], Mean, metrics), arrays as numpy."""
    (value, (mean, metrics)), grad = jax.value_and_grad(objective, has_aux=True)(x.logprobs, x, loss)
    return float(value), np.asarray(grad), mean, metrics


def rows(x: LossInputs, select) -> LossInputs:
    """The batch with its rows indexed."""
    fields = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "loss_mask", "segment_ids")
    return dataclasses.replace(x, **{name: getattr(x, name)[select] for name in fields})


def unpack(batch: Batch) -> Batch:
    """Every segment in a row of its own, padded to T."""
    out = {name: [] for name in ("lp", "lo", "ls", "adv", "mask", "seg")}
    for b in range(batch.mask.shape[0]):
        for s in sorted({int(v) for v in batch.seg[b] if v > 0}):
            where = np.flatnonzero(batch.seg[b] == s)
            pad = batch.mask.shape[1] - len(where)
            for name, values in out.items():
                fill = {"mask": False, "seg": 0}.get(name, np.nan)
                row = getattr(batch, name)[b, where]
                values.append(
                    np.concatenate([np.ones_like(row) if name == "seg" else row, np.full(pad, fill, row.dtype)])
                )
    return Batch(**{name: np.stack(values) for name, values in out.items()})
