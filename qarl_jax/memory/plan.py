# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory plan of one device, with or without an engine on it, made before anything is loaded.

    cfg, made = choose.settle(cfg, capacity())     # "auto" settings chosen; UserError where the run does not fit
    made.keep()                                    # before JAX is asked for its devices: it takes its share at once

A GPU holds, side by side: the learner at the fullest moment of an update (`learner.parts`), staged versions where
weights are published from the GPU, and the engine (`engine.engine_parts`). Each of the two processes also has a CUDA
context, which lies in no allocator.

By default JAX takes memory as it needs it. Its pool then grows in steps that double, and gives nothing back. So a cast
of one gigabyte can ask for all that is left under JAX's limit, although the engine holds it. Therefore the learner's
share is one region, taken at the start; the engine has the rest.

Estimates are the engine's activations and graphs, and the contexts. Everything else is counted from shapes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os

import jax
from qarl_bridge.client import sender
from qarl_bridge.protocol.messages import BridgeError

from qarl_jax import models
from qarl_jax.memory import learner
from qarl_jax.memory.engine import engine_parts, staging_bytes
from qarl_jax.memory.learner import GIB
from qarl_jax.rollout.vllm.config import Config as VllmConfig
from qarl_jax.run.config import RunConfig, on_a_gpu
from qarl_jax.runtime import processes

FRACTION, PREALLOCATE = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"
# Bytes, an estimate for a Hopper GPU: JAX's CUDA context with its programs and its libraries' workspaces. When vLLM
# asked what is free, it was 1.6 GiB at a MoE model, and 2.5 over two GPUs.
JAX_CONTEXT = 1.7 * GIB
COLLECTIVES = 1.0 * GIB  # NCCL's buffers, where the learner is spread over several GPUs
MOST = 0.92  # of a GPU, for a learner that has it to itself: NCCL's buffers and other programs lie beside it
FREE = 0.1  # of the learner's share: compiled programs and fragmentation


def capacity() -> int | None:
    """Bytes of the first device that the learner will run on; None: a CPU.

    A GPU is queried through CUDA, because JAX fixes its allocator when it first lists its devices.
    """
    if on_gpu():
        try:
            return sender.gpu_memory(0)[1]
        except BridgeError:
            return None
    if on_tpu():
        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None


def spread(cfg: RunConfig) -> RunConfig:
    """Replaces a mesh axis of -1 by the number of devices here, times that of processes that have not met yet.

    A run of one process counts GPUs through CUDA.
    """
    if -1 not in dataclasses.asdict(cfg.mesh).values():
        return cfg
    try:
        count = sender.gpu_count() if on_gpu() and not cfg.distributed.is_on else jax.device_count()
    except BridgeError:
        count = jax.device_count()
    apart = processes.planned(cfg.distributed) // processes.count()
    return dataclasses.replace(cfg, mesh=cfg.mesh.over(count * apart))


def on_gpu() -> bool:
    """Tells whether JAX will run on GPUs if there are any, without initializing JAX."""
    if not on_platform("cuda", "gpu"):
        return False
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def on_tpu() -> bool:
    """Tells whether JAX will run on a TPU, without initializing JAX."""
    return on_platform("tpu") and bool(importlib.util.find_spec("libtpu"))


def on_platform(*names: str) -> bool:
    """Tells whether JAX_PLATFORMS allows one of these platforms."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return not platforms or bool(set(names) & set(platforms.split(",")))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory plan of one of the learner's devices, in bytes.

    Attributes:
      size: bytes of the device.
      learner: parts of an update, `learner.parts`.
      one_base: bytes of a base of which learner and engine share one copy, outside of JAX's pool.
      staging: two published versions, one, the buffer of a chunked transfer, or nothing.
      engine: the parts of an engine on this device; empty: it is elsewhere, or embedded in the learner.
      reserved: bytes left to the engine: its parts, or `gpu_memory_utilization` of the GPU, where that is more
        (vLLM refuses to start if less is free); without `kv_cache_gb` that and its CUDA graphs.
      apart: bytes and parts of an engine on a GPU of its own, of the same size; None: there is none.
      devices: number of the learner's devices. The plan is that of a device with an engine.
      engines: number of devices with an engine.
      allowed: share of the device that JAX may take; the user may have lowered it (several runs on a GPU).
      chosen: lines on the settings that `choose.settle` chose.
    """

    size: int
    learner: dict[str, int]
    staging: int
    engine: dict[str, int]
    reserved: int
    apart: tuple[int, dict[str, int]] | None = None
    devices: int = 1
    engines: int = 1
    allowed: float = MOST
    one_base: int = 0
    chosen: tuple[str, ...] = ()

    @property
    def context(self) -> int:
        """Bytes of JAX's CUDA context and of NCCL's buffers, outside of JAX's pool."""
        return 0 if on_tpu() else int(JAX_CONTEXT + (COLLECTIVES if self.devices > 1 else 0))

    @property
    def needed(self) -> int:
        """Bytes of the learner's share, with the part left free."""
        return math.ceil(sum(self.learner.values()) / (1 - FREE))

    @property
    def available(self) -> int:
        """Bytes that the learner can have."""
        beside = self.reserved + self.staging + self.one_base + self.context
        return int(min(self.size - beside, self.allowed * self.size))

    @property
    def taken(self) -> int:
        """Bytes that the run takes of the device."""
        return self.needed + self.reserved + self.staging + self.one_base + self.context

    @property
    def missing(self) -> int:
        """Bytes by which the run exceeds the device; 0: it fits."""
        short = self.needed - self.available
        if self.engine:
            short = max(short, sum(self.engine.values()) - self.reserved)
        if self.apart is not None:
            short = max(short, sum(self.apart[1].values()) - self.apart[0])
        return max(0, short)

    @property
    def fraction(self) -> float:
        """Share of the device's memory that JAX preallocates."""
        return math.floor(self.available / self.size * 1000 + 1e-3) / 1000  # of what was given in thousandths, all

    def keep(self) -> None:
        """Sets JAX's preallocation, unless the user has set it. Call before JAX first lists its devices."""
        if FRACTION not in os.environ and PREALLOCATE not in os.environ:
            os.environ[FRACTION], os.environ[PREALLOCATE] = f"{self.fraction:.3f}", "true"

    def words(self) -> str:
        """Says in one sentence by how much the run does not fit."""
        there = self.engine if self.apart is None else self.apart[1]
        engine = f", engine {sum(there.values()) / GIB:.1f}" if there else ""
        where = "" if self.apart is None else f" on a GPU of its own, of which it may use {self.apart[0] / GIB:.1f}"
        base = f", base of both {self.one_base / GIB:.1f}" if self.one_base else ""
        there_are = f"{self.size / GIB:.1f} there are"
        if self.allowed < MOST and self.available == int(self.allowed * self.size):
            there_are = f"{self.available / GIB:.1f} that {FRACTION}={self.allowed:g} lets JAX take"
        return (
            f"it needs {self.missing / GIB:.1f} GiB more than the {there_are} (learner "
            f"{self.needed / GIB:.1f}{base}, staging {self.staging / GIB:.1f}{engine}{where})"
        )

    def lines(self) -> list[str]:
        """Returns the plan as lines of text."""
        rows = [(f"learner: {name}", size) for name, size in self.learner.items()]
        rows += [("learner: left free", self.needed - sum(self.learner.values())), ("JAX's context", self.context)]
        rows += [("base, of learner and engine", self.one_base), ("staging (published versions)", self.staging)]
        rows += [(f"engine: {name}", size) for name, size in self.engine.items()]
        rows += [("engine: reserved beyond", self.reserved - sum(self.engine.values()))] if self.engine else []
        verdict = f"{self.missing / GIB:.1f} GiB too much" if self.missing else "fits"
        lines = [f"device       {self.size / GIB:.1f} GiB: {verdict}; JAX takes {self.fraction:.1%} of it at once"]
        if self.devices > 1:
            few = f"an engine on {self.engines}, whose plan this is"
            has = (
                "no engine on them" if not self.engine else few if self.engines < self.devices else "an engine on each"
            )
            lines[0] += f"\n             {self.devices} such devices, {has}"
        lines += [f"  {line}" for line in self.chosen]
        lines += [f"  {name:<32}{size / GIB:9.2f} GiB" for name, size in rows if size]
        if self.apart is not None:
            lines.append(f"  on the engine's GPU, of {self.apart[0] / GIB:.1f} GiB that it may use:")
            lines += [f"  {name:<32}{size / GIB:9.2f} GiB" for name, size in self.apart[1].items()]
        return lines


def make(cfg: RunConfig, size: int, ours: dict[str, int] | None = None) -> Plan:
    """Plans a run on devices of `size` bytes. Reads no weights, makes no array, asks JAX for no device.

    ours: the learner's bytes by part; None: they are counted.
    """
    cfg = on_a_gpu(cfg)
    share = os.environ.get(FRACTION)
    plan = Plan(
        size=size,
        learner=learner.parts(cfg, per_device=True) if ours is None else ours,
        staging=staging_bytes(cfg),
        one_base=learner.one_base_bytes(cfg),
        engine={},
        reserved=0,
        devices=learner.planned_mesh(cfg).size,
        engines=0,
        allowed=min(MOST, float(share)) if share else MOST,
    )
    engine = cfg.rollout.engine
    if not isinstance(engine, VllmConfig):
        return plan
    parts = engine_parts(cfg)
    share_bytes = int(engine.gpu_memory_utilization * size)
    if engine.has_own_gpu:
        there = parts | ({"staging (published versions)": plan.staging} if plan.staging else {})
        return dataclasses.replace(plan, apart=(share_bytes, there))
    # A cache of no given size fills the share, and vLLM captures its graphs after that.
    filled = share_bytes + parts["CUDA graphs (estimate)"]
    reserved = max(sum(parts.values()), share_bytes) if engine.kv_cache_gb else filled
    engines = engine.started * engine.tensor_parallel_size * processes.planned(cfg.distributed)
    return dataclasses.replace(plan, engine=parts, reserved=reserved, engines=engines)


def quantized(cfg: RunConfig, *, rollout: bool = False) -> list[str]:
    """Lists the stacked weights that have a QTensor: scheme, number of matrices, name, shape of one matrix.

    Args:
      rollout: of the published policy, not of the learner's forward.
    """
    made = learner.shapes(cfg)
    graphdef, qweights = (made.served, made.published) if rollout else (made.graphdef, made.qweights)
    model = models.config_of(graphdef)
    return [
        f"{model.scheme_of(path)!s:<10} {math.prod(q.shape[:-2]):>6} x {model.describe(path)} {list(q.shape[-2:])}"
        for path, q in models.by_path(qweights).items()
    ]


def describe(cfg: RunConfig) -> str:
    """Returns a run's sizes as text: parameters, bytes by part (whole mesh and per device), quantized weights."""
    whole, own = learner.parts(cfg), learner.parts(cfg, per_device=True)
    mesh = learner.planned_mesh(cfg)
    lines = [
        f"model        {learner.parameters(cfg) / 1e6:,.1f} M parameters on {mesh.size} device(s)",
        f"{'whole mesh':>39}{'one device':>14}",
    ]
    rows = [(name, whole[name], own[name]) for name in whole]
    rows.append(("sum", sum(whole.values()), sum(own.values())))
    lines += [f"  {name:<24}{a / GIB:9.3f} GiB{b / GIB:10.3f} GiB" for name, a, b in rows]
    if shared := learner.one_base_bytes(cfg):
        lines.append(f"base         held once by learner and engine, beside these: {shared / GIB:.3f} GiB")
    resting = {name: state for name, (state, on_host) in learner.optimizer_states(cfg).items() if on_host}
    if resting:
        lines.append("host         pinned memory, group by group on the devices for an update (optimizer.offload)")
    for name, state in resting.items():
        a, b = learner.nbytes(state), learner.nbytes(state, mesh)
        lines.append(f"  {name:<24}{a / GIB:9.3f} GiB{b / GIB:10.3f} GiB")
    split = cfg.quant.rollout_scheme != cfg.quant.forward
    for rollout in (False, True) if split else (False,):
        names = quantized(cfg, rollout=rollout)
        where = ("in the sampler" if rollout else "in the learner's forward") if split else "in learner and sampler"
        lines.append(f"quantized    {len(names) or 'no'} stacks of weights {where}; everything else stays as it is")
        lines += [f"  {name}" for name in names]
    return "\n".join(lines)
