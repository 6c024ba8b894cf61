# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses a run's memory settings: the fastest that fit a device, or an error that names settings which do."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

from qarl_jax.memory.engine import at_once, engine_parts, kv_bytes
from qarl_jax.memory.learner import GIB
from qarl_jax.memory.plan import Plan, make, on_a_gpu, replaced
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.run.config import RunConfig
from qarl_jax.types import UserError


def settle(cfg: RunConfig, device: int | None) -> tuple[RunConfig, Plan | None]:
    """Replaces every "auto" of a run's memory settings; returns the run and the plan that it fits.

    `model.remat`, `optimizer.offload` and `rollout.engine.memory` may be auto: the first choice that fits, from the
    fastest. Without a device's size (on a CPU) nothing is planned; everything is recomputed and nothing offloaded.

    Args:
      device: bytes of a device (`plan.capacity`).

    Raises:
      UserError: it does not fit; the sentence names settings that do, if any were found.
    """
    if device is None:
        offload = cfg.optimizer.offload is True
        return replaced(cfg, {"optimizer.offload": offload, "model.remat": cfg.model.remat_or_full}), None
    first: Plan | None = None
    for choice in _choices(cfg, device):
        made = make(choice, device)
        if not made.missing:
            return choice, made
        first = first or made
    assert first is not None
    raise UserError(f"This run does not fit the device: {first.words()}. {advice(cfg, device)}")


def fits(cfg: RunConfig, device: int) -> bool:
    """Tells whether any choice of the run's "auto" settings fits."""
    return not _least_missing(cfg, device)


def _least_missing(cfg: RunConfig, device: int) -> int:
    """Bytes by which the smallest choice of the run's "auto" settings does not fit; 0: one fits."""
    least: int | None = None
    for choice in _choices(cfg, device):
        missing = make(choice, device).missing
        least = missing if least is None else min(least, missing)
        if not least:
            break
    return least or 0


def advice(cfg: RunConfig, device: int) -> str:
    """Words overrides under which the run fits as a sentence."""
    found = savings(cfg, device)
    if found is None:
        return "No settings were found that fit: use a larger device, a smaller model, or more devices (mesh.fsdp)."
    return f"It fits with: {' '.join(found)}"


def savings(cfg: RunConfig, device: int) -> list[str] | None:
    """Finds few overrides under which the run fits, among the known ways to save memory; None: all are not enough."""
    taken: list[dict[str, Any]] = []
    best = cfg
    for change in _savings(cfg):
        try:
            changed = replaced(cfg, _merged([*taken, change]))
        except UserError:  # it does not go with the rest of the run
            continue
        if _least_missing(changed, device) > _least_missing(
            best, device
        ):  # several micro-batches add up their gradients
            continue
        best = changed
        taken.append(change)
        if fits(best, device):
            break
    else:
        return None
    for change in list(taken[:-1]):  # what is not needed after all
        rest = [x for x in taken if x is not change]
        if fits(replaced(cfg, _merged(rest)), device):
            taken = rest
    return [f"{key}={_word(value)}" for key, value in _merged(taken).items()]


def _choices(cfg: RunConfig, device: int) -> Iterator[RunConfig]:
    """Yields the run with its "auto" settings replaced, from the fastest to the smallest.

    A cache for a quarter of the sequences makes them wait for each other: on an H100 it quadrupled the rollout of a 4B
    model, 4.1 to 18 s, where moments on the host took no time that could be measured (6.1 s of updates with and without
    them; benchmarks/results/zero_mismatch_4b_h100.json). So the cache gives way last.
    """
    remats = ("dots", "mixer", "attention", "full") if cfg.model.remat == "auto" else (cfg.model.remat,)
    offloads = (False, True) if cfg.optimizer.offload == "auto" else (cfg.optimizer.offload,)
    engine = cfg.rollout.engine
    shares: tuple[float, ...] = (0.0,)
    if isinstance(engine, vllm.Config):
        shares = (1.0, 0.5, 0.25) if engine.memory == "auto" else shares
    for share, offload, remat in itertools.product(shares, offloads, remats):
        choice = replaced(cfg, {"model.remat": remat, "optimizer.offload": offload})
        yield replaced(choice, _engine_settings(choice, device, share)) if share else choice


def _engine_settings(cfg: RunConfig, device: int, share: float) -> dict[str, Any]:
    """Sizes `rollout.engine.memory=auto`: a KV cache for `share` of a step's sequences, and vLLM's share of the GPU."""
    cache = kv_bytes(cfg, max(1, math.ceil(share * at_once(cfg))))
    gigabytes = math.ceil(cache / GIB * 100) / 100
    sized = replaced(cfg, {"rollout.engine.kv_cache_gb": gigabytes})
    parts = engine_parts(on_a_gpu(sized))
    needed = sum(parts.values())
    if not sized.rollout.engine.has_own_gpu:
        # vLLM refuses to start where less than this is free, and by then has its context, and JAX its own. Nothing else
        # depends on the number here, because the cache's size is given.
        needed -= parts["context (estimate)"]
    return {
        "rollout.engine.memory": "given",
        "rollout.engine.kv_cache_gb": gigabytes,
        "rollout.engine.gpu_memory_utilization": min(1.0, math.ceil(needed / device * 1000) / 1000),
    }


def _savings(cfg: RunConfig) -> Iterator[dict[str, Any]]:
    """Yields ways to save memory, from the cheapest."""
    engine = cfg.rollout.engine
    if isinstance(engine, vllm.Config) and engine.memory != "auto":
        yield {"rollout.engine.memory": "auto"}
    if cfg.model.remat != "full":
        yield {"model.remat": "full"}
    if cfg.train.grad_dtype == "float32" and cfg.model.dtype == "bfloat16":
        yield {"train.grad_dtype": "bfloat16"}
    rows = cfg.train.micro_batch_rows
    while rows > 1:
        rows //= 2
        yield {"train.micro_batch_rows": rows}
    if cfg.optimizer.offload is not True:
        yield {"optimizer.offload": True}
    if isinstance(engine, vllm.Config) and engine.stages_on_gpu and not engine.has_own_gpu:
        for buffers in range(engine.staging_buffers - 1, -1, -1):
            yield {"rollout.engine.staging_buffers": buffers}
        yield {"rollout.engine.transport": "host"}


def _merged(changes: list[dict[str, Any]]) -> dict[str, Any]:
    return functools.reduce(lambda a, b: a | b, changes, {})


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
