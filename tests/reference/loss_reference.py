# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Objectives in float64 numpy, one loop per response and token, with their gradients in closed form.

Written from the formulas in the papers and reference codes, token by token, without segment sums, broadcasting or
automatic differentiation, so that it shares no idea with the implementation. Central differences of the value check the
closed forms (`central_differences`).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Batch:
    """Float64 copies of what an objective sees; arrays [B, T]."""

    lp: np.ndarray
    lo: np.ndarray
    ls: np.ndarray
    adv: np.ndarray
    mask: np.ndarray
    seg: np.ndarray

    def responses(self):
        """Index lists of the non-empty responses: (row, [t, ...])."""
        out = []
        for b in range(self.mask.shape[0]):
            for s in sorted({int(v) for v in self.seg[b] if v > 0}):
                where = [t for t in range(self.mask.shape[1]) if self.seg[b, t] == s and self.mask[b, t]]
                if where:
                    out.append((b, where))
        return out


@dataclasses.dataclass
class Result:
    """Loss, its gradient [B, T], the sum of the absolute terms (for tolerances) and per-token weights."""

    value: float
    grad: np.ndarray
    scale: float
    weight: np.ndarray
    dropped: list[bool]


def clamp(x, low, high):
    return min(max(x, low), high)


def weights(mismatch, lo, ls, cap=2.0, low=None, high=None):
    """Weight of each token of one response, and the factor on the upper clip bound."""
    diffs = [a - b for a, b in zip(lo, ls, strict=True)]
    rho = [math.exp(clamp(d, -20, 20)) for d in diffs]
    product = math.exp(clamp(math.fsum(diffs), -20, 20))
    geometric = math.exp(clamp(math.fsum(diffs) / len(diffs), -20, 20))
    lo_b = 1 / cap if low is None else low
    hi_b = cap if high is None else high
    n, widen = len(diffs), [1.0] * len(diffs)
    if mismatch == "none":
        w = [1.0] * n
    elif mismatch == "tis":
        w = [min(x, cap) for x in rho]
    elif mismatch == "ais":
        ess = math.fsum(rho) ** 2 / math.fsum(x * x for x in rho)
        k3 = math.fsum(x - 1 - clamp(d, -20, 20) for x, d in zip(rho, diffs, strict=True)) / n
        mix = 1 - ess / n * math.exp(-k3)
        w = [(1 - mix) + mix * min(x, cap) for x in rho]
    elif mismatch == "acr":
        w = [min(x, cap) for x in rho]
        widen = [1 / min(1.0, cap / x) for x in rho]  # 1 / r_trunc, QuRL eq. 9
    elif mismatch == "decoupled":
        w = rho
    elif mismatch == "mis":
        w = [x if lo_b <= x <= hi_b else 0.0 for x in rho]
    elif mismatch == "icepop":
        lo_b, hi_b = (0.5 if low is None else low), (5.0 if high is None else high)
        w = [x if lo_b <= x <= hi_b else 0.0 for x in rho]
    elif mismatch == "seq_tis":
        w = [min(product, cap)] * n
    elif mismatch == "seq_mis":
        w = [product if product <= cap else 0.0] * n
    elif mismatch == "geometric":
        mean = math.fsum(diffs) / n
        w = [math.exp(clamp(mean, -math.log(cap), math.log(cap)))] * n
    elif mismatch == "geometric_mis":
        w = [geometric if lo_b <= geometric <= hi_b else 0.0] * n
    elif mismatch == "geometric_filter":
        w = [1.0 if 0.999 <= geometric <= 1.001 else 0.0] * n
    elif mismatch == "veto":
        w = [0.0 if any(d < math.log(1e-4) for d in diffs) else 1.0] * n
    else:
        raise KeyError(mismatch)
    return w, widen


def ppo_clip(r, dr, a, el, eh, dual=None):
    """(J, dJ/dlp) of min(rA, clip(r)A), with the dual clip for A < 0."""
    if a > 0:
        return (r * a, dr * a) if r <= 1 + eh else ((1 + eh) * a, 0.0)
    if a < 0:
        if dual is not None and r > dual:
            return dual * a, 0.0
        return (r * a, dr * a) if r >= 1 - el else ((1 - el) * a, 0.0)
    return 0.0, 0.0


def band_width(d, opt):
    """Factor on the edges of TBPO's band for one response with these log-ratios."""
    wide = {"fixed": 1.0}.get(opt.get("bands", "fixed"), math.sqrt(4096 / len(d)))
    if opt.get("bands") == "spread" and len(d) > 1:
        mean = math.fsum(d) / len(d)
        s = math.sqrt(math.fsum((x - mean) ** 2 for x in d) / (len(d) - 1))
        wide *= max(s / opt.get("spread_ref", 0.0256), 1.0)
    return wide


CLIPS = {"grpo": (0.2, 0.2), "drgrpo": (0.2, 0.2), "dapo": (0.2, 0.28), "ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
AGGREGATION = {
    "tbpo": "seq-mean-token-mean",
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "drgrpo": "seq-mean-token-sum-norm",
}


def loss(name, batch: Batch, **options) -> Result:
    """Value and gradient of an objective with its options, over the whole batch."""
    opt = dict(options)
    mode = opt.get("aggregation", AGGREGATION.get(name, "token-mean"))
    length_limit = opt.get("max_response_len") or 1.0
    mismatch = opt.get("mismatch", "geometric" if name == "tbpo" else "none")
    responses = batch.responses()
    n_tokens, n_seqs = sum(len(ts) for _, ts in responses), len(responses)
    value, scale, dropped = 0.0, 0.0, []
    grad, weight_map = np.zeros(batch.lp.shape), np.zeros(batch.lp.shape)

    for b, ts in responses:
        L = len(ts)
        lp = [float(batch.lp[b, t]) for t in ts]
        lo = list(lp) if opt.get("on_policy") else [float(batch.lo[b, t]) for t in ts]
        ls = [float(batch.ls[b, t]) for t in ts]
        adv = [float(batch.adv[b, t]) for t in ts]
        if opt.get("positive_only"):
            adv = [max(a, 0.0) for a in adv]
        w, widen = weights(
            mismatch, lo, ls, opt.get("mismatch_cap", 2.0), opt.get("mismatch_low"), opt.get("mismatch_high")
        )
        limit = opt.get("off_policy_mask")
        if limit is not None and adv[0] < 0 and math.fsum(s - p for s, p in zip(ls, lp, strict=True)) / L > limit:
            w = [0.0] * L
        coefficient = {
            "token-mean": 1 / n_tokens,
            "seq-mean-token-mean": 1 / (n_seqs * L),
            "seq-mean-token-sum": 1 / n_seqs,
            "seq-mean-token-sum-norm": 1 / (n_seqs * length_limit),
        }[mode]
        mean_diff = math.fsum(p - o for p, o in zip(lp, lo, strict=True)) / L
        live = False
        for k, t in enumerate(ts):
            a = adv[k]
            if name in ("gspo", "tbpo"):  # one ratio per response; d r / d lp = r / L for each of its tokens
                if name == "gspo":
                    r = math.exp(min(mean_diff, 10.0))
                    dr = r if mean_diff < 10 else 0.0
                    el, eh = opt.get("clip_low", 3e-4), opt.get("clip_high", 4e-4)
                    j, dj = ppo_clip(r, dr, a, el, (1 + eh) * widen[k] - 1, opt.get("dual_clip"))
                else:
                    r = math.exp(clamp(mean_diff, -20, 20))
                    wide = band_width([p - o for p, o in zip(lp, lo, strict=True)], opt)
                    if a > 0:
                        high = 1 + opt.get("clip_high", 4e-4) * wide
                        j, inside = min(r, high) * a, r <= high
                    else:
                        low, high = 1 - opt.get("neg_clip_low", 3e-4) * wide, 1 + opt.get("neg_clip_high", 7e-4) * wide
                        j, inside = clamp(r, low, high) * a, low <= r <= high
                    dj = r * a if inside and abs(mean_diff) < 20 else 0.0
                for u in ts:
                    grad[b, u] -= coefficient * w[k] * dj / L
            else:
                d = lp[k] - lo[k]
                r = math.exp(clamp(d, -20, 20))
                dr = r if abs(d) < 20 else 0.0
                if name == "sapo":
                    tau = opt.get("tau_pos", 1.0) if a > 0 else opt.get("tau_neg", 1.05)
                    z = math.exp(-abs(tau * (r - 1)))
                    s = 1 / (1 + z) if r >= 1 else z / (1 + z)
                    j, dj = 4 / tau * s * a, 4 * z / (1 + z) ** 2 * dr * a
                elif name == "dppo":
                    p, q = math.exp(min(lp[k], 0.0)), math.exp(min(lo[k], 0.0))
                    limit = {"tv": 0.15, "kl": 0.05}[opt.get("divergence", "tv")]
                    limit = opt.get("clip_high", limit) if a > 0 else opt.get("clip_low", limit)
                    if opt.get("divergence") == "kl":
                        far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else math.log(q / p)
                    else:
                        far = abs(p - q)
                    c = 0.0 if far > limit and a * (p - q) > 0 else min(r, opt.get("ratio_max", 1e4))
                    j, dj = c * a * lp[k], c * a
                elif name == "cispo":
                    c = clamp(r, opt.get("ratio_min", 0.0), opt.get("ratio_max", 5.0))
                    j, dj = c * a * lp[k], c * a
                else:
                    assert name in CLIPS, f"objective {name!r} has no formula: add its branch to `loss` in {__file__}"
                    el, eh = CLIPS[name]
                    el, eh = opt.get("clip_low", el), opt.get("clip_high", eh)
                    j, dj = ppo_clip(r, dr, a, el, (1 + eh) * widen[k] - 1, opt.get("dual_clip"))
                grad[b, t] -= coefficient * w[k] * dj
            live = live or dj != 0
            value -= coefficient * w[k] * j
            scale += abs(coefficient * w[k] * j)
            weight_map[b, t] = w[k]
        dropped.append(not live and adv[0] != 0)
    return Result(value, grad, scale, weight_map, dropped)


def central_differences(name, batch: Batch, step=1e-6, **options) -> np.ndarray:
    """Gradient of the reference value with respect to lp, token by token."""
    grad = np.zeros(batch.lp.shape)
    for b, ts in batch.responses():
        for t in ts:
            values = []
            for sign in (1, -1):
                lp = batch.lp.copy()
                lp[b, t] += sign * step
                values.append(loss(name, dataclasses.replace(batch, lp=lp), **options).value)
            grad[b, t] = (values[0] - values[1]) / (2 * step)
    return grad


def kl(batch: Batch, ref, kind):
    """(value, gradient) of the token-mean KL estimate."""
    responses = batch.responses()
    total = sum(len(ts) for _, ts in responses)
    value, grad = 0.0, np.zeros(batch.lp.shape)
    for b, ts in responses:
        for t in ts:
            raw = float(batch.lp[b, t] - ref[b, t])
            d, inside = clamp(raw, -20, 20), abs(raw) < 20
            k3 = math.exp(-d) - 1 + d
            v = {"k2": d * d / 2, "k3": min(k3, 10), "k3+": min(k3, 10)}[kind]
            g = {"k2": d, "k3": (1 - math.exp(-d)) if k3 < 10 else 0.0, "k3+": d}[kind]
            value += v / total
            grad[b, t] = (g if inside else 0.0) / total
    return value, grad


def value_loss(batch: Batch, v, v_old, ret, clip):
    """(value, gradient with respect to v) of the clipped value loss."""
    responses = batch.responses()
    total = sum(len(ts) for _, ts in responses)
    value, grad = 0.0, np.zeros(batch.lp.shape)
    for b, ts in responses:
        for t in ts:
            plain = (v[b, t] - ret[b, t]) ** 2
            near = clamp(v[b, t], v_old[b, t] - clip, v_old[b, t] + clip)
            clipped = (near - ret[b, t]) ** 2
            value += 0.5 * max(plain, clipped) / total
            if plain >= clipped:
                grad[b, t] = (v[b, t] - ret[b, t]) / total
            elif near == v[b, t]:
                grad[b, t] = (near - ret[b, t]) / total
    return value, grad


def gae(rewards, values, mask, seg, gamma, lam):
    """(advantages, returns) by walking each response's masked tokens backwards: holes simply do not exist."""
    adv, ret = np.zeros(values.shape), np.zeros(values.shape)
    for b in range(values.shape[0]):
        for s in {int(x) for x in seg[b] if x > 0}:
            ts = [t for t in range(values.shape[1]) if seg[b, t] == s and mask[b, t]]
            a = v_next = 0.0
            for t in reversed(ts):
                a = rewards[b, t] + gamma * v_next - values[b, t] + gamma * lam * a
                v_next = values[b, t]
                adv[b, t], ret[b, t] = a, a + values[b, t]
    return adv, ret


def group_advantages(rewards, kind):
    """Row by row, from the definition."""
    out = np.zeros(rewards.shape)
    for p, row in enumerate(rewards):
        n = len(row)
        if n < 2 or max(row) - min(row) < 1e-8:
            continue
        mean = math.fsum(row) / n
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in row) / (n - 1))
        for i, x in enumerate(row):
            out[p, i] = (x - mean) / (std + 1e-6) if kind == "grpo" else x - mean
    return out
