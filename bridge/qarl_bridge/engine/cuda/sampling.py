# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant log-probs, temperature and sampling for a CUDA engine, as Triton kernels.

log-probs    float32(z - top - log(sum(exp(z - top)))) in float64, z the float32 logits over the temperature; each
             exp is rounded to a multiple of 2^-107, so that the sum is exact in every order
a draw       the argmax of log-prob - log(time), time exponential by Philox from (seed, draw, token)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from qarl_bridge.engine.cuda.norm_ops import nearest


@triton.jit
def _log1p(x):
    """Computes log(1 + x) accurately near 0, by IEEE operations and the logarithm."""
    total = 1.0 + x
    return tl.where(total == 1.0, x, tl.log(total) * x / (total - 1.0))


@triton.jit
def _normalizer(z_ptr, V, BLOCK: tl.constexpr):
    """Computes (top, log(sum(exp(z - top)))) of a row of up to 2^18 logits, float64.

    The sum leaves out the largest logit's exp(0) = 1, and log1p adds it: log-probs close to 0 keep their digits. The
    other terms are integers times 2^-35, 2^-71 and 2^-107, whose sums are exact.
    """
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        top = tl.maximum(top, tl.load(z_ptr + start + at, mask=start + at < V, other=float("-inf")))
    highest = tl.max(top).to(tl.float64)
    high = tl.zeros((BLOCK,), tl.float64)
    middle = tl.zeros((BLOCK,), tl.float64)
    low = tl.zeros((BLOCK,), tl.float64)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        z = tl.load(z_ptr + start + at, mask=start + at < V, other=float("-inf")).to(tl.float64)
        x = tl.where(z == highest, 0.0, tl.exp(z - highest)) * 2.0**35
        rounded = nearest(x)
        high += rounded
        x = (x - rounded) * 2.0**36
        rounded = nearest(x)
        middle += rounded
        low += nearest((x - rounded) * 2.0**36)
        largest += (z == highest).to(tl.int32)
    below = (tl.sum(middle) + tl.sum(low) * 2.0**-36) * 2.0**-36
    return highest, _log1p((tl.sum(high) + below) * 2.0**-35 + (tl.sum(largest) - 1).to(tl.float64))


@triton.jit
def _of_all(z_ptr, y_ptr, V, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    top, log_total = _normalizer(z_ptr, V, BLOCK)
    at = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        z = tl.load(z_ptr + start + at, mask=start + at < V).to(tl.float64)
        tl.store(y_ptr + row * V + start + at, (z - top - log_total).to(tl.float32), mask=start + at < V)


@triton.jit
def _of_tokens(z_ptr, tokens_ptr, y_ptr, V, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    top, log_total = _normalizer(z_ptr, V, BLOCK)
    for column in range(columns):
        z = tl.load(z_ptr + tl.load(tokens_ptr + row * columns + column)).to(tl.float64)
        tl.store(y_ptr + row * columns + column, (z - top - log_total).to(tl.float32))


@triton.jit
def _divide_rows(z_ptr, V, stride, states_ptr, temperatures_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + tl.load(states_ptr + row)).to(tl.float32)
    if temperature == 0.0 or temperature == 1.0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + row * stride + at, mask=at < V)
    tl.store(z_ptr + row * stride + at, tl.math.div_rn(z, temperature), mask=at < V)


@triton.jit
def _race(p_ptr, seeds_ptr, draws_ptr, best_ptr, ids_ptr, V, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    none = at * 0
    bits, _, _, _ = tl.philox(tl.load(seeds_ptr + row), at, none + tl.load(draws_ptr + row), none, none)
    # Uniform in (0, 1), with all of float32's digits near 0: those decide who is first.
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    time = -_log1p(-u)  # exponential
    p = tl.load(p_ptr + row * V + at, mask=at < V, other=float("-inf"))
    best, first = tl.max(p - tl.log(time), axis=0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(best_ptr + place, best)
    tl.store(ids_ptr + place, (block * BLOCK + first).to(tl.int64))


def draw(logprobs: torch.Tensor, seeds: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Samples one token from each row's distribution: int64 [M].

    Each token gets an exponential random time, a function of (seed, draw, token) by Philox 4x32-10, divided by its
    probability; the token with the smallest time is sampled. So rows are independent, and a batch is one launch.

    Args:
      logprobs: float32 [M, V], contiguous.
      seeds: int64 [M], the seed of each row's request. draws: int32 [M], the request's number of earlier draws.
    """
    m, v = logprobs.shape
    blocks = triton.cdiv(v, 8192)
    best = torch.empty(m, blocks, dtype=torch.float32, device=logprobs.device)
    ids = torch.empty(m, blocks, dtype=torch.int64, device=logprobs.device)
    if m:
        _race[(m, blocks)](logprobs, seeds, draws, best, ids, v, BLOCK=8192, num_warps=8)
    return ids.gather(1, best.argmax(1, keepdim=True))[:, 0]


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits in float32, each row's beside each other."""
    return logits.float() if logits.stride(-1) == 1 else logits.float().contiguous()


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Computes log-probs float32 [M, V] of logits [M, V], in float64."""
    y = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        z = _rows(logits)
        _of_all[(z.shape[0],)](z, y, z.shape[1], z.stride(0), BLOCK=4096, num_warps=8)
    return y


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Computes the log-probs [M, C] of tokens [M, C] by logits [M, V], equal to those of `log_softmax`."""
    y = torch.empty(token_ids.shape, dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        z = _rows(logits)
        tokens = token_ids.to(torch.int64).contiguous()
        _of_tokens[(z.shape[0],)](z, tokens, y, z.shape[1], z.stride(0), tokens.shape[1], BLOCK=4096, num_warps=8)
    return y


class NoRanks:
    """A stand-in for vLLM's kernel of the sampled tokens' ranks, which reads all logits again. Ranks are 0: the bridge
    does not read them."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._zero

    def _zero(self, ranks: torch.Tensor, *others: Any, **named: Any) -> None:
        ranks.zero_()


def apply_temperature(logits: torch.Tensor, states: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Divides logits float32 [M, V] by each row's temperature, in place; 0 and 1 leave a row unchanged.

    Args:
      states: [M], index of each row's temperature in `temperatures`.
      temperatures: float32.
    """
    m, v = logits.shape
    if m:
        _divide_rows[(m, triton.cdiv(v, 8192))](logits, v, logits.stride(0), states, temperatures, BLOCK=8192)
